"""What a cluster serves, by the measured figures of one GPU: a discrete-event simulation of engines and of what speaks HTTP.

    python benchmarks/simulate_cluster.py                          # 1, 2, 8, 64 and 1,000 GPUs; the tables of docs/scale.md
    python benchmarks/simulate_cluster.py --gpus 8 --fronts 1 2 4  # when does the process that speaks HTTP become the limit?
    python benchmarks/simulate_cluster.py --check                  # one and two real servers on this CPU against the simulation

**Model.** A step of an engine takes `base + sequence * n + prompt_token * p` seconds with n decoding sequences and p prompt
tokens, at most `BATCHED_TOKENS` in all. The three numbers come from benchmarks/results: the time between tokens at 32
sequences, the throughput at 256, and the throughput of prompts alone. A front, one process that speaks HTTP, takes `request`
seconds of its processor for a request and `event` seconds for each event that it sends. Outputs of a step are one event for
each sequence. While a front is behind, the outputs of a sequence become one event, as in the real one: it never holds up a
step, but clients get their tokens in pieces.

**Load.** As many requests as the engines have slots, each replaced when it has ended. Lengths are drawn around their means. An
engine belongs to one front, and all fronts have the same number of engines.

Left out: the network's delays, the prefix cache, and the differences between real engines, such as clocks.

`--check` measures closed loops at one server, takes the three numbers from them, and compares two other loads: one server at
another concurrency, and two servers at once. It counts tokens by the seconds of processor that the servers take, which other
jobs of the machine disturb less than the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import simpy

RESULTS = Path(__file__).parent / "results"
BATCHED_TOKENS = 4096
SPREAD = 0.5  # lengths are drawn from 0.5 to 1.5 of their mean
MODEL = "fa-serve-demo"
ROUNDS = 4
EVENT_BYTES = 270  # one chunk of a streamed chat completion, with its framing
REQUEST = 900e-6  # seconds; docs/log/2026-11.md, "What a request costs over HTTP, halved": 816 and 1,046 us
EVENT = 21e-6  # the same page: 21.0 us for a token of 256 streams


@dataclass(frozen=True)
class Engine:
    """Seconds of a step: base, for each decoding sequence, for each token of a prompt."""

    base: float
    sequence: float
    prompt_token: float


@dataclass(frozen=True)
class Front:
    """Seconds of the processor: for a request, for an event that is sent."""

    request: float = REQUEST
    event: float = EVENT


@dataclass(frozen=True)
class ClosedLoop:
    """Measured output tokens per second with `at_once` requests of `tokens_in` and `tokens_out` tokens."""

    at_once: int
    tokens_in: int
    tokens_out: int
    tokens_per_second: float


def fitted(loops: list[ClosedLoop]) -> Engine:
    """The engine that gives these figures, three or more.

    In a closed loop a step has at_once decoding sequences, and at_once / tokens_out new prompts on average.
    """
    rows = [[1.0, loop.at_once, loop.at_once * loop.tokens_in / loop.tokens_out] for loop in loops]
    seconds = [loop.at_once / loop.tokens_per_second for loop in loops]
    scale = 1.0 / np.array(seconds)  # relative errors count
    found = np.linalg.lstsq(np.array(rows) * scale[:, None], np.ones(len(loops)), rcond=None)[0]
    return Engine(*(max(float(value), 0.0) for value in found))


def h200_engine(results: Path = RESULTS) -> Engine:
    """Llama 3.1 8B's shape in bfloat16 on one H200."""
    lines = [
        json.loads(line) for name in ("serving", "engine") for line in (results / f"{name}.jsonl").read_text().splitlines()
    ]
    ours = {line["case"]: line["ours"] for line in lines}
    between = ours["llama8b between tokens, 32 at once"] / 1000
    round_of_256 = 256 / ours["llama8b throughput, 256 at once"]  # 256 tokens in and out: a prompt token for each output token
    prompt_token = 1.0 / ours["llama8b D"]
    sequence = (round_of_256 - 256 * prompt_token - between) / (256 - 32)
    return Engine(between - 32 * sequence, sequence, prompt_token)


@dataclass
class Request:
    tokens_in: int
    tokens_out: int
    sent: float
    left: int  # tokens of the prompt that are not computed yet


@dataclass
class Waiting:
    """Outputs of one engine that a front has not sent. streams: sequences that have gained tokens; begun, ended: requests"""

    streams: int = 0
    tokens: int = 0
    begun: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)


@dataclass
class Tally:
    """What is counted after the warm-up. tokens: that clients have got; events: in so many pieces"""

    since: float
    tokens: int = 0
    events: int = 0
    requests: int = 0
    busy: float = 0.0
    first_token: list[float] = field(default_factory=list)


