"""What the security tests measure with: a second client that probes all the while, and the memory of the server's processes.

    probe = Probe(url, key)           # a separate process, so that the attacker's work in Python does not delay its clock
    ...
    report = probe.stop()             # report.health.p99, report.completion.p99, report.failures

Probes are sent at intervals over new connections: `GET /health`, and a greedy completion of 4 tokens. A probe that takes longer
than the interval also counts as the probes that would have been sent while it was waiting, so that one freeze of ten seconds is
ten seconds of bad service and not one bad reply among hundreds.

On a machine that is busy with other work, a probe is late although nothing held up the server. Linux tells how long a thread
was ready to run and had no processor (/proc/PID/task/TID/schedstat). `report.own_p99` is the p99 of /health less these waits
of the event loop's thread and of the probing thread. It is printed beside the p99 and tells the machine's part.

Run as a script, this file is the probing process; it imports nothing outside the standard library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

INTERVALS = {"health": 0.025, "completion": 0.15}
TIMEOUT = 20.0  # a probe that waits longer has failed
HEALTH_P99 = 0.050  # seconds, whatever the attack
COMPLETION_FACTOR = 5  # times the calm p99
CALM_COMPLETION = 0.085  # seconds: the calm p99 is taken to be at least this, for short calm measurements
MEMORY_FACTOR = 1.10
MEMORY_SLACK = 48 * 2**20  # what an allocator keeps of an honest request's memory varies by this much


@dataclass
class Latencies:
    """Seconds of the probes of one kind, sorted, and the probes that got no 200."""

    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def quantile(self, q: float) -> float:
        """The smallest latency that at least the fraction q of the probes does not exceed; infinite without probes."""
        return self.seconds[max(0, math.ceil(q * len(self.seconds)) - 1)] if self.seconds else math.inf

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)


@dataclass
class ProbeReport:
    """own: the seconds of each /health less the waits for a processor, sorted"""

    health: Latencies
    completion: Latencies
    own: list[float] = field(default_factory=list)

    @property
    def own_p99(self) -> float:
        return Latencies(self.own).p99 if self.own else 0.0

    @property
    def failures(self) -> list[str]:
        return self.health.failures + self.completion.failures

    def figures(self) -> dict[str, float]:
        """For people: milliseconds and counts."""
        kinds = {"health": self.health, "completion": self.completion}
        found = {f"{name}_{q}_ms": round(1000 * getattr(kind, q), 1) for name, kind in kinds.items() for q in ("p50", "p99")}
        found["health_own_p99_ms"] = round(1000 * self.own_p99, 1)
        return found | {"probes": len(self.health.seconds) + len(self.completion.seconds), "failed": len(self.failures)}


class Probe:
    """Probes `url` with the API key `key` (None without keys) from a separate process until `stop`.

    pid: of the server, whose first thread is its event loop; None if it is not known
    ask: path and body of what stands for a completion where the server generates nothing
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        model: str = "fa-serve-demo",
        pid: int | None = None,
        ask: tuple[str, dict] | None = None,
    ):
        wanted = {"model": model, "prompt": "x", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        given = json.dumps(ask or ("/v1/completions", wanted))
        command = [sys.executable, "-I", str(Path(__file__).resolve()), url, key or "", given, str(pid or "")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop(self) -> ProbeReport:
        """Ends the probing after the probes that are under way, which may take as long as the server is frozen."""
        try:
            printed, _ = self._process.communicate("", timeout=3 * TIMEOUT)
        finally:
            self._process.kill()
            self._process.wait()
        kinds = json.loads(printed)
        own = sorted(kinds["health"]["own"])
        found = {name: Latencies(sorted(kind["seconds"]), kind["failures"]) for name, kind in kinds.items()}
        return ProbeReport(**found, own=own)


def measure(
    url: str, key: str | None, seconds: float, pid: int | None = None, ask: tuple[str, dict] | None = None
) -> ProbeReport:
    """The latencies of a server that nothing else uses."""
    probe = Probe(url, key, pid=pid, ask=ask)
    time.sleep(seconds)
    return probe.stop()


def warm_up(url: str, key: str | None, model: str = "fa-serve-demo") -> None:
    """Use what an honest client may use, so that what a server does once is done: the document of its API, half a second of
    the interpreter; all pages of the KV cache, which the system gives when they are written; a grammar; and the kernels of as
    many batch sizes as oneDNN's cache holds."""
    _get(url, key, "/openapi.json")
    lengths = [{"prompt": [7] * length, "max_tokens": 1} for length in range(9, 777, 6)]
    prompts = [{"prompt": [5 + (i * 7 + j * (i + 3)) % 2000 for j in range(1000)]} for i in range(18)]
    grammars = [{"structured_outputs": {"regex": "[a-f]{3}"}}]
    together = [{"prompt": f"def f{i}(x):", "max_tokens": 8 + i} for i in range(48)]
    with ThreadPoolExecutor(48) as threads:
        for body in lengths:  # one after the other, so that each is a step
            _complete(url, key, {"model": model} | body)
        for bodies in (prompts, grammars, together, together):
            list(threads.map(lambda fields: _complete(url, key, {"model": model, "prompt": "x"} | fields), bodies))


def _get(url: str, key: str | None, path: str) -> None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        reply = connection.getresponse()
        reply.read()
    assert reply.status == 200, reply.status


def _complete(url: str, key: str | None, body: dict) -> None:
    """One completion. A server that allows its key fewer at once is asked again."""
    address = urlsplit(url)
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    status = 429
    while status == 429:
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read()
        status = reply.status
        time.sleep(0.05 if status == 429 else 0)
    assert status == 200, text


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    tree = [pid]
    for each in tree:
        tree += children.get(each, [])
    return tree


def memory_of(pid: int) -> int:
    """Bytes of memory of the process and its descendants; a page that n processes share counts as 1/n in each.

    Mapped files are not counted: the kernel can drop them, and what they count depends on who else has mapped them.
    """
    total = 0
    for each in process_tree(pid):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            values = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
            total += values["Pss"] - values.get("Pss_File", 0) + values.get("SwapPss", 0)
    return total


def loop_seconds(pid: int) -> float:
    """Seconds of a processor that the server's event loop has taken so far, which is the first thread of its process."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class MemoryWatch:
    """Measures the memory of a process and its descendants until `stop`, which returns the largest value."""

    def __init__(self, pid: int):
        self._pid = pid
        self._peak = memory_of(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(0.2):
            self._peak = max(self._peak, memory_of(self._pid))

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return max(self._peak, memory_of(self._pid))


def _waits(pid: str) -> float:
    """Seconds for which the event loop and the calling thread have waited for a processor so far."""
    waited = 0.0
    for each in ("/proc/thread-self", f"/proc/{pid}/task/{pid}") if pid else ():
        with contextlib.suppress(OSError):
            waited += int(Path(f"{each}/schedstat").read_text().split()[1]) / 1e9
    return waited


def _main(url: str, key: str, ask: str, pid: str) -> None:
    address = urlsplit(url)
    stopped = threading.Event()
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    path, wanted = json.loads(ask)
    requests = {"health": ("GET", "/health", None), "completion": ("POST", path, json.dumps(wanted))}
    results: dict[str, dict[str, list]] = {name: {"seconds": [], "failures": [], "own": []} for name in requests}

    def probe(name: str) -> None:
        interval = INTERVALS[name]
        method, path, body = requests[name]
        while not stopped.is_set():
            waited = _waits(pid)
            begin = time.monotonic()
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=TIMEOUT)
            try:
                connection.request(method, path, body, headers)
                reply = connection.getresponse()
                text = reply.read()
                if reply.status != 200:
                    results[name]["failures"].append(f"{name}: {reply.status} {text[:200]!r}")
            except (OSError, http.client.HTTPException) as error:
                results[name]["failures"].append(f"{name}: {error!r}")
            finally:
                connection.close()
            taken = time.monotonic() - begin
            results[name]["own"].append(max(0.0, taken - (_waits(pid) - waited)))
            results[name]["seconds"] += [taken - k * interval for k in range(max(1, math.ceil(taken / interval)))]
            stopped.wait(max(0.0, interval - taken))

    threads = [threading.Thread(target=probe, args=(name,)) for name in requests]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stopped.set()
    for thread in threads:
        thread.join()
    print(json.dumps(results))


if __name__ == "__main__":
    _main(*sys.argv[1:])
