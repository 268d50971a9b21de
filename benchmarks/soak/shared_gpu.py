"""Generation on one server and embeddings on another of the same GPU: rates alone and together, and whether anything is lost.

    python -m benchmarks.soak.shared_gpu --seconds 20
    python -m benchmarks.soak.shared_gpu --tiny --seconds 2    # on a CPU; the numbers say nothing

The generator (Qwen3-0.6B's shape) takes 60% of the memory with `--gpu-memory-utilization 0.6`, and the encoder (bge-base's
shape) what its weights and one batch need. Each load runs for so many seconds by itself, then both at once: 32 clients that ask
for 128 tokens after 256, and 16 clients that send one text of 128 tokens a request. Every answer is counted, and its length is
checked: a request that fails, or an answer that is too short, ends the run with exit status 1. Vectors of one text are compared
before, during and after. Lines go to results/embeddings.jsonl: the rate of each load beside its rate alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np

from benchmarks.engine import bench_embeddings, engine_workloads
from benchmarks.engine.bench_serving import ours, server
from benchmarks.engine.engine_workloads import say
from benchmarks.measure import Results
from fa_serve.client.bench import Load, run

ROOT = Path(__file__).parents[2]
FAMILIES = {"full": ("qwen06", "bge-base"), "tiny": ("tiny", "tiny")}


class Encoding:
    """Clients that ask for vectors until they are stopped. texts: answered; worst: cosine distance of one text's vectors"""

    def __init__(self, url: str, length: int) -> None:
        self.url = url
        self.length = length
        self.texts = 0
        self.worst = 0.0
        self._first: np.ndarray | None = None

    async def _ask(self, http: httpx.AsyncClient, text: str) -> np.ndarray:
        body = {"model": "bench", "input": text, "encoding_format": "base64"}
        answer = await http.post("/v1/embeddings", json=body)
        answer.raise_for_status()
        vector = np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), np.float32)
        if not np.isfinite(vector).all():
            raise RuntimeError("a vector is not finite")
        return vector

    async def load(self, seconds: float, stop: threading.Event | None = None, clients: int = 16) -> float:
        """Texts a second of these clients, for so many seconds, or until they are stopped if that comes later."""
        self.texts = 0
        end = time.perf_counter() + seconds
        begin = time.perf_counter()

        async def client(http: httpx.AsyncClient, number: int) -> None:
            same = bench_embeddings.texts_of(1, self.length, seed=-1)[0]
            for count in itertools.count():
                if time.perf_counter() > end and (stop is None or stop.is_set()):
                    return
                text = bench_embeddings.texts_of(1, self.length, seed=number << 32 | count)[0]
                vector = await self._ask(http, text if count % 16 else same)
                self.texts += 1
                if not count % 16:
                    if self._first is None:
                        self._first = vector
                    cosine = self._first @ vector / np.linalg.norm(self._first) / np.linalg.norm(vector)
                    self.worst = max(self.worst, 1 - float(cosine))

        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            await asyncio.gather(*(client(http, number) for number in range(clients)))
        return self.texts / (time.perf_counter() - begin)


async def generate(url: str, end: float, sizes: tuple[int, int], vocab: int, clients: int = 32) -> float:
    """Tokens a second of clients that ask until then. Raises RuntimeError if a request fails or an answer is too short."""
    tokens = 0
    seconds = 0.0
    seed = 1
    while time.perf_counter() < end:
        seed += 1
        load = Load(url, "bench", ids=(5, vocab), requests=2 * clients, concurrency=clients, warmup=1, seed=seed)
        report = await run(Load(**{**load.__dict__, "prompt_tokens": sizes[0], "output_tokens": sizes[1]}))
        wanted = 2 * clients * sizes[1]
        got = round(report["output_tokens_per_s"] * report["seconds"])
        if report["failed"] or abs(got - wanted) > 0.01 * wanted:
            raise RuntimeError(f"{report['failed']} requests failed, {got} of {wanted} tokens came: {report['errors']}")
        tokens += wanted
        seconds += report["seconds"]
    return tokens / seconds


async def measure(urls: tuple[str, str], args: argparse.Namespace, vocab: int) -> dict[str, float]:
    generator, encoder = urls
    sizes = (16, 8) if args.tiny else (256, 128)
    encoding = Encoding(encoder, 16 if args.tiny else 128)
    for seconds in (min(5.0, args.seconds), args.seconds):  # the first is not counted
        found = {
            "texts alone": await encoding.load(seconds),
            "tokens alone": await generate(generator, time.perf_counter() + seconds, sizes, vocab),
        }
    end = time.perf_counter() + args.seconds
    # the client of the encoder is a thread, because both clients together are more than one interpreter's loop can do
    stop = threading.Event()
    beside = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(encoding.load(args.seconds, stop))))
    try:
        tokens = await generate(generator, end, sizes, vocab)  # its last round ends later, and is not alone then either
    finally:
        stop.set()
    texts = await beside
    if encoding.worst > 1e-3:
        raise RuntimeError(f"the vectors of one text differ by a cosine distance of {encoding.worst:.1e}")
    return found | {"texts together": texts, "tokens together": tokens, "cosine distance": encoding.worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tiny", action="store_true", help="a CPU and small models; the numbers say nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    args.serve = ["--dtype", "float32", "--num-pages", "512"] if args.tiny else []
    args.dtype = "float32" if args.tiny else "bfloat16"
    generator, encoder = FAMILIES["tiny" if args.tiny else "full"]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        engine_workloads.make_folder(generator, Path(one), args.device)
        bench_embeddings.make_folder(encoder, Path(other), args.dtype)
        command, env = ours(one, args)
        place = command.index("--gpu-memory-utilization")
        command[place + 1] = "0.6"
        with (
            server("fa_serve", command, env, time.time() + 120, args) as (first, _),
            bench_embeddings.served(args, Path(other)) as second,
        ):
            say("both servers are ready")
            try:
                found = asyncio.run(measure((first, second), args, engine_workloads.SHAPES[generator]["vocab_size"]))
            except (RuntimeError, httpx.HTTPError) as error:
                sys.exit(f"lost: {type(error).__name__}: {error}")
    say(json.dumps({name: round(value, 6) for name, value in found.items()}))
    results = Results("embeddings", args.out, kept=not args.tiny)
    for what, unit in (("texts", "sentences/s"), ("tokens", "tok/s")):
        results.add(f"{encoder} beside {generator}, {what}", unit, found[f"{what} together"], {"alone": found[f"{what} alone"]})
    results.summarise()


if __name__ == "__main__":
    main()
