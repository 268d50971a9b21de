"""Which calls the Hopper kernel of latent attention serves, and its tiles. `latent_decode` describes the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fa_serve.backends.triton.triton_tiles import DecodeTiles
from fa_serve.spec import AttentionSpec

ROPE_COLUMNS = 64
"""Columns in shared memory for the numbers of a key behind its value."""
P_STAGES = 2
"""Blocks of probabilities in shared memory."""
MIN_ROWS = 32
"""Query heads per KV head from which `auto` may choose the kernel."""
MEASURED = False
"""Whether the kernel has been measured. Until then `auto` leaves its calls to the portable kernel."""


@dataclass(frozen=True)
class Ring:
    """The blocks of keys in shared memory: `stages` blocks of `block_n` keys."""

    block_n: int
    stages: int


def takes_latent(spec: AttentionSpec) -> bool:
    """Whether this kernel computes a call: one that names the backend, or, once the kernel is measured, one that `auto` asks
    about with enough rows to fill its tile."""
    if spec.op != "decode" or not spec.values_in_keys or not _can_compute(spec):
        return False
    return spec.named or (MEASURED and spec.num_heads // spec.num_kv_heads >= MIN_ROWS)


def _can_compute(spec: AttentionSpec) -> bool:
    rest = spec.head_dim - spec.head_dim_v
    plain = not (spec.softcap or spec.sinks or spec.alibi or spec.attention_chunk or spec.block_mask or spec.needs_grad)
    return (
        plain
        and spec.window_size[0] < 0
        and spec.dtype == spec.kv_dtype
        and spec.dtype in (torch.float16, torch.bfloat16)
        and spec.head_dim_v in (256, 512)
        and 0 < rest <= ROPE_COLUMNS
        and spec.page_size % 16 == 0
        and spec.whole_rows
    )


@lru_cache(maxsize=4096)
def latent_hopper_tiles(
    num_sms: int, groups: int, num_kv_heads: int, batch: int, max_seqlen_q: int, max_seqlen_k: int, num_splits: int
) -> DecodeTiles:
    """The tile of one call, which has 64 rows. With 512 + 64 numbers a key, shared memory holds 4 blocks of 32 keys beside the
    queries. A program has an SM to itself, so there are as many programs as SMs. No share is shorter than 128 keys.

    The module `latent_decode` has the arithmetic. Nothing is measured yet.
    """
    block_n = 32
    tiles = DecodeTiles(64, block_n, num_warps=4, num_stages=4, splits=num_splits, balanced=False, registers=128)
    if num_splits:
        return tiles
    units = num_kv_heads * -(-groups * max_seqlen_q // 64)
    max_blocks = -(-max_seqlen_k // block_n)
    if max_blocks <= 1:
        return tiles.without_splits()
    wave = max(1, num_sms // units)
    if batch == 1:
        return replace(tiles, splits=min(wave, max_blocks))
    return replace(tiles, splits=wave, balanced=True, min_blocks=4)
