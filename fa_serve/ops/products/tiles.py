"""Tiles of products with matrices, which follow from a product alone, and into how many sums any product is split.

The tiles of quantised weights are in quantised/tiles.py, those of experts in ../moe/tiles.py. None of these modules imports
Triton, so that table.py can be asked anywhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fa_serve.launching.sizes import power_of_2
from fa_serve.ops.products.problem import Product


class MatrixRowTile(NamedTuple):
    """block_n rows of a matrix by block_k columns, which a program multiplies with one token."""

    block_n: int
    block_k: int


def matrix_row_tile(product: Product) -> MatrixRowTile:
    """The tile of the product of one token with a matrix.

    Two tiles are considered: 8 x 1024, of which an SM holds 3 programs at once, and 8 x 512, of which it holds 5. The one that
    fills its last wave of programs better is chosen; rows of up to 1024 elements take the narrow one. That was the faster of
    both for each of seven shapes on one H200. A fixed number of programs that each compute several tiles was slower.
    """
    n = product.outputs
    tiles = []
    for block_k, resident in ((1024, 3), (512, 5)):
        block_n = 4 if product.gated else 8
        # a smaller tile has less in flight, which costs less than SMs without a program
        while block_n > 1 and n // block_n < 256:
            block_n //= 2
        waves = -(-n // block_n) / (product.num_sms * resident)
        tiles.append((waves / math.ceil(waves), MatrixRowTile(block_n, min(block_k, power_of_2(product.k)))))
    (wide_fill, wide), (narrow_fill, narrow) = tiles
    return narrow if product.k <= 1024 or narrow_fill > wide_fill + 0.05 else wide


class InvariantTile(NamedTuple):
    """block_m rows by block_n columns of the output; block_k elements of the sum at once, num_stages of them in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int


def invariant_tile(product: Product) -> InvariantTile:
    """One tile for every size of a dtype: a choice by the number of rows would change the order of sums."""
    return InvariantTile(32, 32, 32, 2) if product.dtype.itemsize == 4 else InvariantTile(64, 64, 128, 3)


def choose_splits(programs: int, room: int, k: int, columns: int, most: int = 1 << 30) -> int:
    """The ranges of columns that are summed by different programs: 1, 2, 4, ... while all programs have room at a time.

    programs: of the product if its sums are not split
    room:     the most programs that there may be
    columns:  the least number of the k columns that a range has
    """
    splits = 1
    while 2 * splits <= most and 2 * splits * programs <= room and 2 * splits * columns <= k:
        splits *= 2
    return splits
