"""Tile shapes and schedules of the Hopper kernel: pure functions of what the host knows, one frozen dataclass out.

`forward_tiles` says how large a tile is, how many warpgroups work on it and in which order tiles are dealt; `head_group` how
many heads are worked on together so that their keys stay in the L2 cache. No autotuning: a serving path must not stall on a
new length. `benchmarks/tune_hopper.py` measures the alternatives; each branch carries the figure that chose it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache


class Schedule(IntEnum):
    """How tiles reach the thread blocks.

    GRID     one block per tile; the hardware deals blocks in order, longest tiles first
    DYNAMIC  a resident grid; whoever is free takes the next tile from a counter in global memory
    """

    GRID = 0
    DYNAMIC = 1


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One way to run the kernel.

    groups:   consumer warpgroups, 64 query rows each; block_m = 64 * groups
    block_n:  keys per step
    stages:   K blocks and V blocks in flight, each
    q_stages: query tiles in shared memory. With 2 the next tile's queries arrive while this one computes, and its first
              product is issued under this tile's last (`overlap`); with 1 a resident block starts each tile cold
    pingpong: warpgroups take turns to issue their products, so that one computes its softmax under the other's GEMMs
    overlap:  a step's QK^T is issued before the previous step's PV and both run under the softmax (FlashAttention-3, 3.2).
              False waits for each product: an ablation
    rescale_late: O follows a new maximum after a step's QK^T is issued, under it, instead of before
    softmax_first: every exponential of a step comes before the wait for the previous PV; else ptxas chooses
    o_parts:  0: O leaves through the place of its queries, which is free for the next ones when it has left. 2: O has a place
              of its own for half of it, and a lone query tile is free after its last QK^T
    blocks_per_sm: how many blocks share a multiprocessor; more than one needs small tiles
    """

    groups: int
    block_n: int
    stages: int
    q_stages: int
    schedule: Schedule
    pingpong: bool = False
    overlap: bool = True
    softmax_first: bool = True
    o_parts: int = 0
    blocks_per_sm: int = 1
    rescale_late: bool = False

    @property
    def block_m(self) -> int:
        return 64 * self.groups

    @property
    def registers(self) -> tuple[int, int]:
        """(at launch for every thread, of a consumer thread after setmaxnreg); the producer warp keeps 24."""
        warpgroups = self.groups + 1
        launch = min(65536 // (128 * warpgroups * self.blocks_per_sm) // 8 * 8, 240)
        consumer = min((launch * warpgroups - 24) // self.groups // 8 * 8, 240)
        return launch, consumer


HEAD_DIMS = {
    (64, 64): (64, 0, 64),
    (96, 96): (128, 0, 128),
    (128, 128): (128, 0, 128),
    (192, 128): (128, 64, 128),
    (256, 256): (128, 128, 256),
}
"""(head_dim, head_dim_v) -> widths in shared memory (first part of Q and K, second part or 0, V). 96 is padded with zeros by
the copy engine; 192 is computed as 128 + 64, because tiles are powers of two."""


@lru_cache(maxsize=4096)
def forward_tiles(
    head_dim: int,
    head_dim_v: int,
    window: tuple[int, int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    varlen: bool,
    paged: bool = False,
) -> TileConfig:
    """The tile of one call. A paged call is a varlen one as well.

    The figures are TFLOPS on one H200, bf16, 16k tokens of hidden size 2048, from `benchmarks/tune_hopper.py`.
    """
    first, second, _ = HEAD_DIMS[head_dim, head_dim_v]
    left, right = window
    masked = left >= 0 or right >= 0
    seen = max_seqlen_k  # by a row, on average
    if right >= 0:
        seen = min(seen - max_seqlen_q // 2, left + right + 1 if left >= 0 else seen)
    if first + second <= 128 and (max_seqlen_q <= 64 or (masked and seen <= (1024 if first == 64 else 256))):
        # one warpgroup has all the rows there are, or works on few keys that its rows do not see; two or three blocks share
        # a multiprocessor and hide each other's start and end. D64 causal: 302 at 512 keys, 378 at 1k and 430 at 2k, with the
        # tile below 246, 339 and 409, but 475 and 526 at 8k; a window of 128 at 16k keys in 0.44 of the time. D128: 334
        # and 344 at 512 keys, 440 and 474 at 1k, windows not compared. 512 packed sequences of 64: 88, one block a tile 68
        blocks = 3 if first == 64 else 2
        return TileConfig(1, 64, blocks, 2, Schedule.DYNAMIC, softmax_first=first > 64, blocks_per_sm=blocks)
    if max_seqlen_q <= 64:
        return TileConfig(1, 64, 2, 1, Schedule.GRID, o_parts=2)
    if head_dim == 256:
        # shared memory has room for one query tile only; with a place for half of O its successor arrives under the last PV:
        # 512 keys 517 and 466 without. O follows a maximum before the next step: 4k 691, 659 under it
        return TileConfig(2, 64, 2, 1, Schedule.DYNAMIC, o_parts=2)
    if second:
        return TileConfig(2, 128, 2, 1, Schedule.DYNAMIC, o_parts=2, rescale_late=True)  # causal 4k 525, 495 before the step
    if first == 64 and (paged or (masked and max_seqlen_k <= 4096)):
        # two warpgroups waste less of the diagonal: 402 at 2k; three with ping-pong 368.
        # Three leave a producer that looks pages up few registers: 2k queries over 6k keys in pages take 561 us, 401 with two
        return TileConfig(2, 128, 3, 2, Schedule.DYNAMIC, softmax_first=False)
    if first == 64:
        # with the exponentials where ptxas puts them 409 at 512 keys, before the wait 375; 516 and 516 at 8k. Long causal tiles
        # start cold without loss: 2.18 ms at 16k with one Q slot, 2.34 with two. Packed ones may be short, and keep two.
        # O under the products: 2k 501 and 472, 16k 543 and 535, but 512 keys 405 and 412, causal 16k 489 and 502
        return TileConfig(
            3,
            128,
            2,
            1 if masked and not varlen else 2,
            Schedule.DYNAMIC,
            pingpong=True,
            softmax_first=False,
            rescale_late=not masked and max_seqlen_k > 1024,
        )
    # ping-pong helps where tiles are short (1k keys 625 and 604, causal 2k 526 and 482), not at 16k (755 and 757, causal 745
    # and 747). O under the products helps without it (16k 757 and 745, causal 747 and 733) and over pages (617 and 602)
    pingpong = varlen or max_seqlen_k <= (4096 if masked else 1024)
    return TileConfig(
        2,
        128,
        2,
        2,
        Schedule.DYNAMIC,
        pingpong=pingpong,
        softmax_first=masked or max_seqlen_k > 512,
        rescale_late=paged or not pingpong,
    )


@lru_cache(maxsize=4096)
def head_group(
    batch_heads: int, heads_per_kv: int, kv_bytes_per_head: int, tiles_per_head: int, equal: bool = False
) -> tuple[int, int]:
    """(query heads worked on together, longest tiles first; at least so many in the last such group).

    Together go as many heads as keep their keys and values within a third of the L2 cache (of 50 MiB, whose halves may both
    hold a line): D128, 16k keys, reads 645 MB of memory with 4 heads and 207 MB is the least. The last group has enough for
    about three tiles per multiprocessor, so that the end is even: D256, 4k causal, loses 19% with 1 head and 13% with 4; where
    that is half of all heads, they all go together (D256, 16k causal, 805 TFLOPS, 786 with the last 4 of 8). `equal` tiles end
    as evenly in any order, and KV heads go one by one (D256 4k 806 and 789, 1k 696 and 678; at 16k no faster: D64 600 and 610).
    """
    if equal and tiles_per_head <= 64:
        return heads_per_kv, heads_per_kv
    cached = max((16 << 20) // max(kv_bytes_per_head, 1), 1) * heads_per_kv
    even = min(-(-3 * 132 // max(tiles_per_head, 1)), 32)
    if batch_heads <= 2 * even and not equal:
        return batch_heads, batch_heads
    return min(cached, batch_heads), min(-(-even // heads_per_kv) * heads_per_kv, batch_heads)
