"""Tiles of the products of experts, which depend only on the product. This module imports no Triton. Left out: the kernels.

Tiles for many pairs are chosen by the average number of pairs for each expert. In deterministic mode, only tiles that add in
the same order are chosen by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa_serve.launching.sizes import power_of_2
from fa_serve.ops.products import tiles as products_tiles
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.quantised.tiles import run_width, unit_columns
from fa_serve.ops.products.tiles import choose_splits

MATRIX_BLOCK_M = 128
"""Pairs of a tile of the Hopper kernel for matrices."""


class ExpertRowTile(NamedTuple):
    """block_n rows of the weights by block_k elements of each, which a program of num_warps warps reads at once.

    vector: neighbouring elements of a row that a thread has, or 1
    stages: tiles that are loaded before the first is used. Quantised weights have one
    """

    block_n: int
    block_k: int
    vector: int
    stages: int
    num_warps: int


def expert_row_tile(product: Product) -> ExpertRowTile:
    """The tile of the kernels for few tokens: of `_gated_rows` if the product is gated, else of `_mixed_rows`.

    A thread loads 16 bytes at once. Gated rows of 2048 elements take 56 registers of a thread, so an SM has 18 programs with
    144 KB in flight. Other tiles of that kernel are within 2% on one H200.

    8 warps of `_mixed_rows` have 8 experts, one each, or fewer experts with several warps each. With 8 experts of 2048 rows all
    programs of a token run at once: 4 on each SM, with 56 registers for a thread and 64 KB in flight before they wait.
    """
    width = power_of_2(product.k)
    if product.matrix_dtype is None:
        return ExpertRowTile(8, max(unit_columns(product), min(512, width)), 1, 1, 4)
    vector = 16 // product.matrix_dtype.itemsize
    if product.gated:
        # at most 8 steps of `_dot_matrices` for rows of up to 8192 elements
        return ExpertRowTile(4, min(512, width), vector, 1, 2) if width <= 4096 else ExpertRowTile(4, 1024, vector, 1, 4)
    block_n = max(2, min(8, 32 // power_of_2(product.top_k)))
    return ExpertRowTile(block_n, min(256, width), vector, 1, 8 if product.top_k > 2 else 4)


class GroupedTile(NamedTuple):
    """block_m pairs by block_n columns of a product's weights; block_k elements of the sum at once, num_stages in flight.

    masked: rows of a tile that have no pair are not loaded. In tiles of many such rows, their copies of the last pair would be
            most of what a program reads
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    masked: bool = False


HOPPER_INVARIANT_TILES = (
    GroupedTile(128, 256, 64, 8, 3),
    GroupedTile(64, 128, 64, 4, 4, masked=True),
    GroupedTile(64, 32, 128, 4, 4, masked=True),
)
"""Tiles that give bitwise equal rows on Hopper, as the HOPPER_TILES of products/tiles.py do for dense weights: each multiplies
by wgmma of k16, at least 64 rows at a time, and has one accumulator for all columns. The Hopper kernel for matrices
(matrix_wgmma.py) gives rows the same bits."""


def grouped_tile(product: Product) -> GroupedTile:
    """The tile of the portable kernel for many pairs."""
    if product.values == "float":
        return grouped_matrix_tile(product)
    return _grouped_unpack_tile(product)._replace(block_k=run_width(product))


