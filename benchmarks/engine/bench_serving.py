"""The service over HTTP against vLLM's server and our own offline engine, on one GPU, one of them at a time.

    python -m benchmarks.engine.bench_serving --shapes qwen06 --peer-path DIR  # vLLM and what it needs lie in DIR
    python -m benchmarks.engine.bench_serving --shapes qwen06,llama8b --peer-path DIR --budget 300
    python -m benchmarks.engine.bench_serving --open --shapes llama8b --peer-path DIR --budget 500
    python -m benchmarks.engine.bench_serving --open --shapes llama8b --no-peers --seconds 5  # ours alone, in 130 s
    python -m benchmarks.engine.bench_serving --shapes tiny --device cpu --requests 8         # tries the script out

`--open` measures open loops (open_loops.py), from a cold start and warm, in place of the two closed ones. Then our
server starts once more, with the caches that it has filled.

Two loads, `LOADS` below: 256 requests at once for throughput, 32 for the times that a client sees. A model has its shape's
config and random weights, and a tokenizer with a word for each id (engine_workloads.py); prompts are random token ids, end
tokens are ignored, prefix caches are off. Every server answers the same requests of the same client (`fa-serve bench`, in
`--clients` processes, whose busiest is `client_busy`); before each load go two rounds of as many requests as are at once, with
other prompts, which are not counted. The offline engine gets the throughput load at once, after the same. Of the budget
PEER_SECONDS are kept for the peer, which compiles for more than a minute and a half before it is ready; the offline engine goes
without when the rest is short (`--no-offline`).

What is written: output tokens per second, medians of the time to the first token and between tokens, and the seconds from
the start of a server to its first ready answer. `ratio` is ours against the peer, above 1 when ours is better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from benchmarks.child_process import Log
from benchmarks.engine import open_loops
from benchmarks.engine.engine_workloads import LIMIT, SHAPES, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_serve.client.bench import Load

MEMORY = 0.85
PEER_SECONDS = 150
WARM_UP = 2  # rounds, so that prompts have met sequences that decode
# requests, at once, tokens in, tokens out
LOADS = {"256 at once": (768, 256, 256, 256), "32 at once": (160, 32, 512, 128)}  # the first: of three --waves
THROUGHPUT, LATENCY = LOADS
UNITS = {"throughput": "tok/s", "goodput": "req/s", "start": "s"}  # of cases that are not in milliseconds, by a word
Measures = dict[str, float]


def run(args: argparse.Namespace) -> None:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in args.shapes:
        deadline = time.time() + args.budget
        with tempfile.TemporaryDirectory(prefix="bench_serving_") as folder:
            sides = {"fa_serve": ours(folder, args), **({"vllm": vllm(folder, args)} if args.peer_path else {})}
            reserved = PEER_SECONDS if args.peer_path else 0
            offline = alone(shape, folder, args, deadline - reserved)
            say(
                f"{shape}: model written{' and measured alone' * args.offline} after "
                f"{time.time() - deadline + args.budget:.0f} s"
            )
            for side, (command, env) in sides.items():
                end = deadline - (reserved if side == "fa_serve" else 0)
                try:
                    measures = (opened if args.open else closed)(side, command, env, shape, end, args)
                except (RuntimeError, OSError) as error:
                    say(f"  {side}: {error}")
                    continue
                for name, value in measures.items():
                    found.setdefault(f"{shape} {name}", {})[side] = value
                say(f"  {side:<10}" + ", ".join(f"{name} {value:.5g}" for name, value in measures.items()))
                if side == "fa_serve" and offline == offline and (mine := measures.get(f"throughput, {THROUGHPUT}")):
                    found[f"{shape} throughput, {THROUGHPUT}, against the engine offline"] = {side: mine, "offline": offline}
                record(found, args)
            say(f"  {'offline':<10}{offline:.5g} tokens/s")


def closed(side: str, command: list[str], env: dict[str, str], shape: str, end: float, args: argparse.Namespace) -> Measures:
    with server(side, command, env, end, args) as (url, seconds):
        say(f"  {side}: ready after {seconds:.1f} s")
        return {"start": seconds} | measure(url, shape, args, end)


def opened(side: str, command: list[str], env: dict[str, str], shape: str, end: float, args: argparse.Namespace) -> Measures:
    """A server with empty caches for each of the cold rates. The last one goes on with the warm loads, and starts once more."""
    from fa_serve.client.bench import Load

    suffix = "" if args.peer_path else ", alone"  # keeps the line of a start that was measured beside a peer
    measures: Measures = {}
    for rate in args.cold_rates:
        with tempfile.TemporaryDirectory() as caches:
            cold = env | open_loops.empty_caches(caches)
            with server(side, command, cold, end, args) as (url, seconds):
                say(f"  {side}: ready after {seconds:.1f} s, cold")
                base = Load(url=url, model="bench", ids=(5, SHAPES[shape]["vocab_size"]), warmup=1)
                load = open_loops.workload(base, args.requests)
                measures |= {f"start, cold{suffix}": seconds} | open_loops.straight_after_ready(load, rate, args.seconds)
                if rate == args.cold_rates[-1]:
                    measures |= open_loops.warm(load, args.rates, args.seconds, args.clients)
            if rate == args.cold_rates[-1] and side == "fa_serve":
                measures |= start_again(f"start, warm{suffix}", command, cold, end, args)
    return measures


def start_again(case: str, command: list[str], env: dict[str, str], end: float, args: argparse.Namespace) -> Measures:
    """Seconds until our server is ready with the caches that a start before has filled; nothing if it is not ready in time."""
    try:
        with server("fa_serve", command, env, end, args) as (_, seconds):
            say(f"  fa_serve: ready after {seconds:.1f} s, with the caches of the start before")
            return {case: seconds}
    except RuntimeError as error:  # the loads have been measured all the same
        say(f"  fa_serve: not started again: {error}")
        return {}


def record(found: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    """Write what has been measured so far, so that a run that is cut off loses nothing."""
    if args.device != "cuda":
        say("not written: results are those of a GPU")
        return
    from benchmarks.measure import Results

    results = Results("serving", args.out)
    for case, values in found.items():
        if "fa_serve" in values:
            unit = next((unit for word, unit in UNITS.items() if word in case), "ms")
            results.add(case, unit, values["fa_serve"], {name: value for name, value in values.items() if name != "fa_serve"})
    results.summarise()


# The servers, each in a separate process group


def ours(folder: str, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    command = [
        sys.executable,
        "-m",
        "fa_serve",
        "serve",
        folder,
        "--device",
        args.device,
        "--max-model-len",
        str(LIMIT),
        "--gpu-memory-utilization",
        str(MEMORY),
        "--no-prefix-caching",
        "--log-level",
        "warning",
        "--served-model-name",
        "bench",
        *args.serve,
    ]
    return command, {"PYTHONPATH": path()}


def vllm(folder: str, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        folder,
        "--max-model-len",
        str(LIMIT),
        "--gpu-memory-utilization",
        str(MEMORY),
        "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "bench",
    ]
    return command, peer_environment(args.peer_path)


def peer_environment(path: str) -> dict[str, str]:
    """What vLLM's server is started with. path: of the folder that it and what it needs lie in"""
    own = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return own | {"PYTHONPATH": path}


