"""The truth about health: an engine that is stopped or hangs, a log that nobody reads, the end, half-closed clients."""

import asyncio
import contextlib
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from fa_serve.server.bounds.half_closed import PROBE_SECONDS
from server_process import engine_of, start_warm
from streams import until
from tiny_models import make_model
from warm_processes import fa_serve_with_a_short_log

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, SamplingParams

MODEL = "fa-serve-demo"
TEXT = {"model": MODEL, "prompt": "Hello", "max_tokens": 8}
LONG = {"model": MODEL, "prompt": "x", "max_tokens": 1900, "ignore_eos": True}


def eventually(condition, seconds: float) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it never came true"
        time.sleep(0.05)
    return time.monotonic() - begin


def status(served, path: str) -> int:
    return httpx.get(served.url + path, timeout=30).status_code


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it has ended, perhaps while it was read
        return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
@linux
def test_a_stopped_engine(start_server):
    """/health and /ready say so within 5 s and a beat, and recover; SIGTERM ends both processes in time all the same."""
    served = start_server("--process", "--drain-timeout", "1")
    engine = engine_of(served.process.pid)
    try:
        assert httpx.post(f"{served.url}/v1/completions", json=TEXT, timeout=30).status_code == 200
        os.kill(engine, signal.SIGSTOP)
        took = eventually(lambda: status(served, "/health") == 503, 15)
        assert status(served, "/ready") == 503
        refused = httpx.post(f"{served.url}/v1/completions", json=TEXT, timeout=30)
        assert refused.status_code == 503
        assert "no sign of life" in refused.json()["error"]["message"]
        os.kill(engine, signal.SIGCONT)
        eventually(lambda: status(served, "/health") == status(served, "/ready") == 200, 30)
        held = httpx.post(f"{served.url}/v1/completions", json=TEXT | {"guided_regex": "[a-z]{2}-[0-9]"}, timeout=30).json()
        assert re.fullmatch("[a-z]{2}-[0-9]", held["choices"][0]["text"]), "a structured output of an engine's process"
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}) as response:
            chunks = response.iter_raw()  # a generator that nobody holds closes the connection
            next(chunks)
            os.kill(engine, signal.SIGSTOP)
            begin = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            served.process.wait(20)
            ended = time.monotonic() - begin
        assert ended < 15, f"--drain-timeout is 1 s, and the process took {ended:.1f} s"
        assert not alive(engine), "the engine's process is left behind"
        print(f"\nsaid after {took:.1f} s, ended after {ended:.1f} s")
    finally:
        served.end()
        if alive(engine):
            os.kill(engine, signal.SIGKILL)


@pytest.mark.slow
@linux
def test_a_stopped_engine_with_nothing_in_flight_ends_soon(start_server):
    served = start_server("--process", "--drain-timeout", "30")
    engine = engine_of(served.process.pid)
    try:
        os.kill(engine, signal.SIGSTOP)
        begin = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        assert time.monotonic() - begin < 15, "half of --drain-timeout"
        assert not alive(engine)
    finally:
        served.end()
        if alive(engine):
            os.kill(engine, signal.SIGKILL)


@linux
def test_a_second_signal_ends_a_stopped_engine_as_well(start_server):
    served = start_server("--process")
    engine = engine_of(served.process.pid)
    try:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}) as response:
            chunks = response.iter_raw()  # a generator that nobody holds closes the connection
            next(chunks)
            os.kill(engine, signal.SIGSTOP)
            served.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.ReadError):  # a connection that is idle when the signal comes is closed
                status(served, "/ready")
            eventually(lambda: status(served, "/ready") == 503, 30)
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(20) == 128 + signal.SIGTERM
        eventually(lambda: not alive(engine), 30)
    finally:
        served.end()
        if alive(engine):
            os.kill(engine, signal.SIGKILL)


