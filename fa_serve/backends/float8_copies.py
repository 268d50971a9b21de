"""Which calls have float8 copies of their inputs, and how much memory the copies of keys and values of a paged call take.

A backend that multiplies float8 numbers reads copies of the KV cache, which have other scales and transposed values. The
lengths of sequences are on the device, so the host allocates room for the longest possible sequence, once for each sequence. If
that is more than MAX_COPY_BYTES, `fa_serve.dispatch` plans the call with products in q's dtype, which are more accurate. The
choice depends only on shapes and `max_seqlen_k`. This module leaves out the copies of dense and packed keys, which are no
larger than the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve.spec import AttentionSpec, Precision, dims, dtype_name

MAX_COPY_BYTES = 1 << 30
"""Bytes that the copies of one call may take. With 8 KV heads of 128, this is room for 512k keys with "fp8", such as 64
sequences of up to 8k keys, and for 340k keys with "qk8". A layer's copies are freed before the next layer's are made."""


def copied_bytes(k_cache: Tensor, v_cache: Tensor, batch: int, max_seqlen_k: int, precision: Precision) -> int:
    """Bytes of the copies of `batch` sequences of up to `max_seqlen_k` keys; 0 for products in q's dtype.

    "qk8" copies values in 16 bits. Scales are a hundredth of the copies, and are not counted.
    """
    if precision == "bf16":
        return 0
    value_bytes = v_cache.shape[3] * (1 if precision == "fp8" else 2)
    return batch * max_seqlen_k * k_cache.shape[2] * (k_cache.shape[3] + value_bytes)


def cannot_quantize(spec: AttentionSpec) -> str | None:
    """Why no backend multiplies float8 copies of the inputs of this call, or None. The precision is not "bf16".

    A backend may have further reasons, such as its GPUs.
    """
    if spec.block_mask:
        return f"multiplies float8 only without a block_mask, got precision {spec.precision!r}"
    if spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn):
        return f"quantises caches of q's dtype or float8_e4m3fn, got {dtype_name(spec.kv_dtype)}"
    widest = 256 if spec.precision == "qk8" else 128
    if spec.head_dim != spec.head_dim_v or spec.head_dim not in (64, 128, widest):
        sizes = "64, 128 and 256" if spec.precision == "qk8" else "64 and 128"
        got = dims(spec.head_dim, spec.head_dim_v)
        return f"supports head sizes {sizes} with precision {spec.precision!r}, got {got}"
    if spec.needs_grad:
        return f"has no backward pass with precision {spec.precision!r}, and an input requires gradients"
    return None
