"""Prompts that leave most of the GPU idle: a few queries behind many keys, like one chunk of a long prompt.

A prompt kernel gives each multiprocessor some rows of one head and all their keys. 256 queries of 16 heads are 32 such tiles
for 132 multiprocessors. The decoding kernel splits the keys as well, so its programs fill the GPU, although each of them is
slower. So does the Hopper kernel with packed and paged keys (`hopper.split_kv`). `decodes_chunks` says for which calls the
decoding kernel is the faster one; `fa_serve.dispatch` plans these calls as decoding. The choice depends on shapes alone, and
both kernels add in a fixed order. This module leaves out batches of unequal prompts (`mixed`).
"""

from __future__ import annotations

from fa_serve.spec import AttentionSpec

MIN_KEYS = 1024
"""Fewer visible keys than these are not worth a second kernel that combines splits."""
TILE_ROWS = 128
"""Rows of a prompt kernel's tile at head_dim 128."""
MIN_SPLIT_KEYS = 2048
"""From how many visible keys on the prompt kernel splits keys. 256 queries of 32 heads behind 1024 keys take 28 us split and
24 whole on one H100. It lies between the 1,024 and the 4,096 keys that were measured."""


def decodes_chunks(
    spec: AttentionSpec, batch: int, seqlen_q: int, seqlen_k: int, num_sms: int, *, splits_keys: bool = False
) -> bool:
    """Whether the decoding kernel is the faster one for `batch` sequences of `seqlen_q` queries and up to `seqlen_k` keys.

    splits_keys: the other kernel is the Hopper kernel, and it may split the keys of this call

    In us on one H200, decoding kernel and Hopper kernel, by the number of tiles of the latter for 132 multiprocessors. Heads of
    128: 16 tiles 110 and 375 (16 heads, 128 queries behind 32,768 keys); 32 tiles 203 and 376 (32 heads, the same), 39 and 58
    (256 queries behind 4096 keys), 20 and 24 (behind 1024); 64 tiles 68 and 59, 33 and 24 (the same with 32 heads), 118 and 107
    (16 heads, 512 queries behind 8192 keys). Heads of 64: 64 tiles 238 and 310 (128 queries behind 32,768 keys). The tiles of
    64 rows that the decoding kernel needs exist for 16-bit heads of up to 128 on compute capability 9.0.

    With split keys the Hopper kernel takes 32 where the decoding kernel takes 44 (32 tiles, 16/16 heads of 128, 256 queries
    behind 4096 keys). 64 queries fill half of its tiles, and for 1024 keys combining costs too much. Heads of 64 were not
    compared.
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
    # without queries there is no tile, and the decoding kernel takes one query of a dense sequence for granted
    return keys >= max(MIN_KEYS, 4 * seqlen_q) and 0 < part * tiles < num_sms
