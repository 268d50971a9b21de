"""Open loops for bench_serving.py: requests that arrive at random, whatever the server does, with random lengths.

    measures = straight_after_ready(load, rate=12, seconds=20)
    measures |= warm(load, rates=[6, 12, 24, 36], seconds=20, clients=2)

Arrivals are a Poisson process. A prompt has 140 to 1,260 tokens and an answer 40 to 360, uniformly. Both servers get the same
requests at the same times. The first token counts from the sending of the request, the time per token is that of the whole
answer after its first token, and the time between tokens is that of each pair of events. Goodput is the rate of requests whose
first token came within 200 ms and whose time per token was within 25 ms.

A cold server has an empty cache of compiled kernels (`empty_caches`), and its load begins in the moment in which it says that
it is ready, without a request before. A warm server has had a load at the highest rate, which is not counted.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine.engine_workloads import say

if TYPE_CHECKING:
    from fa_serve.client.bench import Load

RATES = [6.0, 12.0, 24.0, 36.0]
COLD_RATES = [12.0]
TOKENS_IN = 700  # mean
TOKENS_OUT = 200  # mean
SPREAD = 0.8  # of lengths around their means: 140 to 1,260 and 40 to 360
PERCENTILES = ("p50", "p95", "p99")
TIMES = {"first token": "ttft_ms", "per token": "tpot_ms", "between tokens": "itl_ms"}
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
"""Variables that name the folders in which our server, vLLM and what they use keep compiled kernels."""


def empty_caches(folder: str) -> dict[str, str]:
    """The environment of a server that finds nothing compiled. Each cache is a new folder inside of `folder`."""
    return {name: str(Path(folder) / name.lower()) for name in CACHES}


def straight_after_ready(load: Load, rate: float, seconds: float) -> dict[str, float]:
    """One process sends, because starting others would leave the server time to prepare itself."""
    return _measure(replace(load, warmup=0), "cold", rate, seconds, 1)


def warm(load: Load, rates: list[float], seconds: float, clients: int) -> dict[str, float]:
    _drive(replace(load, seed=8), max(rates), seconds, clients)
    found: dict[str, float] = {}
    for rate in rates:
        found |= _measure(load, "warm", rate, seconds, clients)
    return found


def _measure(load: Load, state: str, rate: float, seconds: float, clients: int) -> dict[str, float]:
    """Raises RuntimeError if a request fails."""
    report = _drive(load, rate, seconds, clients)
    name = f"open, {state}, {rate:g}/s"
    if report["failed"]:
        raise RuntimeError(f"{name}: {report['failed']} requests failed: {report['errors']}")
    shown = {key: report[key] for key in ("seconds", "requests_per_s", "client_busy", "goodput_per_s", *TIMES.values())}
    say(f"    {name}: {json.dumps(shown)}")
    if report["client_busy"] > 0.8:
        say("    the client itself is the limit: give it more --clients")
    found = {f"{name}, goodput": report["goodput_per_s"]}
    for time, key in TIMES.items():
        found |= {f"{name}, {time} {percentile}": report[key][percentile] for percentile in PERCENTILES}
    return found


def _drive(load: Load, rate: float, seconds: float, clients: int) -> dict[str, Any]:
    from fa_serve.client.bench import run

    requests = load.requests or max(round(rate * seconds), 1)
    return asyncio.run(run(replace(load, rate=rate, requests=requests, concurrency=None, processes=clients)))


def workload(load: Load, requests: int | None) -> Load:
    """The load with this module's lengths. `requests`: so many at each rate, with short answers, to try the script out."""
    short = requests is not None
    return replace(
        load,
        requests=requests or 0,
        seed=7,
        prompt_tokens=TOKENS_IN,
        output_tokens=8 if short else TOKENS_OUT,
        spread=SPREAD,
    )
