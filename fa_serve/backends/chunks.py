"""Prompts that leave most of the GPU idle: a few queries behind many keys, like one chunk of a long prompt.

A prompt kernel gives each multiprocessor some rows of one head and all their keys. 256 queries of 16 heads are 32 such tiles
for 132 multiprocessors. The decoding kernel divides the keys as well, so its programs fill the GPU, although each of them is
slower. `divides_keys` says for which calls it is the faster one; `fa_serve.dispatch` plans these calls as decoding. The choice
depends on shapes alone, and both kernels add in a fixed order. This module leaves out batches of unequal prompts (`mixed`).
"""

from __future__ import annotations

from fa_serve.spec import AttentionSpec

MIN_KEYS = 1024
"""Fewer visible keys than these are not worth a second kernel that merges."""
ROWS = 128
"""Rows of a prompt kernel's tile at head_dim 128."""


def divides_keys(spec: AttentionSpec, batch: int, seqlen_q: int, seqlen_k: int, num_sms: int) -> bool:
    """Whether the decoding kernel is the faster one for `batch` sequences of `seqlen_q` queries and up to `seqlen_k` keys.

    On one H200 the Hopper kernel takes 57 us for 256 queries behind 4096 keys and 374 us for 128 behind 32,768 (16/8 and 16/2
    heads of 128), which is a quarter and an eighth of its speed in a full GPU. By its machine code, the decoding kernel with 64
    rows should reach more than half of that speed in any shape, so it is chosen where tiles fill less than half of the
    multiprocessors; this bound has not been measured. Its tiles of 64 rows exist for 16-bit heads of up to 128 on compute
    capability 9.0.
    """
    if spec.arch != 90 or spec.dtype.itemsize != 2 or max(spec.head_dim, spec.head_dim_v) > 128:
        return False
    if spec.needs_grad or spec.attention_chunk or spec.block_mask or spec.precision != "bf16":
        return False
    left, _ = spec.window_size
    keys = seqlen_k if left < 0 else min(seqlen_k, left + seqlen_q)
    tiles = batch * spec.num_heads * -(-seqlen_q // ROWS)
    return keys >= max(MIN_KEYS, 4 * seqlen_q) and 2 * tiles < num_sms
