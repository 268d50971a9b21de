"""Which calls the Hopper kernel of latent attention serves, and its tiles. `plan` describes the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fa_serve.backends.triton.tiles import DecodeTiles
from fa_serve.spec import OPTIONS, AttentionSpec

ROPE_COLUMNS = 64
"""Columns in shared memory for the numbers of a key after its value."""
VALUE_PARTS = 4
"""Parts of the columns of values. A product with 256 columns needs 154 registers, and a thread has 128 at launch."""
P_STAGES = 2
"""Blocks of probabilities in shared memory."""
MIN_ROWS = 33
"""The fewest rows that this kernel serves. The rows are the query heads of all queries of a sequence. From this number on,
tiles of the portable kernel also have 64 rows.

Times in us on one H200 in bfloat16, of this kernel and of the portable one. 16 rows: 168 and 162 for 64 x 8192 keys, 59 and 56
for 1 x 131072. 64 rows: 188 and 302, 64 and 91; 16 heads and 4 queries: 61 and 93 for 32 x 4096. 128 rows: 331 and 544, 96 and
148.
"""


@dataclass(frozen=True)
class Ring:
    """The blocks of keys in shared memory: `stages` blocks of `block_n` keys."""

    block_n: int
    stages: int


def cannot_decode_latent(spec: AttentionSpec) -> str | None:
    """Why this kernel does not compute the decoding of latent attention in a paged cache, or None."""
    found = spec.options
    if spec.window_size[0] >= 0:
        found.append("a window")
    if found:
        return f"decodes latent attention only without {', '.join(OPTIONS)} or windows, got {', '.join(found)}"
    rest = spec.head_dim - spec.head_dim_v
    if spec.num_kv_heads != 1 or spec.head_dim_v not in (256, 512) or rest not in range(16, ROPE_COLUMNS + 1, 16):
        got = f"{spec.num_kv_heads} with {spec.head_dim_v} and {rest} more"
        return (
            "decodes latent attention with one KV head whose values have 256 or 512 numbers and whose keys have 16, 32, 48 or "
            f"64 more, got {got}"
        )
    queries = 1 if spec.sizes is None else spec.sizes[1]
    if spec.num_heads * queries < MIN_ROWS:
        got = f"{spec.num_heads} heads and up to {queries} queries"
        return f"decodes latent attention if a sequence has at least {MIN_ROWS} query heads over all its queries, got {got}"
    return None


@lru_cache(maxsize=4096)
def latent_hopper_tiles(
    num_sms: int, groups: int, num_kv_heads: int, batch: int, max_seqlen_q: int, max_seqlen_k: int, num_splits: int
) -> DecodeTiles:
    """The tile of one call, which has 64 rows. With 512 + 64 numbers a key, shared memory holds the queries and 4 blocks of 32
    keys. A program has an SM to itself, so there are as many programs as SMs. No share is shorter than 128 keys.

    The module `plan` has the arithmetic. Other blocks of keys and shares are not measured.
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