class FrontProcess:
    """A queue of work for one processor: requests, and for each engine the outputs that have come since it was served last."""

    def __init__(self, env: simpy.Environment, cost: Front, tally: Tally):
        self._env = env
        self._cost = cost
        self._tally = tally
        self._requests: deque[tuple[Request, EngineProcess]] = deque()
        self._outputs: dict[EngineProcess, Waiting] = {}
        self._news = env.event()
        env.process(self._run())

    def accept(self, request: Request, engine: EngineProcess) -> None:
        self._requests.append((request, engine))
        self._wake()

    def pass_on(self, engine: EngineProcess, streams: int, begun: list[Request], ended: list[Request]) -> None:
        """A step of an engine has given `streams` sequences a token each."""
        waiting = self._outputs.setdefault(engine, Waiting())
        waiting.streams = max(waiting.streams, streams)
        waiting.tokens += streams
        waiting.begun += begun
        waiting.ended += ended
        self._wake()

    def _wake(self) -> None:
        if not self._news.triggered:
            self._news.succeed()

    def _run(self) -> Iterator[simpy.Event]:
        while True:
            if not (self._requests or self._outputs):
                yield self._news
                self._news = self._env.event()
            while self._requests:
                request, engine = self._requests.popleft()
                yield from self._work(self._cost.request)
                engine.add(request)
            for engine in list(self._outputs):
                waiting = self._outputs.pop(engine)
                yield from self._work(self._cost.event * waiting.streams)
                self._count(waiting)
                for _ in waiting.ended:
                    engine.send()

    def _work(self, seconds: float) -> Iterator[simpy.Event]:
        yield self._env.timeout(seconds)
        if self._env.now >= self._tally.since:
            self._tally.busy += seconds

    def _count(self, sent: Waiting) -> None:
        if self._env.now < self._tally.since:
            return
        self._tally.events += sent.streams
        self._tally.tokens += sent.tokens
        self._tally.requests += len(sent.begun)
        self._tally.first_token += [self._env.now - request.sent for request in sent.begun]


class EngineProcess:
    """Continuous batching: each step computes a token of every sequence, and as much of the prompts as fits."""

    def __init__(self, env: simpy.Environment, cost: Engine, front: FrontProcess, loop: ClosedLoop, seed: int):
        self._env = env
        self._cost = cost
        self._front = front
        self._loop = loop
        self._draw = random.Random(seed)
        self._prompts: deque[Request] = deque()
        self._ends: dict[int, list[Request]] = {}  # sequences by the number of their last step
        self._decoding = 0
        self._step = 0
        self._news = env.event()
        env.process(self._run())

    def start(self) -> Iterator[simpy.Event]:
        """The clients of this engine begin in the course of one answer, so that they do not end together."""
        for _ in range(self._loop.at_once):
            self.send()
            yield self._env.timeout(self._cost.base * self._loop.tokens_out / self._loop.at_once)

    def send(self) -> None:
        """A client sends its next request."""
        spread = self._draw.uniform(1 - SPREAD, 1 + SPREAD)
        tokens = max(round(self._loop.tokens_in * spread), 1), max(round(self._loop.tokens_out * spread), 2)
        self._front.accept(Request(*tokens, self._env.now, left=tokens[0]), self)

    def add(self, request: Request) -> None:
        self._prompts.append(request)
        if not self._news.triggered:
            self._news.succeed()

    def _run(self) -> Iterator[simpy.Event]:
        while True:
            if not (self._prompts or self._decoding):
                yield self._news
            self._news = self._env.event()
            room = max(BATCHED_TOKENS - self._decoding, 1)
            streams = self._decoding
            begun: list[Request] = []
            computed = 0
            while self._prompts and computed < room:
                part = min(self._prompts[0].left, room - computed)
                self._prompts[0].left -= part
                computed += part
                if not self._prompts[0].left:
                    begun.append(self._prompts.popleft())
            cost = self._cost
            yield self._env.timeout(cost.base + cost.sequence * streams + cost.prompt_token * computed)
            for request in begun:
                self._ends.setdefault(self._step + request.tokens_out - 1, []).append(request)
            ended = self._ends.pop(self._step, [])
            self._decoding += len(begun) - len(ended)
            self._step += 1
            if streams or begun:
                self._front.pass_on(self, streams + len(begun), begun, ended)


def simulate(
    engine: Engine, front: Front, gpus: int, fronts: int, loop: ClosedLoop, seconds: float, warm_up: float
) -> dict[str, Any]:
    """What clients get, after `warm_up` seconds. loop: the load of one GPU; its throughput is not read"""
    env = simpy.Environment()
    tally = Tally(warm_up)
    processes = [FrontProcess(env, front, tally) for _ in range(fronts)]
    for number in range(gpus):
        env.process(EngineProcess(env, engine, processes[number % fronts], loop, number).start())
    env.run(until=warm_up + seconds)
    waits = sorted(tally.first_token) or [float("nan")]
    return {
        "gpus": gpus,
        "fronts": fronts,
        "tokens_per_second": tally.tokens / seconds,
        "requests_per_second": tally.requests / seconds,
        "first_token_p50_ms": statistics.median(waits) * 1000,
        "first_token_p99_ms": waits[int(len(waits) * 0.99)] * 1000,
        "tokens_per_event": tally.tokens / max(tally.events, 1),
        "front_busy": tally.busy / seconds / fronts,
        "gbit_per_second": tally.events * EVENT_BYTES * 8 / seconds / 1e9,
    }


