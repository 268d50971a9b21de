"""Which tile comes next: the table of tiles for packed sequences, and the counters of the dynamic schedule.

Packed sequences have lengths that only the device knows. A small kernel turns them into a table of the tiles that exist,
longest first, and the attention kernel reads one record of 32 bytes per tile. The small kernel also clears the rows past the
last sequence, which have no tile. So no thread block starts without work, the host does not wait for the device, and sequences
of unequal lengths are balanced. FlashAttention-3 instead finds its tiles by a prefix sum in each thread block.

A record is 8 int32, the fields of `types.Tile`: first query row in the sequence (-1: no tile), the sequence's number
(where the reader puts the head), first row of the sequence in q, number of queries, first row in k (in a paged cache: the
sequence's number), number of keys, first key block, last key block + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from fa_serve.backends.triton.primitives import clear_rows_past_end
from fa_serve.launching.launch import Launch, on_device_of, power_of_2

RECORD = 8
SEQUENCES_AT_A_TIME = 256  # sequences that a program reads at a time
_COUNTERS = 1 << 14
_MAX_STREAMS = 1 << 10
_CLEARED_ROWS = 16  # rows without tiles for each program without a record


@triton.jit
def ceil_div_up_to_zero(x, block):
    """ceil(x / block) for x > 0, else 0."""
    return (tl.maximum(x, 0) + block - 1) // block


@triton.jit
def _tiles_above(blocks, q_len, kv_len, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """How many tiles of each sequence reach past `blocks` key blocks: its last tiles, because later rows reach further."""
    tiles = ceil_div_up_to_zero(q_len, BLOCK_M)
    first = q_len * 0
    if HAS_RIGHT:
        # the tile of rows [m * BLOCK_M, (m + 1) * BLOCK_M) reaches key (m + 1) * BLOCK_M + shift
        shift = kv_len - q_len + right
        first = tl.maximum(blocks * BLOCK_N - shift, 0) // BLOCK_M
    return tl.where(kv_len > blocks * BLOCK_N, tl.maximum(tiles - first, 0), 0)


@triton.jit
def sequence_bounds(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED: tl.constexpr, GROUP: tl.constexpr):
    """First query, number of queries, first key and number of keys of sequences b; 0 queries if another kernel computes them.

    GROUP: 1, or each sequence begins at a multiple of GROUP keys, see `triton.float8_inputs`
    """
    here = b < batch
    q0 = tl.load(cu_q_ptr + b, mask=here, other=0)
    q_len = tl.load(cu_q_ptr + b + 1, mask=here, other=0) - q0
    k0 = b
    kv_len = tl.load(k_ptr + b, mask=here, other=0)
    if not PAGED:
        k0 = kv_len
        kv_len = tl.load(k_ptr + b + 1, mask=here, other=0) - k0
        if GROUP > 1:
            k0 = (k0 // GROUP + b) * GROUP
    return q0, tl.where(q_len > skip_q, q_len, 0), k0, kv_len


class PackedOutput(NamedTuple):
    """Where the launch of a table finds the rows of out and lse that have no tile.

    stride_lse: numbers of lse from one head to the next
    stride_token, stride_head: strides of out
    tail:       a lower bound of the number of rows that belong to no sequence
    """

    total_q: int
    num_heads: int
    stride_lse: int
    stride_token: int
    stride_head: int
    dim_v: int
    tail: int = 0

    @property
    def numbers(self) -> tuple[int, int, int]:
        """In the order of OUTPUT."""
        return self.total_q, self.num_heads, self.stride_lse

    @property
    def strides(self) -> tuple[int, int]:
        return self.stride_token, self.stride_head

    @property
    def widths(self) -> tuple[int, int]:
        return self.dim_v, power_of_2(self.dim_v)

    def programs(self, records: int) -> int:
        """How many programs make a table with room for `records` records: one for each record, or more if the tail is long."""
        return max(records, min(self.tail // _CLEARED_ROWS, 1 << 10))


OUTPUT = ("total_q", "num_heads", "stride_lse")
"""The parameters of kernels that take `PackedOutput.numbers`. Kernels are not compiled anew for their values."""


@triton.jit
def clear_tail(out_ptr, lse_ptr, cu_q_ptr, batch, skip_q, output, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Clear the rows past the last sequence, unless the kernel that computes the sequences of up to skip_q queries does so.

    output: total_q, num_heads, the stride of lse from head to head, and the strides of out from token to token and head to head
    """
    total_q, num_heads, stride_lse, stride_token, stride_head = output
    if skip_q == 0:
        end = tl.load(cu_q_ptr + batch)
        strides = (stride_token, stride_head, stride_lse)
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        clear_rows_past_end(out_ptr, lse_ptr, end, total_q, program, programs, num_heads, strides, DIM_V, BLOCK_DV)


