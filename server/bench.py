"""A load client for any OpenAI-compatible server: `fa-serve bench`.

    report = asyncio.run(run(Load(url="http://127.0.0.1:8000", requests=200, concurrency=32)))

Prompts are random token ids, so that no server can answer from a cache, and answers have a fixed length. Requests arrive as a
Poisson process (`rate`), or as fast as `concurrency` lets them. A client in Python is easily slower than the server it
measures: each connection is one asyncio protocol over httptools that does nothing but note when events arrive; they are read
when the stream has ended, and the connection is used again, as OpenAI's own client does. `client_busy` in the report tells how
busy the client was: near 1 the figures are its own, and `processes` gives it more of them. Left out: what the numbers mean
(docs/serving.md).
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import httptools
import httpx

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Load:
    """
    requests:     how many in all, after `warmup` ones that are not counted
    concurrency:  how many at once; None is no bound, for use with a rate
    rate:         requests per second, arriving as a Poisson process; None starts each as soon as concurrency allows
    prompt_tokens, output_tokens: of each request; token ids are drawn from `ids`
    processes:    of the client; requests, concurrency and rate are shared among them
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    key: str | None = None
    requests: int = 200
    concurrency: int | None = 32
    rate: float | None = None
    prompt_tokens: int = 128
    output_tokens: int = 128
    ids: tuple[int, int] = (100, 1000)
    warmup: int = 4
    seed: int = 0
    processes: int = 1


@dataclass
class Exchange:
    """One request: when it was sent, when each event came, and what they said."""

    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    events: list[bytes] = field(default_factory=list)
    status: int = 0
    tokens: int = 0
    error: str | None = None

    def settle(self) -> None:
        """Judge the stream now that it has ended, and forget what it said."""
        if self.error is None and self.status != 200:
            self.error = f"status {self.status}: {b''.join(self.events)[:200].decode(errors='replace')}"
        elif self.error is None and (len(self.events) < 2 or self.events[-1] != b"[DONE]"):
            self.error = "the stream ended without [DONE]"
        elif self.error is None:
            self.tokens = int((json.loads(self.events[-2]).get("usage") or {}).get("completion_tokens", 0))
        self.events = []

    @property
    def token_arrivals(self) -> list[float]:
        return self.arrivals[:-2]  # all but the usage and [DONE]


class _Connection(asyncio.Protocol):
    """Sends one request after the other and notes events; httptools takes the chunks apart."""

    _ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def ask(self, request: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Done when the answer has ended."""
        self._exchange = exchange
        self._rest = b""
        self._parser = httptools.HttpResponseParser(self)
        self._ended = asyncio.get_running_loop().create_future()
        exchange.sent = time.perf_counter()
        if self.usable:
            self._transport.write(request)
        else:
            self._ended.set_result(None)
        return self._ended

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._exchange.error = f"not HTTP: {error}"
            self._transport.close()

    def on_headers_complete(self) -> None:
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        exchange = self._exchange
        if exchange.status != 200:
            exchange.events.append(body)
            return
        *lines, self._rest = (self._rest + body).split(b"\n\n")
        for line in lines:
            exchange.arrivals.append(now)
            exchange.events.append(line.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        if self._parser.should_keep_alive():
            self._end()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self._end():
            self._exchange.error = f"connection lost: {exc}"
        self._end()

    def _end(self) -> bool:
        """Whether an answer was awaited."""
        if awaited := self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        return awaited


async def run(load: Load, progress: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Run the load and return its report, ready for JSON. `progress` is told of requests that have ended."""
    load = replace(load, url=load.url.rstrip("/"))
    load = load if load.model else replace(load, model=await first_model(load.url, load.key))
    rng = random.Random(f"warm-up {load.seed}")
    for _ in range(load.warmup):
        exchange = await _exchange(load, _body(load, rng), idle := list[_Connection]())
        _close(idle)
        if exchange.error:
            raise RuntimeError(f"warm-up failed: {exchange.error}")
    if load.processes == 1:
        return _report(load, [await _offer(load, progress)])
    context = multiprocessing.get_context("spawn")
    parts = _parts(load)
    barrier = context.Barrier(len(parts))
    with ProcessPoolExecutor(len(parts), context, _meet_at, (barrier,)) as pool:
        loop = asyncio.get_running_loop()
        shares = []
        for share in asyncio.as_completed([loop.run_in_executor(pool, _work, part) for part in parts]):
            shares.append(await share)
            progress(len(shares[-1].exchanges))
    return _report(load, shares)


@dataclass
class _Share:
    """What one process of the client has seen; the clock is the machine's."""

    exchanges: list[Exchange]
    begin: float
    end: float
    busy: float


def _parts(load: Load) -> list[Load]:
    """One load for each process; together they are the whole."""
    number = min(load.processes, load.requests, load.concurrency or load.requests)

    def part(total: int, index: int) -> int:
        return total // number + (index < total % number)

    return [
        replace(
            load,
            requests=part(load.requests, i),
            concurrency=load.concurrency and part(load.concurrency, i),
            rate=load.rate and load.rate / number,
            seed=load.seed * number + i,
            processes=1,
        )
        for i in range(number)
    ]


_barrier: Any = None  # of a process of the client, where all of them meet before they begin


def _meet_at(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _work(load: Load) -> _Share:
    _barrier.wait()  # interpreters take their time to start
    return asyncio.run(_offer(load, lambda _: None))


async def _offer(load: Load, progress: Callable[[int], None]) -> _Share:
    rng = random.Random(load.seed)
    bodies = [_body(load, rng) for _ in range(load.requests)]
    gate = asyncio.Semaphore(load.concurrency or load.requests)
    idle = list[_Connection]()

    async def one(body: bytes) -> Exchange:
        async with gate:
            exchange = await _exchange(load, body, idle)
        progress(1)
        return exchange

    begin = time.perf_counter()
    busy = time.process_time()
    tasks = []
    due = begin
    for body in bodies:
        if load.rate is not None:
            due += rng.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(body)))
    exchanges = await asyncio.gather(*tasks)
    end = time.perf_counter()
    _close(idle)
    return _Share(exchanges, begin, end, (time.process_time() - busy) / (end - begin))


