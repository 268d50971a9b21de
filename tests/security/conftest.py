"""A server with two keys, an attacker's and an honest client's, and a watch over what the honest client gets meanwhile."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import server_process
from security.probe import (
    CALM_COMPLETION,
    COMPLETION_FACTOR,
    HEALTH_P99,
    MEMORY_FACTOR,
    MEMORY_SLACK,
    MemoryWatch,
    Probe,
    ProbeReport,
    measure,
    memory_of,
    warm_up,
)

# Attacks measure what another client waits for, which a busy machine spoils. They run when they are asked for, with
# FA_SERVE_LOAD=short or full (`make test-security`).
collect_ignore = []
if "FA_SERVE_LOAD" not in os.environ:
    collect_ignore += ["test_attacks.py", "test_bounds.py", "test_encoders.py", "test_expensive_parts.py", "test_floods.py"]
    collect_ignore += ["test_fuzz.py", "test_images.py", "test_isolation.py"]

FULL = os.environ.get("FA_SERVE_LOAD") == "full"
ATTACKER = "attackers-key"
HONEST = "honest-key"
MODEL = "fa-serve-demo"
CALM_SECONDS = 10.0 if FULL else 6.0  # the server gives back free memory each 5 s
SETTLE_SECONDS = 30.0
# A short attack has tens of probes, so that its p99 is its slowest probe, on a machine that may run other tests meanwhile.
SHORT_SLACK = {"health": 0.0 if FULL else 0.5, "completion": 0.0 if FULL else 1.0}


@dataclass
class Fortress:
    """A running server. `calm` and `calm_memory` were measured when nobody attacked it. ask: see `Probe`"""

    process: server_process.ServerProcess
    log: Path
    calm: ProbeReport
    calm_memory: int
    ask: tuple[str, dict[str, Any]] | None = None

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 80

    def client(self, key: str | None = ATTACKER, timeout: float = 30.0) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, limits=limits, trust_env=False)

    def post(self, path: str, body: Any, key: str | None = ATTACKER) -> httpx.Response:
        """One POST. `body` is JSON to be written, or bytes to be sent as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.client(key) as client:
            return client.post(path, content=content, headers={"content-type": "application/json"})

    def complete(self, prompt: Any = "x", key: str | None = HONEST, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields}, key)

    def metric(self, name: str, labels: str = "") -> float:
        """One value of /metrics, the name without `fa_serve:`; 0 if it is absent."""
        with self.client(HONEST) as client:
            text = client.get("/metrics").text
        found = re.search(rf"^fa_serve:{name}(?:{{{labels}.*}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def memory(self) -> int:
        return memory_of(self.pid)

    def limits(self) -> dict[str, float]:
        """Seconds that the p99 of /health and of a completion may take under attack."""
        # on a machine that is busy with other work, /health is late without an attack
        health = max(HEALTH_P99, COMPLETION_FACTOR * self.calm.health.p99)
        completion = COMPLETION_FACTOR * max(self.calm.completion.p99, CALM_COMPLETION)
        return {"health": health + SHORT_SLACK["health"], "completion": completion + SHORT_SLACK["completion"]}

    @contextmanager
    def under_attack(
        self, what: str, *, memory: bool = True, latency: bool = True, growth: int | None = None
    ) -> Iterator[None]:
        """Probe while the block attacks; afterwards assert that the honest client noticed nothing and the memory came back.

        memory: whether the memory has to come back
        latency: whether the probes' latencies are bounded; the probes must succeed in any case
        growth: bytes that the memory may grow by meanwhile; by default it may grow by any amount
        """
        probe = Probe(self.url, HONEST, pid=self.pid, ask=self.ask)
        watch = MemoryWatch(self.pid)
        failed = False
        begin = time.monotonic()
        try:
            yield
        except BaseException:
            failed = True
            raise
        finally:
            seconds = time.monotonic() - begin
            report = probe.stop()
            peak = watch.stop()
            kept = self.settled_memory() if memory and not failed else self.memory()
            megabytes = {"calm_mb": self.calm_memory >> 20, "peak_mb": peak >> 20, "kept_mb": kept >> 20}
            print(f"\n{what}: {json.dumps({'seconds': round(seconds, 1)} | report.figures() | megabytes)}")
        failures = report.failures
        assert not failures, failures[:3]
        for name, allowed in self.limits().items() if latency else ():
            p99 = getattr(report, name).p99
            assert p99 <= allowed, f"{name} p99 {p99:.3f} s under attack, allowed {allowed:.3f} s"
        grown = peak - self.calm_memory
        assert growth is None or grown <= growth, f"{grown >> 20} MB more under attack, allowed {growth >> 20} MB"
        if memory:
            allowed = self.allowed_memory()
            assert kept <= allowed, f"{kept >> 20} MB kept after {SETTLE_SECONDS:g} s, allowed {allowed >> 20} MB"

    def allowed_memory(self) -> int:
        return int(self.calm_memory * MEMORY_FACTOR) + (0 if FULL else MEMORY_SLACK)

    def settled_memory(self) -> int:
        """The memory once it is back at its calm value, or after 30 seconds."""
        end = time.monotonic() + SETTLE_SECONDS
        while (kept := self.memory()) > self.allowed_memory() and time.monotonic() < end:
            time.sleep(0.5)
        return kept

    def is_well(self) -> bool:
        """Whether the next test can use this server."""
        try:
            with self.client(HONEST, timeout=5) as client:
                served = (
                    client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 4}).status_code == 200
                )
        except httpx.HTTPError:
            return False
        return served and self.memory() <= self.allowed_memory() + MEMORY_SLACK


def _start(log: Path, *flags: str, keys: bool = True, **environment: str) -> Fortress:
    names = {"FA_SERVE_API_KEYS": f"{ATTACKER},{HONEST}"} if keys else {}
    process = server_process.start(*flags, log=log, **(names | environment))
    key = HONEST if keys else None
    try:
        warm_up(process.url, key)
        return Fortress(
            process, log, measure(process.url, key, CALM_SECONDS, process.process.pid), memory_of(process.process.pid)
        )
    except BaseException:
        process.end()
        raise


@pytest.fixture
def start_fortress(tmp_path: Path) -> Iterator[Callable[..., Fortress]]:
    """`start_fortress("--flag", ..., FA_SERVE_NAME="value")`: a separate server, with the two keys."""
    started = []

    def start(*flags: str, **options: Any) -> Fortress:
        started.append(_start(tmp_path / f"log-{len(started)}", *flags, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.end()


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Fortress]]:
    """The same for all tests of a module."""
    started = []

    def start(*flags: str, **options: Any) -> Fortress:
        started.append(_start(tmp_path_factory.mktemp("fortress") / "log", *flags, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.end()


@pytest.fixture(scope="session")
def _shared_fortress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Fortress]]:
    kept: list[Fortress] = []

    def get() -> Fortress:
        if kept and not kept[0].is_well():  # an attack that succeeded must not fail the tests after it
            kept.pop().process.end()
        if not kept:
            kept.append(_start(tmp_path_factory.mktemp("fortress") / "log"))
        return kept[0]

    yield get
    for each in kept:
        each.process.end()


@pytest.fixture
def fortress(_shared_fortress: Callable[[], Fortress]) -> Fortress:
    """A server with the default settings and two keys, shared by the tests that leave it as it was."""
    return _shared_fortress()
