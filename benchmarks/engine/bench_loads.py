"""Loads over HTTP that mix long prompts, shared prefixes, several answers and options of sampling, beside vLLM's server.

    python -m benchmarks.engine.bench_loads --peer-path DIR                  # 8B on one GPU; vLLM and what it needs lie in DIR
    python -m benchmarks.engine.bench_loads --loads long,answers --no-peers
    python -m benchmarks.engine.bench_loads --shape tiny --device cpu --requests 4      # tries the script out

The loads are those of simulate_scheduler.py, which describes them, with the same prompts at the same times for both servers.
Requests of `answers` are sampled, because vLLM gives one answer to a greedy one; those of `sampled` have three penalties, and
those of `logprobs` ask for the five most likely tokens. `sampled` comes twice: first of all loads, when the servers have only
seen the plain requests of the warm-up, and as `sampled again`.

Both servers keep prefixes and run at the same time on one GPU, each with as many tokens of keys and values, and one of them
gets a load at a time. They start one after the other. Ours starts twice: first with empty caches of compiled kernels, and the
seconds until it is ready are `start, cold`; then with the caches that it has filled, `start, warm`. Each server gets the
warm-up, then the loads take turns.

Written for each load: tokens and requests a second, and the times to the first token and between events of a stream, p50 and
p99, as `fa-serve bench` and vLLM's client count them. With n = 4, the events of all answers are in one stream. The lines are in
results/loads.jsonl. Kernels that ours compiled or loaded after it was ready are printed (`late compilations`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engine import open_loops, simulate_scheduler
from benchmarks.engine.bench_serving import path, peer_environment, server
from benchmarks.engine.engine_workloads import SHAPES, make_folder, say
from benchmarks.engine.simulate_scheduler import Arrival
from benchmarks.measure import Results
from fa_serve.client.bench import offer_bodies
from fa_serve.client.bench_report import LoadResult, make_report

TOKENS = 320_000
"""Of keys and values that each server keeps: 42 GB for 8B, so that two servers fit into 139 GB."""
LONGEST = 32_768
FIRST = 5  # of the ids that prompts have
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "answers": {"temperature": 1.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, **PENALTIES},
    "logprobs": {"logprobs": 5},
}
"""Fields of the requests of a load, beside those of `body_of`."""
ORDER = ("sampled", "long", "answers", "prefixes", "logprobs", "mixed-80", "sampled again", "mixed-100", "mixed-50")
WARM_UP = simulate_scheduler.closed(64, 32, 512, 64)
PERCENTILES = ("p50", "p99")
TIMES = {"first token": "ttft_ms", "between tokens": "itl_ms"}


def body_of(arrival: Arrival, vocab: int, options: dict[str, Any], longest: int) -> bytes:
    """A body for /v1/completions. longest: tokens of a prompt and of an answer at most"""
    body = {
        "model": "bench",
        "prompt": [FIRST + token % (vocab - FIRST) for token in arrival.prompt[:longest]],
        "max_tokens": min(arrival.max_tokens, longest),
        "n": arrival.n,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body | options).encode()


def schedule(arrivals: list[Arrival]) -> tuple[int | None, list[float]]:
    """How many requests there are at once, None for no limit, and when each is sent; [] for as soon as possible."""
    if any(each.at < 0 for each in arrivals):
        return sum(each.at >= 0 for each in arrivals), []
    return None, [each.at for each in arrivals]


_barrier: Any = None  # in a process of the client: all processes wait here before they begin


def set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def offer_part(url: str, bodies: list[bytes], at_once: int | None, dues: list[float]) -> LoadResult:
    """Send a client's part of a load when all clients have started."""
    _barrier.wait()
    return asyncio.run(offer_bodies(url, None, bodies, at_once, dues))


def offer(url: str, bodies: list[bytes], at_once: int | None, dues: list[float], clients: int) -> dict[str, Any]:
    """The report of a load whose requests are divided among so many processes.

    Raises RuntimeError if a request fails.
    """
    clients = min(clients, len(bodies), at_once or len(bodies))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(clients, context, set_barrier, (context.Barrier(clients),)) as pool:
        parts = [
            pool.submit(
                offer_part,
                url,
                bodies[index::clients],
                at_once and at_once // clients + (index < at_once % clients),
                dues[index::clients],
            )
            for index in range(clients)
        ]
        report = make_report({}, [part.result() for part in parts])
    if report["failed"]:
        raise RuntimeError(f"{report['failed']} of {len(bodies)} requests failed: {report['errors']}")
    return report


