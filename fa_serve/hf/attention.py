"""The attention function: transformers' words in, ours out."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector  # of what models collect by hooks, without telling us

from fa_serve.hf.continuous import paged_attention
from fa_serve.hf.masks import Implicit
from fa_serve.hf.ops import attend, attention, attention_varlen, traced
from fa_serve.spec import UnsupportedModelError

if TYPE_CHECKING:
    from fa_serve.hf.paged import PagedBatch, Probe

logger = logging.getLogger(__name__)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Implicit | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool = False,
    fa_serve_batch: PagedBatch | Probe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of `attn_implementation="fa_serve"`.

    query:          (batch, heads, seqlen_q, head_dim); key, value: (batch, kv_heads, seqlen_k, dim), not repeated
    attention_mask: Implicit, or 4-dimensional, bool or float: either is the whole truth about who sees whom. With None it is
                    the module's word that counts: is_causal, and sliding_window (keys seen on a side, the query's own included)
    position_bias:  (1 or batch, heads, seqlen_q, seqlen_k), added to the scores
    cu_seq_lens_*:  a batch of one is sequences packed end to end; they attend within themselves only
    Returns out (batch, seqlen_q, heads, head_dim_v), contiguous, and None for the weights.
    """
    name = type(module).__name__
    if dropout:
        raise UnsupportedModelError(
            f"{name} asks for attention dropout {dropout}, which fa_serve has not: call model.eval(), or set the dropout of "
            "attention in the model's config to 0"
        )
    if output_attentions or "attentions" in (cast("Any", _active_collector).get() or ()):
        raise UnsupportedModelError('fa_serve never forms the attention weights: use attn_implementation="eager" for them')
    if kwargs.get("cache") is not None:
        kwargs |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        kwargs |= {"max_length_q": max_length_q, "max_length_k": max_length_k, "position_bias": position_bias}
        kwargs |= {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return cast("tuple[Tensor, None]", paged_attention(module, query, key, value, attention_mask, **kwargs))
    extra = s_aux is not None or position_bias is not None or cu_seq_lens_q is not None or fa_serve_batch is not None
    short = query.is_cuda and not (extra or torch.is_grad_enabled() or traced(query))
    if short and isinstance(attention_mask, Implicit):
        # layers of a forward that are alike in all but addresses are checked once
        alike = (*[(x.shape, x.stride(), x.dtype, x.device) for x in (query, key, value)], scaling and float(scaling), softcap)
        if alike in attention_mask.steps:
            step = attention_mask.steps[alike]
            if step is not None and (done := step(query, key, value, attention_mask.padding)) is not None:
                return done, None
            short = False
    # the module's word is about a sequence that attends to itself; the engine's are all causal
    own = getattr(module, "is_causal", fa_serve_batch is not None) and query.shape[2] == key.shape[2]
    causal = bool(own if is_causal is None else is_causal)
    left = -1 if sliding_window is None else sliding_window - 1
    window_size = (left, 0 if causal else left)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    if fa_serve_batch is not None:
        if position_bias is not None:
            raise UnsupportedModelError(f"{name} adds a position_bias to its scores, which a paged cache has no place for")
        return fa_serve_batch.attend(module, query, key, value, attention_mask, causal=causal, left=left, **options), None

    mask: Tensor | None = None
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if needs_grad and query.is_cuda and not torch.compiler.is_compiling():
        _say_who_has_gradients()
    if isinstance(attention_mask, Implicit):
        window_size = attention_mask.window_size
        if attention_mask.keys is not None:
            key = key[:, :, : attention_mask.keys]
            value = value[:, :, : attention_mask.keys]
            position_bias = None if position_bias is None else position_bias[..., : attention_mask.keys]
        mask = None if attention_mask.padding is None else attention_mask.padding[:, None, None]
        cu_seq_lens_q = attention_mask.starts if cu_seq_lens_q is None else cu_seq_lens_q
    elif attention_mask is not None:
        if attention_mask.dim() != 4:
            raise UnsupportedModelError(f"{name} passes a mask of shape {tuple(attention_mask.shape)}, not of 4 dimensions")
        mask = attention_mask
        window_size = (-1, -1)
    # a window that reaches over all keys is none
    keys, (left, right) = key.shape[2], window_size
    options["window_size"] = (-1 if left + 1 >= keys else left, -1 if right >= keys else right)

    q = query.transpose(1, 2)
    k = key.transpose(1, 2)
    v = value.transpose(1, 2)
    packing = attention_mask.packing if isinstance(attention_mask, Implicit) else None
    if packing is not None and position_bias is None and cu_seq_lens_q is None and not needs_grad:
        k, v = (x[packing.rows, packing.columns] for x in (k, v))
        cu_seqlens = (packing.cu_seqlens_q, packing.cu_seqlens_k)
        out = attention_varlen(q.flatten(0, 1), k, v, *cu_seqlens, q.shape[1], packing.max_seqlen_k, **options)
        return out.view(*q.shape[:2], *out.shape[1:]), None
    if cu_seq_lens_q is not None:
        if q.shape[0] != 1:
            raise UnsupportedModelError(f"cu_seq_lens_q describes a batch of 1, packed end to end, got a batch of {q.shape[0]}")
        cu_q = cu_seq_lens_q.to(torch.int32)
        cu_k = cu_q if cu_seq_lens_k is None else cu_seq_lens_k.to(torch.int32)
        if isinstance(attention_mask, Implicit) and attention_mask.tail:
            cu_q = (cu_q - cu_q[-1] + q.shape[1]).clamp(min=0)
        if mask is None and position_bias is None:
            lengths = int(max_length_q or q.shape[1]), int(max_length_k or k.shape[1])
            return attention_varlen(q[0], k[0], v[0], cu_q, cu_k, *lengths, **options)[None], None
        mask = _combine(mask, _same_sequence(cu_q, cu_k, q.shape[1], k.shape[1]))
    if position_bias is not None:
        mask = _combine(position_bias, mask)
    if not short:
        return attention(q, k, v, mask=mask, **options), None
    out, step = attend(query, key, value, mask, **options)
    if isinstance(attention_mask, Implicit) and attention_mask.keys is None and attention_mask.starts is None:
        attention_mask.steps[alike] = step
    return out, None


@functools.cache
def _say_who_has_gradients() -> None:
    logger.warning(
        "fa_serve's kernels have no backward pass: attention that needs gradients runs on PyTorch's own. For inference, use "
        "torch.no_grad() or torch.inference_mode()"
    )


def _same_sequence(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(1, 1, seqlen_q, seqlen_k) bool: whether a query and a key belong to the same packed sequence."""
    q, k = (
        torch.searchsorted(starts, torch.arange(length, dtype=torch.int32, device=starts.device), right=True)
        for starts, length in ((cu_seqlens_q, seqlen_q), (cu_seqlens_k, seqlen_k))
    )
    return (q[:, None] == k[None, :])[None, None]


def _combine(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Both masks at once, each bool (keeps where True) or float (added), broadcastable to each other."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        first, second = second, first
    return torch.where(second, first, float("-inf")) if second.dtype == torch.bool else first + second
