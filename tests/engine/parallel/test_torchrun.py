"""Ranks that torchrun starts: two processes with the environment of two machines, which meet on the loopback address.

torchrun itself takes two more processes that import torch, so it runs where FA_SERVE_TEST_TORCHRUN is set.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from typing import Any

import httpx
import pytest
from server_process import one_layer
from warm_processes import WarmProcess, fa_serve

from fa_serve.engine import Engine, EngineConfig, EngineDeadError, SamplingParams
from fa_serve.engine.parallel import torchrun as module
from fa_serve.engine.parallel.links import Link
from fa_serve.engine.parallel.torchrun import KEY, Torchrun
from fa_serve.spec import ParameterError

SECRET = "a secret of the test"
SETTINGS = {
    "model": one_layer(),
    "device": "cpu",
    "dtype": "float32",
    "quantization": "fp8",
    "seed": 3,
    "page_size": 8,
    "num_pages": 300,
}
PROMPTS = ["Once upon a time", "one two three one two"]
PARAMS = SamplingParams(max_tokens=8, temperature=0.9)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def environment(rank: int, port: int, **more: str) -> dict[str, str]:
    """What torchrun sets on the only process of a machine of two."""
    told = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in told.items()} | {KEY: SECRET} | more


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes the `Torchrun` of a rank."""
    port = free_port()

    def make(rank: int = 0, settings: dict[str, Any] | None = None, **more: str) -> Torchrun | None:
        for name, value in environment(rank, port, **more).items():
            monkeypatch.setenv(name, value)
        return Torchrun.find(EngineConfig(**{"tensor_parallel": 2} | (settings or {})))

    return make


