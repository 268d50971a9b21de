"""A load for any server with OpenAI's API: `fa-serve bench`.

    report = asyncio.run(run(Load(url="http://127.0.0.1:8000", requests=200, concurrency=32)))

Prompts are random token ids, so no server can answer from a cache, and answers have a fixed length. Requests arrive as a
Poisson process (`rate`), or as soon as `concurrency` allows. `client_busy` in the report is the fraction of the time in which
the client's process was busy. Near 1 the figures measure the client, not the server; more `processes` help. The meaning of the
figures is described in docs/serving.md (Sizing).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx

from . import failures
from .bench_report import LoadResult, make_report
from .http_connection import Connection, Exchange, close_all, exchange_on_connection


@dataclass(frozen=True)
class Load:
    """
    url:           the server's address
    model, key:    name of the model, None for the first that the server lists; API key, if the server needs one
    requests:      number of requests, after `warmup` requests that are not counted
    concurrency:   maximum number of requests at once; None is no limit, for use with a rate
    rate:          requests per second, as a Poisson process; None starts each request as soon as concurrency allows
    prompt_tokens: tokens of each prompt, drawn from the token ids `ids[0]` to `ids[1] - 1`
    output_tokens: tokens of each answer
    spread:        0 gives all requests these lengths; 0.8 draws each length uniformly from 0.2 to 1.8 times these
    seed:          seed of prompts and arrivals
    processes:     processes of the client, which share requests, concurrency and rate
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    key: str | None = None
    requests: int = 200
    concurrency: int | None = 32
    rate: float | None = None
    prompt_tokens: int = 128
    output_tokens: int = 128
    spread: float = 0.0
    ids: tuple[int, int] = (100, 1000)
    warmup: int = 4
    seed: int = 0
    processes: int = 1


class LoadError(Exception):
    """The server cannot be measured: it cannot be reached, or it refuses the first requests."""


async def run(load: Load, progress: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Run the load and return its report, ready for JSON. `progress` is called with the number of requests that have ended.

    Raises LoadError if the server cannot be reached or refuses the warm-up.
    """
    load = replace(load, url=load.url.rstrip("/"))
    if load.model is None:
        load = replace(load, model=await first_model(load.url, load.key))
    await _warm_up(load)
    results = [await offer(load, progress)] if load.processes == 1 else await _offer_in_processes(load, progress)
    settings = {
        "model": load.model,
        "requests": load.requests,
        "concurrency": load.concurrency,
        "rate": load.rate,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "spread": load.spread,
    }
    return make_report(settings, results)


async def first_model(url: str, key: str | None) -> str:
    """The name of the first model that the server lists. Raises LoadError if it cannot be reached."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(headers=headers) as client:
            return failures.first_model(await client.get(f"{url}/v1/models"))
    except httpx.HTTPError as error:
        raise LoadError(failures.connection_failed(url, error)) from None
    except ValueError as error:
        raise LoadError(str(error)) from None


async def offer(load: Load, progress: Callable[[int], None]) -> LoadResult:
    """Offer the load from this process."""
    rng = random.Random(load.seed)
    bodies = [_body(load, rng) for _ in range(load.requests)]
    pauses = [rng.expovariate(load.rate) for _ in bodies] if load.rate is not None else []
    return await offer_bodies(load.url, load.key, bodies, load.concurrency, list(itertools.accumulate(pauses)), progress)


async def offer_bodies(
    url: str,
    key: str | None,
    bodies: Sequence[bytes],
    concurrency: int | None,
    dues: Sequence[float] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> LoadResult:
    """Send these bodies to /v1/completions, and wait for all answers.

    concurrency: maximum number of requests at once; None is no limit
    dues:        when each body is sent, in seconds from now; empty sends each as soon as concurrency allows
    """
    gate = asyncio.Semaphore(concurrency or len(bodies))
    idle: list[Connection] = []

    async def send(body: bytes) -> Exchange:
        async with gate:
            exchange = await exchange_on_connection(url, key, body, idle)
        progress(1)
        return exchange

    begin = time.perf_counter()
    busy = time.process_time()
    tasks = []
    for body, due in itertools.zip_longest(bodies, dues):
        if due is not None:
            await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(body)))
    exchanges = await asyncio.gather(*tasks)
    end = time.perf_counter()
    close_all(idle)
    return LoadResult(exchanges, begin, end, (time.process_time() - busy) / (end - begin))


async def _warm_up(load: Load) -> None:
    rng = random.Random(f"warm-up {load.seed}")
    idle: list[Connection] = []
    for _ in range(load.warmup):
        exchange = await exchange_on_connection(load.url, load.key, _body(load, rng), idle)
        close_all(idle)
        idle.clear()
        if exchange.error:
            remedy = "" if exchange.status else f": {failures.NO_SERVER}"
            raise LoadError(f"the warm-up at {load.url} failed: {exchange.error}{remedy}")


def _body(load: Load, rng: random.Random) -> bytes:
    low, high = load.ids
    num_prompt_tokens, num_output_tokens = (
        _length(mean, load.spread, rng) for mean in (load.prompt_tokens, load.output_tokens)
    )
    body = {
        "model": load.model,
        "prompt": [rng.randrange(low, high) for _ in range(num_prompt_tokens)],
        "temperature": 0,
        "max_tokens": num_output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def _length(mean: int, spread: float, rng: random.Random) -> int:
    return rng.randint(max(round(mean * (1 - spread)), 1), round(mean * (1 + spread))) if spread else mean


async def _offer_in_processes(load: Load, progress: Callable[[int], None]) -> list[LoadResult]:
    context = multiprocessing.get_context("spawn")
    loads = _divided(load)
    barrier = context.Barrier(len(loads))
    results = []
    with ProcessPoolExecutor(len(loads), context, _set_barrier, (barrier,)) as pool:
        loop = asyncio.get_running_loop()
        for result in asyncio.as_completed([loop.run_in_executor(pool, _offer_after_barrier, each) for each in loads]):
            results.append(await result)
            progress(len(results[-1].exchanges))
    return results


def _divided(load: Load) -> list[Load]:
    """One load for each process. Together they are the whole load."""
    number = min(load.processes, load.requests, load.concurrency or load.requests)

    def portion(total: int, index: int) -> int:
        return total // number + (index < total % number)

    return [
        replace(
            load,
            requests=portion(load.requests, index),
            concurrency=load.concurrency and portion(load.concurrency, index),
            rate=load.rate and load.rate / number,
            seed=load.seed * number + index,
            processes=1,
        )
        for index in range(number)
    ]


_barrier: Any = None  # in a process of the client: all processes wait here before they begin


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _offer_after_barrier(load: Load) -> LoadResult:
    _barrier.wait()  # interpreters start at different times
    return asyncio.run(offer(load, lambda _: None))