class Drive:
    """Offers loads to servers, and keeps what they measure, by case and server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.vocab = SHAPES[options.shape]["vocab_size"]
        self.found: dict[str, dict[str, float]] = {}
        self.results = Results("loads", options.out, kept=options.device == "cuda")

    def load(self, name: str, url: str) -> dict[str, Any]:
        kind = name.removesuffix(" again")
        draw = random.Random(kind.split("-")[0] + name.removeprefix(kind))  # loads of one kind differ in their rates alone
        arrivals = WARM_UP(draw) if kind == "warm-up" else simulate_scheduler.LOADS[kind](draw)
        arrivals = arrivals[: self.options.requests]
        longest = LONGEST if self.options.requests is None else 24
        bodies = [body_of(each, self.vocab, OPTIONS.get(kind, {}), longest) for each in arrivals]
        at_once, dues = schedule(arrivals)
        return offer(url, bodies, at_once, dues, self.options.clients)

    def note(self, case: str, side: str, value: float) -> None:
        """Keep a value, and write its line as soon as ours is known."""
        values = self.found.setdefault(f"{self.options.shape} {case}", {})
        values[side] = value
        if "fa_serve" in values:
            unit = "ms" if any(time in case for time in TIMES) else case.split(", ")[-1] if "/s" in case else "s"
            peers = {name: each for name, each in values.items() if name != "fa_serve"}
            self.results.add(f"{self.options.shape} {case}", unit, values["fa_serve"], peers)

    def compare(self, name: str, urls: dict[str, str]) -> None:
        """Offer a load to each server in turn."""
        for side, url in urls.items():
            try:
                report = self.load(name, url)
            except RuntimeError as error:
                say(f"{name}, {side}: {error}")
                continue
            self.note(f"{name}, tokens/s", side, report["output_tokens_per_s"])
            self.note(f"{name}, requests/s", side, report["requests_per_s"])
            for time_of, key in TIMES.items():
                for percentile in PERCENTILES:
                    self.note(f"{name}, {time_of} {percentile}", side, report[key][percentile])
            keys = ("seconds", "output_tokens_per_s", "requests_per_s", "client_busy", *TIMES.values())
            say(f"{name}, {side}: {json.dumps({key: report[key] for key in keys})}{late_compilations(side, url)}")


def late_compilations(side: str, url: str) -> str:
    """What our server's metrics say of kernels that were compiled after it was ready, as an end of a printed line."""
    if side != "fa_serve":
        return ""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    found = re.search(r"^\S*late_compilations\S* ([\d.e+]+)$", text, re.MULTILINE)
    return f", late compilations {float(found[1]):.0f}" if found else ""


def ours(folder: str, options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    command = [
        *(sys.executable, "-m", "fa_serve", "serve", folder),
        *("--device", options.device, "--served-model-name", "bench", "--log-level", "warning"),
        *("--max-model-len", str(options.longest), "--num-pages", str(options.tokens // 16)),
        *options.serve,
    ]
    return command, {"PYTHONPATH": path()}


def vllm(folder: str, options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    size = str(options.tokens * kv_bytes(options.shape))
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--host", "127.0.0.1"),
        *("--served-model-name", "bench", "--disable-uvicorn-access-log", "--max-model-len", str(options.longest)),
        # ours is there already, so vLLM must not ask for most of the GPU; the second flag is what its cache gets
        *("--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", size),
        *options.peer_flag,
    ]
    return command, peer_environment(options.peer_path)


def kv_bytes(shape: str) -> int:
    """Of the keys and values of a token, in 16 bits."""
    sizes = SHAPES[shape]
    return 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]


def start(drive: Drive, folder: Path, stack: ExitStack, end: float) -> dict[str, str]:
    """Start both servers, which stop with the stack. Returns their addresses by name, without a peer that does not start."""
    options = drive.options
    model = folder / "model"
    model.mkdir()
    make_folder(options.shape, model, options.device)
    say("the model is written")
    command, env = ours(str(model), options)
    env |= open_loops.empty_caches(str(folder / "caches"))
    if options.starts:
        with server("fa_serve", command, env, end, options) as (_, seconds):
            say(f"fa_serve: ready after {seconds:.1f} s with empty caches")
            drive.note("start, cold", "fa_serve", seconds)
    sides = {"fa_serve": (command, env)}
    if options.peer_path:
        sides["vllm"] = vllm(str(model), options)
    urls: dict[str, str] = {}
    for side, (command, env) in sides.items():  # one after the other, so that a start has the machine to itself
        try:
            urls[side], seconds = stack.enter_context(server(side, command, env, end, options))
        except RuntimeError as error:
            say(f"{side}: {error}")
            continue
        say(f"{side}: ready after {seconds:.1f} s")
        if options.starts or side != "fa_serve":
            drive.note("start, warm" if side == "fa_serve" else "start, cold", side, seconds)
    return urls


def run(options: argparse.Namespace) -> None:
    drive = Drive(options)
    end = time.time() + options.budget
    with tempfile.TemporaryDirectory(prefix="bench_loads_") as folder, ExitStack() as stack:
        urls = start(drive, Path(folder), stack, end)
        for side, url in urls.items():
            say(f"warm-up, {side}: {drive.load('warm-up', url)['seconds']} s{late_compilations(side, url)}")
        left_out = []
        for name in options.loads:
            if time.time() < end:
                drive.compare(name, urls)
            else:
                left_out.append(name)
    if left_out:
        say(f"not measured for lack of time: {', '.join(left_out)}")
    drive.results.summarise()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--loads", type=lambda text: text.split(","), default=list(ORDER), help="in this order")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM's server; none leaves it out")
    parser.add_argument("--no-peers", action="store_true", help="leave vLLM out, whatever --peer-path is")
    parser.add_argument("--no-starts", dest="starts", action="store_false", help="start ours once, without measuring it")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds after which no further load begins")
    parser.add_argument("--clients", type=int, default=4, help="processes that send requests")
    parser.add_argument("--requests", type=int, help="so many of each load's, with prompts and answers of 24 tokens at most")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of keys and values that each server keeps")
    parser.add_argument("--longest", type=int, default=LONGEST, help="max_model_len of both servers")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--serve", action="append", default=[], metavar="FLAG", help="one more of `fa-serve serve`'s")
    parser.add_argument("--peer-flag", action="append", default=[], metavar="FLAG", help="one more of vLLM's")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    options.peer_path = "" if options.no_peers else options.peer_path
    run(options)


if __name__ == "__main__":
    main()
