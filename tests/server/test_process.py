"""The server as a process: the report of the start, signals, and failures while loading."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time

import httpx
import pytest
from fa_serve.server.app import create_app
from fa_serve.server.process import Server
from fa_serve.server.settings import Settings
from server_process import children_of, command_of, engine_of, start
from warm_processes import run_warm

MODEL = "fa-serve-demo"


def eventually(condition, seconds: float = 10.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.02)


def test_start_up_is_reported_by_phase(served):
    phases = [line.split()[0] for line in served.lines if re.search(r"\d s ", line)]
    assert phases[:2] == ["import", "config"]
    assert phases[-1] == "ready"
    assert {"engine", "weights", "kv"} <= set(phases[2:-1]), "the engine reports its phases"
    printed = served.lines[-1].replace("curl", "curl -s -w '\\n%{http_code}'", 1)
    assert subprocess.run(printed, shell=True, capture_output=True, text=True, check=True).stdout.endswith("200")


@pytest.mark.slow
def test_second_signal_ends_at_once_and_all_that_is_logged_is_json(tmp_path):
    """In a fresh interpreter, because transformers decides while it is imported whether it draws progress bars."""
    served = start("--log-format", "json", log=tmp_path / "log")
    body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 1900, "ignore_eos": True}
    try:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as response:
            pieces = response.iter_raw()  # kept in a variable, because the end of the iterator would close the connection
            next(pieces)
            served.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{served.url}/ready").status_code == 503)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(10) == 128 + signal.SIGTERM
    finally:
        served.end()
    logged = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in logged)
    assert any("SIGTERM" in line["message"] for line in logged), logged


@pytest.mark.slow
def test_two_ranks_drain_and_end_together(start_server):
    """SIGTERM comes to every process, as from a terminal that closes or from systemd with its default."""
    served = start_server("--tensor-parallel", "2", "--process", "--dtype", "float32")
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            engine = engine_of(served.process.pid)
            [follower] = children_of(engine)
            assert "fa_serve.engine.parallel.follower_main" in command_of(follower)
            for process in (follower, engine, served.process.pid):
                os.kill(process, signal.SIGTERM)
            received = list(lines)
        assert "data: [DONE]" in received
        assert served.process.wait(30) == 0
        assert not command_of(follower), "no rank is left"
    finally:
        served.end()


def test_a_model_that_cannot_be_loaded(tmp_path):
    """A folder without a model is a wrong argument, which is told before anything is imported. What reads a model tells that
    it cannot be read."""
    ended = run_warm("serve", str(tmp_path), "--port", "0", timeout=120)
    assert (ended.returncode, "config.json" in ended.stderr) == (2, True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    ended = run_warm("serve", str(tmp_path), "--port", "0", timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.startswith("fa-serve: ")


TEXT = {"model": "fake", "prompt": "Hi"}


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.anyio
async def test_what_does_not_end_within_the_drain_is_cut_off_with_an_error(engine):
    url = asyncio.get_running_loop().create_future()
    app = create_app(engine, Settings())
    server = Server(app, "127.0.0.1", 0, drain_timeout=0.05, on_ready=url.set_result)
    serving = asyncio.create_task(server.serve())
    async with httpx.AsyncClient(base_url=await url) as client:
        engine.gate.clear()
        request = asyncio.create_task(client.post("/v1/completions", json={**TEXT, "stream": True}))
        await until(lambda: app.state.service.in_flight)
        server.handle_exit(signal.SIGTERM, None)
        response = await request
        assert "The request was cut off: the server is shutting down." in response.text
        await asyncio.wait_for(serving, 5)
    assert server.failure is None


@pytest.mark.slow
def test_a_server_whose_engine_has_died_says_why_and_ends_cleanly(start_server):
    """Nothing is left to drain, so SIGTERM ends it at once, as it ends one that serves: with 0."""
    served = start_server("--process")
    try:
        os.kill(engine_of(served.process.pid), signal.SIGKILL)
        eventually(lambda: httpx.get(f"{served.url}/health").status_code == 503)
        said = httpx.get(f"{served.url}/health").json()["error"]["message"]
        assert said == "The server is dead: the engine has died: its process ended with exit code -9."
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 0
    finally:
        served.end()


def test_a_port_in_use_is_known_before_anything_is_loaded(engine):
    started = []
    engine.start = started.append
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Server(create_app(engine, Settings()), "127.0.0.1", taken.getsockname()[1], 1, print)
        with pytest.raises(OSError, match="in use"):
            server.run()
    assert not started
