"""What the warps of the Hopper kernel of latent attention agree on: its variant, its arguments, and what they share.

`plan` describes the algorithm. This module leaves out what the warps compute (`warps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fa_serve.backends.hopper.latent.tiles import P_STAGES, ROPE_COLUMNS, VALUE_PARTS, Ring
from fa_serve.backends.hopper.shared_memory import ring_of
from fa_serve.backends.triton.splits import SplitVariant, sequence_lengths, split_of_sequence, visible_blocks

SLOTS = gl.constexpr(P_STAGES)
ROPE = gl.constexpr(ROPE_COLUMNS)
PARTS = gl.constexpr(VALUE_PARTS)


@dataclass(frozen=True)
class LatentHopperVariant:
    """Everything that is fixed when the kernel is compiled.

    split:     the part that the kernel which combines splits shares; its dim_v is the size of values
    tiles:     the blocks of keys in shared memory
    rest:      numbers of a key after its value
    page_size: tokens per page
    has_right: some queries of a sequence do not see all of its keys
    """

    split: SplitVariant
    tiles: Ring
    rest: int
    page_size: int
    has_right: bool

    @property
    def has_left(self) -> bool:
        """False, because there are no windows; `producer.pages_of` reads it."""
        return False

    @property
    def gathers(self) -> bool:
        """Whether threads copy the keys. False, because the copy engine does."""
        return False

    @property
    def page_rows(self) -> int:
        """The rows of one copy: the largest number of keys that divides both a page and a block."""
        return math.gcd(self.page_size, self.tiles.block_n)

    @property
    def width(self) -> int:
        """Columns of a part of the values. There are four, and each warpgroup of values multiplies two."""
        return self.split.dim_v // VALUE_PARTS

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: (of the warpgroups of values, of the producer warps). The threads of four warpgroups have 128
        each at launch, which leaves 136 for the warpgroup of scores."""
        return (168, 40)

    @property
    def score_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of scores [64, block_n] as wgmma leaves them."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.tiles.block_n, 16])

    @property
    def output_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of a part of the output [64, width] as wgmma leaves it."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.width, 16])

    @property
    def probability_memory(self) -> gl.NVMMASharedLayout:
        """Layout of P [64, block_n] in shared memory."""
        return gl.NVMMASharedLayout(2 * self.tiles.block_n, 16, rank=2)

    @property
    def query_layout(self) -> gl.BlockedLayout:
        """Layout of a part of the queries [64, width] on their way to shared memory: 16 bytes a thread."""
        threads = self.width // 8
        return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


class LatentArgs(NamedTuple):
    """The kernel's arguments, see `plan.attn_latent_hopper`, and what all warps of a program know.

    first, stop: the program's sequences, [first, stop); seq_start: where the first one starts on the line of `splits`
    line_begin, line_end, line_size: the program's share of that line
    share, unit:   which split or share, and which tile of rows
    row_first:     first packed row of the tile; kv_head: its KV head
    """

    q: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    splits: gl.tensor
    block_table: gl.tensor
    used_k: gl.tensor
    cu_q: gl.tensor
    k_descale: gl.tensor
    v_descale: gl.tensor
    max_k: gl.tensor
    batch: gl.tensor
    units: gl.tensor
    unit_rows: gl.tensor
    num_splits: gl.tensor
    min_blocks: gl.tensor
    max_q: gl.tensor
    window_right: gl.tensor
    lse_stride: gl.tensor
    table_stride: gl.tensor
    scale: gl.tensor
    k_pitch: gl.tensor
    stride_ot: gl.tensor
    stride_oh: gl.tensor
    stride_qt: gl.tensor
    stride_qh: gl.tensor
    first: gl.tensor
    stop: gl.tensor
    seq_start: gl.tensor
    line_begin: gl.tensor
    line_end: gl.tensor
    line_size: gl.tensor
    share: gl.tensor
    unit: gl.tensor
    row_first: gl.tensor
    kv_head: gl.tensor


