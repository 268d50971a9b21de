"""Prompts that leave most of the GPU idle: a few queries over many keys, like one chunk of a long prompt.

A prompt kernel gives each multiprocessor some rows of one head and all their keys. 256 queries of 16 heads are 32 such tiles
for 132 multiprocessors. The decoding kernel also splits the keys, so its programs fill the GPU, although each of them is
slower. With packed and paged keys, the Hopper kernel splits keys too (`hopper.split_kv`). `decodes_chunks` says for which calls
the decoding kernel is faster; `fa_serve.dispatch` plans these calls as decoding. The choice depends only on shapes, and both
kernels add in a fixed order. This module leaves out batches of unequal prompts (`mixed`).
"""

from __future__ import annotations

from fa_serve.spec import AttentionSpec

MIN_KEYS = 1024
"""With fewer visible keys, a second kernel that combines splits costs more than splitting gains."""
TILE_ROWS = 128
"""Rows of a prompt kernel's tile at head_dim 128."""
MIN_SPLIT_KEYS = 2048
"""The prompt kernel splits keys from this many visible keys on. 256 queries of 32 heads over 1024 keys take 28 us split and
24 us whole on one H100. The value lies between the 1,024 and the 4,096 keys that were measured."""


def decodes_chunks(
    spec: AttentionSpec, batch: int, seqlen_q: int, seqlen_k: int, num_sms: int, *, splits_keys: bool = False
) -> bool:
    """Whether the decoding kernel is faster for `batch` sequences of `seqlen_q` queries and up to `seqlen_k` keys.

    splits_keys: the other kernel is the Hopper kernel, and it may split the keys of this call

    Times on one H200 in us, first the decoding kernel, then the Hopper kernel, ordered by the number of tiles that the Hopper
    kernel has for 132 multiprocessors. Heads of 128: 16 tiles 110 and 375 (16 heads, 128 queries over 32,768 keys); 32 tiles
    203 and 376 (32 heads, the same), 39 and 58 (256 queries over 4096 keys), 20 and 24 (over 1024); 64 tiles 68 and 59, 33 and
    24 (the same with 32 heads), 118 and 107 (16 heads, 512 queries over 8192 keys). Heads of 64: 64 tiles 238 and 310 (128
    queries over 32,768 keys). The decoding kernel needs tiles of 64 rows, which exist for 16-bit heads of up to 128 on compute
    capability 9.0.

    If the Hopper kernel splits keys, it takes 32 us where the decoding kernel takes 44 us (32 tiles, 16/16 heads of 128, 256
    queries over 4096 keys). But 64 queries fill only half of its tiles, and for 1024 keys combining costs too much. Heads of 64
    were not compared.
    """
    if spec.arch != 90 or spec.dtype.itemsize != 2 or max(spec.head_dim, spec.head_dim_v) > 128:
        return False
    if spec.needs_grad or spec.attention_chunk or spec.block_mask or spec.precision != "bf16":
        return False
    left, _ = spec.window_size
    keys = seqlen_k if left < 0 else min(seqlen_k, left + seqlen_q)
    tiles = batch * spec.num_heads * -(-seqlen_q // TILE_ROWS)
    narrow = max(spec.head_dim, spec.head_dim_v) <= 64
    if splits_keys and not narrow and 2 * seqlen_q > TILE_ROWS and keys >= MIN_SPLIT_KEYS:
        return False
    part = 2 if narrow else 3
    # without queries there is no tile, and the decoding kernel assumes that a dense sequence has a query
    return keys >= max(MIN_KEYS, 4 * seqlen_q) and 0 < part * tiles < num_sms
