"""What `fa-serve ray` gains by its routing, and what clients notice of a lost replica, over replicas of one machine.

    python -m benchmarks.engine.bench_replicas                                        # the embedded model on a CPU
    python -m benchmarks.engine.bench_replicas --model Qwen/Qwen3-0.6B --device cuda  # two GPUs
    python -m benchmarks.engine.bench_replicas --shape llama8b --device cuda  # the same with random weights of this shape
    python -m benchmarks.engine.bench_replicas --parts throughput                     # one part, which starts two servers
    python -m benchmarks.engine.bench_replicas --parts throughput --servers 2  # two processes speak HTTP for two replicas

1. **Conversations**: each turn sends everything that was said before. Measured is the share of prompt tokens that come from a
   prefix cache, with the router of fa_serve and with the same router when it knows nothing of prompts. The gate: both give the
   same answers, greedily.
2. **A lost replica**: clients ask in a closed loop, and the process of one replica is killed. Measured are the requests that
   fail and the latencies of all.
3. **Throughput**: `fa-serve bench` loads one replica, and two with twice as many requests at once. With three GPUs or more both
   servers start side by side; they are loaded one after the other. With `--servers N`, N processes speak HTTP for the two
   replicas, each for a part of the clients, as `fa-serve ray --address` in one cluster.

Results of GPUs go to results/replicas.jsonl in the form of measure.py. Left out: replicas of several machines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.engine.engine_workloads import SHAPES, make_folder
from benchmarks.measure import Results
from fa_serve.client.bench import Load, run

CONVERSATIONS = 24
TURNS = 6
TURN_TOKENS = 96
ANSWER_TOKENS = 8
AT_ONCE = 6
PARTS = ("conversations", "throughput")
"""What --parts takes. "conversations" are 1 and 2 of the list above, on the same server."""
PLAIN = "from fa_serve.__main__ import main; main()"
BLIND = f"from fa_serve.server.ray import prefix_router as r; f = r.in_order; r.in_order = lambda x, _, y: f(x, x, y); {PLAIN}"


@contextmanager
def served(
    program: str, options: argparse.Namespace, *more: str, replicas: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, int]]:
    """The address and the process of a server over replicas. environment: beside that of this process"""
    flags = ["--port", "0", "--device", options.device, "--replicas", str(replicas), "--replica-cpus", "0.5", *more]
    flags += ["--num-pages", "4096", "--dtype", "float32"] if options.device == "cpu" else []
    command = [sys.executable, "-c", program, "ray", *([options.model] if options.model else []), *flags]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, env=os.environ | dict(environment or {}), stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            url = next((line.strip() for line in server.stdout or () if line.startswith("http://")), None)
            if url is None:
                log.seek(0)
                raise RuntimeError(f"the server did not start: {' '.join(command)}\n{''.join(log.readlines()[-20:])}")
            yield url, server.pid
        finally:
            server.terminate()
            server.wait(60)


async def converse(url: str) -> tuple[float, list[str]]:
    """The share of cached prompt tokens after the first turns, and all answers in the order of conversations."""
    draw = random.Random(0)
    said = [[draw.randrange(1000) for _ in range(TURN_TOKENS)] for _ in range(CONVERSATIONS)]
    answers = [""] * CONVERSATIONS
    cached = asked = 0
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def turn(number: int) -> tuple[int, int]:
            body = {"model": model, "prompt": said[number], "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
            async with gate:
                reply = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            answers[number] += reply["choices"][0]["text"]
            return reply["usage"]["prompt_tokens_details"]["cached_tokens"], reply["usage"]["prompt_tokens"]

        for round_ in range(TURNS):
            order = list(range(CONVERSATIONS))
            draw.shuffle(order)
            counts = await asyncio.gather(*map(turn, order))
            if round_:
                cached += sum(count for count, _ in counts)
                asked += sum(count for _, count in counts)
            for tokens in said:
                tokens += [draw.randrange(1000) for _ in range(TURN_TOKENS)]
    return cached / asked, answers


async def lose_one(url: str, server: int, seconds: float) -> dict[str, Any]:
    """Kill a replica after a third of the time."""
    times: list[float] = []
    failures: list[str] = []
    begin = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def ask(number: int) -> None:
            body = {"model": model, "prompt": [number, 1, 2], "max_tokens": 16, "temperature": 0}
            while time.monotonic() - begin < seconds:
                start = time.monotonic()
                reply = await client.post("/v1/completions", json=body)
                times.append(time.monotonic() - start)
                if reply.status_code != 200:
                    failures.append(reply.json()["error"]["message"])

        async def kill() -> None:
            await asyncio.sleep(seconds / 3)
            os.kill(replicas_of(server)[0], signal.SIGKILL)

        await asyncio.gather(kill(), *map(ask, range(8)))
    times.sort()
    milliseconds = {f"p{q}_ms": round(1000 * times[min(int(len(times) * q / 100), len(times) - 1)]) for q in (50, 99, 100)}
    return {"requests": len(times), "failed": len(failures), "messages": sorted(set(failures)), **milliseconds}


@contextmanager
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a Ray cluster of this machine, and the environment of those that join it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    flags = ["--head", "--port", str(port), "--include-dashboard", "false", "--disable-usage-stats", "--block"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags]
    with tempfile.TemporaryFile("w+") as log:
        head = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            if not any("Ray runtime started" in line for line in head.stdout or ()):
                log.seek(0)
                raise RuntimeError(f"the cluster did not start: {log.read()[-2000:]}")
            yield f"127.0.0.1:{port}", environment
        finally:
            head.terminate()
            head.wait(60)


def throughput(options: argparse.Namespace) -> dict[int, float]:
    """Output tokens per second of one replica and of two."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    rates = {}
    if options.servers == 1 and options.device == "cuda" and len(visible) >= 3:
        with ExitStack() as stack, ThreadPoolExecutor() as threads:
            one = served(PLAIN, options, replicas=1, environment={"CUDA_VISIBLE_DEVICES": visible[0]})
            two = served(PLAIN, options, replicas=2, environment={"CUDA_VISIBLE_DEVICES": ",".join(visible[1:3])})
            addresses = list(threads.map(lambda server: stack.enter_context(server)[0], (one, two)))
            return {replicas: rate(options, [url], replicas) for replicas, url in zip((1, 2), addresses, strict=True)}
    with served(PLAIN, options, replicas=1) as (url, _):
        rates[1] = rate(options, [url], 1)
    if options.servers == 1:
        with served(PLAIN, options, replicas=2) as (url, _):
            rates[2] = rate(options, [url], 2)
        return rates
    with ExitStack() as stack:
        address, environment = stack.enter_context(cluster())
        servers = [served(PLAIN, options, "--address", address, environment=environment) for _ in range(options.servers)]
        rates[2] = rate(options, [stack.enter_context(server)[0] for server in servers], 2)
    return rates