@pytest.mark.slow
def test_a_step_that_hangs_is_seen_while_it_hangs_and_left_behind_at_the_end(monkeypatch):
    async def main() -> float:
        engine = Engine(EngineConfig(device="cpu", num_pages=64), model=make_model())
        step = engine.step
        go_on = threading.Event()
        monkeypatch.setattr(engine, "step", lambda: go_on.wait(60) and step())
        running = AsyncEngine(engine)
        assert (running.pulse().silent_seconds, running.pulse().busy_seconds) == (0, 0)
        await running.start()
        asking = asyncio.create_task(anext(running.generate([1, 2], SamplingParams(max_tokens=1), "one")))
        await until(lambda: running.pulse().busy_seconds > 0.5)
        go_on.set()
        await asking
        await until(lambda: running.pulse().busy_seconds == 0)
        go_on.clear()
        asking = asyncio.create_task(anext(running.generate([1, 2], SamplingParams(max_tokens=1), "two")))
        await until(lambda: running.pulse().busy_seconds > 0)
        begin = time.monotonic()
        await running.shutdown(timeout=0.2)
        took = time.monotonic() - begin
        assert (await asking).error.code == "engine_dead"
        go_on.set()
        await asyncio.sleep(1)  # the thread of the engine ends while there is a loop to tell
        return took

    assert asyncio.run(main()) < 30, "it does not wait for the step"


@pytest.mark.slow
@linux
def test_a_log_that_nobody_reads(tmp_path):
    """An unread pipe holds 40 lines of the access log here, and the queue before it 64. Nobody waits for it, and it says later
    what it has lost."""
    os.mkfifo(tmp_path / "log")
    unread = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(unread, fcntl.F_SETPIPE_SZ, 4096)
    served = start_warm(log=tmp_path / "log", call=fa_serve_with_a_short_log)
    try:
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
        num_slow = 0
        for _ in range(600):
            begin = time.monotonic()
            connection.request("GET", "/v1/models")  # probes are not logged
            response = connection.getresponse()
            assert response.status == 200
            response.read()
            num_slow += time.monotonic() - begin > 2
        connection.close()
        assert num_slow < 4, "a server that waited for the log would answer none of the last 500"
        assert httpx.post(f"{served.url}/v1/completions", json=TEXT, timeout=60).status_code == 200
        text = httpx.get(f"{served.url}/metrics").text
        dropped = re.search(r"^fa_serve:log_records_dropped_total (\S+)$", text, re.MULTILINE)
        assert float(dropped[1]) > 100
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0, "the end does not wait for the log either"
    finally:
        served.end()
        os.close(unread)


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
TOKENS = 150
"""An answer takes three times as long as a server waits for it before it sends an interim response."""


def post(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def half_closed(served, requests: bytes) -> bytes:
    """What a client gets that ends its side after the requests."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(requests)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while data := connection.recv(65536):
            received += data
    return received


@pytest.mark.slow
@linux
def test_half_a_connection(served):
    """A client that has sent everything still gets its answer: a short one as it is, a long one after an interim response."""
    short = half_closed(served, post(TEXT))
    assert short.replace(INTERIM, b"").startswith(b"HTTP/1.1 200 OK"), "a busy machine has no short ones"
    assert half_closed(served, post(TEXT | {"stream": True})).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    begin = time.monotonic()
    answer = half_closed(served, post(LONG | {"max_tokens": TOKENS}))
    waited = time.monotonic() - begin
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == TOKENS
    assert answer.replace(INTERIM, b"").startswith(b"HTTP/1.1 200 OK")
    assert answer.startswith(INTERIM) or waited < 2 * PROBE_SECONDS


@pytest.mark.slow
@linux
def test_half_a_connection_with_a_pipelined_request(served):
    """No interim response may stand inside of the stream, and the connection ends behind the answers."""
    with ThreadPoolExecutor() as pool:  # three streams take as many steps as one
        list(pool.map(partial(_half_closed_with, served), (HEALTH, HEALTH[:20], post(TEXT)[:-1])))


def _half_closed_with(served, second: bytes) -> None:
    """The second request is whole, or ends in its head or in its body."""
    answer = half_closed(served, post(LONG | {"max_tokens": TOKENS, "stream": True}) + second)
    first, end, rest = answer.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert end
    assert first.count(b"HTTP/1.1") == 1
    if second == HEALTH:
        # on a slow machine, the server sends 100 Continue first
        assert rest.replace(INTERIM, b"").startswith(b"HTTP/1.1 200 OK")
        assert rest.endswith(b'{"status":"alive"}')
    else:
        assert rest == b""


@linux
@pytest.mark.parametrize("pipelined", [b"", HEALTH], ids=["alone", "pipelined"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_is_gone_is_still_noticed(served, stream, pipelined):
    host, _, port = served.url.removeprefix("http://").partition(":")
    aborted = served.aborted()
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(post(LONG | {"n": 4, "stream": stream}) + pipelined)
        eventually(lambda: served.metric("num_requests_running") == 4, 30)
    eventually(lambda: served.metric("num_requests_running") == 0, 30)
    assert served.aborted() == aborted + 4
