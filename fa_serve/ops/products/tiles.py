"""Tiles of products with matrices, which depend only on the product, and the number of sums into which any product is split.

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
    fills its last wave of programs better is chosen; rows of up to 1024 elements take the narrow one. This choice was the
    faster of the two for each of seven shapes on one H200. A fixed number of programs that each compute several tiles was
    slower.
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


REQUESTED_BYTES = 8 << 20
"""A weight of up to so many bytes is requested into the L2 cache while the previous kernel runs.

On one H200 this took the step of one sequence from 0.788 to 0.758 ms at the shape of Qwen3-0.6B, whose weights with long rows
have 4 and 6 MB. Requests for larger weights are in the way of loads: at the shape of Llama 3.1 8B, where they are limited to
1,024 columns of each row, the step took 4.38 ms instead of 4.16.
"""


def columns_ahead(product: Product, begin: int, threads: int) -> int:
    """How many columns from `begin` on are requested before a kernel waits for the previous one. 0 if none are.

    threads: those that request columns of one row, the same number each, in units of 16 bytes
    """
    size = (product.matrix_dtype or product.dtype).itemsize
    is_small = product.n * product.k * size <= REQUESTED_BYTES
    if not product.is_programmatic or not is_small or not product.aligned or product.k * size % 16:
        return 0
    unit = 16 // size * threads
    return max(product.k - begin, 0) // unit * unit


class InvariantTile(NamedTuple):
    """block_m rows by block_n columns of the output; block_k elements of the sum at once, num_stages of them in flight.

    segments: ranges of k, each of which is summed from zero, and whose sums are added in order
    apart:    each segment has its own program, and a second kernel adds the sums
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    segments: int = 1
    apart: bool = False


class InvariantRowsTile(NamedTuple):
    """block_n columns of the output for a few tokens, in a ring of up to `stages` of block_k elements of the sum."""

    block_n: int
    block_k: int
    stages: int


class InvariantWgmmaTile(NamedTuple):
    """128 rows by block_n columns of the output, in a ring of `stages` of 64 elements of the sum.

    lag: stages by which the first consumer precedes the second one in a tile; 0: they may begin together
    """

    block_n: int
    stages: int
    lag: int = 0


ONE_TILE = InvariantTile(64, 64, 128, 3)
"""The only tile on GPUs for which a choice by the number of rows could change the order of sums."""
HOPPER_TILES = (
    InvariantTile(128, 256, 64, 3, 8),
    InvariantTile(128, 128, 64, 4, 8),
    InvariantTile(64, 128, 64, 5),
    InvariantTile(64, 64, 128, 4),
    InvariantTile(64, 32, 128, 6),
    InvariantTile(64, 16, 128, 8),
)
"""Tiles that give bitwise equal rows on Hopper, from the largest. Each multiplies by wgmma of k16, at least 64 rows at a time,
and has one accumulator for a segment. So all of them add the same products to an output, in the same order."""
CHOOSES_BY_ROWS = True
"""The switch: whether tiles on Hopper depend on the number of rows. It is on because tests/gpu/test_rollouts_gpu.py has found
the rows of HOPPER_TILES and of `InvariantWgmmaTile` equal in every bit, on an H200 with Triton 3.6 for five sizes of weights;
test_row_invariant_compiled.py reads the machine code."""
LEAST_WGMMA_ROWS = 129
"""The fewest rows that the kernel with the copy engine (row_invariant_wgmma.py) multiplies."""
MOST_FEW_ROWS = 8
"""The most tokens that the kernel for few rows (row_invariant_few.py) multiplies."""
FUSES_FEW_ROWS = True
"""The switch: whether a product of few tokens has the norm before it and the gate after it in its launch in deterministic mode,
with the bits of separate launches. test_row_invariant_few_compiled.py reads that the code is made for equal bits, and
tests/gpu/test_rollouts_gpu.py compares the bits; it must be off where that test fails."""
FEW_ROWS_IN_USUAL_MODE = False
"""The switch for 2 to MOST_FEW_ROWS tokens in the usual mode, whose norms and gates have launches of their kind. It is off,
because it has not been measured. Plans that exist keep their kernel when it changes (`PLANS.clear()`)."""
FEW_ROWS_ROOM = 112 << 10
"""Bytes of shared memory for the tokens and the weights of a program for few rows. There is one program for each
multiprocessor, and a second one has room beside it: that of the next launch."""
MOST_FEW_ROWS_WEIGHTS = 1 << 24
"""The most weights that the kernel for few rows multiplies. With more of them, the launches that it saves are a small part of
the time, and its one program for each multiprocessor reads at a lower rate than the programs of `invariant`: the gate of an 8B
model took 70 us on one H200, and 64 with its norm and gate in separate launches."""
MOST_TOKEN_BYTES = 64 << 10
"""Bytes of the tokens, so that there is room for weights."""


