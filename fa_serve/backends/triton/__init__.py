"""Portable Triton kernels: any GPU that Triton compiles for, and Triton's interpreter on a CPU.

`prefill` is the FlashAttention-2 forward pass over dense, packed and paged keys, and `backward` the gradients of dense and
packed calls. `decode` splits one sequence's keys, paged or dense, among programs when the queries are few. `tree` computes any
number of queries against paged keys, and the bits of a query's output do not depend on the other queries. `latent` reads pages
whose values are a part of their keys. `block_sparse` walks over lists of key blocks, for prompts and for decoding;
`mask_blocks` makes such lists from a mask. In each of these folders `plan` describes the algorithm and plans calls, and
`kernel` (`kernels` in `backward`) has the kernels. `store_kv` writes the paged cache.

Kernels share `primitives`, which are steps of the algorithm, `splits`, which cuts keys and combines the results, `key_pages`,
which finds keys in a cache, and `float8_conversions`, which reads a quantised cache. `float8_inputs` makes the float8 copies
that `prefill` and the Hopper kernel multiply, and `prefill.float8_products` has the parts of `prefill` that differ for them.
`tiles` chooses tiles.

This package leaves out everything that only Hopper has (`backends.hopper`), and what a decoder layer computes in addition to
attention (`fa_serve.ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from fa_serve.backends.calls import AttentionOptions
from fa_serve.backends.float8_copies import cannot_quantize
from fa_serve.backends.mask_blocks import cannot_scan
from fa_serve.backends.triton.backward.plan import plan_backward
from fa_serve.backends.triton.block_sparse.plan import plan_block_sparse
from fa_serve.backends.triton.decode.plan import plan_decode
from fa_serve.backends.triton.latent import plan as latent
from fa_serve.backends.triton.mask_blocks import plan_over_blocks
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.backends.triton.store_kv import plan_store_kv
from fa_serve.backends.triton.tiles import DECODE_MIN_ROWS
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.launching.plans import Run
from fa_serve.spec import AttentionSpec, dtype_name

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEAD_DIM = 512
_MAX_HEAD_DIM_OF_GRADIENTS = 256

_COMPUTED = {
    "prefill": frozenset({"softcap", "sinks", "alibi", "attention_chunk"}),
    "decode": frozenset({"softcap", "sinks", "alibi", "attention_chunk"}),
    "tree": frozenset({"softcap", "sinks", "attention_chunk"}),
    "block_sparse": frozenset({"softcap", "sinks", "alibi", "attention_chunk", "block_mask"}),
    "latent": frozenset[str](),
    "backward": frozenset({"softcap", "sinks"}),
    "store_kv": frozenset[str](),
}
"""The options that each kernel computes, see `spec.OPTIONS`."""
_PLANS: dict[str, Callable[[Any, AttentionOptions], Run]] = {
    "prefill": plan_forward,
    "decode": plan_decode,
    "tree": plan_tree,
    "block_sparse": plan_block_sparse,
    "backward": plan_backward,
}


class TritonBackend:
    """The portable kernels as a backend of attention."""

    name = "triton"
    mixed_rows: int | None = DECODE_MIN_ROWS
    differentiable = False

    def supports(self, spec: AttentionSpec) -> str | None:
        interpreted = triton.knobs.runtime.interpret
        if spec.device != "cuda" and not interpreted:
            return f"runs on CUDA and ROCm devices, got {spec.device}"
        if spec.device == "cuda" and 0 < spec.arch < 80 and torch.version.hip is None:
            return f"needs compute capability 8.0 or newer, got {spec.arch / 10}"
        if interpreted and spec.dtype == torch.bfloat16 and spec.op != "store_kv":
            return (
                "computes only float16 and float32 in Triton's interpreter, which treats bfloat16 bit patterns as integers, "
                "and TRITON_INTERPRET is set"
            )
        if spec.dtype not in _DTYPES:
            return f"computes float16, bfloat16 and float32, got {dtype_name(spec.dtype)}"
        if spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn):
            return f"reads a cache of q's dtype or float8_e4m3fn, got {dtype_name(spec.kv_dtype)}"
        if spec.kv_dtype == torch.float8_e4m3fn and 0 < spec.arch < 89:
            return f"reads float8_e4m3fn on compute capability 8.9 or newer, got {spec.arch / 10}"
        if spec.precision != "bf16" and (reason := _cannot_multiply_float8(spec) or cannot_quantize(spec)):
            return reason
        not_latent = latent.unsupported(spec)
        widest = spec.head_dim_v if not_latent is None else max(spec.head_dim, spec.head_dim_v)
        if widest > _MAX_HEAD_DIM:
            return not_latent if spec.values_in_keys else f"has kernels for a head_dim up to {_MAX_HEAD_DIM}, got {widest}"
        if (spec.needs_grad or spec.op == "backward") and widest > _MAX_HEAD_DIM_OF_GRADIENTS:
            return f"computes gradients for a head_dim up to {_MAX_HEAD_DIM_OF_GRADIENTS}, got {widest}"
        if spec.layout == "paged" and spec.needs_grad:
            return "has no backward pass through a paged cache, and an input requires gradients"
        kernel = _kernel_of(spec)
        if kernel != "backward" and (options := spec.options_beyond(_COMPUTED[kernel])):
            return f"does not support {options} in its {kernel} kernel, which this call needs"
        if (spec.needs_grad or kernel == "backward") and (options := spec.options_beyond(_COMPUTED["backward"])):
            return f"has no backward pass for {options}, and an input requires gradients"
        return None

    def plan(self, spec: AttentionSpec, tensors: Any, options: AttentionOptions | None) -> Run:
        kernel = _kernel_of(spec)
        if kernel == "store_kv":
            return plan_store_kv(tensors)
        assert options is not None
        if kernel == "latent":
            return latent.plan_latent(tensors, options, decodes=spec.op == "decode")
        if kernel == "block_sparse" and spec.mask is not None:
            return plan_over_blocks(plan_block_sparse, tensors, options)
        return _PLANS[kernel](tensors, options)


def _kernel_of(spec: AttentionSpec) -> str:
    """The room of the kernel that serves a call."""
    if spec.op in ("store_kv", "backward", "tree"):
        return spec.op
    if spec.block_mask or (spec.mask is not None and cannot_scan(spec) is None):
        return "block_sparse"
    if latent.unsupported(spec) is None:
        return "latent"
    return "decode" if spec.op == "decode" else "prefill"


def _cannot_multiply_float8(spec: AttentionSpec) -> str | None:
    """Why these kernels have no float8 products for this call, or None."""
    if spec.device == "cuda" and spec.arch < 89:
        got = spec.arch / 10 if spec.arch else "a ROCm device"
        return f"multiplies float8 on compute capability 8.9 or newer, got {got}"
    if spec.dtype == torch.float32:
        return f"multiplies float8 for float16 and bfloat16, got {dtype_name(spec.dtype)}"
    if spec.mask is not None:
        return f"multiplies float8 only without an explicit mask, got a {spec.mask} mask"
    if spec.attention_chunk:
        return f"multiplies float8 only without an attention_chunk, got precision {spec.precision!r}"
    return None
