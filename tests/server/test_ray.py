"""The server over two replicas of the embedded model, which Ray runs: it answers as one server does, and survives a replica.

Each replica divides the model between two ranks and has its engine in a process, as on GPUs: a replica is three processes.

A cluster takes most of a minute to start on two cores, so these tests run when they are asked for: `make test-ray`. There they
fail if Ray is missing.
"""

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from encoder_folders import TEXTS, save_encoder
from fa_serve.server.app import create_app
from fa_serve.server.settings import Settings
from server_process import ServerProcess, start
from typer.testing import CliRunner

from fa_serve.__main__ import app
from fa_serve.engine import AsyncEngine, Encoder, EngineConfig

ROOT = Path(__file__).parents[2]
MODEL = "fa-serve-demo"
KEYS = ["left", "right"]
LEFT = {"authorization": "Bearer left"}
RIGHT = {"authorization": "Bearer right"}
needs_ray = pytest.mark.skipif("FA_SERVE_TEST_RAY" not in os.environ, reason="make test-ray runs it")
needs_room = pytest.mark.skipif(
    os.environ.get("FA_SERVE_TEST_RAY") != "cluster",
    reason="FA_SERVE_TEST_RAY=cluster make test-ray runs it, with three nodes of Ray",
)

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
COMPLETION = {"model": MODEL, "prompt": "import os\n", "temperature": 0, "max_tokens": 12, "logprobs": 1}
CONTRACT: list[tuple[str, str, Any, dict[str, str]]] = [
    ("GET", "/v1/models", None, LEFT),
    ("POST", "/v1/completions", COMPLETION, LEFT),
    ("POST", "/v1/completions", COMPLETION | {"prompt": ["a", "b"], "n": 2, "seed": 7, "temperature": 1}, LEFT),
    ("POST", "/v1/chat/completions", CHAT, LEFT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}, LEFT),
    ("POST", "/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "max_completion_tokens": 8}, LEFT),
    ("POST", "/tokenize", {"model": MODEL, "prompt": "Once"}, LEFT),
    ("GET", "/v1/models", None, {"authorization": "Bearer wrong"}),
    ("POST", "/v1/completions", COMPLETION | {"temperature": 3}, LEFT),
    ("POST", "/v1/completions", COMPLETION | {"prompt": [999_999]}, LEFT),
    ("POST", "/v1/completions", COMPLETION | {"max_tokens": 99_999}, LEFT),
    ("POST", "/v1/completions", COMPLETION | {"logit_bias": {"999999": 1}}, LEFT),
    ("POST", "/v1/completions", COMPLETION | {"model": "another"}, LEFT),
]


@pytest.fixture(scope="module")
def replicas() -> Iterator[ServerProcess]:
    server = start(
        *("--replicas", "2", "--tensor-parallel", "2", "--process", "--replica-cpus", "0.5", "--dtype", "float32"),
        *("--max-per-key", "4", "--log-level", "warning"),
        verb="ray",
        FA_SERVE_API_KEYS=",".join(KEYS),
        FA_SERVE_PUBLIC_METRICS="true",
    )
    yield server
    server.end()


