"""`fa-serve serve` beside `transformers serve` on a CPU: the same chats over HTTP, greedy, on the embedded model.

    python -m benchmarks.engine.bench_transformers_serve --json benchmarks/results/transformers_serve.jsonl

All servers run at once and are asked in turn, so that what disturbs one disturbs the others. A result is the processor time of
a server's processes for each token of its answers: other programs on the machine disturb it less than the clock. It is a
comparison of servers and not of kernels: the model has three million parameters, and attention runs in PyTorch on a CPU.
The ratio is that of the medians over the rounds. Nothing is downloaded. Both caches have the same size: by default, that of
continuous batching takes 15 GiB of a CPU's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
import transformers

from benchmarks.measure import commit
from fa_serve.demo import model_path

TICKS = os.sysconf("SC_CLK_TCK")
MAX_TOKENS = 48
START_SECONDS = 600.0
BOUNDS = {"--cb-block-size": 16, "--cb-num-blocks": 512, "--cb-max-batch-tokens": 512}
OUR_BOUNDS = {"--page-size": 16, "--num-pages": 512, "--max-num-batched-tokens": 512}
SERVERS: dict[str, list[str]] = {
    "ours": [str(each) for pair in OUR_BOUNDS.items() for each in pair],
    "transformers serve": [],
    "transformers serve --continuous-batching": [
        "--continuous-batching",
        *(str(each) for pair in BOUNDS.items() for each in pair),
    ],
}


def command(name: str, port: int) -> list[str]:
    folder = Path(sys.executable).parent
    if name == "ours":
        return [str(folder / "fa-serve"), "serve", "--device", "cpu", "--port", str(port), *SERVERS[name]]
    return [str(folder / "transformers"), "serve", str(model_path()), "--device", "cpu", "--port", str(port), *SERVERS[name]]


class Server:
    """A server in its own group of processes, at http://127.0.0.1:PORT."""

    def __init__(self, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.model = "fa-serve-demo" if name == "ours" else str(model_path())
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command(name, self.port),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Return when it is healthy."""
        late = time.monotonic() + START_SECONDS
        while time.monotonic() < late and self.process.poll() is None:
            try:
                if httpx.get(f"http://localhost:{self.port}/health", timeout=5).is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise SystemExit(f"a server ended, or was not healthy within {START_SECONDS:.0f} s: {self.process.args}")

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

    async def ask(self, client: httpx.AsyncClient, question: str) -> str:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        answer = await client.post(f"http://localhost:{self.port}/v1/chat/completions", json=body, timeout=300)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])

    async def offer(self, questions: list[str], at_once: int) -> list[str]:
        """The answers to all questions, so many at once."""
        limit = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient() as client:

            async def one(question: str) -> str:
                async with limit:
                    return await self.ask(client, question)

            return await asyncio.gather(*map(one, questions))


@contextmanager
def running() -> Iterator[dict[str, Server]]:
    servers: dict[str, Server] = {}
    try:
        for name in SERVERS:
            servers[name] = Server(name)
        for server in servers.values():
            server.wait()
        yield servers
    finally:
        for server in servers.values():
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()


def questions(count: int, seed: int) -> list[str]:
    """Sums and functions, of which no two rounds share one: a cache of prefixes finds the template alone."""
    sums = [f"What is {(7 * i + seed) % 90 + 1} + {(11 * i + 3 * seed) % 90 + 1}?" for i in range(count // 2)]
    return [*sums, *(f"Write a Python function that reads file {seed}-{i}." for i in range(count - len(sums)))]


def measure(servers: dict[str, Server], at_once: int, count: int, rounds: int) -> dict[str, list[float]]:
    """Processor milliseconds a token, for each server and round."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_path())
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(rounds + 1):  # the first one warms up
        asked = questions(count, number)
        told = {}
        for name, server in servers.items():
            before = server.cpu_seconds()
            told[name] = asyncio.run(server.offer(asked, at_once))
            spent = server.cpu_seconds() - before
            tokens = sum(len(tokenizer.encode(answer)) + 1 for answer in told[name])
            if number:
                found[name].append(1000 * spent / tokens)
        same = sum(len(set(answers)) == 1 for answers in zip(*told.values(), strict=True))
        print(f"{at_once} at once, round {number}: {same} of {count} answers are the same", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--json", type=Path, help="file to which the lines are appended")
    args = parser.parse_args()
    with running() as servers:
        for at_once in (1, 16):
            found = measure(servers, at_once, args.requests, args.rounds)
            medians = {name: statistics.median(values) for name, values in found.items()}
            ours = medians.pop("ours")
            line = {
                "bench": "transformers_serve",
                "case": f"embedded model, {at_once} at once",
                "unit": "processor ms/token",
                "ours": round(ours, 3),
                "peers": {name: round(value, 3) for name, value in medians.items()},
                "ratio": round(min(medians.values()) / ours, 3),
                "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "commit": commit(),
            }
            print(json.dumps(line), flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
