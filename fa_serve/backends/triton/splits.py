"""How split-KV decoding cuts keys into splits, on the device, and how it combines their results.

The kernels that compute splits (`decode`, `latent`) and the kernel `_combine` here each derive the same splits from the
lengths, so nothing about the splits is stored. This module leaves out what is computed for a split.

In the helpers, `sequences` is (cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left). A dense batch has no cu_q_ptr, and all
of its sequences have max_q queries and max_k keys. A packed batch without used_k_ptr has block lists, and only they say which
keys a sequence has.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fa_serve.backends.triton.primitives import LOG2E, finish_softmax, first_visible, wait_for_previous_kernel
from fa_serve.backends.triton.tiles import combine_tiles
from fa_serve.launching.launch import Launch, launch_options


@dataclass(frozen=True, slots=True)
class SplitVariant:
    """What both kernels of a decoding call are compiled for.

    groups:      query heads per KV head
    dim_v:       head_dim_v; block_dv: the same, padded to a tile
    block_m:     packed rows per tile; a row is one query of one query head
    block_n:     keys per block
    batch_block: width of the prefix sum over the batch, 1 if not balanced
    balanced:    the key blocks of the batch are cut into equal shares
    has_left:    there is a limit to the left, a window or, if `chunked`, a chunk
    pdl:         both kernels are launched programmatically
    block_sparse: block lists name the keys (`block_sparse`), and every sequence has all splits, some of which may be empty
    """

    groups: int
    dim_v: int
    block_dv: int
    block_m: int
    block_n: int
    batch_block: int
    balanced: bool
    has_left: bool
    pdl: bool
    chunked: bool = False
    block_sparse: bool = False


COUNTS = ("batch", "units", "tiles_per_head", "unit_rows", "splits", "min_blocks", "max_q", "window_left")
"""The parameters of kernels that take `SplitCounts.numbers`. Kernels are not compiled anew for their values."""


@dataclass(frozen=True, slots=True)
class SplitCounts:
    """The numbers of a call's splits, which both kernels take.

    batch:      sequences
    heads:      KV heads, or lists of key blocks per sequence (`block_sparse`)
    rows:       packed rows per head and sequence, at most
    block_m:    rows per tile
    splits:     splits per sequence or, if balanced, shares of the whole batch
    min_blocks: the least number of key blocks per split
    max_q:      sequences with more queries are left alone
    left:       window to the left or length of a chunk, -1 for neither
    """

    batch: int
    heads: int
    rows: int
    block_m: int
    splits: int
    min_blocks: int
    max_q: int
    left: int

    @property
    def tiles_per_head(self) -> int:
        """Tiles of packed rows per head."""
        return -(-self.rows // self.block_m)

    @property
    def units(self) -> int:
        """Tiles of packed rows per sequence, over all heads."""
        return self.heads * self.tiles_per_head

    @property
    def unit_rows(self) -> int:
        """Rows per tile that can hold a query."""
        return min(self.block_m, self.rows)

    def buffer_size(self, var: SplitVariant) -> int:
        """Size of the buffer of the splits in float32 numbers: results, then log-sum-exps (see `lse_of_splits`)."""
        places = self.splits * (2 if var.balanced else self.batch) * self.units * self.unit_rows
        return places * (var.dim_v + 1)

    @property
    def numbers(self) -> tuple[int, ...]:
        """In the order of COUNTS."""
        return (
            self.batch,
            self.units,
            self.tiles_per_head,
            self.unit_rows,
            self.splits,
            self.min_blocks,
            self.max_q,
            self.left,
        )


@triton.jit
def visible_blocks(q_len, kv_len, window_left, var: tl.constexpr):
    """-> the first key that any query of the sequence sees, its block, and the number of blocks from there on."""
    first_key = kv_len * 0
    if var.has_left:
        first_key = tl.maximum(first_visible(kv_len - q_len, window_left, var.chunked), 0)
    first_block = first_key // var.block_n
    return first_key, first_block, tl.maximum((kv_len + var.block_n - 1) // var.block_n - first_block, 0)


@triton.jit
def sequence_lengths(seq, sequences):
    """-> first row, number of queries and number of keys of a sequence."""
    cu_q_ptr, used_k_ptr, _, max_q, max_k, _ = sequences
    if cu_q_ptr is None:
        row0 = seq * max_q
        q_len = max_q
        kv_len = max_k
    else:
        row0 = tl.load(cu_q_ptr + seq)
        q_len = tl.load(cu_q_ptr + seq + 1) - row0
        kv_len = max_k
        if used_k_ptr is not None:
            kv_len = tl.load(used_k_ptr + seq)
    return row0, q_len, kv_len


@triton.jit
def _ends_on_line(index, sequences, var: tl.constexpr):
    """Where each sequence ends on a line that holds the key blocks of all sequences, at least one block for each sequence.

    Sequences that are left to another kernel take no room.
    """
    cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left = sequences
    if cu_q_ptr is None:
        _, _, blocks = visible_blocks(max_q, max_k, window_left, var)
        ends = tl.minimum(index + 1, batch) * tl.maximum(blocks, 1)
    else:
        live = index < batch
        q_len = tl.load(cu_q_ptr + index + 1, mask=live, other=0) - tl.load(cu_q_ptr + index, mask=live, other=0)
        kv_len = tl.load(used_k_ptr + index, mask=live, other=0)
        _, _, blocks = visible_blocks(q_len, kv_len, window_left, var)
        ends = tl.cumsum(tl.where((q_len > 0) & (q_len <= max_q), tl.maximum(blocks, 1), 0), 0)
    return ends


@triton.jit
def sequences_of_share(share, index, sequences, splits, min_blocks, var: tl.constexpr):
    """The sequences of which a program computes splits. If balanced, the line of `_ends_on_line` is cut into equal shares.

    index: the numbers [0, batch_block); the caller passes them, so that a kernel in Gluon can choose their layout

    -> the first sequence, the last sequence + 1, where the first sequence starts on the line, and (begin, end, size) of the
    share.
    """
    first = share // splits
    stop = first + 1
    seq_start = 0
    line = (0, 0, 0)
    if var.balanced:
        ends = _ends_on_line(index, sequences, var)
        total = tl.max(ends, 0)
        size = tl.maximum((total + splits - 1) // splits, min_blocks)
        begin = share * size
        end = tl.minimum(begin + size, total)
        first = tl.sum((ends <= begin).to(tl.int32), 0)
        stop = tl.where(begin < end, tl.sum((ends < end).to(tl.int32), 0) + 1, first)
        seq_start = tl.max(tl.where(ends <= begin, ends, 0), 0)
        line = (begin, end, size)
    return first, stop, seq_start, line


@triton.jit
def _start_on_line(seq, sequences, shares, min_blocks, var: tl.constexpr):
    """-> where a sequence starts on the line, and the size of a share."""
    index = tl.arange(0, var.batch_block)
    ends = _ends_on_line(index, sequences, var)
    size = tl.maximum((tl.max(ends, 0) + shares - 1) // shares, min_blocks)
    return tl.max(tl.where(index < seq, ends, 0), 0), size


@triton.jit
def split_of_sequence(share, seq_start, line, blocks, splits, min_blocks, ours, var: tl.constexpr):
    """The split of a sequence that a program computes.

    blocks: number of visible blocks of the sequence; line: (begin, end, size) of the program's share of the line

    -> the split and the number of splits, the split's first block and its last block + 1, the place of its result, and where
    the next sequence starts on the line.
    """
    if var.balanced:
        line_begin, line_end, share_size = line
        blocks = tl.where(ours, tl.maximum(blocks, 1), 0)
        first_share = seq_start // share_size
        split = share - first_share
        num_splits = (seq_start + blocks - 1) // share_size - first_share + 1
        begin = tl.maximum(line_begin - seq_start, 0)
        end = tl.minimum(line_end - seq_start, blocks)
        # A share has two places for results: one for a sequence that began in an earlier share, one for a sequence that
        # begins in this share and goes on in the next one.
        place = 2 * share + (split == 0).to(tl.int32)
        seq_start = seq_start + blocks
    else:
        split = share % splits
        num_splits = tl.minimum(tl.maximum(blocks // min_blocks, 1), splits)
        begin = blocks * split // num_splits
        end = blocks * (split + 1) // num_splits
        place = share
    return split, num_splits, begin, end, place, seq_start


@triton.jit
def lse_of_splits(splits_ptr, batch, splits, units, unit_rows, var: tl.constexpr):
    """Where the buffer of the splits holds their log-sum-exps: after the results, (places, dim_v) and then (places,).

    One buffer holds both, because the host takes a microsecond or more for each allocation.
    """
    places = tl.cast(splits, tl.int64) * units * unit_rows
    if var.balanced:
        places *= 2
    else:
        places *= batch
    return splits_ptr + places * var.dim_v


@triton.jit
def store_split(
    splits_ptr, out, lse, live, place, unit, batch, splits, units, unit_rows, var: tl.constexpr, SLICE: tl.constexpr = 0
):
    """Store the result of a split for packed rows, [BLOCK_M, columns] and [BLOCK_M] float32, until it is combined.

    place: place of the split's result; unit: number of the tile of rows
    SLICE: as in `store_rows`
    """
    at = (place.to(tl.int64) * units + unit) * unit_rows + tl.arange(0, out.shape[0])
    offs_dv = SLICE * out.shape[1] + tl.arange(0, out.shape[1])
    keep = live[:, None] & (offs_dv < var.dim_v)[None, :]
    tl.store(splits_ptr + at[:, None] * var.dim_v + offs_dv[None, :], out, mask=keep)
    if SLICE == 0:
        tl.store(lse_of_splits(splits_ptr, batch, splits, units, unit_rows, var) + at, lse, mask=live)


@triton.jit
def store_rows(out_ptr, lse_ptr, out, lse, rows, live, row0, kv64, strides, var: tl.constexpr, SLICE: tl.constexpr = 0):
    """Store packed rows at their tokens and query heads. strides: of out by token and head, of lse by head.

    SLICE: number of the slice of columns that `out` holds, if it does not hold all columns; lse is stored with slice 0
    """
    stride_ot, stride_oh, stride_lh = strides
    offs_dv = SLICE * out.shape[1] + tl.arange(0, out.shape[1])
    token = row0.to(tl.int64) + rows // var.groups
    head = kv64 * var.groups + rows % var.groups
    out_ptrs = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + offs_dv[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=live[:, None] & (offs_dv < var.dim_v)[None, :])
    if SLICE == 0 and lse_ptr is not None:
        tl.store(lse_ptr + head * stride_lh + token, lse, mask=live)


@triton.jit(do_not_specialize=["max_k", *COUNTS, "stride_lh", "blocks_per_seq"])
def _combine(
    out_ptr,
    lse_ptr,
    splits_ptr,
    used_k_ptr,
    cu_q_ptr,
    max_k,
    batch,
    units,
    tiles_per_head,
    unit_rows,
    splits,
    min_blocks,
    max_q,
    window_left,
    stride_lh,
    blocks_per_seq,
    stride_ot,
    stride_oh,
    var: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Combine the splits of BLOCK_ROWS rows of one sequence, BLOCK_SPLITS at a time, with the weights exp(lse - max lse).

    The lengths may be read before the wait: the kernel that lets this one start has waited for the kernels that wrote them.
    """
    BLOCK_DV: tl.constexpr = var.block_dv
    sequences = (cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left)
    seq = tl.program_id(0) // blocks_per_seq
    row0, q_len, kv_len = sequence_lengths(seq, sequences)
    _, _, blocks = visible_blocks(q_len, kv_len, window_left, var)
    if var.balanced:
        start, size = _start_on_line(seq, sequences, splits, min_blocks, var)
        place0 = 2 * (start // size)
        num_splits = (start + tl.maximum(blocks, 1) - 1) // size - start // size + 1
    else:
        place0 = seq * splits
        num_splits = splits if var.block_sparse else tl.minimum(tl.maximum(blocks // min_blocks, 1), splits)
    wait_for_previous_kernel(var.pdl)
    if (num_splits <= 1) | (q_len <= 0) | (q_len > max_q):
        return

    split_lse_ptr = lse_of_splits(splits_ptr, batch, splits, units, unit_rows, var)
    slot = (tl.program_id(0) % blocks_per_seq) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    unit = slot // unit_rows
    rows = unit % tiles_per_head * var.block_m + slot % unit_rows
    live = (unit < units) & (rows < q_len * var.groups)
    offs_s = tl.arange(0, BLOCK_SPLITS)
    offs_dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    for first in tl.range(0, num_splits, BLOCK_SPLITS):
        split = first + offs_s
        place = place0 + split
        if var.balanced:
            # only the first split of a sequence was left in the second place of its share
            place = place0 + 2 * split + (split == 0).to(tl.int32)
        keep = (split < num_splits)[:, None] & live[None, :]
        at = place.to(tl.int64)[:, None] * (units * unit_rows) + slot[None, :]
        lse = tl.load(split_lse_ptr + at, mask=keep, other=float("-inf")) * LOG2E
        out = tl.load(
            splits_ptr + at[:, :, None] * var.dim_v + offs_dv[None, None, :],
            mask=keep[:, :, None] & (offs_dv < var.dim_v)[None, None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(lse - safe_max[None, :])
        alpha = tl.exp2(row_max - safe_max)
        acc = acc * alpha[:, None] + tl.sum(out * weight[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(weight, 0)
        row_max = new_max
    inverse, lse = finish_softmax(row_max, row_sum)
    kv64 = (unit // tiles_per_head).to(tl.int64)
    strides = (stride_ot, stride_oh, stride_lh)
    store_rows(out_ptr, lse_ptr, acc * inverse[:, None], lse, rows, live, row0, kv64, strides, var)


def combine_launch(counts: SplitCounts, var: SplitVariant, lse_stride: int, out_strides: tuple[int, ...]) -> Launch:
    """The launch that combines the results of the splits.

    Each call passes the tensors out, lse, the buffer of the splits, seqused_k and cu_seqlens_q, and then the number max_k.
    """
    tiles = combine_tiles(var.balanced, counts.splits, var.block_dv, counts.batch * counts.units * counts.unit_rows)
    blocks_per_seq = -(-counts.units * counts.unit_rows // tiles.block_rows)
    return Launch(
        _combine,
        counts.batch * blocks_per_seq,
        varying=(*counts.numbers, lse_stride, blocks_per_seq),
        strides=out_strides,
        fixed=(var, tiles.block_splits, tiles.block_rows),
        options=launch_options(var.pdl, tiles.num_warps),
    )