@contextmanager
def server(
    side: str, command: list[str], env: dict[str, str], deadline: float, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Its address, and the seconds until it was ready. A peer's log stays, as peer_SIDE.log beside the results.

    Raises RuntimeError, with the errors and the end of its log, if it is not ready in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"peer_{side}.log"
    with tempfile.TemporaryFile("w+") if side == "fa_serve" else path.open("w+") as log:
        begin = time.time()
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            while not ready(url, "/ready" if side == "fa_serve" else "/health"):
                if process.poll() is not None or time.time() > deadline:
                    told = Log(lines=40)
                    log.seek(0)
                    for line in log:
                        told.add(line)
                    raise RuntimeError(f"not ready after {time.time() - begin:.0f} s\n{told.report()}")
                time.sleep(0.1)
            seconds = time.time() - begin
            if side == "fa_serve":
                say(f"  fa_serve starts: {phases(log.fileno())}")
            yield url, seconds
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def phases(log: int) -> str:
    """The phases of our server's start and their seconds, from its log, in which the server goes on to write."""
    text = os.pread(log, 1 << 20, 0).decode(errors="replace")
    found = re.findall(r"^(\w+) +([\d.]+) s  ", text, re.MULTILINE)
    return ", ".join(f"{name} {seconds}" for name, seconds in found)


def ready(url: str, path: str) -> bool:
    try:
        return httpx.get(url + path, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


# The clients


def measure(url: str, shape: str, args: argparse.Namespace, deadline: float) -> dict[str, float]:
    from fa_serve.client.bench import Load

    words = (5, SHAPES[shape]["vocab_size"])
    base = Load(url=url, model="bench", ids=words, warmup=1)
    found = {}
    for name, (requests, at_once, tokens_in, tokens_out) in LOADS.items():
        if time.time() > deadline:
            break
        if name == THROUGHPUT:
            requests = args.waves * at_once
        load = replace(
            base,
            requests=args.requests or requests,
            concurrency=at_once,
            prompt_tokens=tokens_in,
            seed=7,
            output_tokens=tokens_out if args.requests is None else 8,
        )
        first = drive(replace(load, seed=8, requests=min(WARM_UP * at_once, load.requests)), args)
        say(f"    {name}, first: {first['seconds']:.2f} s, {first['output_tokens_per_s']:.0f} tokens/s")
        answer = drive(load, args)
        if answer["failed"]:
            raise RuntimeError(f"{name}: {answer['failed']} requests failed: {answer['errors']}")
        shown = ("seconds", "output_tokens_per_s", "client_busy", "ttft_ms", "itl_ms")
        say(f"    {name}: {json.dumps({key: answer[key] for key in shown})}")
        if answer["client_busy"] > 0.8:
            say("    the client itself is the limit: give it more --clients")
        if name == THROUGHPUT:
            found[f"throughput, {name}"] = answer["output_tokens_per_s"]
        else:
            found |= {f"first token, {name}": answer["ttft_ms"]["p50"], f"between tokens, {name}": answer["itl_ms"]["p50"]}
    return found


def drive(load: Load, args: argparse.Namespace) -> dict[str, Any]:
    from fa_serve.client.bench import run as offer

    return asyncio.run(offer(replace(load, processes=args.clients)))


# The engine alone, in a separate process


def alone(shape: str, folder: str, args: argparse.Namespace, deadline: float) -> float:
    """Write the model; -> tokens a second of our engine without a server."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine.bench_serving",
        "offline",
        "--shapes",
        shape,
        "--folder",
        folder,
        "--device",
        args.device,
        "--waves",
        str(args.waves),
    ]
    if args.requests is not None:
        command += ["--requests", str(args.requests)]
    if not args.offline:
        command += ["--no-offline"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path()}
    try:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=deadline - time.time())
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        if not (Path(folder) / "tokenizer_config.json").exists():
            sys.exit(f"the model could not be written: {error}")
        say(f"  offline: {error}")  # the servers may still be measured
        return float("nan")
    return float(done.stdout.splitlines()[-1]) if args.offline else float("nan")


def path() -> str:
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))


def offline(args: argparse.Namespace) -> None:
    """Every request at once, with text, as a server makes it."""
    import gc

    import torch

    from benchmarks.engine.engine_workloads import Workload, make_folder
    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    make_folder(args.shapes[0], Path(args.folder), args.device)
    if not args.offline:
        return
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    settings = {"model": args.folder, "device": args.device, "max_model_len": LIMIT, "gpu_memory_utilization": MEMORY}
    engine = Engine(EngineConfig(**settings, prefix_caching=False))
    _, at_once, tokens_in, tokens_out = LOADS[THROUGHPUT]
    requests = args.waves * at_once
    if args.requests is not None:
        requests = args.requests
        tokens_out = 8

    def seconds(name: str, lengths: list[tuple[int, int]]) -> float:
        prompts = Workload(lengths).prompts(name, engine.vocab_size)
        begin = time.perf_counter()
        for row, (prompt, (_, tokens)) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            engine.add_request(f"{name}-{row}", prompt, params)
        while engine.has_unfinished():
            engine.step()
        return time.perf_counter() - begin

    for name in ("first", "again"):  # a step with prompts is captured when it comes again
        seconds(name, [(tokens_in, tokens_out)] * min(at_once, requests))
    print(requests * tokens_out / seconds("load", [(tokens_in, tokens_out)] * requests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"run": run, "offline": offline}
    parser.add_argument("part", nargs="?", choices=parts, default="run", help="run; the other is run's own")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["qwen06", "llama8b"])
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM's server; none leaves it out")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for each shape")
    parser.add_argument("--clients", type=int, default=2, help="processes that send requests")
    parser.add_argument("--waves", type=int, default=3, help="throughput: so many times the requests that are at once")
    parser.add_argument("--requests", type=int, help="so many of each load's, with answers of 8 tokens")
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM out, whatever --peer-path is")
    parser.add_argument("--open", action="store_true", help="open loops in place of the closed ones, and no offline engine")
    parser.add_argument("--rates", type=rates, default=open_loops.RATES, help="--open: requests per second, warm")
    parser.add_argument(
        "--cold-rates", type=rates, default=open_loops.COLD_RATES, help="--open: the same, each after a cold start"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="--open: of arrivals at each rate")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="one more of `fa-serve serve`'s")
    parser.add_argument("--no-offline", dest="offline", action="store_false", help="leave the engine without a server out")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    args.peer_path = "" if args.no_peers else args.peer_path
    args.offline = args.offline and not args.open
    parts[args.part](args)


def rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]


if __name__ == "__main__":
    main()