def test_when_torchrun_has_a_say(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(1, LOCAL_RANK="3", TORCHELASTIC_USE_AGENT_STORE="True")
    assert (found.rank, found.size, found.local_rank, found.local_size, found.has_store) == (1, 2, 3, 1, True)
    assert place(settings={"tensor_parallel": 1}) is None, "ranks of a training job may each run an engine"
    assert place(WORLD_SIZE="1") is None
    with pytest.raises(ParameterError, match="tensor_parallel must be 4, the number of processes that torchrun has started"):
        place(WORLD_SIZE="4")
    with pytest.raises(ParameterError, match="max_restarts must be 0 under torchrun"):
        place(settings={"max_restarts": 1})
    with pytest.raises(ParameterError, match=f"{KEY} must have at least 16 characters under torchrun, .* got 5"):
        place(**{KEY: "short"})
    assert place() is not None
    monkeypatch.delenv("RANK")
    assert Torchrun.find(EngineConfig(tensor_parallel=2)) is None


@pytest.mark.slow
def test_only_those_who_know_the_secret_are_listened_to(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who is silent, one who speaks another protocol, one with another secret, a rank that is there twice; and rank 1."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 1)
    leader = place(0)
    follower = place(1)
    links: list[Link] = []
    thread = threading.Thread(target=leader.accept, args=(links,))
    thread.start()
    address = ("127.0.0.1", leader.port)
    strangers = []
    while not strangers:
        with suppress(OSError):
            strangers.append(socket.create_connection(address))
    strangers.append(socket.create_connection(address))
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(AuthenticationError):
        Client(address, authkey=b"another secret than ours")
    impostor = Client(address, authkey=SECRET.encode())
    impostor.send_bytes(b"7")
    connection = follower.connect()
    thread.join(10)
    [link] = links
    assert (link.rank, link.host) == (1, "127.0.0.1")
    with pytest.raises(OSError):  # noqa: PT011
        socket.create_connection(address)  # nobody listens once all ranks are there
    link.connection.send("hello")
    assert connection.recv() == "hello"
    time.sleep(1.2)  # silence is allowed now
    connection.send("ready")
    assert link.connection.recv() == "ready"
    reader = threading.Thread(target=lambda: suppress(EOFError, OSError).__enter__() or link.connection.poll(5))
    reader.start()
    link.kill()
    with pytest.raises((EOFError, OSError)):
        connection.recv()
    reader.join(10)
    for each in (*strangers, impostor, connection):
        each.close()


def test_ranks_that_do_not_find_each_other(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.2)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 has not connected within 0.2 s"):
        place(0).accept([])
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 cannot connect to rank 0 at 127.0.0.1"):
        place(1).connect()
    with pytest.raises(ParameterError, match="MASTER_ADDR must be an address of rank 0's machine"):
        place(0, MASTER_ADDR="192.0.2.1").accept([])
    monkeypatch.setattr(module, "START_SECONDS", 20.0)
    follower = place(1)
    with Listener(("127.0.0.1", follower.port), authkey=b"another secret than ours") as listener:
        thread = threading.Thread(target=_refuse, args=(listener,))
        thread.start()
        with pytest.raises(EngineDeadError, match=f"rank 1 of 2 and rank 0 at 127.0.0.1 have different secrets .{KEY}."):
            follower.connect()
        thread.join(10)


def _refuse(listener: Listener) -> None:
    with suppress(AuthenticationError):
        listener.accept()


SCRIPT = f"""
from fa_serve.engine import EngineConfig, EngineDeadError, SamplingParams, open_engine
engine = open_engine(EngineConfig(tensor_parallel=2, **{SETTINGS}))
for each in engine.generate({PROMPTS}, SamplingParams(max_tokens=8, temperature=0.9)):
    print(each.token_ids)
engine.add_request("a", "Once", SamplingParams(max_tokens=1500, ignore_eos=True))
engine.step()
print("running", flush=True)
try:
    while engine.has_unfinished():
        engine.step()
except EngineDeadError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_machines_answer_as_one_rank_and_end_with_a_killed_one() -> None:
    """The weights are rounded while they are loaded, so that quantised weights are divided between processes, too."""
    port = free_port()
    script = partial(exec, SCRIPT, {})
    processes = [WarmProcess(script, environment=os.environ | environment(rank, port)) for rank in range(2)]
    leader, follower = processes
    try:
        engine = Engine(EngineConfig(**SETTINGS))
        expected = [str(each.token_ids) for each in engine.generate(PROMPTS, PARAMS)]
        engine.close()
        assert leader.stdout is not None
        lines = [leader.stdout.readline().strip() for _ in range(3)]
        assert lines == [*expected, "running"]
        follower.kill()
        assert leader.stdout.read() == "rank 1 of 2 on 127.0.0.1 has ended, or its machine cannot be reached\n"
        assert leader.wait(10) == 0
    finally:
        for process in processes:
            with process:
                process.kill()


SERVE = ["serve", "--port", "0", "--device", "cpu", "--num-pages", "300", "--dtype", "float32", "--tensor-parallel", "2"]


def start_machine(kind: str, rank: int, port: int) -> WarmProcess | subprocess.Popen[str]:
    """What serves on one of two machines."""
    if kind == "environment":
        return WarmProcess(fa_serve, SERVE, environment=os.environ | environment(rank, port))
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", str(rank)]
    command += ["-m", "fa_serve", *SERVE, "--process"]
    return subprocess.Popen(command, env=os.environ | {KEY: SECRET}, stdout=subprocess.PIPE, text=True)


needs_time = pytest.mark.skipif("FA_SERVE_TEST_TORCHRUN" not in os.environ, reason="FA_SERVE_TEST_TORCHRUN runs torchrun")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["environment", pytest.param("torchrun", marks=needs_time)])
def test_a_server_of_two_machines_drains(kind: str) -> None:
    """SIGTERM comes to every process, or to the torchrun of rank 0, which sends it to all processes of this machine."""
    port = free_port()
    processes = [start_machine(kind, rank, port) for rank in range(2)]
    leader, follower = processes
    try:
        assert leader.stdout is not None
        lines = iter(leader.stdout.readline, "")
        url = next(line.strip() for line in lines if line.startswith("http://"))
        body = {"model": "fa-serve-demo", "prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            received = response.iter_lines()
            assert next(received).startswith("data: ")
            targets = [leader.pid, follower.pid] if kind == "environment" else [leader.pid]
            for process in targets:
                os.kill(process, signal.SIGTERM)
            assert "data: [DONE]" in list(received)
        # a torchrun ends with 1 after a signal, and the other one when it has lost the store of the first
        codes = [process.wait(30) for process in processes]
        assert codes == [0, 0] or kind == "torchrun"
    finally:
        for each in processes:
            with each:
                each.kill()