def invariant_tile(product: Product) -> InvariantTile:
    """The tile of a product whose rows do not depend on the number of rows."""
    if product.dtype.itemsize == 4:
        return InvariantTile(32, 32, 32, 2)
    if CHOOSES_BY_ROWS and product.arch == 90:
        return hopper_invariant_tile(product)
    return ONE_TILE


def hopper_invariant_tile(product: Product) -> InvariantTile:
    """The largest tile of HOPPER_TILES that the rows fill and of which there are enough for the multiprocessors.

    All tiles have one segment: a second accumulator for the sum of segments would not leave room for tiles of many rows.
    """
    few = product.tokens <= 64
    fitting = [tile for tile in HOPPER_TILES if (tile.block_m == 64 if few else tile.block_n >= 32)]
    # With few rows, programs wait for memory, and one program for each multiprocessor keeps it busy. With 256 rows and 1024
    # columns on one H200, 64 x 64 took 17.1 us, 64 x 128 took 28.0, and 64 x 32 took 13.7.
    enough = product.num_sms * (0.75 if few else 1.5)
    return next((tile for tile in fitting if _programs(product, tile) >= enough), fitting[-1])


def invariant_rows_tile(product: Product) -> InvariantRowsTile:
    """The tile of a product of few tokens with its norm and gate: the largest of which all multiprocessors compute about as
    many. A gate has two accumulators."""
    columns = (32, 16, 8) if product.gated else (64, 32, 16, 8)

    def unused(block_n: int) -> float:
        """The share of the tiles that could be computed in the time that the tiles take."""
        tiles = -(-product.outputs // block_n)
        return -(-tiles // product.num_sms) * product.num_sms / tiles

    block_n = next((n for n in columns if unused(n) <= 1.1), min(columns, key=unused))
    halves = 2 if product.gated else 1
    block_k = 256 if block_n * halves <= (16 if product.gated else 32) else 128
    stage_bytes = block_n * halves * block_k * product.dtype.itemsize
    return InvariantRowsTile(block_n, block_k, (FEW_ROWS_ROOM - few_rows_bytes(product)) // stage_bytes)


def few_rows_bytes(product: Product) -> int:
    """Bytes of the tokens of a product of few tokens in shared memory, for a power of two of tokens and whole blocks."""
    return power_of_2(product.tokens) * -(-product.k // 256) * 256 * product.dtype.itemsize


def invariant_wgmma_tile(product: Product) -> InvariantWgmmaTile:
    """The tile of the row-invariant product of many rows."""
    tiles = -(-product.tokens // 128) * -(-product.n // 256)
    return InvariantWgmmaTile(256, 4, 2) if tiles >= product.num_sms else InvariantWgmmaTile(128, 6, 3)


def _programs(product: Product, tile: InvariantTile) -> int:
    return -(-product.tokens // tile.block_m) * -(-product.n // tile.block_n)


def segment_columns(k: int, segments: int) -> int:
    """Columns of a segment, a multiple of every block_k. The last segment has the rest."""
    return -(-k // (segments * 128)) * 128


def choose_splits(programs: int, room: int, k: int, columns: int, most: int = 1 << 30) -> int:
    """The number of ranges of columns that different programs sum: 1, 2, 4, ... as long as the GPU holds all programs at once.

    programs: number of programs of the product if its sums are not split
    room:     the most programs that there may be
    columns:  the fewest of the k columns that a range may have
    """
    splits = 1
    while 2 * splits <= most and 2 * splits * programs <= room and 2 * splits * columns <= k:
        splits *= 2
    return splits
