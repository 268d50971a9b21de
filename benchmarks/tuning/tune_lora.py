"""Ways to compute products with their adapters: microseconds in a CUDA graph, beside the product of the base.

    python -m benchmarks.tuning.tune_lora                         # the products of an 8B model with 1, 64 and 256 tokens: 90 s
    python -m benchmarks.tuning.tune_lora --tokens 64 --tiles --shapes o,down
    python -m benchmarks.tuning.tune_lora --tokens 512,2048       # prompts

A table for each number of tokens and of adapters has a line for each way, a column for each product with its norm, gate or
residual sum, and their sum for a layer, beside that of the base. The weights of a call are not in the L2 cache.

    separate        four launches behind each other (separate.py)
    one launch      one token; programs that multiply by the weights wait for those that multiply by A (row_product.py)
    ahead           one token; A in a launch before the product (row_product.py)
    merged          few tokens; A with the weights and B behind them (product.py), with so many programs in the second launch

What the tables decide, in fa_serve/ops/lora: `ahead` of `plan_lora_row` in row_product.py, `MERGED_PRODUCTS` in run.py,
`FINISH_PROGRAMS` in product.py. With --tiles, lines with other tiles of merged products for `choose_product_tile`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import graph_microseconds
from fa_serve import ops, spec
from fa_serve.engine.runner.lora_arrays import LARGE_TILE_ROWS, tile_arrays
from fa_serve.ops.lora import product
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS, MOST_MERGED_TOKENS, SMALL_TILE_ROWS
from fa_serve.ops.lora.product import (
    FINISH_PROGRAMS,
    ProductTile,
    choose_product_tile,
    plan_lora_product,
)
from fa_serve.ops.lora.row_product import plan_lora_row
from fa_serve.ops.lora.separate import separate_linear_lora
from fa_serve.ops.triton_ops import TritonOps

Way = Callable[[Tensor, ops.LoraWeights], Any]
"""Computes the product with these weights and these adapters."""

SHAPES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "qkv": ((4096, 1024, 1024), 4096, {"norm": True}),
    "o": ((4096,), 4096, {"residual": True}),
    "gate_up": ((14336, 14336), 4096, {"activation": "silu", "norm": True}),
    "down": ((4096,), 14336, {"residual": True}),
    "qkv06": ((2048, 1024, 1024), 1024, {"norm": True}),
    "o06": ((1024,), 2048, {"residual": True}),
    "gate_up06": ((3072, 3072), 1024, {"activation": "silu", "norm": True}),
    "down06": ((1024,), 3072, {"residual": True}),
}
BYTES = 300 << 20
SLOTS = 32
MOST_DECODING = 256
"""Up to so many tokens are one of each sequence; more are prompts, in a graph for so many sequences."""


class Problem:
    """Copies of a product with different addresses, each with the adapters of SLOTS slots."""

    def __init__(self, shape: str, tokens: int) -> None:
        self.widths, self.k, self.extras = SHAPES[shape]
        n = sum(self.widths)
        self.x = torch.randn(tokens, self.k, dtype=torch.bfloat16, device="cuda")
        self.weight = [self._random(n, self.k) for _ in range(max(2, BYTES // (2 * n * self.k)))]
        self.residual = torch.zeros(tokens, n, dtype=torch.bfloat16, device="cuda") if "residual" in self.extras else None
        self.activation = self.extras.get("activation")
        self.norm = None
        if "norm" in self.extras:
            self.norm = ops.Norm(torch.ones(self.k, dtype=torch.bfloat16, device="cuda"), 1e-5)
        self.lora = [self._adapters(n) for _ in self.weight]
        self.pages = torch.arange(SLOTS, dtype=torch.int32, device="cuda")[:, None]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") / self.k**0.5

    def _adapters(self, n: int) -> ops.LoraWeights:
        parts = len(self.widths)
        numbers = torch.full((2, SLOTS, 4), -1, dtype=torch.int32, device="cuda")[:, :, :parts]
        scales = torch.ones(SLOTS, 4, device="cuda")[:, :parts]
        counters = torch.zeros(LORA_COUNTERS, COUNTER_WORDS, dtype=torch.int64, device="cuda")
        a = self._random(SLOTS, parts, 16, self.k)
        return ops.LoraWeights(a, self._random(SLOTS, 16, n), scales, *numbers, counters, self.widths)

    def batch(self, adapters: int) -> ops.LoraBatch:
        """As many tiles as a graph has for a step that decodes, or for one with prompts. adapters: of the step"""
        tokens = len(self.x)
        slots = np.arange(tokens) % adapters if adapters else np.full(tokens, -1)
        block_rows = SMALL_TILE_ROWS if tokens <= MOST_DECODING else LARGE_TILE_ROWS
        rows, tiles = tile_arrays(slots, block_rows)
        padded = np.zeros((tokens // block_rows + min(tokens, MOST_DECODING), 3), dtype=np.int32)
        padded[: len(tiles)] = tiles
        moved = [torch.from_numpy(each.astype(np.int32)).cuda() for each in (rows, padded, slots)]
        return ops.LoraBatch(*moved, self.pages, torch.ones(SLOTS, dtype=torch.int32, device="cuda"), block_rows)

    def base(self, weight: Tensor, lora: ops.LoraWeights) -> Any:
        if self.activation is not None:
            return ops.linear(self.x, weight, norm=self.norm, activation=self.activation, next_weight=weight)
        return ops.linear(self.x, weight, norm=self.norm, residual=self.residual)

    def separate(self, batch: ops.LoraBatch, weight: Tensor, lora: ops.LoraWeights) -> Any:
        around = (self.norm, self.activation, self.residual, 1.0)
        return separate_linear_lora(TritonOps(), self.x, weight, None, lora, batch, *around)

    def one_token(self, batch: ops.LoraBatch, ahead: bool) -> Way:
        given = (self.norm, self.activation, 1.0)
        compute = plan_lora_row(self.x, self.weight[0], self.lora[0], batch, *given, ahead)
        return lambda weight, lora: compute(self.x, weight, None, lora, batch, self.norm, self.residual)

    def normalised(self) -> Tensor:
        return self.x if self.norm is None else ops.rms_norm(self.x, self.norm)

    def merged(self, batch: ops.LoraBatch, tile: ProductTile | None = None, programs: int = FINISH_PROGRAMS) -> Way:
        with patch.object(product, "FINISH_PROGRAMS", programs):
            compute = plan_lora_product(self.x, self.weight[0], self.lora[0], batch, self.activation, 1.0, tile)
        return lambda weight, lora: compute(self.normalised(), weight, None, lora, batch, self.residual)

    def ways(self, adapters: int) -> dict[str, Way]:
        """By name. adapters: of the step"""
        batch = self.batch(adapters)
        tokens = len(self.x)
        found: dict[str, Way] = {"base": self.base, "separate": partial(self.separate, batch)}
        if tokens == 1:
            found["one launch"] = self.one_token(batch, False)
            found["ahead"] = self.one_token(batch, True)
        elif tokens <= MOST_MERGED_TOKENS:
            found |= {f"merged {programs}": self.merged(batch, None, programs) for programs in (1024, 512)}
        return found

    def microseconds(self, call: Callable[[Tensor, ops.LoraWeights], Any]) -> float:
        turns = cycle(zip(self.weight, self.lora, strict=True))
        count = max(8, len(self.weight))
        calls = [partial(call, *each) for each in islice(turns, count)]

        def every() -> None:
            for each in calls:
                each()

        return graph_microseconds(every, calls=1, rep=20) / count


def show_ways(tokens: int, adapters: int, shapes: Sequence[str], times: dict[str, dict[str, float]]) -> None:
    """times: by way and shape. A way that a product does not have leaves the sum out."""
    print(
        f"\n{tokens} tokens, {adapters} adapters, us".ljust(31) + "".join(f"{name:>11}" for name in (*shapes, "sum", "of base"))
    )
    base = sum(times["base"].values())
    for way, by_shape in times.items():
        cells = [f"{by_shape[shape]:.1f}" if shape in by_shape else "-" for shape in shapes]
        if len(by_shape) == len(shapes):
            total = sum(by_shape.values())
            cells += [f"{total:.1f}", f"{total - base:+.1f}"]
        print(f"{way:30}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
    least = [min(each[shape] for way, each in times.items() if way != "base" and shape in each) for shape in shapes]
    cells = [*(f"{time:.1f}" for time in least), f"{sum(least):.1f}", f"{sum(least) - base:+.1f}"]
    print(f"{'best of each':30}" + "".join(f"{cell:>11}" for cell in cells), flush=True)


def compare_ways(tokens: int, shapes: Sequence[str]) -> None:
    counts = (1,) if tokens == 1 else (1, min(tokens, SLOTS))
    times: dict[int, dict[str, dict[str, float]]] = {count: {} for count in counts}
    for shape in shapes:
        problem = Problem(shape, tokens)
        for count in counts:
            for way, call in problem.ways(count).items():
                times[count].setdefault(way, {})[shape] = problem.microseconds(call)
        del problem
        torch.cuda.empty_cache()
    for count in counts:
        show_ways(tokens, count, shapes, times[count])


def tiles_for(tokens: int, n: int, chosen: ProductTile, sms: int) -> Sequence[ProductTile]:
    """The chosen tile, those that differ from it in one way, and tiles of 256 rows of weights.

    A program of 128 rows of weights and 64 tokens reads half as many bytes of tokens as of weights, from the L2 cache, and one
    of 256 rows a quarter.
    """
    others = [chosen._replace(block_n=192 - chosen.block_n, num_stages=3), chosen._replace(block_k=128, num_stages=3)]
    others += [chosen._replace(splits=splits) for splits in (chosen.splits // 2, chosen.splits * 2) if splits]
    others.append(chosen._replace(finish_n=192 - chosen.finish_n))
    wide = chosen._replace(block_n=256, splits=max(1, sms // -(-n // 256)))
    others += [wide._replace(num_stages=stages, num_warps=warps) for stages, warps in ((4, 4), (4, 8), (3, 8))]
    others.append(wide._replace(num_stages=4, num_warps=8, splits=2 * wide.splits))
    return [chosen, *others]


def compare_tiles(tokens: int, shape: str) -> None:
    problem = Problem(shape, tokens)
    one = problem.batch(1)
    n = sum(problem.widths)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = choose_product_tile(tokens, n, problem.k, 2, sms, spec.arch_of(problem.x.device))
    times = {"base": problem.microseconds(problem.base)}
    for tile in tiles_for(tokens, n, chosen, sms):
        times["/".join(map(str, tile[1:]))] = problem.microseconds(problem.merged(one, tile))
    print(f"{shape} {tokens} tokens, us: " + "  ".join(f"{name} {time:.1f}" for name, time in times.items()), flush=True)
    del problem
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--tokens", default="1,64,256")
    parser.add_argument("--tiles", action="store_true", help="other tiles of merged products of 2 to 128 tokens")
    options = parser.parse_args()
    torch.manual_seed(0)
    shapes = options.shapes.split(",")
    for tokens in map(int, options.tokens.split(",")):
        if options.tiles:
            for shape in shapes:
                compare_tiles(tokens, shape)
        else:
            compare_ways(tokens, shapes)


if __name__ == "__main__":
    main()
