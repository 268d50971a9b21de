"""Tiles of the product whose rows do not depend on their number: equal bits, and microseconds beside PyTorch's product.

    python -m benchmarks.tuning.tune_invariant                         # the products of an 8B model, 1 to 8,192 rows
    python -m benchmarks.tuning.tune_invariant --rows 1,64 --shapes 4096x4096

For each product and tile, the results of all numbers of rows are compared with one another in every bit first. A line has the
time of each tile, of the one tile of other GPUs, of `torch.matmul`, and for few rows also of tiles with k in segments, which
would be other bits. What the lines decide is in fa_serve/ops/products/tiles.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import milliseconds
from fa_serve.ops.products import tiles as product_tiles
from fa_serve.ops.products.problem import Details, Product, compiles_gluon
from fa_serve.ops.products.row_invariant import plan_invariant
from fa_serve.ops.products.row_invariant_wgmma import plan_invariant_wgmma
from fa_serve.ops.products.table import select_kernel
from fa_serve.ops.products.tiles import HOPPER_TILES, ONE_TILE, InvariantTile, InvariantWgmmaTile, choose_splits

SHAPES = "6144x4096,4096x4096,28672x4096,4096x14336,1024x4096"
WGMMA_TILES = (InvariantWgmmaTile(256, 4, 2), InvariantWgmmaTile(256, 4), InvariantWgmmaTile(128, 6, 3))
ROWS = "1,16,64,256,2048,8192"


def product_of(x: Tensor, weight: Tensor) -> Product:
    n, k = weight.shape
    sms = torch.cuda.get_device_properties(0).multi_processor_count if x.is_cuda else 132
    return Product(
        values="float",
        n=n,
        k=k,
        tokens=len(x),
        dtype=x.dtype,
        matrix_dtype=x.dtype,
        arch=90,
        invariant=True,
        num_sms=sms,
        gluon=compiles_gluon(),
    )


def call_of(x: Tensor, weight: Tensor, tile: InvariantTile | InvariantWgmmaTile) -> Callable[[], Tensor]:
    """The product of x with a tile."""
    plan: Any = plan_invariant if isinstance(tile, InvariantTile) else plan_invariant_wgmma
    multiply = plan(product_of(x, weight), tile, Details(strides=(*x.stride(), *weight.stride())))
    return partial(multiply, x, weight, None, None, None)


def tiles_for(rows: int) -> Iterator[InvariantTile | InvariantWgmmaTile]:
    """Every tile that a product of so many rows could have."""
    for tile in HOPPER_TILES:
        if tile.block_n >= 64 or rows <= 512:
            yield tile
    yield from WGMMA_TILES


def segmented(n: int, k: int, tiles: Iterable[InvariantTile]) -> Iterator[InvariantTile]:
    """These tiles with k in segments, which would be other bits."""
    segments = choose_splits(-(-n // 64), 320, k, 512)
    if segments > 1:
        yield from (tile._replace(segments=segments, apart=True) for tile in tiles)


def unequal_rows(x: Tensor, weight: Tensor, tiles: list[Any]) -> list[str]:
    """What differs from the same rows of the first tile with all rows: tiles, and places of rows."""
    whole = call_of(x, weight, tiles[0])()
    found = []
    for tile in tiles:
        for rows in (slice(0, 1), slice(5, 6), slice(0, 16), slice(3, 67), slice(0, len(x))):
            out = call_of(x[rows].clone(), weight, tile)()
            if not torch.equal(out, whole[rows]):
                found.append(f"{tile} {rows.start}:{rows.stop} {(out != whole[rows]).float().mean():.2%}")
    return found


def name_of(tile: InvariantTile | InvariantWgmmaTile) -> str:
    if isinstance(tile, InvariantWgmmaTile):
        return f"wgmma {tile.block_n}/{tile.stages}/{tile.lag}"
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}/{tile.segments}{'a' if tile.apart else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help="n x k, separated by commas")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--rep", type=int, default=15, help="milliseconds that each tile is measured")
    options = parser.parse_args()
    torch.manual_seed(0)
    product_tiles.CHOOSES_BY_ROWS = True
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") / 64
        x = torch.randn(333, k, dtype=torch.bfloat16, device="cuda")
        differences = unequal_rows(x, weight, list(tiles_for(len(x))))
        print(f"{shape}: {'equal bits' if not differences else 'DIFFERENT BITS: ' + '; '.join(differences)}", flush=True)
        for rows in map(int, options.rows.split(",")):
            x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
            chosen = select_kernel(product_of(x, weight)).tile
            tiles = [*tiles_for(rows), *(segmented(n, k, HOPPER_TILES[2:4]) if rows <= 256 else ())]
            calls: dict[str, Callable[[], Tensor]] = {"torch": partial(torch.matmul, x, weight.t())}
            calls |= {name_of(tile): call_of(x, weight, tile) for tile in tiles}
            calls |= {"one tile": call_of(x, weight, ONE_TILE)}
            times = {name: 1e3 * milliseconds(call, rep=options.rep, warmup=5) for name, call in calls.items()}
            listed = "  ".join(f"{name} {time:.1f}" for name, time in times.items())
            ratio = times[name_of(chosen)] / times["torch"]
            print(f"  {rows} rows, us: {listed}  chosen {name_of(chosen)}: {ratio:.2f} of torch", flush=True)


if __name__ == "__main__":
    main()
