"""`fa-serve serve` beside `transformers serve`, over HTTP and greedy: chats on a CPU, or prompts of a shape on a GPU.

    python -m benchmarks.engine.bench_transformers_serve                  # on a CPU; beside other work it may not end
    python -m benchmarks.engine.bench_transformers_serve --shape llama8b  # on a GPU

**On a CPU** the servers have the embedded model. All of them run at once and are asked in turn, so that what disturbs one
disturbs the others. A result is the processor time of a server's processes for each token of its answers: other programs on
the machine disturb it less than the clock. It is a comparison of servers and not of kernels: the model has three million
parameters, and attention runs in PyTorch. The ratio is that of the medians over the rounds. Both caches have the same size:
by default, that of continuous batching takes 15 GiB of a CPU's memory.

**With `--shape`** (one of engine_workloads.py, with random weights) one server runs at a time, with its defaults for a GPU, and
a result is the tokens per second of `SHAPE_LOADS`: prompts of 256 tokens and answers of 128. Without continuous batching
`transformers serve` computes one request at a time, so it is asked for one at once alone.

Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import transformers

from benchmarks.engine.engine_workloads import SHAPES, make_folder
from benchmarks.measure import Results
from fa_serve.demo import model_path

TICKS = os.sysconf("SC_CLK_TCK")
MAX_TOKENS = 48
START_SECONDS = 600.0
BOUNDS = {"--cb-block-size": 16, "--cb-num-blocks": 512, "--cb-max-batch-tokens": 512}
OUR_BOUNDS = {"--page-size": 16, "--num-pages": 512, "--max-num-batched-tokens": 512}
GPU_FLAGS = ["--no-prefix-caching", "--max-model-len", "4096"]
TOKENS_IN = 256
TOKENS_OUT = 128
SHAPE_LOADS = {"1 at once": (1, 4), "64 at once": (64, 256)}
"""Name of a load: how many requests are in flight, and how many are sent in all."""
Answer = TypeVar("Answer", str, int)
SERVERS: dict[str, list[str]] = {
    "ours": [str(each) for pair in OUR_BOUNDS.items() for each in pair],
    "transformers serve": [],
    "transformers serve --continuous-batching": [
        "--continuous-batching",
        *(str(each) for pair in BOUNDS.items() for each in pair),
    ],
}

BATCHING = {"ours", "transformers serve --continuous-batching"}


def command(name: str, folder: Path, device: str, port: int) -> list[str]:
    """What starts a server. On a GPU it has its defaults, but a name for the model and no cache of prefixes."""
    programs = Path(sys.executable).parent
    flags = ["--device", device, "--port", str(port)]
    if name == "ours":
        ours = [sys.executable, "-m", "fa_serve", "serve", str(folder), "--served-model-name", str(folder), *flags]
        return [*ours, *(SERVERS[name] if device == "cpu" else GPU_FLAGS)]
    theirs = [str(programs / "transformers"), "serve", str(folder), *flags]
    if not (programs / "transformers").exists():  # the package is on PYTHONPATH and not installed
        theirs[:1] = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
    return [*theirs, *(SERVERS[name] if device == "cpu" else SERVERS[name][:1])]


class Server:
    """A server in its own group of processes, at http://127.0.0.1:PORT."""

    def __init__(self, name: str, folder: Path, device: str, log: IO[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.model = str(folder)
        self.ready_path = "/ready" if name == "ours" else "/health"
        self.log = log
        self.command = command(name, folder, device, self.port)
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Return when it answers requests: ours is healthy before, while the model is loaded."""
        late = time.monotonic() + START_SECONDS
        while time.monotonic() < late and self.process.poll() is None:
            try:
                if httpx.get(f"http://localhost:{self.port}{self.ready_path}", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        self.log.seek(0)
        told = self.log.read()[-4000:]
        raise SystemExit(f"a server ended, or was not ready within {START_SECONDS:.0f} s: {self.command}\n{told}")

    def stop(self) -> None:
        with suppress(ProcessLookupError):  # it has ended, and was waited for
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def cpu_seconds(self) -> float:
        """Processor time of all processes of the group, of user and system."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(fields[2]) == self.process.pid:
                total += int(fields[11]) + int(fields[12])
        return total / TICKS

    async def answer(self, client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> dict[str, Any]:
        body = body | {"model": self.model, "temperature": 0}
        answer = await client.post(f"http://localhost:{self.port}{route}", json=body, timeout=600)
        answer.raise_for_status()
        return dict(answer.json())

    async def chat(self, client: httpx.AsyncClient, question: str) -> str:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS}
        answer = await self.answer(client, "/v1/chat/completions", body)
        return str(answer["choices"][0]["message"]["content"])

    async def complete(self, client: httpx.AsyncClient, prompt: str) -> int:
        """-> the number of tokens of the answer"""
        answer = await self.answer(client, "/v1/completions", {"prompt": prompt, "max_tokens": TOKENS_OUT})
        return int(answer["usage"]["completion_tokens"])


async def offer(ask: Callable[[httpx.AsyncClient, str], Awaitable[Answer]], prompts: list[str], at_once: int) -> list[Answer]:
    """The answers to all prompts, so many at once."""
    limit = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:

        async def one(prompt: str) -> Answer:
            async with limit:
                return await ask(client, prompt)

        return await asyncio.gather(*map(one, prompts))


@contextmanager
def running(names: Collection[str], folder: Path, device: str) -> Iterator[dict[str, Server]]:
    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        for name in names:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            servers[name] = Server(name, folder, device, log)
            stack.callback(servers[name].stop)
        for server in servers.values():
            server.wait()
        yield servers


def questions(count: int, seed: int) -> list[str]:
    """Sums and functions, of which no two rounds share one: a cache of prefixes finds the template alone."""
    sums = [f"What is {(7 * i + seed) % 90 + 1} + {(11 * i + 3 * seed) % 90 + 1}?" for i in range(count // 2)]
    return [*sums, *(f"Write a Python function that reads file {seed}-{i}." for i in range(count - len(sums)))]


def processor_times(servers: dict[str, Server], at_once: int, count: int, rounds: int) -> dict[str, list[float]]:
    """Processor milliseconds a token, for each server and round."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path())
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):  # the first one warms up
        asked = questions(count, number)
        told = {}
        for name, server in servers.items():
            before = server.cpu_seconds()
            told[name] = asyncio.run(offer(server.chat, asked, at_once))
            spent = server.cpu_seconds() - before
            tokens = sum(len(tokenizer.encode(answer)) + 1 for answer in told[name])
            if number:
                found[name].append(1000 * spent / tokens)
        same = sum(len(set(answers)) == 1 for answers in zip(*told.values(), strict=True))
        print(f"{at_once} at once, round {number}: {same} of {count} answers are the same", file=sys.stderr)
    return found


def on_a_cpu(args: argparse.Namespace, results: Results) -> None:
    """The lines of the embedded model."""
    with running(SERVERS, model_path(), "cpu") as servers:
        for at_once in (1, 16):
            found = processor_times(servers, at_once, args.requests, args.rounds)
            medians = {name: statistics.median(values) for name, values in found.items()}
            ours = medians.pop("ours")
            results.show(f"embedded model on a CPU, {at_once} at once, processor time of a token", "ms", ours, medians)


def random_prompts(count: int, vocab_size: int, seed: int) -> list[str]:
    """Words of the tokenizer that `make_folder` writes: each one is a token."""
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(5, vocab_size)}" for _ in range(TOKENS_IN)) for _ in range(count)]


def token_rate(server: Server, at_once: int, count: int, vocab_size: int) -> float:
    """Tokens per second of the second of two loads; the first one warms up."""
    for seed in (at_once, at_once + 1):
        prompts = random_prompts(count, vocab_size, seed)
        begin = time.perf_counter()
        tokens = sum(asyncio.run(offer(server.complete, prompts, at_once)))
        seconds = time.perf_counter() - begin
        print(f"  {at_once} at once: {tokens} tokens in {seconds:.2f} s", file=sys.stderr, flush=True)
    return tokens / seconds


def of_a_shape(args: argparse.Namespace, results: Results) -> None:
    """The lines of a shape: one server after the other, each with the whole device."""
    rates: dict[str, dict[str, float]] = {load: {} for load in SHAPE_LOADS}
    with tempfile.TemporaryDirectory(prefix="bench_transformers_serve_") as temporary:
        folder = Path(temporary)
        # in this process, the memory of the model that is written would be lost for the servers
        writer = multiprocessing.get_context("spawn").Process(target=make_folder, args=(args.shape, folder, args.device))
        writer.start()
        writer.join()
        for name in SERVERS:
            print(name, file=sys.stderr, flush=True)
            with running([name], folder, args.device) as servers:
                for load, (at_once, count) in SHAPE_LOADS.items():
                    if at_once == 1 or name in BATCHING:
                        rates[load][name] = token_rate(servers[name], at_once, count, SHAPES[args.shape]["vocab_size"])
            for load, found in rates.items():
                peers = {peer: rate for peer, rate in found.items() if peer != "ours"}
                if peers:  # written after each server, for a run that is cut off
                    results.show(f"{args.shape}, {load}", "tok/s", found["ours"], peers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="on a CPU")
    parser.add_argument("--requests", type=int, default=32, help="on a CPU: of each round")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="without it the embedded model on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of the shape")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    tried_out = args.shape is not None and args.device == "cpu"
    results = Results("transformers_serve", args.out, kept=not tried_out, transformers=transformers.__version__)
    (of_a_shape if args.shape else on_a_cpu)(args, results)


if __name__ == "__main__":
    main()
