"""What a token costs the process that speaks HTTP: the real service over an engine that emits tokens at a set pace.

    python -m benchmarks.engine.bench_http                           # 256 streams, as fast as they come
    python -m benchmarks.engine.bench_http --step 0.02 --profile 25  # a step each 20 ms; where the time goes
    python -m benchmarks.engine.bench_http --tokens 1 --rounds 8     # what a request costs

Everything is the real thing but the engine in its process, which computes nothing: client, connections, loop, pipe.
What is written: the processor's microseconds of the HTTP process for each token and for each event, which other jobs on the
machine disturb less than the clock; tokens and events per second; tokens per event, 1 as long as the process keeps up.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import resource
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fa_serve.engine import EngineConfig, EngineStats, RequestOutput
from fa_serve.engine.process import async_engine, engine_process

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from fa_serve.engine import SamplingParams


class Metronome:
    """An engine whose steps give every request one token, `step` seconds apart; its place is in the engine's process."""

    vocab_size = 2048
    eos_ids: frozenset[int] = frozenset()
    grammars = SimpleNamespace(sweep=lambda: None, close=lambda: None)
    card = None

    def __init__(self, config: EngineConfig, **_: Any) -> None:
        self.config = replace(config, max_model_len=4096, dtype="float32", device="cpu")
        self.tokenizer = None
        self._step = float(os.environ["BENCH_HTTP_STEP"])
        self._due = 0.0
        self._left: dict[str, list[int]] = {}
        self._steps = 0

    def close(self) -> None:
        """Nothing is held."""

    def stats(self) -> EngineStats:
        return EngineStats(len(self._left), 0, 64, 0, self._steps, 0, 0, 0, 0)

    def add_request(self, name: str, prompt: list[int], params: SamplingParams, **_: Any) -> None:
        assert params.max_tokens is not None
        self._left[name] = [len(prompt), params.max_tokens, 0]

    def abort(self, name: str) -> list[RequestOutput]:
        self._left.pop(name, None)
        return []

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def prepare_one(self) -> bool:
        return False

    def preparations(self) -> tuple[int, int]:
        return 0, 0

    def step(self) -> list[RequestOutput]:
        self._due = max(self._due + self._step, time.perf_counter())
        time.sleep(max(0.0, self._due - time.perf_counter()))
        self._steps += 1
        outputs = []
        for name, counts in list(self._left.items()):
            counts[2] += 1
            prompt, wanted, given = counts
            ended = "length" if given == wanted else None
            outputs.append(RequestOutput(name, [], " word", [5], None, ended is not None, ended, None, prompt, given))
            if ended:
                del self._left[name]
        return outputs


_process_main = engine_process._main


def metronome_main(connection: Connection, ahead: bool) -> None:
    from fa_serve.engine.process import child

    child.import_engine = lambda *_, **__: Metronome  # type: ignore[assignment,return-value]
    _process_main(connection, ahead)


def serve(args: argparse.Namespace, pipe: Connection) -> None:
    """The process that speaks HTTP; tells its address, and at the word of the client what it has spent since the last word."""
    from fa_serve.server.app import create_app
    from fa_serve.server.process import Server
    from fa_serve.server.settings import Settings

    os.environ["BENCH_HTTP_STEP"] = str(args.step)
    engine_process._main = metronome_main
    config = EngineConfig(process=True, max_num_seqs=args.streams)
    settings = Settings(max_num_seqs=args.streams)
    server = Server(create_app(async_engine.AsyncEngine(config), settings), "127.0.0.1", 0, 1.0, pipe.send)
    profile = cProfile.Profile(time.thread_time)  # the loop alone, whatever else the machine does

    def spent() -> None:
        pipe.recv()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(usage.ru_utime + usage.ru_stime)

    async def listen() -> None:
        asyncio.get_running_loop().add_reader(pipe.fileno(), spent)
        if args.profile:
            profile.enable()
        await server.serve([server.config.bind_socket()])

    import uvloop

    uvloop.run(listen())
    if args.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.profile)


def measure(args: argparse.Namespace, url: str, pipe: Connection) -> dict[str, float]:
    from fa_serve.client import bench

    load = bench.Load(
        url=url,
        requests=args.streams * args.rounds,
        concurrency=args.streams,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.tokens,
        warmup=0,
    )
    load = replace(load, model=asyncio.run(bench.first_model(url, None)))

    def seconds() -> float:
        pipe.send(None)
        return float(pipe.recv())

    asyncio.run(bench.offer(replace(load, requests=8, concurrency=8), lambda _: None))
    before = seconds()
    result = asyncio.run(bench.offer(load, lambda _: None))
    spent = seconds() - before
    failed = [exchange.error for exchange in result.exchanges if exchange.error]
    assert not failed, failed[:3]
    clock = result.end - result.begin
    tokens = sum(exchange.tokens for exchange in result.exchanges)
    events = sum(len(exchange.token_arrivals) for exchange in result.exchanges)
    return {
        "cpu_us_per_token": spent / tokens * 1e6,
        "cpu_us_per_event": spent / events * 1e6,
        "tokens_per_s": tokens / clock,
        "events_per_s": events / clock,
        "tokens_per_event": tokens / events,
        "server_busy": spent / clock,
        "client_busy": result.busy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each stream, one after the other")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--step", type=float, default=0.0055, help="seconds of a step of the engine")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="of the profile of the HTTP process")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(args, theirs))
    server.start()
    try:
        found = measure(args, ours.recv(), ours)
        print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    finally:
        import signal

        os.kill(server.pid or 0, signal.SIGTERM)
        server.join(20)
        server.kill()


if __name__ == "__main__":
    main()
