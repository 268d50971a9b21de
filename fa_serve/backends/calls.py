"""The tensors and the options of one attention call, as plans and backends take them.

    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu_seqlens_q, keys=cu_seqlens_k)
    options = complete_options(CallOptions(causal=True), q, max_seqlen_q, max_seqlen_k)

`CallOptions` holds the options as the caller gave them, and `AttentionOptions` holds the options that backends read;
`complete_options` checks the former and returns the latter. `growing_facts` is the part of a plan's key that stays the same in
decoding, where the number of keys grows at each step. This module leaves out the table of plans (`fa_serve.launching.plans`)
and what a backend does with a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.block_lists import BlockLists
from fa_serve.spec import FEW_QUERIES, ParameterError, Precision

_FAR = 1 << 29  # a window beyond any length; kernels add lengths to it in 32 bits


def growing_facts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...] | None:
    """The facts of a dense call with one query per sequence, without the number of keys, which grows by one at each step.

    The facts include the bit length of the number of keys, because tiles are chosen by it, and all relations between tensors
    that are checked or that kernels depend on. Returns None for few keys, which decoding kernels leave to other kernels, for
    inputs that need gradients, for any mask other than one bool per key, and for strides of unusual alignment or width. Such a
    call has facts of the usual form.
    """
    k_shape = k.shape
    v_shape = v.shape
    if len(k_shape) != 4 or len(v_shape) != 4:
        return None
    batch_k, keys, heads_k, dim_k = k_shape
    batch_v, keys_v, heads_v, dim_v = v_shape
    k_strides = k.stride()
    v_strides = v.stride()
    page_k, token_k, head_k, unit_k = k_strides
    page_v, token_v, head_v, unit_v = v_strides
    if (page_k | token_k | head_k | page_v | token_v | head_v) & 15 or (page_k | head_k | page_v | head_v) >> 31:
        return None
    if (token_k | token_v) >> 24:  # the 128 tokens of a tile would span 2^31 elements
        return None
    if keys <= FEW_QUERIES or keys != keys_v or unit_k != 1 or unit_v != 1:
        return None
    if torch.is_grad_enabled() and _needs_grad(q, k, v):
        return None
    seen = None
    if mask is not None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1) or mask.shape[3] != keys:
            return None
        seen = (mask.shape[0], mask.stride(3), mask.device)
    same = k_strides == v_strides
    return (
        (q.shape, q.stride(), q.dtype, q.device),
        (batch_k, heads_k, dim_k, k.dtype, k.device),
        (batch_v, heads_v, dim_v, v.dtype, v.device),
        (keys.bit_length(), same, seen),
    )


def _needs_grad(*tensors: Tensor) -> bool:
    return any(x.requires_grad for x in tensors)


def mask_form(mask: Tensor | None) -> str:
    """The form of a mask: "none" if there is no mask, "bool" or "float"."""
    return "none" if mask is None else "bool" if mask.dtype == torch.bool else "float"


class AttentionTensors(NamedTuple):
    """The tensors of one attention call; shapes are those of `fa_serve.api` for the layout of the spec.

    k, v: keys and values, or the paged caches
    keys: the tensor that tells how many keys each sequence has: cu_seqlens_k (varlen), seqused_k (paged), or None (dense)
    out:  written in place if given, else the plan allocates it
    lse:  written in place if given (only `mixed` gives it); else the plan allocates it if the options ask for it
    alibi_slopes: float32, (num_heads,) or (batch, num_heads)
    blocks: the key blocks of each block of queries. If there is a `mask`, they were scanned from it (see `mask_blocks`): the
          bits of a bool mask are stored at the number of their key block, not at its place in the list, and kernels add the
          numbers of a float mask to the scores of partial blocks
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    keys: Tensor | None = None
    block_table: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    alibi_slopes: Tensor | None = None
    blocks: BlockLists | None = None

    @property
    def alibi_form(self) -> str:
        """The form of `alibi_slopes`: "none", "heads" (one for each head) or "batch" (one for each sequence and head)."""
        if self.alibi_slopes is None:
            return "none"
        return "heads" if self.alibi_slopes.dim() == 1 else "batch"


class BackwardTensors(NamedTuple):
    """The tensors of one backward pass: the arguments and results of a dense or packed call, and the gradients of the results.

    lse:          float32, (batch, num_heads, seqlen_q) or (num_heads, total_q)
    dout:         like out; dlse: like lse, or None if lse was not used
    needs_dsinks: whether the gradient of `sinks` is asked for
    needs_dmask:  whether the gradient of `mask` is asked for, which is then a float mask
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    mask: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None
    needs_dsinks: bool = False
    needs_dmask: bool = False
    alibi_slopes: Tensor | None = None


class Gradients(NamedTuple):
    """The gradients that a backward pass computes, each like its tensor; None for a gradient that was not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    mask: Tensor | None = None