def invariant_grouped_tile(product: Product) -> GroupedTile:
    """The tile of a product on Hopper whose rows must not depend on the number of rows, for dtypes of 16 bits.

    With few pairs, narrow tiles give each multiprocessor a program that reads weights.
    """
    many, few, narrow = HOPPER_INVARIANT_TILES
    if product.pairs_per_expert > 96:
        return many
    programs = min(product.pairs, product.num_experts) * -(-product.n // few.block_n)
    return few if 2 * programs >= 3 * product.num_sms else narrow


def grouped_matrix_tile(product: Product) -> GroupedTile:
    """The tile of the portable kernel with matrices, also with those that were dequantised.

    A tile of 16 pairs wastes least where experts have few pairs, and a tile of 128 pairs uses tensor cores best. Stages fit in
    the shared memory of each architecture (arch 0 is ROCm, with 64 KiB). float32 is multiplied without tensor cores. The tiles
    for Hopper are the fastest of eight on one H200, at the sizes of Qwen3-30B-A3B and gpt-oss-20b with 1 to 8192 tokens. The
    other tiles are not measured.
    """
    pairs_per_expert = product.pairs_per_expert
    if product.dtype.itemsize == 4:
        return GroupedTile(32, 32, 32, 4, 2)
    if product.invariant:
        if product.arch == 90 and products_tiles.CHOOSES_BY_ROWS:
            return invariant_grouped_tile(product)
        return GroupedTile(64, 128, 64, 4, 3 if product.arch else 2)
    if product.arch == 90:
        if pairs_per_expert <= 8:
            return GroupedTile(16, 128, 128, 4, 4)
        if pairs_per_expert <= 24:
            return GroupedTile(32, 128, 64, 4, 4)
        return GroupedTile(64, 128, 64, 4, 3) if pairs_per_expert <= 96 else GroupedTile(128, 256, 64, 8, 3)
    stages = 3 if product.arch else 2
    if pairs_per_expert <= 16:
        return GroupedTile(16, 128, 64, 4, stages)
    if pairs_per_expert <= 96:
        return GroupedTile(64, 128, 64, 4, stages)
    return GroupedTile(128, 128, 64, 8, stages)


def _grouped_unpack_tile(product: Product) -> GroupedTile:
    """The tile of the portable kernel with quantised weights, whose block_k follows from their format.

    Weights go to tensor cores from registers, so a tile has 64 rows of weights, and up to 64 pairs, like the tile of a dense
    product (`unpack_linear_tile`), which is the fastest of five. A second tile of an expert unpacks its weights again, which
    costs more than multiplying with padding. So a tile has room for the average number of pairs plus 2.5 times its square root,
    which random routing needs for 99% of the experts. This is derived and has not been measured.
    """
    if product.dtype.itemsize == 4:
        return GroupedTile(16, 32, 32, 4, 2)
    if product.invariant:
        return GroupedTile(32, 64, 32, 4, 2)
    pairs_per_expert = product.pairs_per_expert
    block_m = 16 if pairs_per_expert <= 8 else 32 if pairs_per_expert <= 20 else 64
    return GroupedTile(block_m, 64, 32, 4, 3 if block_m == 16 else 2)


class GroupedWgmmaTile(NamedTuple):
    """block_m pairs by block_n rows of weights, computed by a warp for each 16 rows.

    splits: ranges of columns that are summed by different programs
    """

    block_m: int
    block_n: int
    splits: int = 1


def grouped_wgmma_tile(product: Product) -> GroupedWgmmaTile:
    """The tile of the Hopper kernel for quantised experts. It is derived and has not been measured.

    A second tile of an expert unpacks its weights again, so a tile has room for the average number of pairs plus 2.5 times its
    square root, which random routing needs for 99% of the experts. 128 rows of weights share the input that a tile copies;
    registers suffice for 128 pairs. Then tensor cores are busy for 1,024 cycles with half a block, and 256 threads unpack it in
    450 to 620.
    """
    for block_m, most in ((16, 8), (32, 20), (64, 48)):
        if product.pairs_per_expert <= most:
            return GroupedWgmmaTile(block_m, 128)
    return GroupedWgmmaTile(128, 128)


def one_expert_tile(product: Product) -> GroupedWgmmaTile:
    """The tile of the same kernel for 129 to 512 tokens with a dense weight.

    In a tile of 256 tokens by 128 rows, a thread spills 34 of its 128 sums. For 256 tokens of 28672 x 4096 on one H100, this
    tile is still faster than one with half of the tokens or half of the rows. For weights with fewer rows, it would leave most
    multiprocessors without a tile.

    256 tokens of 4096 x 14336 take three times as long as only their products would: a multiprocessor has one program of four
    warps, which waits for copies and products in turn, although its shared memory holds two programs. So two programs share the
    columns where there are too few tiles for two on each multiprocessor.
    """
    if -(-product.n // 128) >= product.num_sms:
        return GroupedWgmmaTile(256, 128)
    programs = -(-product.tokens // 128) * -(-product.n // 64)
    splits = choose_splits(programs, 2 * product.num_sms, product.k, 2048, most=2)
    return GroupedWgmmaTile(128, 64, splits)


@dataclass(frozen=True)
class MatrixTile:
    """MATRIX_BLOCK_M pairs by block_n rows of weights, in a ring of `stages`.

    lag: blocks of columns by which the first consumer precedes the second one in a tile; 0: they may begin together
    """

    block_n: int
    stages: int
    lag: int = 0

    @property
    def block_m(self) -> int:
        return MATRIX_BLOCK_M


def matrix_tile(product: Product) -> MatrixTile:
    """The tile of the Hopper kernel for matrices.

    A stage of 48 KiB takes tensor cores 1,024 cycles, and four of them fit into shared memory. Of 128 and 256 rows, 3 to 6
    stages and lags of 0 to 3 blocks on one H200, this was the fastest, or within 5% of the fastest, for 1,024 and 8,192 tokens.
    """
    return MatrixTile(256, 4, 2)