def fronts_needed(engine: Engine, front: Front, gpus: int, loop: ClosedLoop) -> int:
    """Fronts that are busy for 70% of the time when the engines give all that they can."""
    per_answer = loop.tokens_out * (engine.base / loop.at_once + engine.sequence) + loop.tokens_in * engine.prompt_token
    work = (front.request + loop.tokens_out * front.event) / per_answer  # processors for each GPU
    return max(int(np.ceil(gpus * work / 0.7)), 1)


async def _measured(servers: list[Server], at_once: int, tokens_in: int, tokens_out: int) -> ClosedLoop:
    """The mean of the servers, all under this load at the same time, by the seconds of their processors."""
    from fa_serve.client.bench import Load, offer

    async def one(server: Server) -> float:
        load = Load(
            url=server.url,
            model=MODEL,
            requests=at_once,
            concurrency=at_once,
            prompt_tokens=tokens_in,
            output_tokens=tokens_out,
        )
        await offer(load, lambda _: None)
        before = server.processor_seconds()
        result = await offer(replace(load, requests=at_once * ROUNDS), lambda _: None)
        assert not any(exchange.error for exchange in result.exchanges), result.exchanges
        return at_once * ROUNDS * tokens_out / (server.processor_seconds() - before)

    speeds = await asyncio.gather(*map(one, servers))
    return ClosedLoop(at_once, tokens_in, tokens_out, statistics.mean(speeds))


@dataclass(frozen=True)
class Server:
    url: str
    process: int

    def processor_seconds(self) -> float:
        """Of all threads of the process, since it was started."""
        user, system = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(count: int) -> Iterator[list[Server]]:
    """Servers of the embedded model, each on a processor of this machine."""
    command = [sys.executable, "-m", "fa_serve", "serve", "--port", "0", "--device", "cpu", "--no-prefix-caching"]
    flags = ["--dtype", "float32", "--num-pages", "4096", "--log-level", "error"]
    processors = sorted(os.sched_getaffinity(0))
    servers = []
    try:
        for number in range(count):
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            server = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=env)
            os.sched_setaffinity(server.pid, {processors[number % len(processors)]})
            servers.append(server)
        yield [
            Server(next(line.strip() for line in server.stdout or () if line.startswith("http://")), server.pid)
            for server in servers
        ]
    finally:
        for server in servers:
            server.kill()
            server.wait()


def check(tolerance: float) -> bool:
    """Whether the simulation agrees with one and two real servers of the embedded model on this CPU."""
    with started(2) as servers:
        loads = ((2, 32, 64), (16, 32, 64), (8, 512, 32))
        engine = fitted([asyncio.run(_measured(servers[:1], *load)) for load in loads])
        microseconds = [round(value * 1e6, 1) for value in (engine.base, engine.sequence, engine.prompt_token)]
        print("a step takes {} us, {} us for a sequence, {} us for a token of a prompt".format(*microseconds))
        agrees = True
        for count in (1, 2):
            real = asyncio.run(_measured(servers[:count], 8, 128, 64))
            row = simulate(engine, Front(0.0, 0.0), count, count, real, 60.0, 10.0)  # the front's cost is in the engine's
            found = row["tokens_per_second"]
            wanted = count * real.tokens_per_second
            agrees &= abs(found / wanted - 1) <= tolerance
            print(f"{count} server(s): {wanted:.0f} tokens/s, simulated {found:.0f} ({found / wanted - 1:+.1%})")
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8, 64, 1000])
    parser.add_argument("--fronts", type=int, nargs="+", help="by default as many as are busy for 70% of the time")
    parser.add_argument("--at-once", type=int, default=256, help="requests in flight for each GPU")
    parser.add_argument("--tokens", type=int, nargs=2, default=[256, 256], metavar=("IN", "OUT"))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--request-us", type=float, default=REQUEST * 1e6)
    parser.add_argument("--event-us", type=float, default=EVENT * 1e6)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        raise SystemExit(0 if check(0.1) else 1)
    engine = h200_engine()
    front = Front(args.request_us / 1e6, args.event_us / 1e6)
    loop = ClosedLoop(args.at_once, *args.tokens, 0.0)
    print("| GPUs | HTTP processes | tokens/s | requests/s | first token p50, p99, ms | tokens in an event | busy | Gbit/s |")
    print("|---|---|---|---|---|---|---|---|")
    for gpus in args.gpus:
        for fronts in args.fronts or [fronts_needed(engine, front, gpus, loop)]:
            row = simulate(engine, front, gpus, fronts, loop, args.seconds, args.seconds)
            print(
                f"| {gpus:,} | {fronts} | {row['tokens_per_second']:,.0f} | {row['requests_per_second']:,.0f} | "
                f"{row['first_token_p50_ms']:.0f}, {row['first_token_p99_ms']:.0f} | {row['tokens_per_event']:.2f} | "
                f"{row['front_busy']:.0%} | {row['gbit_per_second']:.2f} |"
            )


if __name__ == "__main__":
    main()
