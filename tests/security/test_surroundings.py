"""What surrounds the server goes wrong: a full disk, clocks that jump, readers that are slow, many beams.

A server goes on for an honest client, and ends with its usual code. test_attacks.py measures latencies under the same load.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from security import attacks
from security.probe import process_tree
from server_process import ServerProcess, start_warm

ROOT = Path(__file__).resolve().parents[2]
WALL_CLOCK = re.compile(r"\btime\.time\(|datetime\.(now|utcnow)\(")
KEYS = {"FA_SERVE_API_KEYS": "attackers-key,honest-key"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")


def complete(server: ServerProcess, key: str = "honest-key", **fields: object) -> httpx.Response:
    path, body = attacks.completion(**fields)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx.post(server.url + path, content=body, headers=headers, timeout=60, trust_env=False)


def ends_well(server: ServerProcess) -> None:
    assert complete(server).status_code == 200
    assert httpx.get(f"{server.url}/health", timeout=30, trust_env=False).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    server.end()


@pytest.mark.slow
@linux
@pytest.mark.parametrize("process", [(), ("--process",)], ids=["thread", "process"])
def test_a_log_on_a_full_disk(process):
    """Each write fails with ENOSPC."""
    server = start_warm(*process, log=Path("/dev/full"), **KEYS)
    for _ in range(20):
        assert complete(server).status_code == 200
    ends_well(server)


def test_no_duration_is_read_from_a_clock_that_jumps():
    """The time of day is in answers and in logs, and what the ages of files are told by, and only there."""
    found = []
    for file in sorted([*(ROOT / "server").rglob("*.py"), *(ROOT / "fa_serve").rglob("*.py")]):
        for line in file.read_text().splitlines():
            if WALL_CLOCK.search(line) and "int(time.time())" not in line:
                found.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert found == ["fa_serve/engine/cache/folder_files.py: now = time.time()"]


@pytest.fixture(scope="module", params=[(), ("--process",)], ids=["thread", "process"])
def server(request, tmp_path_factory) -> ServerProcess:
    log = tmp_path_factory.mktemp("surroundings") / "log"
    served = start_warm("--send-timeout", "2", *request.param, log=log, **KEYS)
    yield served
    served.end()


@pytest.mark.slow
def test_slow_readers_of_many_answers_are_cut_off(server):
    """24 streams of 16 answers each, of which nothing is read: all of them end, and what they held is free."""
    body = attacks.completion(n=16, stream=True, max_tokens=400, ignore_eos=True, logprobs=5)[1]
    message = attacks.head(attacks.COMPLETIONS, "attackers-key", f"Content-Length: {len(body)}") + body
    url = httpx.URL(server.url)
    opened = []
    try:
        for _ in range(24):
            connection = attacks.connect((url.host, url.port), 30.0)
            connection.setsockopt(attacks.socket.SOL_SOCKET, attacks.socket.SO_RCVBUF, 4096)
            opened.append(connection)
            connection.sendall(message)
        time.sleep(1)
        assert complete(server).status_code == 200
    finally:
        for each in opened:
            each.close()
    nothing_is_left(server)


@pytest.mark.slow
def test_a_storm_of_beams(server):
    """The beams of one key are its sequences, and another key's completion takes its turn between them."""
    fields = {"use_beam_search": True, "n": 8, "max_tokens": 8, "temperature": 0}

    def one(_: int) -> int:
        try:
            return complete(server, "attackers-key", prompt="def f", **fields).status_code
        except httpx.TimeoutException:  # of the attacker, whose beams wait for each other
            return 0

    with ThreadPoolExecutor(24) as threads:
        sent = threads.map(one, range(24))
        time.sleep(0.5)
        reply = complete(server)
        assert reply.status_code == 200, json.dumps(reply.json())
        assert set(sent) <= {0, 200, 429}
    nothing_is_left(server)


def nothing_is_left(server: ServerProcess) -> None:
    end = time.monotonic() + 60
    headers = {"authorization": "Bearer honest-key"}
    while True:
        text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60, trust_env=False).text
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        found = [float(re.search(rf"^fa_serve:{name}{{.*}} (\S+)$", text, re.MULTILINE)[1]) for name in names]
        if not any(found):
            return
        assert time.monotonic() < end, dict(zip(names, found, strict=True))
        time.sleep(0.2)


@pytest.mark.slow
@linux
def test_a_process_without_more_memory(server):
    """As with `ulimit -v`, which a server learns of when it asks for memory. A request may fail, and the next one is served."""
    pids = process_tree(server.process.pid)
    former = {pid: resource.prlimit(pid, resource.RLIMIT_AS) for pid in pids}
    assert complete(server).status_code == 200
    for pid in pids:
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size + (32 << 20), former[pid][1]))
    found = []
    try:
        for name in ("prompt-of-16-mb", "escapes", "large-answer", "choices"):
            path, body = attacks.BODIES[name]()
            headers = {"authorization": "Bearer attackers-key", "content-type": "application/json"}
            try:
                reply = httpx.post(server.url + path, content=body, headers=headers, timeout=20, trust_env=False)
                found.append((name, reply.status_code))
            except httpx.TransportError as error:
                found.append((name, type(error).__name__))
            assert complete(server).status_code == 200, found
    finally:
        for pid, limits in former.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, limits)
    print(found)
    assert complete(server).status_code == 200
    nothing_is_left(server)