class LatentMemory(NamedTuple):
    """The buffers of a program.

    q, qr:   the queries: (parts, 64, width) for the columns of values, and [64, 64] for the rest
    c, cr:   the keys likewise: (stages * parts, block_n, width) and (stages, block_n, 64)
    c_boxes, cr_boxes: the same memory as boxes of a page's rows by 64 columns
    p:       (2, 64, block_n), probabilities
    factors: (2, 64), float32: the factors of the output before P C of a block is added and, after the last block, 1 / sum
    records: (2, 4), int32: blocks of the sequence, 0 after the last one; its first token in q; its queries; the place of the
             split's result, or -1 if it is the result of all keys
    """

    q: gl.tensor
    qr: gl.tensor
    c: gl.tensor
    cr: gl.tensor
    c_boxes: gl.tensor
    cr_boxes: gl.tensor
    p: gl.tensor
    factors: gl.tensor
    records: gl.tensor


class LatentBarriers(NamedTuple):
    """mbarriers of the blocks of keys and the slots of P: readers wait for `full`, writers for `empty`."""

    k_full: gl.tensor
    k_empty: gl.tensor
    p_full: gl.tensor
    p_empty: gl.tensor


class LatentWork(NamedTuple):
    """What a program computes of one sequence.

    live:       whether the program computes anything of the sequence
    k_origin:   the sequence, which is its row of the block table; row0: its first token in q
    begin:      the first block of keys; blocks: how many, at least one (which may be hidden) if live, else 0
    inner_end:  blocks below this one need no mask
    place:      the place of the split's result in the buffer; whole: the split has all keys
    """

    live: gl.tensor
    k_origin: gl.tensor
    row0: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    begin: gl.tensor
    blocks: gl.tensor
    inner_end: gl.tensor
    place: gl.tensor
    whole: gl.tensor


@gluon.jit
def latent_work(index, seq_start, args, var: gl.constexpr):
    """-> what the program computes of the sequence `index`, and where the next sequence starts on the line."""
    SPLIT: gl.constexpr = var.split
    BLOCK_N: gl.constexpr = var.tiles.block_n
    GROUPS: gl.constexpr = var.split.groups
    seq = args.share * 0 + index
    sequences = (args.cu_q, args.used_k, args.batch, args.max_q, args.max_k, -1)
    row0, q_len, kv_len = sequence_lengths(seq, sequences)
    _, _, blocks = visible_blocks(q_len, kv_len, -1, SPLIT)
    ours = (q_len > 0) & (q_len <= args.max_q)
    line = (args.line_begin, args.line_end, args.line_size)
    split, num_splits, begin, end, place, seq_start = split_of_sequence(
        args.share, seq_start, line, blocks, args.num_splits, args.min_blocks, ours, SPLIT
    )
    end = gl.minimum(end, (kv_len + BLOCK_N - 1) // BLOCK_N)
    inner_end = kv_len // BLOCK_N
    if var.has_right:
        offset = kv_len - q_len + args.window_right + 1
        last_token = gl.minimum(args.row_first + 63, q_len * GROUPS - 1) // GROUPS
        end = gl.minimum(end, (gl.maximum(last_token + offset, 0) + BLOCK_N - 1) // BLOCK_N)
        inner_end = gl.minimum(inner_end, gl.maximum(args.row_first // GROUPS + offset, 0) // BLOCK_N)
    live = ours & (split < num_splits) & (args.row_first < q_len * GROUPS)
    blocks = gl.where(live, gl.maximum(end - begin, 1), 0)
    return LatentWork(live, seq, row0, q_len, kv_len, begin, blocks, inner_end, place, num_splits == 1), seq_start


@gluon.jit
def allocate_latent_memory(k_desc, var: gl.constexpr):
    WIDTH: gl.constexpr = var.width
    BLOCK_N: gl.constexpr = var.tiles.block_n
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = k_desc.dtype
    q = gl.allocate_shared_memory(dtype, [PARTS, 64, WIDTH], QUERIES)
    qr = gl.allocate_shared_memory(dtype, [64, ROPE], QUERIES)
    c, c_boxes = ring_of(WIDTH, k_desc, var, PARTS)
    cr, cr_boxes = ring_of(ROPE, k_desc, var)
    p = gl.allocate_shared_memory(dtype, [SLOTS, 64, BLOCK_N], var.probability_memory)
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], PLAIN)
    records = gl.allocate_shared_memory(gl.int32, [SLOTS, 4], PLAIN)
    return LatentMemory(q, qr, c, cr, c_boxes, cr_boxes, p, factors, records)


@gluon.jit
def allocate_latent_barriers(var: gl.constexpr):
    STAGES: gl.constexpr = var.tiles.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=PARTS)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
    fence_async_shared()
    return LatentBarriers(k_full, k_empty, p_full, p_empty)