async def first_model(url: str, key: str | None) -> str:
    """The name of the first model that the server lists."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(headers=headers) as client:
            response = await client.get(f"{url}/v1/models")
            response.raise_for_status()
    except httpx.HTTPError as error:
        raise RuntimeError(f"{url}: {error}") from None
    return str(response.json()["data"][0]["id"])


def _body(load: Load, rng: random.Random) -> bytes:
    low, high = load.ids
    return json.dumps(
        {
            "model": load.model,
            "prompt": [rng.randrange(low, high) for _ in range(load.prompt_tokens)],
            "temperature": 0,
            "max_tokens": load.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def _request(where: SplitResult, key: str | None, body: bytes) -> bytes:
    lines = [
        f"POST {where.path.rstrip('/')}/v1/completions HTTP/1.1",
        f"Host: {where.netloc}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def _close(connections: list[_Connection]) -> None:
    for connection in connections:
        connection.close()


async def _exchange(load: Load, body: bytes, idle: list[_Connection]) -> Exchange:
    """`idle`: connections that have been used and may be used again."""
    exchange = Exchange()
    where = urlsplit(load.url)
    secure = where.scheme == "https"
    try:
        connection = idle.pop() if idle else None
        if connection is None or not connection.usable:
            _, connection = await asyncio.get_running_loop().create_connection(
                _Connection,
                where.hostname or where.netloc,
                where.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
            )
        await connection.ask(_request(where, load.key, body), exchange)
        if connection.usable:
            idle.append(connection)
    except OSError as error:
        exchange.error = f"no connection: {error}"
    exchange.settle()
    return exchange


def _report(load: Load, shares: list[_Share]) -> dict[str, Any]:
    exchanges = [exchange for share in shares for exchange in share.exchanges]
    seconds = max(share.end for share in shares) - min(share.begin for share in shares)
    good = [exchange for exchange in exchanges if exchange.error is None]
    first = [exchange.arrivals[0] - exchange.sent for exchange in good]
    whole = [exchange.arrivals[-1] - exchange.sent for exchange in good]
    gaps = [b - a for exchange in good for a, b in zip(exchange.token_arrivals, exchange.token_arrivals[1:], strict=False)]
    tokens = sum(exchange.tokens for exchange in good)
    errors = sorted({exchange.error for exchange in exchanges if exchange.error})
    return {
        "model": load.model,
        "requests": load.requests,
        "failed": len(exchanges) - len(good),
        "errors": errors[:5],
        "concurrency": load.concurrency,
        "rate": load.rate,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "client_busy": round(max(share.busy for share in shares), 2),
        "ttft_ms": _quantiles(first),
        "itl_ms": _quantiles(gaps),
        "e2e_ms": _quantiles(whole),
    }


def _quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds, by nearest rank; empty when there is nothing to rank."""
    if not seconds:
        return {}
    ranked = sorted(seconds)
    found = {f"p{q * 100:g}": ranked[math.ceil(round(q * len(ranked), 6)) - 1] for q in QUANTILES}
    return {name: round(value * 1e3, 3) for name, value in {"mean": sum(ranked) / len(ranked), **found}.items()}