class StoreTensors(NamedTuple):
    """The tensors of one call of `fa_serve.store_kv`."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


class CallOptions(NamedTuple):
    """The options of one call of `fa_serve.api` as the caller gave them; they are a part of the key of its plan.

    The operators for graphs (`fa_serve.operators`) take them in this order, with `window_size` as two numbers. The options that
    every call has come last.
    """

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, ...] = (-1, -1)
    softcap: float = 0.0
    attention_chunk: int = 0
    precision: Precision = "bf16"
    deterministic: bool = False
    return_lse: bool = False
    backend: str = "auto"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The options of one attention call, validated and with their defaults filled in.

    window_size: (left, right) with causality folded in (right == 0), -1 unlimited
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths; for a dense batch, the lengths themselves
    num_splits:  as in `fa_serve.attention_paged`
    skip_q:      sequences with up to this many queries are left to another kernel (see `mixed`), and if skip_q > 0, so are the
                 rows past the last sequence. For the op "decode" the bound is `max_seqlen_q` instead: sequences with more
                 queries are left to another kernel
    deterministic: as in `AttentionSpec`
    attention_chunk: keys per chunk, 0 without chunks; with chunks, window_size is (-1, 0). The query at position p, counted
                 from the sequence's first key, sees the keys from p // attention_chunk * attention_chunk to p
    precision:   as in `fa_serve.attention`
    """

    softmax_scale: float
    window_size: tuple[int, int]
    softcap: float
    max_seqlen_q: int
    max_seqlen_k: int
    return_lse: bool
    num_splits: int = 0
    skip_q: int = 0
    deterministic: bool = False
    attention_chunk: int = 0
    precision: Precision = "bf16"

    @property
    def left(self) -> int:
        """The left limit in the form that kernels take: the length of a chunk or of the left window, or -1 without a limit."""
        return self.attention_chunk or self.window_size[0]

    @property
    def in_spec(self) -> dict[str, Any]:
        """The fields of `AttentionSpec` that these options decide."""
        return {
            "window_size": self.window_size,
            "softcap": self.softcap != 0.0,
            "attention_chunk": self.attention_chunk > 0,
            "deterministic": self.deterministic,
        }


def complete_options(
    given: CallOptions, q: Tensor, max_seqlen_q: int, max_seqlen_k: int, num_splits: int = 0
) -> AttentionOptions:
    """Check the options of a call, fill in their defaults, and fold causality into the window.

    Raises ValueError or TypeError with the name of the option, the rule and the value. Does not check
    `attention_chunk`; `effective_chunk` does.
    """
    if given.causal not in (False, True):
        raise ValueError(f"causal must be a bool, got {given.causal!r}")
    window_size = given.window_size
    if len(window_size) != 2:
        raise ValueError(f"window_size must be (left, right), got {window_size}")
    left, right = window_size
    if not (type(left) is type(right) is int and left >= -1 and right >= -1):
        raise ValueError(f"window_size must be integers (left, right) with each >= -1, got {window_size}")
    if not 0 <= given.softcap < math.inf:
        raise ValueError(f"softcap must be finite and >= 0 (0 is off), got {given.softcap}")
    scale = q.shape[-1] ** -0.5 if given.softmax_scale is None else float(given.softmax_scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale must be finite and > 0, got {given.softmax_scale}")
    if given.precision not in ("bf16", "qk8", "fp8"):
        raise ParameterError("precision", 'be "bf16", "qk8" or "fp8"', given.precision)
    return AttentionOptions(
        softmax_scale=scale,
        window_size=(min(left, _FAR), 0 if given.causal else min(right, _FAR)),
        softcap=float(given.softcap),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        return_lse=given.return_lse,
        num_splits=num_splits,
        deterministic=given.deterministic,
        attention_chunk=given.attention_chunk,
        precision=given.precision,
    )


def effective_chunk(attention_chunk: int, window_size: tuple[int, int], max_seqlen_k: int) -> int:
    """Check `attention_chunk`, which needs a causal call without a window -> the chunk, or 0 if it covers every sequence."""
    if type(attention_chunk) is not int or attention_chunk < 0:
        raise ParameterError("attention_chunk", "be 0 (off) or a positive int", attention_chunk)
    if attention_chunk and window_size != (-1, 0):
        raise ParameterError(
            "attention_chunk",
            f"be 0 unless the call is causal and has no window (effective window_size (-1, 0), here {window_size})",
            attention_chunk,
        )
    return 0 if attention_chunk >= max_seqlen_k else attention_chunk
