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
    STATIC   a resident grid that walks the tiles in a snake, so that a sorted list is balanced without communication
    DYNAMIC  a resident grid; whoever is free takes the next tile from a counter in global memory
    """

    GRID = 0
    STATIC = 1
    DYNAMIC = 2


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
    blocks_per_sm: how many blocks share a multiprocessor; more than one needs small tiles
    """

    groups: int
    block_n: int
    stages: int
    q_stages: int
    schedule: Schedule
    pingpong: bool = False
    overlap: bool = True
    blocks_per_sm: int = 1

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
    (256, 256): (256, 0, 256),
}
"""(head_dim, head_dim_v) -> widths in shared memory (first part of Q and K, second part or 0, V). 96 is padded with zeros by
the copy engine; 192 is computed as 128 + 64, because tiles are powers of two."""


def shared_bytes(tiles: TileConfig, head_dim: int, head_dim_v: int) -> int:
    """What a block takes; Hopper has 232,448 bytes for one block and 233,472 for all blocks of a multiprocessor."""
    first, second, value = HEAD_DIMS[head_dim, head_dim_v]
    queries = tiles.q_stages * tiles.block_m * (first + second)
    keys = tiles.stages * tiles.block_n * (first + second + value)
    return 2 * (queries + keys) + 1024


@lru_cache(maxsize=4096)
def forward_tiles(
    head_dim: int, head_dim_v: int, masked: bool, max_seqlen_q: int, max_seqlen_k: int, varlen: bool
) -> TileConfig:
    """The tile of one call; `masked` is any causal or window limit.

    The figures (TFLOPS on one H200, bf16, 16k tokens, 4,096 keys) are those of the measurements behind each choice.
    """
    width = HEAD_DIMS[head_dim, head_dim_v]
    schedule = Schedule.DYNAMIC if masked or varlen else Schedule.STATIC
    if max_seqlen_q <= 64:
        # one warpgroup has all the rows there are; two blocks share a multiprocessor and hide each other's start and end
        block_n, q_stages, blocks = (64, 1, 2) if width[0] <= 128 and not width[1] else (64, 1, 1)
        return TileConfig(1, block_n, 2, q_stages, Schedule.GRID, blocks_per_sm=blocks)
    if width[0] == 256:
        # 737 unmasked with ping-pong; shared memory has room for one query tile only
        return TileConfig(2, 64, 2, 1, schedule, pingpong=not masked)
    if width[1]:
        return TileConfig(2, 128, 2, 1, schedule)
    if width[0] == 64:
        # 521 with three warpgroups and ping-pong, 483 without ping-pong; below 2k three rows of 64 waste a third of a
        # causal tile, and two are better
        groups = 2 if max_seqlen_k <= 1024 and masked else 3
        return TileConfig(groups, 128, 2, 2, schedule, pingpong=True)
    # 679 unmasked resident, 606 one block per tile; ping-pong changes nothing (676)
    return TileConfig(2, 128, 2, 2, schedule)


@lru_cache(maxsize=4096)
def head_group(batch_heads: int, heads_per_kv: int, kv_bytes_per_head: int, tiles_per_head: int) -> int:
    """Query heads worked on together, longest tiles first.

    As many as keep their keys and values within half of the L2 cache (of 50 MiB), and enough for about three tiles per
    multiprocessor, so that the last group ends evenly: a list schedule of D256, 4k causal, loses 13% with 6 heads and 1% with
    13. Long sequences can afford it, because the tiles of one head run side by side and share what they read.
    """
    cached = max((24 << 20) // max(kv_bytes_per_head, 1), 1) * heads_per_kv
    even = min(-(-3 * 132 // max(tiles_per_head, 1)), 32)
    group = -(-max(cached, even) // heads_per_kv) * heads_per_kv
    return min(group, batch_heads)
