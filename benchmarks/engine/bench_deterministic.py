"""What deterministic mode costs: the rates of the engine in both modes, in one run.

    python -m benchmarks.engine.bench_deterministic                    # 0.6B, 8B and a mixture on one GPU
    python -m benchmarks.engine.bench_deterministic --shapes qwen06
    python -m benchmarks.engine.bench_deterministic --cells decode     # of the cells, those whose names contain a part
    python -m benchmarks.engine.bench_deterministic --shapes tiny --device cpu --tiny  # to try the script

For each shape with random weights: tokens a second of 1, 64 and 256 requests that decode, and of prompts of 512 and 4,096
tokens. The peer is the usual mode, so the ratio is deterministic / usual: 0.91 is the aim of 1.10. Before it is timed, an
answer alone is compared with the same answer among the others, in every bit. The lines are in results/deterministic.jsonl.

A cell is warmed up until two calls in a row agree within 10%, and is the median of three calls in which no kernel was compiled
and no graph captured (benchmarks/steady.py), of fewer when CELL_SECONDS have passed.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.engine_workloads import SHAPES, make_model
from benchmarks.measure import Cells, Results
from benchmarks.steady import late_work, steady_seconds
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.ops.products import tiles

BATCHES = (1, 64, 256)
PROMPTS = (512, 4096)
CELL_SECONDS = 6.0
"""After which no further call of a cell is timed, but the first one, so that 0.6B and 8B fit into 150 seconds of a GPU."""


def draw_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]


def rate(engine: Engine, prompts: list[list[int]], tokens: int, counted: int) -> float:
    """Tokens a second: `counted` for each prompt, once calls of this shape have settled."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    seconds = steady_seconds(lambda: engine.generate(prompts, params), lambda: late_work(engine), budget=CELL_SECONDS)
    return len(prompts) * counted / seconds


def require_equal_bits(engine: Engine, prompts: list[list[int]]) -> None:
    """Raise AssertionError unless the first answer has the same bits alone and among the others."""
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=0)

    def bits(asked: list[list[int]]) -> list[tuple[int, float]]:
        return [(entry.token_id, entry.logprob) for entry in engine.generate(asked, params)[0].logprobs or []]

    assert bits(prompts[:1]) == bits(prompts), "an answer depends on the batch"


def measure(results: Results, shape: str, device: str, tiny: bool, cells: str = "") -> None:
    """A line for each case. cells: parts of names, separated by commas; empty: all"""
    wanted = Cells(cells, math.inf)
    batches = BATCHES[:2] if tiny else BATCHES
    lengths = (16, 48) if tiny else PROMPTS
    new = 8 if tiny else 128
    rates: dict[str, float] = {}  # in deterministic mode

    def note(case: str, found: float) -> None:
        if case in rates:
            results.show(case, "tokens/s", rates[case], {"usual": found})
        else:
            rates[case] = found
            print(f"{case}: {found:.5g} tokens/s in deterministic mode", flush=True)

    for deterministic in (True, False):
        dtype = torch.float32 if tiny else torch.bfloat16
        model = make_model(shape, device, dtype=dtype)
        size: dict[str, Any] = {"num_pages": 512} if tiny else {}
        longest = max(lengths) + 64
        engine = Engine(
            EngineConfig(deterministic=deterministic, prefix_caching=False, max_model_len=longest, **size), model=model
        )
        if deterministic:
            require_equal_bits(engine, draw_prompts(4, 40, engine.vocab_size))
        for batch in batches:
            case = f"{shape} decode {batch}"
            if wanted.takes(case):
                note(case, rate(engine, draw_prompts(batch, 16, engine.vocab_size), new, new))
        for length in lengths:
            case = f"{shape} prompt {length}"
            if wanted.takes(case):
                prompts = draw_prompts(2 if tiny else 16, length, engine.vocab_size)
                note(case, rate(engine, prompts, 1, length))
        engine.close()
        del engine, model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen06,llama8b,qwen30a3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few and short requests")
    parser.add_argument("--one-tile", action="store_true", help="switch tiles.CHOOSES_BY_ROWS off: one tile for every size")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--cells", default="", help="parts of the names of cells, separated by commas, such as decode")
    options = parser.parse_args()
    tiles.CHOOSES_BY_ROWS &= not options.one_tile
    results = Results("deterministic", options.out)
    for shape in options.shapes.split(","):
        measure(results, shape, options.device, options.tiny, options.cells)


if __name__ == "__main__":
    main()