@triton.jit(do_not_specialize=["max_tiles", "batch", "skip_q", "left", "right", *OUTPUT])
def _tile_table(
    table_ptr,
    cu_q_ptr,
    k_ptr,
    out_ptr,
    lse_ptr,
    max_tiles,
    batch,
    skip_q,
    left,
    right,
    total_q,
    num_heads,
    stride_lse,
    stride_token,
    stride_head,
    DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PAGED: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per tile finds the tile's sequence, counts the tiles that come before, and writes its record at that index.

    All programs clear the rows past the last sequence, and those from `max_tiles` on write nothing else.
    """
    index = tl.program_id(0)
    output = (total_q, num_heads, stride_lse, stride_token, stride_head)
    clear_tail(out_ptr, lse_ptr, cu_q_ptr, batch, skip_q, output, DIM_V, BLOCK_DV)
    before = 0
    sequence = 0
    m = 0
    q_start = 0
    q_len = 0
    k_start = 0
    kv_len = 0
    for start in range(0, batch, CHUNK):
        b = start + tl.arange(0, CHUNK)
        q0, ql, k0, kl = sequence_bounds(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED, GROUP)
        tiles = ceil_div_up_to_zero(ql, BLOCK_M)
        last = before + tl.cumsum(tiles, 0)
        mine = (last > index) & (last - tiles <= index)
        sequence += tl.sum(tl.where(mine, b, 0), 0)
        m += tl.sum(tl.where(mine, index - (last - tiles), 0), 0)
        q_start += tl.sum(tl.where(mine, q0, 0), 0)
        q_len += tl.sum(tl.where(mine, ql, 0), 0)
        k_start += tl.sum(tl.where(mine, k0, 0), 0)
        kv_len += tl.sum(tl.where(mine, kl, 0), 0)
        before += tl.sum(tiles, 0)
    if index == 0:
        tl.store(table_ptr + max_tiles * 8, 0)
        tl.store(table_ptr + max_tiles * 8 + 1, before)
    if index >= before:
        tl.store(table_ptr + index.to(tl.int64) * 8, -1, mask=index < max_tiles)
    else:
        reach = kv_len
        if HAS_RIGHT:
            reach = tl.minimum(reach, (m + 1) * BLOCK_M + kv_len - q_len + right)
        blocks = ceil_div_up_to_zero(reach, BLOCK_N)
        rank = 0
        for start in range(0, batch, CHUNK):
            b = start + tl.arange(0, CHUNK)
            _, ql, _, kl = sequence_bounds(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED, GROUP)
            longer = _tiles_above(blocks, ql, kl, right, BLOCK_M, BLOCK_N, HAS_RIGHT)
            as_long = _tiles_above(blocks - 1, ql, kl, right, BLOCK_M, BLOCK_N, HAS_RIGHT)
            if blocks == 0:
                as_long = ceil_div_up_to_zero(ql, BLOCK_M)
            rank += tl.sum(tl.where(b < sequence, as_long, longer), 0)
        # equally long tiles of one sequence are in reverse order: count those whose rows come after this tile's
        tiles = ceil_div_up_to_zero(q_len, BLOCK_M)
        longer_own = _tiles_above(blocks, q_len, kv_len, right, BLOCK_M, BLOCK_N, HAS_RIGHT)
        rank += tiles - longer_own - 1 - m
        high = tl.maximum(blocks, 1)
        low = 0
        if HAS_LEFT:
            low = tl.minimum(tl.maximum(m * BLOCK_M + kv_len - q_len - left, 0) // BLOCK_N, high - 1)
        record = table_ptr + rank.to(tl.int64) * 8
        tl.store(record, m * BLOCK_M)
        tl.store(record + 1, sequence)
        tl.store(record + 2, q_start)
        tl.store(record + 3, q_len)
        tl.store(record + 4, k_start)
        tl.store(record + 5, kv_len)
        tl.store(record + 6, low)
        tl.store(record + 7, high)


def max_tile_count(total_q: int, batch: int, max_seqlen_q: int, block_m: int, skip_q: int = 0) -> int:
    """An upper bound of the number of tiles per head that needs no length from the device.

    Each sequence adds less than one tile to total_q / block_m, and only sequences of more than `skip_q` queries have tiles.
    """
    batch = min(batch, total_q // (skip_q + 1))
    return min((total_q + batch * (block_m - 1)) // block_m, batch * -(-max_seqlen_q // block_m))


def table_launch(
    max_tiles: int,
    batch: int,
    window_size: tuple[int, int],
    block_m: int,
    block_n: int,
    skip_q: int,
    paged: bool,
    output: PackedOutput,
    group: int = 1,
) -> Launch:
    """The launch of `_tile_table` for `tile_table`; max_tiles > 0. `group`: see `sequence_bounds`."""
    left, right = window_size
    numbers = (max_tiles, batch, skip_q, left, right, *output.numbers)
    fixed = (*output.widths, block_m, block_n, left >= 0, right >= 0, paged, group, SEQUENCES_AT_A_TIME)
    return Launch(_tile_table, output.programs(max_tiles), numbers, fixed, {"num_warps": 1}, strides=output.strides)


def tile_table(launch: Launch, max_tiles: int, cu_seqlens_q: Tensor, keys: Tensor, out: Tensor, lse: Tensor | None) -> Tensor:
    """Compute the table of tiles, which may be read by kernels that are launched later on the same stream, and clear the rows
    of `out` and `lse` that belong to no sequence.

    launch: from `table_launch` with the same `max_tiles`
    keys:   cu_seqlens_k, or the seqused_k of a paged cache
    Returns int32 ((max_tiles + 1) * 8,): the records, longest tile first and -1 where there is no tile; then a counter that is
    0, and the number of tiles.
    """
    table = torch.empty((max_tiles + 1) * RECORD, dtype=torch.int32, device=cu_seqlens_q.device)
    launch((table, cu_seqlens_q, keys, out, lse))
    return table


class TileCounters:
    """Counters that are zero, for the dynamic schedule of dense batches: one int32 for each launch that may run at a time.

    The last request of a launch for a tile sets the counter back to zero, so a launch needs no memset. Launches on one stream
    run one after the other and share a counter. A captured graph may be replayed on any stream, so captured launches do not
    share counters; a counter is used again after 16,384 captured launches, far more than could run at the same time.
    """

    def __init__(self) -> None:
        self._captured: dict[torch.device, Tensor] = {}
        self._by_stream: dict[tuple[torch.device, int], Tensor] = {}
        self._taken = 0

    def take(self, device: torch.device, stream: int, capturing: bool) -> Tensor:
        """A counter for one launch on `stream`, at an address that is a multiple of 16 bytes."""
        if capturing:
            if device not in self._captured:  # memory that is allocated during a capture belongs to that graph
                return torch.zeros(1, dtype=torch.int32, device=device)
            self._taken += 1
            return self._captured[device][self._taken % _COUNTERS]
        if device not in self._captured:
            self._captured[device] = torch.zeros(_COUNTERS, 4, dtype=torch.int32, device=device)
            if device.type == "cuda":  # once, because graphs are replayed on streams that do not wait for this one
                torch.cuda.current_stream(device).synchronize()
        counter = self._by_stream.get((device, stream))
        if counter is None:
            if len(self._by_stream) >= _MAX_STREAMS:
                self._by_stream.clear()
            # zeroed on the stream that uses it, where its memory is also reused only by later work
            counter = self._by_stream[device, stream] = torch.zeros(4, dtype=torch.int32, device=device)
        return counter


_TILE_COUNTERS = TileCounters()


def take_counter(x: Tensor) -> Tensor:
    """A counter at zero for a launch on the current stream of x's device."""
    if not x.is_cuda:
        return torch.zeros(1, dtype=torch.int32)
    with on_device_of(x):
        capturing = torch.cuda.is_current_stream_capturing()
    return _TILE_COUNTERS.take(x.device, driver.active.get_current_stream(x.get_device()), capturing)
