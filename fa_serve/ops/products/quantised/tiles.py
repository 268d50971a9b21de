"""Tiles of products with quantised weights, which depend only on the product, and the parts in which its weights are read.

`num_stages` and `stages` are copies in flight; `splits` are ranges of columns that are summed by different programs, whose sums
split_k.py adds. Where a docstring says that a tile was the fastest of several, these were timed for weights of 28672 x 4096,
4096 x 14336, 6144 x 4096 and 4096 x 4096, in CUDA graphs with weights outside of the L2 cache.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fa_serve.launching.sizes import power_of_2
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.quantised.weight import BLOCK_COLUMNS, RUN
from fa_serve.ops.products.tiles import choose_splits


def unit_columns(product: Product) -> int:
    """The columns of a unit of `load_units`."""
    return BLOCK_COLUMNS if product.is_packed else RUN


def count_parts(product: Product, unit: int) -> int:
    """The number of equal parts of `unit` columns such that in any unit of the row, each part lies in one group."""
    return 1 if product.has_row_scales else unit // math.gcd(unit, product.group)


def run_width(product: Product) -> int:
    """Columns that are multiplied at once: a run of 4-bit weights, or up to 128 columns of a part of float8 weights."""
    return RUN if product.is_packed else min(128, BLOCK_COLUMNS // count_parts(product, BLOCK_COLUMNS))


class GemvTile(NamedTuple):
    """block_n rows of weights; each of num_warps warps has its own blocks of 32 words of a row.

    num_stages: blocks of a warp that are loaded or used at a time
    programs:   the most programs for each multiprocessor. More tiles than that are multiplied one after the other
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int


def gemv_tile(product: Product) -> GemvTile:
    """The tile of the Hopper kernel for one token.

    Of 4, 8 and 16 warps, 2 to 4 stages and 1 to 6 programs on one H200 these were the fastest, or within 1% of the fastest.
    """
    tiles = -(-product.n // 16)
    if tiles <= 2 * product.num_sms:
        return GemvTile(16, 8, 3 if product.is_packed else 4, 2)
    if tiles <= 3 * product.num_sms:
        return GemvTile(16, 8, 2 if product.is_packed else 3, 3)
    return GemvTile(16, 4, 3 if product.is_packed else 2, 5)


class UnpackRowTile(NamedTuple):
    """block_n rows of weights by block_k columns, computed by num_warps warps."""

    block_n: int
    block_k: int
    num_warps: int


def unpack_row_tile(product: Product) -> UnpackRowTile:
    """The tile of the portable kernel for one token.

    A thread loads 16 bytes of a row at once, so 4 warps have 512 columns of float8 weights, and 8 warps 1,024 columns of 4-bit
    weights, which were faster than 512 on one H200. Fewer rows do not pay off while every multiprocessor has a program.
    """
    block_n = (16 if product.is_packed else 8) // (2 if product.gated else 1)
    while block_n > 8 and product.outputs // block_n < product.num_sms:
        block_n //= 2
    block_k = 1024 if product.is_packed else 512
    while block_k > 256 and block_k >= 2 * product.k:
        block_k //= 2
    return UnpackRowTile(block_n, block_k, 8 if block_k == 1024 else 4)


class UnpackTile(NamedTuple):
    """block_n rows of weights by block_m tokens, computed by num_warps warps."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int


def unpack_linear_tile(product: Product) -> UnpackTile:
    """The tile of the portable kernel for several tokens. The fastest of five on one H200, for 2 to 128 tokens.

    Up to 64 tokens fit into one tile, so weights are read once. float32, which tensor cores do not multiply, takes small tiles.
    On GPUs before Hopper, larger tiles spill registers. Sums are split until every multiprocessor has two programs, but not
    below 1,024 columns.
    """
    if product.dtype.itemsize == 4:
        return UnpackTile(16, 32, 4, 2, 1)
    block_m = min(64, max(16, power_of_2(product.tokens)))
    programs = -(-product.tokens // block_m) * -(-product.n // 64)
    # the last doubling may lead to almost four programs for each multiprocessor
    splits = choose_splits(programs, 4 * product.num_sms - 1, product.k, 1024, most=8)
    return UnpackTile(block_m, 64, 4, 3 if block_m == 16 else 2, splits)


class WgmmaTile(NamedTuple):
    """block_n rows of weights by block_m tokens, computed by a warp for each 16 rows.

    stages: blocks of columns in shared memory, of which one is multiplied and the others are on their way
    overlapped: weights are unpacked while tensor cores multiply the previous ones, which takes at least 3 stages
    """

    block_m: int
    block_n: int
    stages: int
    splits: int
    overlapped: bool = False


def wgmma_tile(product: Product) -> WgmmaTile:
    """The tile of the Hopper kernel that unpacks weights for 2 to 128 tokens.

    If there are few tiles, columns are split into ranges of at least 1024, as long as the GPU holds all programs at a time. Of
    64 to 256 rows, 2 to 6 stages, 1 to 8 ranges, and with and without overlap, these were the fastest or within 10% of the
    fastest on one H200. Unpacking while the tensor cores multiply pays off for float8 weights only.
    """
    block_m = next(size for size in (16, 32, 64, 128) if product.tokens <= size)
    packed = product.is_packed
    tiles = -(-product.n // 64)
    if tiles >= 2 * product.num_sms:
        block_n = 64 if block_m <= 32 else 128
        stages = {16: 3, 32: 2, 64: 2, 128: 2} if packed else {16: 4, 32: 3, 64: 3, 128: 2}
        return WgmmaTile(block_m, block_n, stages[block_m], 1, not packed and block_m == 16)
    residents = {16: 4, 32: 4, 64: 2, 128: 1}[block_m]
    splits = choose_splits(tiles, residents * product.num_sms, product.k, 1024)
    stages = {16: 3, 32: 2, 64: 2, 128: 3} if packed else {16: 4, 32: 4, 64: 4, 128: 2}
    return WgmmaTile(block_m, 64, stages[block_m], splits, not packed and block_m < 128)


class Float8Tile(NamedTuple):
    """block_n rows of weights by block_m tokens, computed by a warp for each 16 rows.

    stages: blocks of columns in shared memory, of which one is multiplied and the others are on their way
    """

    block_m: int
    block_n: int
    stages: int
    splits: int


def float8_tile(product: Product) -> Float8Tile:
    """The tile of the Hopper kernel that multiplies float8 with float8, for 2 to 128 tokens.

    With at least two tiles for each multiprocessor, few stages let the programs of more tiles run at the same time. Otherwise
    programs have many stages, one or two of them fit on a multiprocessor, and columns are split into ranges of at least 2048.
    Of 64 and 128 rows, 3 to 8 stages and 1 to 4 ranges, these were the fastest on one H200, or within 5% of the fastest.
    """
    block_m = next(size for size in (16, 32, 64, 128) if product.tokens <= size)
    tiles = -(-product.n // 64)
    if tiles >= 2 * product.num_sms:
        return Float8Tile(block_m, 64, 4 if block_m == 128 else 3, 1)
    residents = 2 if block_m <= 32 else 1
    return Float8Tile(block_m, 64, 8, choose_splits(tiles, residents * product.num_sms, product.k, 2048))
