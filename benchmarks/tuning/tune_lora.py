"""Tiles of products with their adapters: microseconds in a CUDA graph, beside the product of the base.

    python -m benchmarks.tuning.tune_lora                         # the products of an 8B model with 64 tokens
    python -m benchmarks.tuning.tune_lora --tokens 1,16 --shapes o,down

A line has the base (PyTorch's product with what is behind it), adapters in separate launches, and each tile, with 1 adapter;
then the chosen tile with 32 adapters and with none. The weights of a call are not in the L2 cache. What the lines decide is
`choose_product_tile` in fa_serve/ops/lora/product.py, and whether few tokens are worth merging.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import graph_microseconds
from fa_serve import ops, spec
from fa_serve.engine.runner.lora_arrays import tile_arrays
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS
from fa_serve.ops.lora.product import ProductTile, choose_product_tile, plan_lora_product
from fa_serve.ops.lora.row_product import launch_row
from fa_serve.ops.lora.separate import separate_linear_lora
from fa_serve.ops.triton_ops import TritonOps

SHAPES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "qkv": ((4096, 1024, 1024), 4096, {}),
    "o": ((4096,), 4096, {"residual": True}),
    "gate_up": ((14336, 14336), 4096, {"activation": "silu"}),
    "down": ((4096,), 14336, {"residual": True}),
    "qkv06": ((2048, 1024, 1024), 1024, {}),
    "o06": ((1024,), 2048, {"residual": True}),
    "gate_up06": ((3072, 3072), 1024, {"activation": "silu"}),
    "down06": ((1024,), 3072, {"residual": True}),
}
BYTES = 300 << 20
SLOTS = 32


class Problem:
    """Copies of a product with different addresses, each with the adapters of SLOTS slots."""

    def __init__(self, shape: str, tokens: int) -> None:
        self.widths, self.k, self.extras = SHAPES[shape]
        n = sum(self.widths)
        self.x = torch.randn(tokens, self.k, dtype=torch.bfloat16, device="cuda")
        self.weight = [self._random(n, self.k) for _ in range(max(2, BYTES // (2 * n * self.k)))]
        self.residual = torch.zeros(tokens, n, dtype=torch.bfloat16, device="cuda") if "residual" in self.extras else None
        self.activation = self.extras.get("activation")
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
        """As many tiles as a graph has. adapters: of the step"""
        tokens = len(self.x)
        slots = np.arange(tokens) % adapters if adapters else np.full(tokens, -1)
        rows, tiles = tile_arrays(slots, 16)
        padded = np.zeros((tokens // 16 + tokens, 3), dtype=np.int32)
        padded[: len(tiles)] = tiles
        moved = [torch.from_numpy(each.astype(np.int32)).cuda() for each in (rows, padded, slots)]
        return ops.LoraBatch(*moved, self.pages, torch.ones(SLOTS, dtype=torch.int32, device="cuda"), 16)

    def base(self, weight: Tensor, lora: ops.LoraWeights) -> Any:
        if self.activation is not None:
            return ops.linear(self.x, weight, activation=self.activation, next_weight=weight)
        return ops.linear(self.x, weight, residual=self.residual)

    def separate(self, batch: ops.LoraBatch, weight: Tensor, lora: ops.LoraWeights) -> Any:
        around = (None, self.activation, self.residual, 1.0)
        return separate_linear_lora(TritonOps(), self.x, weight, None, lora, batch, *around)

    def merged(self, batch: ops.LoraBatch, tile: ProductTile | None) -> Callable[[Tensor, ops.LoraWeights], Any]:
        if len(self.x) == 1:
            return lambda weight, lora: launch_row(self.x, weight, None, lora, batch, None, self.activation, self.residual, 1.0)
        compute = plan_lora_product(self.x, self.weight[0], self.lora[0], batch, self.activation, 1.0, tile)
        return lambda weight, lora: compute(self.x, weight, None, lora, batch, self.residual)

    def microseconds(self, call: Callable[[Tensor, ops.LoraWeights], Any]) -> float:
        turns = cycle(zip(self.weight, self.lora, strict=True))
        count = max(8, len(self.weight))
        calls = [partial(call, *each) for each in islice(turns, count)]

        def every() -> None:
            for each in calls:
                each()

        return graph_microseconds(every, calls=1, rep=20) / count


def tiles_for(tokens: int, n: int, chosen: ProductTile, sms: int) -> Sequence[ProductTile]:
    """The chosen tile, those that differ from it in one way, and tiles of 256 rows of weights.

    A program of 128 rows of weights and 64 tokens reads half as many bytes of tokens as of weights, from the L2 cache, and one
    of 256 rows a quarter.
    """
    if tokens == 1:
        return [chosen]
    others = [chosen._replace(block_n=192 - chosen.block_n, num_stages=3), chosen._replace(block_k=128, num_stages=3)]
    others += [chosen._replace(splits=splits) for splits in (chosen.splits // 2, chosen.splits * 2) if splits]
    others.append(chosen._replace(finish_n=192 - chosen.finish_n))
    wide = chosen._replace(block_n=256, splits=max(1, sms // -(-n // 256)))
    others += [wide._replace(num_stages=stages, num_warps=warps) for stages, warps in ((4, 4), (4, 8), (3, 8))]
    others.append(wide._replace(num_stages=4, num_warps=8, splits=2 * wide.splits))
    return [chosen, *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qkv,o,gate_up,down")
    parser.add_argument("--tokens", default="64")
    parser.add_argument("--chosen", action="store_true", help="no other tile than the chosen one")
    options = parser.parse_args()
    torch.manual_seed(0)
    for tokens in map(int, options.tokens.split(",")):
        for shape in options.shapes.split(","):
            problem = Problem(shape, tokens)
            one = problem.batch(1)
            n = sum(problem.widths)
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            chosen = choose_product_tile(tokens, n, problem.k, 2, sms, spec.arch_of(problem.x.device))
            tiles = [chosen] if options.chosen else tiles_for(tokens, n, chosen, sms)
            times = {"base": problem.microseconds(problem.base)}
            times["separate"] = problem.microseconds(partial(problem.separate, one))
            for tile in tiles:
                times["/".join(map(str, tile[1:]))] = problem.microseconds(problem.merged(one, tile))
            for count in (0, min(tokens, SLOTS)):
                times[f"{count} adapters"] = problem.microseconds(problem.merged(problem.batch(count), chosen))
            print(
                f"{shape} {tokens} tokens, us: " + "  ".join(f"{name} {time:.1f}" for name, time in times.items()), flush=True
            )
            del problem
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