def rate(options: argparse.Namespace, urls: Sequence[str], replicas: int) -> float:
    """Output tokens per second of so many replicas, whose clients are divided among these servers."""
    load = Load(
        requests=replicas * options.requests // len(urls),
        concurrency=replicas * options.concurrency // len(urls),
        prompt_tokens=128,
        output_tokens=128,
        processes=max(2 * replicas // len(urls), 1),
    )

    async def turn_of_all(turn: int) -> float:
        loads = [replace(load, url=url, seed=turn * len(urls) + i) for i, url in enumerate(urls)]
        reports = await asyncio.gather(*map(run, loads))
        return sum(report["output_tokens_per_s"] for report in reports)

    for turn in range(2):  # the first one compiles and captures
        reached = asyncio.run(turn_of_all(turn))
        print(f"{replicas} replicas, {len(urls)} servers, turn {turn}: {reached:.0f} tokens/s", flush=True)
    return reached


def replicas_of(server: int) -> list[int]:
    """Processes of replicas below a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(re.search(r"^PPid:\s+(\d+)", (folder / "status").read_text(), re.MULTILINE)[1])  # type: ignore[index]
            parents[int(folder.name)] = parent, (folder / "cmdline").read_text()
        except OSError:  # it has ended
            continue

    def is_below(process: int) -> bool:
        return process == server or (process in parents and is_below(parents[process][0]))

    return [process for process, (_, name) in parents.items() if "ServeReplica" in name and is_below(process)]


def parts(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{sorted(unknown)} not among {list(PARTS)}")
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", help="by default the embedded model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the load under which a replica is killed")
    parser.add_argument("--shape", choices=SHAPES, help="in place of --model: random weights of this shape")
    parser.add_argument("--requests", type=int, help="throughput: for each replica; default: 1024, on a CPU 64")
    parser.add_argument("--concurrency", type=int, help="of these requests at once; default: 256, on a CPU 16")
    parser.add_argument("--servers", type=int, default=1, help="throughput: processes that speak HTTP for two replicas")
    parser.add_argument("--parts", type=parts, default=list(PARTS), help=f"{', '.join(PARTS)}: with commas; default: all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    if options.servers < 1:
        parser.error(f"--servers must be at least 1, got {options.servers}")
    on_gpu = options.device == "cuda"
    options.requests = options.requests or (1024 if on_gpu else 64)
    options.concurrency = options.concurrency or (256 if on_gpu else 16)
    with tempfile.TemporaryDirectory(prefix="bench_replicas_") as folder:
        if options.shape is not None:
            make_folder(options.shape, Path(folder), options.device)
            options.model = folder
        measure(options)


def measure(options: argparse.Namespace) -> None:
    name = options.shape or options.model or "demo"
    results = Results("replicas", options.out, kept=options.device == "cuda")
    if "conversations" in options.parts:
        with served(BLIND, options, "--deterministic") as (url, _):
            blind, expected = asyncio.run(converse(url))
        with served(PLAIN, options, "--deterministic") as (url, server):
            affine, answers = asyncio.run(converse(url))
            if answers != expected:
                sys.exit("the answers differ with the routing: no figure is reported")
            print(f"prompt tokens from a cache, turns 2 to {TURNS}: {affine:.1%}, without regard to prompts {blind:.1%}")
            lost = asyncio.run(lose_one(url, server, options.seconds))
            print(f"while a replica is killed: {lost}", flush=True)
        results.add(f"{name} prompt tokens from a cache", "share", affine, {"blind": blind} if blind else {})
        results.add(f"{name} a replica is killed, p99", "ms", lost["p99_ms"], {})
        results.add(f"{name} a replica is killed, requests that fail", "share", lost["failed"] / lost["requests"], {})
    if "throughput" in options.parts:
        rates = throughput(options)
        one = rates[1]
        two = rates[2]
        print(f"throughput: one replica {one:.0f} tokens/s, two {two:.0f}, ratio {two / one:.2f}")
        behind = "" if options.servers == 1 else f" behind {options.servers} servers"
        results.add(f"{name} throughput of two{behind}", "tok/s", two, {"one": one})


if __name__ == "__main__":
    main()
