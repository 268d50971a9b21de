"""What the producer and the consumers of the Hopper kernel agree on: the compiled variant, shared memory, barriers, tiles.

Named tuples travel through Gluon functions as the values they hold; nothing here exists at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.tiles import TileConfig

RAGGED = gl.constexpr(1 << 30)
"""Bound of the row coordinate of a ragged descriptor, see `forward._ragged`."""


@dataclass(frozen=True)
class Variant:
    """All that is fixed when the kernel is compiled; passed as one constexpr."""

    tiles: TileConfig
    d0: int
    d1: int
    dv: int
    varlen: bool
    has_left: bool
    has_right: bool
    softcap: bool
    page_size: int = 0

    @property
    def page_rows(self) -> int:
        """Keys that lie in one page whatever the block: what one copy brings of a paged cache."""
        return math.gcd(self.page_size, self.tiles.block_n)

    @property
    def registers(self) -> int:
        """Of a consumer thread; a producer that looks pages up needs more than the 24 of one that does not."""
        return self.tiles.registers[1] - (8 if self.page_size else 0)

    @property
    def producer_registers(self) -> int:
        return 40 if self.page_size else 24

    @property
    def o_width(self) -> int:
        """Columns of O that leave at once."""
        return self.dv // max(self.tiles.o_parts, 1)


class Descs(NamedTuple):
    q: gl.tensor
    q1: gl.tensor
    k: gl.tensor
    k1: gl.tensor
    v: gl.tensor
    o: gl.tensor


class Smem(NamedTuple):
    """q, q1: (q_stages * groups, 64 rows, d); k, k1, v: (stages, block_n, d); o: (groups, 64 rows, o_width), or q if O has no
    place of its own; record: (q_stages, 8) int32. k_boxes, k1_boxes, v_boxes: the memory of k, k1, v as pieces of page_rows
    keys by 64 columns, in the order in which the swizzled layout has them."""

    q: gl.tensor
    q1: gl.tensor
    k: gl.tensor
    k1: gl.tensor
    v: gl.tensor
    o: gl.tensor
    record: gl.tensor
    k_boxes: gl.tensor
    k1_boxes: gl.tensor
    v_boxes: gl.tensor


class Bars(NamedTuple):
    q_full: gl.tensor
    q_empty: gl.tensor
    k_full: gl.tensor
    k_empty: gl.tensor
    v_full: gl.tensor
    v_empty: gl.tensor


class Work(NamedTuple):
    """What the producer needs to deal tiles."""

    table: gl.tensor
    counter: gl.tensor
    total: gl.tensor
    num_m: gl.tensor
    num_heads: gl.tensor
    heads_per_kv: gl.tensor
    head_group: gl.tensor
    head_tail: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    left: gl.tensor
    right: gl.tensor
    block_table: gl.tensor
    table_stride: gl.tensor
    k_pitch: gl.tensor
    v_pitch: gl.tensor


class Epilogue(NamedTuple):
    """What the consumers need besides tiles."""

    lse: gl.tensor
    sinks: gl.tensor
    lse_stride: gl.tensor
    num_heads: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    left: gl.tensor
    right: gl.tensor


class Tile(NamedTuple):
    """One tile of 64 * groups query rows of one head; row < 0 ends the work.

    origin: batch index (dense) or first row (packed) in q; k_origin the same in k, or the sequence's row of the block table;
    key blocks [low, high) are visited.
    """

    row: gl.tensor
    head: gl.tensor
    origin: gl.tensor
    q_len: gl.tensor
    k_origin: gl.tensor
    kv_len: gl.tensor
    low: gl.tensor
    high: gl.tensor
