"""The kernel for few rows on Hopper: bits beside separate launches, microseconds of a layer's products, and tiles.

    python -m benchmarks.tuning.tune_few_rows                           # 0.6B and 8B, 1 and 8 tokens
    python -m benchmarks.tuning.tune_few_rows --shapes qwen06 --tokens 1,2,4,8 --tiles

First each product of a layer, with its norm, gate or residual, is compared in every bit with separate launches. A line of a
layer has the time of its four products in the usual mode, in deterministic mode with separate launches, and with this kernel,
from graphs of `LAYERS` layers that have different weights, so that weights come from memory. With --tiles, a line of a product
has the time of every tile.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.testing import do_bench

from fa_serve import ops
from fa_serve.launching.plans import PLANS
from fa_serve.ops.deterministic import deterministic_mode
from fa_serve.ops.products import tiles
from fa_serve.ops.products.problem import Details, Product, compiles_gluon
from fa_serve.ops.products.row_invariant_few import plan_invariant_rows
from fa_serve.ops.products.tiles import InvariantRowsTile, few_rows_bytes
from fa_serve.ops.triton_ops import TritonOps

LAYERS = 16
BF16 = torch.bfloat16
OPS = TritonOps()


class Shape(NamedTuple):
    """Sizes of a layer. queries: columns of the output of attention; heads: rows of the merged projections"""

    hidden: int
    heads: int
    queries: int
    inner: int


SHAPES = {"qwen06": Shape(1024, 4096, 2048, 3072), "llama8b": Shape(4096, 6144, 4096, 14336)}


class Layer:
    """The four products of a layer with random weights."""

    def __init__(self, shape: Shape) -> None:
        def weight(n: int, k: int) -> Tensor:
            return torch.randn(n, k, device="cuda", dtype=BF16).div_(k**0.5)

        self.shape = shape
        self.norm = ops.Norm(torch.rand(shape.hidden, device="cuda", dtype=BF16) + 0.5, 1e-6)
        self.projections = weight(shape.heads, shape.hidden)
        self.output = weight(shape.hidden, shape.queries)
        self.gate = weight(2 * shape.inner, shape.hidden)
        self.down = weight(shape.hidden, shape.inner)

    def run(self, x: Tensor) -> list[Any]:
        """What the products give; x is updated in place."""
        merged: Any = OPS.linear(x, self.projections, None, self.norm, None, None, 1.0, None)
        OPS.linear(merged[:, : self.shape.queries], self.output, None, None, None, x, 1.0, None)
        inner = OPS.linear(x, self.gate, None, self.norm, "silu", None, 1.0, None)
        return [merged, inner, OPS.linear(inner, self.down, None, None, None, x, 1.0, None)]


def run_all(layers: list[Layer], x: Tensor) -> None:
    for layer in layers:
        layer.run(x)


@contextlib.contextmanager
def switched(deterministic: bool, fused: bool) -> Iterator[None]:
    before = tiles.FUSES_FEW_ROWS
    tiles.FUSES_FEW_ROWS = fused
    PLANS.clear()
    with deterministic_mode(deterministic):
        yield
    tiles.FUSES_FEW_ROWS = before
    PLANS.clear()


def microseconds(run: Callable[[], object]) -> float:
    """The time of a replay of a graph of run()."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return float(do_bench(graph.replay, warmup=10, rep=60, return_mode="median")) * 1e3


def unequal_products(layer: Layer, tokens: int) -> list[str]:
    """The products whose bits differ from those of separate launches, for these tokens and for the first of them alone."""
    x = torch.randn(64, layer.shape.hidden, device="cuda", dtype=BF16)
    with switched(deterministic=True, fused=False):
        expected = [each[:tokens] for each in layer.run(x.clone())]
    found = []
    for count in {1, tokens}:
        with switched(deterministic=True, fused=True):
            actual = layer.run(x[:count].clone())
        names = ("projections", "gate", "down")
        found += [
            f"{name} of {count}" for name, a, b in zip(names, actual, expected, strict=True) if not torch.equal(a, b[:count])
        ]
    return found


def tune(layers: list[Layer], name: str, tokens: int) -> None:
    """The time of each tile of one product of all layers."""
    shape = layers[0].shape
    gated = name == "gate"
    normed = name in ("projections", "gate")
    weights = [getattr(layer, name) for layer in layers]
    n, k = weights[0].shape
    product = Product(
        values="float", n=n, k=k, tokens=tokens, dtype=BF16, matrix_dtype=BF16, arch=90, invariant=True, gated=gated,
        num_sms=132, gluon=compiles_gluon(),
    )  # fmt: skip
    x = torch.randn(tokens, k, device="cuda", dtype=BF16)
    residual = None if normed else torch.zeros(tokens, n, device="cuda", dtype=BF16)
    row = []
    for block_n in (8, 16, 32, 64):
        for block_k in (64, 128, 256):
            stage = block_n * block_k * 2 * (1 + gated)
            for room in (tiles.FEW_ROWS_ROOM, 200 << 10):
                stages = (room - few_rows_bytes(product)) // stage
                if stages < 2 or (gated and block_n > 32):
                    continue
                details = Details(1e-6, 0.0, "silu" if gated else None, 1.0, (k, 1, k, 1))
                multiply = plan_invariant_rows(product, InvariantRowsTile(block_n, block_k, stages), details)
                norm = layers[0].norm.weight if normed else None

                def run(multiply: Callable[..., Tensor] = multiply, norm: Tensor | None = norm) -> None:
                    for weight in weights:
                        multiply(x, weight, None, norm, residual)

                row.append((microseconds(run) / len(weights), f"{block_n}x{block_k}/{stages}"))
    listed = "  ".join(f"{tile} {time:.2f}" for time, tile in sorted(row)[:8])
    print(f"  {name} {n} x {k} ({shape.hidden}), {tokens} tokens, us: {listed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--tiles", action="store_true", help="also the times of every tile")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.shapes.split(","):
        layers = [Layer(SHAPES[name]) for _ in range(LAYERS)]
        for tokens in map(int, options.tokens.split(",")):
            differences = unequal_products(layers[0], tokens)
            x = torch.randn(tokens, SHAPES[name].hidden, device="cuda", dtype=BF16)
            times = {}
            for mode, deterministic, fused in (("usual", False, False), ("separate", True, False), ("few rows", True, True)):
                with switched(deterministic, fused):
                    times[mode] = microseconds(partial(run_all, layers, x)) / LAYERS
            bits = "equal bits" if not differences else "DIFFERENT BITS: " + ", ".join(differences)
            listed = ", ".join(f"{mode} {time:.1f}" for mode, time in times.items())
            print(f"{name}, {tokens} tokens: {bits}; us a layer: {listed}", flush=True)
            if options.tiles:
                for product in ("projections", "output", "gate", "down"):
                    tune(layers, product, tokens)


if __name__ == "__main__":
    main()
