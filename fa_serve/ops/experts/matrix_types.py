"""What the warps of the Hopper kernel of experts with matrices agree on: the compiled variant, what the partitions hand to one
another, and which pairs and rows of weights a tile has.

Left out: the partitions (matrix.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_M = 128
"""Pairs of a tile."""
BLOCK_K = 64
"""Columns of a stage: 128 bytes, the width of a swizzled row."""


@dataclass(frozen=True)
class MatrixTile:
    """block_n rows of weights, in a ring of `stages`.

    lag: blocks of columns by which the first consumer precedes the second one in a tile; 0: they may begin together
    """

    block_n: int
    stages: int
    lag: int = 0


@dataclass(frozen=True)
class MatrixVariant:
    """Everything that is fixed when the kernel is compiled, passed as one constexpr.

    n, k:       outputs and columns
    gated:      the input has a row for each token, and the output for each place in the order of experts; an output is gated
                from two rows of the weights. Else the input has a row for each place, and the output for each pair
    step, up, kind: see `experts_primitives.rows_of_outputs`; limited: the gate has a limit
    transposed: the columns of weights are contiguous
    """

    tile: MatrixTile
    n: int
    k: int
    top_k: int
    gated: bool
    step: int
    up: int
    kind: int
    limited: bool
    transposed: bool

    @property
    def rows(self) -> int:
        """Rows of an expert's weights."""
        return 2 * self.n if self.gated else self.n

    @property
    def outputs(self) -> int:
        """Columns of the output in a tile."""
        return self.tile.block_n // 2 if self.gated else self.tile.block_n

    @property
    def halves(self) -> bool:
        """Whether half of a tile's rows are gates and half of them up values, from distant rows of the weights."""
        return self.gated and self.up != 1

    @property
    def tiles_n(self) -> int:
        """Tiles of the same pairs."""
        return -(-self.rows // self.tile.block_n)

    @property
    def blocks(self) -> int:
        return self.k // BLOCK_K

    @property
    def lag(self) -> int:
        """Where a tile has fewer blocks than the ring, the first consumer could be two tiles ahead, which one barrier cannot
        tell."""
        return self.tile.lag if self.blocks >= self.tile.stages >= self.tile.lag else 0

    @property
    def copied_bytes(self) -> int:
        """What the copy engine brings to a stage."""
        return 2 * BLOCK_K * (self.tile.block_n + (0 if self.gated else BLOCK_M))

    @property
    def arrivals(self) -> int:
        """What makes a stage full: the copy engine's bytes, and the copies of 128 threads if these gather."""
        return 129 if self.gated else 1

    @property
    def ring_shape(self) -> list[int]:
        """Shape of the ring of weights."""
        box = [BLOCK_K, self.tile.block_n] if self.transposed else [self.tile.block_n, BLOCK_K]
        return [self.tile.stages, *box]

    @property
    def box_shape(self) -> list[int]:
        """The same memory as boxes, two for each stage. A swizzled row has 64 columns, and their rows are contiguous."""
        half = self.tile.block_n // 2
        box = [BLOCK_K, half] if self.transposed else [half, BLOCK_K]
        return [2 * self.tile.stages, *box]

    @property
    def product_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of a consumer's sums [64, block_n] as wgmma leaves them."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.tile.block_n, 16])


class MatrixArgs(NamedTuple):
    """What the partitions read: the kernel's arguments, the rings of inputs and weights, the latter's boxes, where each
    consumer rearranges outputs, and barriers.

    w, x:  tensor descriptors; x_ptr: the same tensor as x, for the first product
    total: tiles that may exist
    lead:  says that the first consumer has begun a tile
    """

    w: gl.tensor
    x: gl.tensor
    x_ptr: gl.tensor
    bias: gl.tensor
    order: gl.tensor
    tiles: gl.tensor
    out: gl.tensor
    total: gl.tensor
    stride_be: gl.tensor
    slope: gl.tensor
    limit: gl.tensor
    offset: gl.tensor
    inputs: gl.tensor
    weights: gl.tensor
    boxes: gl.tensor
    staging: gl.tensor
    full: gl.tensor
    empty: gl.tensor
    lead: gl.tensor


class PairTile(NamedTuple):
    """The expert of a tile, the place of its first pair, and the end of that expert's places. Without a pair, no tile
    follows."""

    expert: gl.tensor
    first: gl.tensor
    end: gl.tensor


@gluon.jit
def pair_tile(index, args, var: gl.constexpr):
    """The pairs of the `index`-th tile of the launch. Tiles of the same pairs follow one another: they share the L2 cache."""
    record = args.tiles + 3 * (index // var.tiles_n)
    exists = index < args.total
    expert = gl.load(record, mask=exists, other=0)
    first = gl.load(record + 1, mask=exists, other=0)
    end = gl.load(record + 2, mask=exists, other=0)
    return PairTile(expert, first, end)


@gluon.jit
def weight_rows(tile_n, var: gl.constexpr):
    """The first rows of a tile's two boxes of weights."""
    HALF: gl.constexpr = var.tile.block_n // 2
    if var.halves:
        return tile_n * HALF, tile_n * HALF + var.n
    else:  # noqa: RET505
        return tile_n * (2 * HALF), tile_n * (2 * HALF) + HALF