def _processes_below(ancestor: int) -> dict[int, str]:
    """The command lines of the processes below a process, by their ids."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            names[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)[1])

    def is_below(process: int) -> bool:
        return process in parents and (parents[process] == ancestor or is_below(parents[process]))

    return {process: name for process, name in names.items() if is_below(process)}


def _of_kind(kind: str, ancestor: int) -> list[int]:
    return [process for process, name in _processes_below(ancestor).items() if kind in name]


REPLICA = "ServeReplica"
RANK = "fa_serve.engine.parallel.follower_main"


def _runs(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def by_replica(server: ServerProcess, name: str) -> list[float]:
    """The values of a metric, one for each replica."""
    text = httpx.get(f"{server.url}/metrics").text
    return [float(value) for value in re.findall(rf'^fa_serve:{name}{{.*replica="\w+".*}} (\S+)$', text, re.MULTILINE)]


def eventually(condition, seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it never came true"
        time.sleep(0.05)


def without_names(response: httpx.Response) -> Any:
    """The status and the reply, without names and times, with four digits of each log-probability."""
    text = re.sub(r'"(id|created|cached_tokens)":("[^"]*"|\d+),?', "", response.text)  # each replica has its cache
    text = re.sub(r"\d+\.\d{5,}", lambda found: f"{float(found[0]):.4f}", text)
    if "data: " in text:
        *chunks, last, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        written = "".join(choice["delta"].get("content") or "" for choice in choices)
        text = f"{written} {choices[-1]['finish_reason']} {last} {done}"  # a chunk may have several tokens
    return response.status_code, response.headers["content-type"], text


async def _asked(client: httpx.AsyncClient) -> list[Any]:
    calls = [client.request(method, path, json=body, headers=headers) for method, path, body, headers in CONTRACT]
    return [without_names(await call) for call in calls]


async def _asked_of_one_server() -> list[Any]:
    engine = AsyncEngine(EngineConfig(device="cpu", dtype="float32", num_pages=1024, process=False))
    app = create_app(engine, Settings(api_keys=KEYS))
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await app.state.service.loaded()
        return await _asked(client)


async def _asked_of(url: str) -> list[Any]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return await _asked(client)


@needs_ray
def test_replies_are_those_of_one_server(replicas):
    ours = asyncio.run(_asked_of(replicas.url))
    theirs = asyncio.run(_asked_of_one_server())
    assert [reply[0] for reply in theirs] == [200] * 7 + [401] + [400] * 4 + [404]
    assert ours == theirs


@needs_ray
def test_a_conversation_stays_at_one_replica(replicas):
    body = {"model": MODEL, "prompt": "import os\n" * 60, "max_tokens": 2, "temperature": 0}
    before = by_replica(replicas, "prefix_cache_hits_total")
    for turn in range(4):
        reply = httpx.post(f"{replicas.url}/v1/completions", json=body, headers=RIGHT, timeout=60).json()
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 100) == (turn > 0), "every turn but the first finds the ones before it"
    eventually(lambda: sum(by_replica(replicas, "prefix_cache_hits_total")) >= sum(before) + 300)
    gained = [now - then for now, then in zip(by_replica(replicas, "prefix_cache_hits_total"), before, strict=True)]
    assert sorted(gained)[0] == 0, "one replica has seen nothing of it"


def _read(server: ServerProcess, found: list[str]) -> None:
    body = {"model": MODEL, "prompt": "Once", "stream": True, "max_tokens": 300, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=LEFT, timeout=60) as response:
        found += [str(response.status_code)]
        for line in response.iter_lines():
            found += [line] if line else []


@needs_ray
def test_an_abandoned_stream_is_aborted_in_its_replica(replicas):
    body = {"model": MODEL, "prompt": "Once", "stream": True, "max_tokens": 1900, "ignore_eos": True}
    before = replicas.aborted()
    with httpx.stream("POST", f"{replicas.url}/v1/completions", json=body, headers=LEFT, timeout=60) as response:
        pieces = response.iter_raw()  # kept in a variable, because the end of the iterator would close the connection
        next(pieces)
        eventually(lambda: sum(by_replica(replicas, "num_requests_running")) == 1)
    eventually(lambda: sum(by_replica(replicas, "num_requests_running")) == 0)
    assert replicas.aborted() == before + 1
    assert sum(by_replica(replicas, "generation_tokens_total")) < 1900


@contextmanager
def _four_streams(server: ServerProcess) -> Iterator[tuple[list[list[str]], list[float]]]:
    """What each of four streams has sent, and how many of them each replica has. Returns when the streams have ended."""
    eventually(lambda: len(by_replica(server, "num_requests_running")) == 2, seconds=90)  # a replica may have just ended
    streams: list[list[str]] = [[] for _ in range(4)]
    readers = [threading.Thread(target=_read, args=(server, found)) for found in streams]
    for reader in readers:
        reader.start()
    # two each; or one and three, as the router may still count the stream that the test before has abandoned
    shares: list[float] = []

    def all_run() -> bool:
        shares[:] = by_replica(server, "num_requests_running")
        return sum(shares) == 4 and len(shares) == 2 and min(shares) > 0

    eventually(all_run, seconds=60)
    yield streams, shares
    for reader in readers:
        reader.join(100)


LOST = {
    "message": "The request was cut off: its replica has stopped.",
    "type": "service_unavailable_error",
    "param": None,
    "code": "service_unavailable",
}


def _assert_some_are_lost(streams: list[list[str]], shares: list[float]) -> None:
    """Those of one replica, each with the error of a lost replica."""
    lost = [found for found in streams if found[-1] != "data: [DONE]"]
    assert len(lost) in shares
    for found in lost:
        assert found[0] == "200"
        assert json.loads(found[-1].removeprefix("data: "))["error"] == LOST


@needs_ray
def test_a_killed_replica_loses_its_own_streams_only(replicas):
    """The limit for a key holds for all replicas together, because one process counts."""
    with _four_streams(replicas) as (streams, shares):
        ask = {"url": f"{replicas.url}/v1/completions", "json": COMPLETION, "timeout": 60}
        refused = httpx.post(**ask, headers=LEFT)
        assert refused.status_code == 429
        assert "This API key may have at most 4 sequences in flight" in refused.json()["error"]["message"]
        replica = _of_kind(REPLICA, replicas.process.pid)[0]
        processes = [replica, *_processes_below(replica)]
        assert len(_of_kind(RANK, replica)) == 1
        os.kill(replica, signal.SIGKILL)
        answers = [httpx.post(**ask, headers=RIGHT) for _ in range(4)]
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {answers[0].json()["choices"][0]["text"]}
        assert httpx.get(f"{replicas.url}/ready", headers=RIGHT).status_code == 200
    _assert_some_are_lost(streams, shares)
    eventually(lambda: not any(map(_runs, processes)))


@needs_ray
def test_a_killed_rank_loses_the_streams_of_its_replica_only(replicas):
    """And no other request: one that the ending replica has not begun is sent to the other one."""
    with _four_streams(replicas) as (streams, shares):
        ranks = _of_kind(RANK, replicas.process.pid)
        assert len(ranks) == 2
        os.kill(ranks[0], signal.SIGKILL)
        ask = {"url": f"{replicas.url}/v1/completions", "json": COMPLETION, "timeout": 60}
        assert [httpx.post(**ask, headers=RIGHT).status_code for _ in range(12)] == [200] * 12
    _assert_some_are_lost(streams, shares)


@needs_ray
def test_sigterm_drains_and_nothing_is_left(replicas):
    processes = [process for process, name in _processes_below(replicas.process.pid).items() if name]
    with _four_streams(replicas) as (streams, _):
        replicas.process.send_signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{replicas.url}/ready").status_code == 503)
    assert [found[-1] for found in streams] == ["data: [DONE]"] * 4
    assert replicas.process.wait(30) == 0
    eventually(lambda: not any(map(_runs, processes)))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """Two replicas of an embedder, and its folder."""
    folder = save_encoder(tmp_path_factory.mktemp("embedder"))
    options = ("--replicas", "2", "--replica-cpus", "0.5", "--dtype", "float32", "--device", "cpu", "--log-level", "warning")
    server = start(str(folder), *options, verb="ray", FA_SERVE_PUBLIC_METRICS="true")
    yield server, folder
    server.end()


@needs_ray
def test_an_encoder_has_replicas_too(encoders):
    """Each answers, with the numbers of `Encoder`, in the order of the inputs; and one of them is enough."""
    server, folder = encoders
    wanted = Encoder(EngineConfig(model=folder, device="cpu", dtype="float32")).encode(TEXTS)
    name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]

    def ask() -> None:
        body = {"model": name, "input": list(TEXTS)}
        reply = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()
        np.testing.assert_allclose([each["embedding"] for each in reply["data"]], wanted, atol=1e-6)

    for _ in range(8):
        ask()
    eventually(
        lambda: len(by_replica(server, "prompt_tokens_total")) == 2 and min(by_replica(server, "prompt_tokens_total")) > 0
    )
    refused = httpx.post(f"{server.url}/v1/embeddings", json={"model": name, "input": "a", "dimensions": 99}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
    os.kill(_of_kind(REPLICA, server.process.pid)[0], signal.SIGKILL)
    eventually(lambda: _are_answered(ask), seconds=60)


def _are_answered(ask: Callable[[], None]) -> bool:
    """Whether a request is answered, which one that a killed replica has taken is not."""
    try:
        ask()
    except (KeyError, httpx.HTTPError):
        return False
    return True


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    """The containers of deploy/ray/compose.yaml as processes of this machine: two engines, and the server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    services = yaml.safe_load((ROOT / "deploy" / "ray" / "compose.yaml").read_text())["services"]
    folder = tempfile.mkdtemp(prefix="fa-ray-")  # the paths of sockets are to be short
    environment = os.environ | {
        **services["engine"]["environment"],
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "FA_SERVE_PUBLIC_METRICS": "true",
    }

    def run(service: str, name: str) -> subprocess.Popen:
        command = services[service]["command"][0].replace("fa-serve:6379", f"127.0.0.1:{port}").replace("6379", str(port))
        command = command.replace("${REPLICAS:-2}", "2 --port 0 --device cpu --num-pages 1024 --log-level warning")
        command = command.replace("fa-serve ray", f"{sys.executable} -m fa_serve ray")
        command = re.sub(r"(^|exec |until )ray ", rf"\1{sys.executable} -m ray.scripts.scripts ", command)
        variables = environment | {"RAY_TMPDIR": f"{folder}/{name}"}  # each container has one
        with (tmp_path / f"{name}.log").open("w") as log:
            return subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, stderr=log, text=True, env=variables)

    # the server first, which is the harder order: it waits for the engines
    processes = [run("fa-serve", "s"), run("engine", "a")]
    # Containers do not share ports and are restarted. Here two nodes that start at once can take each other's, and one gives up
    watchdog = threading.Timer(100, processes[1].kill)
    watchdog.start()
    assert any("Ray runtime started" in line for line in processes[1].stdout)
    watchdog.cancel()
    processes.append(run("engine", "b"))
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
    left = _of_kind(folder, 0)  # a container would end them
    for pid in {*left, *(below for above in left for below in _processes_below(above))}:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@needs_room
