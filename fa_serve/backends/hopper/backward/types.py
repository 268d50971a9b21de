"""What the warps of the Hopper backward kernel agree on: the compiled variant, and what they hand to one another.

`forward.types` has the same for the forward kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.backward.tiles import BLOCK_N, GROUPS, BackwardTileConfig

LAUNCH_REGISTERS = 168
"""Registers of every thread at launch: three warpgroups share 65536. The producer's warpgroup has three idle warps."""
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers of a thread after setmaxnreg."""


class BackwardNumbers(NamedTuple):
    """The numbers of both kernels, in the order of their parameters, flat as in `forward.kernel.Numbers`.

    scale, softcap: from `forward.plan.base_2_scales`; softmax_scale: the factor of dK
    num_n:          tiles of one KV head and sequence (packed: an upper bound)
    seqlen_q, seqlen_k: lengths (packed: upper bounds)
    left, right:    the window
    stats_width:    statistics from one head to the next
    """

    scale: float
    softcap: float
    softmax_scale: float
    num_n: int
    num_heads: int
    heads_per_kv: int
    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    stats_width: int


@dataclass(frozen=True)
class HopperBackwardVariant:
    """Everything that is fixed when the kernel is compiled, passed as one constexpr.

    tiles:  the shape of a tile and its stages
    width:  columns of Q, K, V and dO in shared memory, 64 or 128
    varlen: sequences are packed; else the batch is dense
    has_left, has_right, softcap: as in `forward.types.Variant`
    """

    tiles: BackwardTileConfig
    width: int
    varlen: bool
    has_left: bool
    has_right: bool
    softcap: bool

    def __post_init__(self) -> None:
        assert self.row_chunks * self.column_chunks == GROUPS, "dQ of a block is one square of 64 for each warpgroup"

    @property
    def groups(self) -> int:
        return GROUPS

    @property
    def block_n(self) -> int:
        return BLOCK_N

    @property
    def row_chunks(self) -> int:
        """Squares of 64 that dQ of a block has along the queries."""
        return self.tiles.block_m // 64

    @property
    def column_chunks(self) -> int:
        """Squares of 64 that dQ of a block has along head_dim."""
        return self.width // 64

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of a warpgroup's transposed scores [64 keys, block_m] as wgmma leaves them."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.tiles.block_m, 16])

    @property
    def key_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of a warpgroup's dK and dV, [64 keys, width]."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.width, 16])

    @property
    def operand_layout(self) -> gl.DotOperandLayout:
        """Layout of P^T and dS^T as the left operand of dV and dK, in registers."""
        return gl.DotOperandLayout(operand_index=0, parent=self.key_layout, k_width=2)


class BackwardDescriptors(NamedTuple):
    """How the copy engine sees each tensor; lse and delta are the statistics of rows, see `triton.row_statistics`."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    dout: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    dk: gl.tensor
    dv: gl.tensor


class BackwardMemory(NamedTuple):
    """The buffers of a thread block.

    q, dout:    (stages, block_m rows, width)
    lse, delta: (stages, 1, block_m), float32: statistics of the rows in each stage of q and of dout
    k, v:       (groups, 64 rows, width); dK and dV leave through them
    k_chunks:   the memory of k as squares, (groups * column_chunks, 64 keys, 64 columns)
    ds:         (2 * groups, 64 keys, block_m): dS^T of two blocks
    ds_chunks:  the memory of ds as squares, (2 * groups * row_chunks, 64 keys, 64 queries)
    """

    q: gl.tensor
    dout: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    k: gl.tensor
    v: gl.tensor
    k_chunks: gl.tensor
    ds: gl.tensor
    ds_chunks: gl.tensor


class BackwardBarriers(NamedTuple):
    """Two mbarriers for each stage of q and dout, as in `forward.types.Barriers`; k_full and v_full are used once."""

    q_full: gl.tensor
    q_empty: gl.tensor
    do_full: gl.tensor
    do_empty: gl.tensor
    k_full: gl.tensor
    v_full: gl.tensor


class BackwardArgs(NamedTuple):
    """The kernel's arguments besides descriptors; see `BackwardNumbers`."""

    dq_accum: gl.tensor
    cu_seqlens_q: gl.tensor
    cu_seqlens_k: gl.tensor
    scale: gl.tensor
    softcap: gl.tensor
    softmax_scale: gl.tensor
    num_n: gl.tensor
    num_heads: gl.tensor
    heads_per_kv: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    left: gl.tensor
    right: gl.tensor
    stats_width: gl.tensor


class KeyTile(NamedTuple):
    """One tile: `block_n` keys of one KV head of one sequence, and the walk over the query blocks that see them.

    first:     first key in the sequence
    q_origin, k_origin: batch index (dense), or the sequence's first row in q and in k (packed)
    stats_row, stats_column: where the statistics of the sequence's first head begin; stats: the same as one number
    low, high: for each head of the group, the tile visits query blocks [start, high) and then [low, start)
    count:     blocks that the tile visits in all
    """

    first: gl.tensor
    kv_head: gl.tensor
    q_origin: gl.tensor
    q_len: gl.tensor
    k_origin: gl.tensor
    kv_len: gl.tensor
    stats_row: gl.tensor
    stats_column: gl.tensor
    stats: gl.tensor
    low: gl.tensor
    high: gl.tensor
    start: gl.tensor
    count: gl.tensor
