"""Chats of several turns: what the prefix cache saves, for models with states too, and what it costs where nothing repeats.

    python -m benchmarks.engine.bench_chats                                  # a hybrid of 9B, and a mixture with states
    python -m benchmarks.engine.bench_chats --shapes qwen06 --chats 32
    python -m benchmarks.engine.bench_chats --shapes qwen3next --tiny --device cpu --out DIR     # tries the script

Each chat begins with a history of 2,048 tokens. A turn sends all that came before and 128 new tokens, for all chats at once,
and the answer has 64 tokens. An engine without the prefix cache gets prompts of as many tokens as the last turn has.

hit rate:   the part of a later turn's prompts that comes from the cache, the least of all turns after the first
computed:   tokens of a prompt that are computed in a later turn, the mean
first:      milliseconds to the first token of the last turn, of chats that are asked one after the other; the peer has no cache
no hits:    seconds of prompts that have nothing in common; the peer has no cache

The answers with the cache are compared with those without in float32 by the tests; here, a turn of which nothing was found
fails. Lines carry `bench: chats` (measure.py). Left out: other servers.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.engine_workloads import SHAPES, make_model, make_tiny
from benchmarks.measure import Results
from benchmarks.steady import late_work, steady_seconds
from fa_serve.engine import Engine, EngineConfig, SamplingParams


@dataclass(frozen=True)
class Sizes:
    """Of the chats, in tokens. asked: chats whose first token is timed alone; fresh: prompts that have nothing in common"""

    chats: int = 64
    turns: int = 8
    history: int = 2048
    question: int = 128
    answer: int = 64
    asked: int = 16
    fresh: int = 64

    @property
    def longest(self) -> int:
        return self.history + self.turns * (self.question + self.answer) + 64


TINY = Sizes(chats=2, turns=3, history=64, question=16, answer=8, asked=2, fresh=2)


@dataclass
class Turns:
    """What an engine has done. hit_rates, computed: of each turn after the first; firsts: seconds, of the last turn"""

    hit_rates: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)


def random_ids(draw: random.Random, count: int, vocab: int) -> list[int]:
    return [draw.randrange(5, vocab) for _ in range(count)]


def first_token(engine: Engine, prompt: list[int]) -> float:
    """Seconds until the only request has its first token."""
    begin = time.perf_counter()
    engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - begin


def run_chats(engine: Engine, sizes: Sizes, seed: int) -> Turns:
    """All turns of all chats."""
    draw = random.Random(seed)
    params = SamplingParams(max_tokens=sizes.answer, temperature=0.0, ignore_eos=True)
    chats = [random_ids(draw, sizes.history, engine.vocab_size) for _ in range(sizes.chats)]
    found = Turns()
    for turn in range(sizes.turns):
        prompts = [chat + random_ids(draw, sizes.question, engine.vocab_size) for chat in chats]
        if turn == sizes.turns - 1:
            found.firsts = [first_token(engine, prompt) for prompt in prompts[: sizes.asked]]
            return found
        before = engine.stats()
        answers = engine.generate(prompts, params)
        after = engine.stats()
        if turn:
            cached = after.num_cached_tokens - before.num_cached_tokens
            given = after.num_prompt_tokens - before.num_prompt_tokens
            found.hit_rates.append(cached / given)
            found.computed.append((given - cached) / sizes.chats)
        chats = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    return found


@contextmanager
def opened(model: Any, options: argparse.Namespace, sizes: Sizes, caches: bool) -> Iterator[Engine]:
    """An engine with or without the prefix cache."""
    limits = {"num_pages": 512} if options.tiny else {}
    config = EngineConfig(
        device=options.device, prefix_caching=caches, max_model_len=sizes.longest, max_num_seqs=sizes.chats, **limits
    )
    engine = Engine(config, model=model)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def fresh_seconds(engine: Engine, sizes: Sizes) -> float:
    """Of prompts that have nothing in common with any other."""
    draw = random.Random(2)

    def run() -> None:
        prompts = [random_ids(draw, sizes.history, engine.vocab_size) for _ in range(sizes.fresh)]
        engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))

    return steady_seconds(run, lambda: late_work(engine), budget=8.0)


def measure(results: Results, shape: str, model: Any, options: argparse.Namespace, sizes: Sizes) -> None:
    draw = random.Random(3)
    last = sizes.history + (sizes.turns - 1) * (sizes.question + sizes.answer) + sizes.question
    with opened(model, options, sizes, True) as engine:
        run_chats(engine, sizes, 0)  # compiles, and captures graphs
        cached = run_chats(engine, sizes, 1)
        if min(cached.hit_rates) == 0:
            raise RuntimeError(f"{shape}: a turn has found nothing in the prefix cache")
        results.show(f"{shape} hit rate", "part", min(cached.hit_rates), {})
        results.show(f"{shape} computed", "tokens a prompt", statistics.mean(cached.computed), {})
        with_cache = fresh_seconds(engine, sizes)
    with opened(model, options, sizes, False) as engine:
        firsts = [first_token(engine, random_ids(draw, last, engine.vocab_size)) for _ in range(sizes.asked + 2)][2:]
        computed = statistics.median(firsts) * 1e3
        results.show(f"{shape} first", "ms", statistics.median(cached.firsts) * 1e3, {"no cache": computed})
        results.show(f"{shape} no hits", "s", with_cache, {"no cache": fresh_seconds(engine, sizes)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen35-9b,qwen3next", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--chats", type=int, default=Sizes.chats)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few and short chats, and tiny models")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    if options.tiny:
        make_tiny()
    results = Results("chats", options.out)
    sizes = TINY if options.tiny else Sizes(chats=options.chats, asked=min(Sizes.asked, options.chats))
    for shape in options.shapes.split(","):
        model = make_model(shape, options.device, dtype=torch.float32 if options.device == "cpu" else torch.bfloat16)
        measure(results, shape, model, options, sizes)
        del model


if __name__ == "__main__":
    main()