def test_the_files_of_a_cluster_make_one(cluster):
    """Two machines with an engine each and one with the server. A machine that is stopped finishes its streams."""
    server, *engines = cluster
    watchdog = threading.Timer(150, server.kill)
    watchdog.start()
    url = next(line.strip() for line in server.stdout if line.startswith("http://"))
    watchdog.cancel()
    served = ServerProcess(server, url, [])
    eventually(lambda: len(by_replica(served, "num_requests_running")) == 2)
    ask = {"url": f"{url}/v1/completions", "json": COMPLETION, "timeout": 60}
    assert httpx.post(**ask).status_code == 200
    assert not _of_kind(REPLICA, server.pid), "the engines are on other machines"
    with _four_streams(served) as (streams, _):
        engines[0].send_signal(signal.SIGTERM)
    assert [found[-1] for found in streams] == ["data: [DONE]"] * 4
    engines[0].wait(90)
    eventually(lambda: len(by_replica(served, "num_requests_running")) == 1, seconds=30)
    assert [httpx.post(**ask).status_code for _ in range(4)] == [200] * 4
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == 0


def test_without_ray_one_sentence_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fa_serve.server.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, ["ray"])
    assert done.exit_code == 2
    assert done.stderr.startswith("fa-serve: the command ray needs the ray extra (in a clone: pip install '.[server,ray]'): ")
