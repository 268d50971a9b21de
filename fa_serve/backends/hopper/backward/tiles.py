"""Tiles of the Hopper backward kernel. `benchmarks/tuning/tune_backward.py` measures the alternatives."""

from __future__ import annotations

from dataclasses import dataclass

import triton

GROUPS = 2
"""Consumer warpgroups. Each owns 64 keys of the tile and half of the tile's part of dQ."""
BLOCK_N = 64 * GROUPS
WIDE_BLOCK_N = 64
"""Keys of a tile of the kernel for wide heads, where each warpgroup has one of the two gradients of these keys."""
MAX_HEAD_DIM_OF_GRADIENTS = 192 if triton.__version__.startswith("3.9.") else 256
"""With Triton 3.9, ptxas lacks registers for 256 columns and serialises the products."""


@dataclass(frozen=True, slots=True)
class BackwardTileConfig:
    """One way to run either kernel. A tile has `BLOCK_N` or `WIDE_BLOCK_N` keys.

    block_m:   queries in a block, a multiple of 64
    q_stages:  blocks of Q in flight
    do_stages: blocks of dO in flight
    stagger:   neighbouring tiles start at different queries. Otherwise the tiles of a head, which run at the same time, add to
               the same rows of dQ at the same time
    shares_dq: in the kernel for wide heads both warpgroups compute dQ. Otherwise the warpgroup of gradients computes all of it
    """

    block_m: int
    q_stages: int
    do_stages: int = 2
    stagger: bool = False
    shares_dq: bool = False


def gradient_columns(head_dim: int, head_dim_v: int) -> int:
    """Columns in shared memory of Q, K, V and dO; the copy engine fills those past a head size with zeros.

    Above 128, these are the columns of Q and K in the kernel for wide heads; V and dO may have only 128, see
    `second_value_columns`.
    """
    widest = max(head_dim, head_dim_v)
    return next(width for width in (64, 128, 192, 256) if widest <= width)


def second_value_columns(head_dim_v: int, width: int) -> int:
    """Columns of V and dO after the first 128 in the kernel for wide heads."""
    return 0 if head_dim_v <= 128 else width - 128


def hopper_backward_tiles(width: int) -> BackwardTileConfig:
    """The tiles for `width` columns. Up to 128 columns, dQ of a block is one square of 64 by 64 for each warpgroup.

    Measured on one H200 in bfloat16 (16k tokens, hidden size 2048): TFLOPS of 5 products for the whole backward pass at seqlen
    8192, full and causal, then at 16384. cuDNN has 564, 536, 548 and 557 at head_dim 128 and 454, 427, 451 and 441 at 64.

        128 columns, 64 queries:   593 534 568 601   staggered 583 555 575 571   4 stages of Q 578 515 542 567
        64 columns, 128 queries:   454 420 455 447   staggered 461 422 462 450

    192 and 256 columns are computed by the kernel for wide heads (results/train.jsonl). With 256 columns, shared memory has
    room for only two stages each of Q and dO.
    """
    if width == 64:
        return BackwardTileConfig(128, 2, stagger=True)
    return BackwardTileConfig(64, 2)
