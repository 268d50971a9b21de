"""Tiles of the Hopper backward kernel. `benchmarks/tune_backward.py` measures the alternatives."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = 2
"""Consumer warpgroups. Each owns 64 keys of the tile and half of the tile's part of dQ."""
BLOCK_N = 64 * GROUPS
MAX_HEAD_DIM_OF_GRADIENTS = 128


@dataclass(frozen=True, slots=True)
class BackwardTileConfig:
    """One way to run the kernel. A tile has `BLOCK_N` keys.

    block_m:   queries in a block, a multiple of 64
    q_stages:  blocks of Q in flight. With `ahead`, a stage is free after the next block's dP, so more than 2 hide the copies.
               The remainder by a power of 2 takes fewer registers than by 3
    do_stages: blocks of dO in flight
    ahead:     S of the next block is issued between dQ and dK of this one, so that the tensor cores always have work. False
               issues S at the block's start, as FlashAttention-3 does, and needs fewer registers. With blocks of 128 queries
               there are too few registers for True, and ptxas waits for each product
    stagger:   neighbouring tiles start at different queries. Otherwise the tiles of a head, which run at the same time, add to
               the same rows of dQ at the same time
    """

    block_m: int
    q_stages: int
    do_stages: int = 2
    ahead: bool = True
    stagger: bool = False

    def __post_init__(self) -> None:
        assert not self.ahead or self.q_stages > 1, "Q of a block is held until the next block's dP"


def gradient_columns(head_dim: int, head_dim_v: int) -> int:
    """Columns in shared memory of Q, K, V and dO; the copy engine fills those past a head size with zeros."""
    return 64 if max(head_dim, head_dim_v) <= 64 else 128


def backward_tiles(width: int) -> BackwardTileConfig:
    """The tiles for `width` columns, whose part of dQ is a square of 64 for each warpgroup.

    None has been measured. They follow from the registers and the shared memory that the compiled kernel takes.
    """
    return BackwardTileConfig(128, 2, ahead=False) if width == 64 else BackwardTileConfig(64, 4)
