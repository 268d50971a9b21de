"""Which tile comes next: the table of tiles for packed sequences, and the counters behind the dynamic schedule.

Packed sequences have lengths that only the device knows, so a small kernel turns cu_seqlens into a list of the tiles that
exist, longest first, and the attention kernel reads one 32-byte record per tile: no dead tiles are launched, no host sync, and
unequal lengths are balanced. The list replaces what FlashAttention-3 finds with a prefix sum in every block.

A record is 8 int32: first query row in the sequence (-1: no tile), head (filled by the reader), first row of the sequence in q,
its length, first row in k (in a paged cache: the sequence's number), its length, first and last + 1 key block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.launch import Launch

RECORD = 8
_CHUNK = 256
_COUNTERS = 1 << 14


@triton.jit
def _ceil_div_up_to_zero(x, block):
    """ceil(x / block) for x > 0, else 0."""
    return (tl.maximum(x, 0) + block - 1) // block


@triton.jit
def _tiles_above(blocks, q_len, kv_len, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """How many tiles of each sequence reach past `blocks` key blocks. Later rows reach further, so it is a suffix."""
    tiles = _ceil_div_up_to_zero(q_len, BLOCK_M)
    first = q_len * 0
    if HAS_RIGHT:
        # the tile of rows [m * BLOCK_M, (m + 1) * BLOCK_M) reaches key (m + 1) * BLOCK_M + shift
        shift = kv_len - q_len + right
        first = tl.maximum(blocks * BLOCK_N - shift, 0) // BLOCK_M
    return tl.where(kv_len > blocks * BLOCK_N, tl.maximum(tiles - first, 0), 0)


@triton.jit
def _lengths(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED: tl.constexpr):
    """Of sequences b: first query and number of queries, 0 of a sequence that is left to another kernel; the same of keys."""
    here = b < batch
    q0 = tl.load(cu_q_ptr + b, mask=here, other=0)
    q_len = tl.load(cu_q_ptr + b + 1, mask=here, other=0) - q0
    k0 = b
    kv_len = tl.load(k_ptr + b, mask=here, other=0)
    if not PAGED:
        k0 = kv_len
        kv_len = tl.load(k_ptr + b + 1, mask=here, other=0) - k0
    return q0, tl.where(q_len > skip_q, q_len, 0), k0, kv_len


@triton.jit(do_not_specialize=["slots", "batch", "skip_q", "left", "right"])
def _tile_table(
    table_ptr,
    cu_q_ptr,
    k_ptr,
    slots,
    batch,
    skip_q,
    left,
    right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per tile: find its sequence, count the tiles that go before it, write its record there."""
    index = tl.program_id(0)
    before = 0
    sequence = 0
    m = 0
    q_start = 0
    q_len = 0
    k_start = 0
    kv_len = 0
    for start in range(0, batch, CHUNK):
        b = start + tl.arange(0, CHUNK)
        q0, ql, k0, kl = _lengths(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED)
        tiles = _ceil_div_up_to_zero(ql, BLOCK_M)
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
        tl.store(table_ptr + slots * 8, 0)
        tl.store(table_ptr + slots * 8 + 1, before)
    if index >= before:
        tl.store(table_ptr + index.to(tl.int64) * 8, -1)
    else:
        reach = kv_len
        if HAS_RIGHT:
            reach = tl.minimum(reach, (m + 1) * BLOCK_M + kv_len - q_len + right)
        blocks = _ceil_div_up_to_zero(reach, BLOCK_N)
        rank = 0
        for start in range(0, batch, CHUNK):
            b = start + tl.arange(0, CHUNK)
            _, ql, _, kl = _lengths(b, batch, skip_q, cu_q_ptr, k_ptr, PAGED)
            longer = _tiles_above(blocks, ql, kl, right, BLOCK_M, BLOCK_N, HAS_RIGHT)
            as_long = _tiles_above(blocks - 1, ql, kl, right, BLOCK_M, BLOCK_N, HAS_RIGHT)
            if blocks == 0:
                as_long = _ceil_div_up_to_zero(ql, BLOCK_M)
            rank += tl.sum(tl.where(b < sequence, as_long, longer), 0)
        # within a sequence tiles that are as long are its last ones that are not longer: count those behind this one
        tiles = _ceil_div_up_to_zero(q_len, BLOCK_M)
        longer_own = _tiles_above(blocks, q_len, kv_len, right, BLOCK_M, BLOCK_N, HAS_RIGHT)
        rank += tiles - longer_own - 1 - m
        high = tl.maximum(blocks, 1)
        low = 0
        if HAS_LEFT:
            low = tl.minimum(tl.maximum(m * BLOCK_M + kv_len - q_len - left, 0) // BLOCK_N, high - 1)
        record = table_ptr + rank.to(tl.int64) * 8
        tl.store(record, m * BLOCK_M)
        tl.store(record + 1, 0)
        tl.store(record + 2, q_start)
        tl.store(record + 3, q_len)
        tl.store(record + 4, k_start)
        tl.store(record + 5, kv_len)
        tl.store(record + 6, low)
        tl.store(record + 7, high)


def tile_slots(total_q: int, batch: int, max_seqlen_q: int, block_m: int, skip_q: int = 0) -> int:
    """Bounds the number of tiles without reading a length: each sequence adds less than one tile to total_q / block_m, and only
    those of more than skip_q queries have any."""
    batch = min(batch, total_q // (skip_q + 1))
    return min((total_q + batch * (block_m - 1)) // block_m, batch * -(-max_seqlen_q // block_m))


def table_launch(
    slots: int, batch: int, window_size: tuple[int, int], block_m: int, block_n: int, skip_q: int, paged: bool
) -> Launch:
    """Of `_tile_table`; slots > 0. Tensors: the table, cu_seqlens_q, and cu_seqlens_k or the seqused_k of a paged cache."""
    left, right = window_size
    fixed = (block_m, block_n, left >= 0, right >= 0, paged, _CHUNK)
    return Launch(_tile_table, slots, (slots, batch, skip_q, left, right), fixed, {"num_warps": 1})


def tile_table(launch: Launch, slots: int, cu_seqlens_q: Tensor, keys: Tensor) -> Tensor:
    """-> int32: `slots` records, longest tile first, -1 where there is no tile; behind them a counter at 0 and how many tiles
    there are."""
    table = torch.empty((slots + 1) * RECORD, dtype=torch.int32, device=cu_seqlens_q.device)
    launch((table, cu_seqlens_q, keys))
    return table


class TileCounters:
    """Counters at zero for the dynamic schedule of dense batches, one int32 per launch that may run beside another.

    The block that takes the last tile puts its counter back to zero, so a launch costs no memset. Launches on one stream run
    one after the other and share a counter. A captured graph may be replayed on any stream, so each captured launch gets its
    own; they repeat after 16,384, far more than the launches that could run at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[torch.device, Tensor] = {}
        self._by_stream: dict[tuple[torch.device, int], Tensor] = {}
        self._taken = 0

    def take(self, device: torch.device, stream: int, capturing: bool) -> Tensor:
        if capturing:
            if device not in self._buffers:  # memory from inside a capture belongs to that graph
                return torch.zeros(1, dtype=torch.int32, device=device)
            self._taken += 1
            return self._buffers[device][self._taken % _COUNTERS]  # 16 bytes apart, as launches want addresses
        if device not in self._buffers:
            self._buffers[device] = torch.zeros(_COUNTERS, 4, dtype=torch.int32, device=device)
            if device.type == "cuda":  # once: graphs are replayed on streams that do not wait for this one
                torch.cuda.current_stream(device).synchronize()
        key = (device, stream)
        if key not in self._by_stream:  # zeroed on the stream that uses it, and never a graph's as well
            self._by_stream[key] = torch.zeros(4, dtype=torch.int32, device=device)
        return self._by_stream[key]
