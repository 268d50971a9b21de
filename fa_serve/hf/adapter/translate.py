"""What transformers tells an attention layer, in fa_serve's words: one record, `LayerCall`, and the function that makes it.

    call = translate(module, query, key, value, attention_mask, scaling, sliding_window=128, softcap=50.0)
    call.visible_window           # (127, 0)

transformers says which keys a query sees in four places: in the mask, in keyword arguments of the call (`is_causal`,
`sliding_window`, `cu_seq_lens_q`), in an attribute of the module (`is_causal`), and in its config (`layer_types`). The rule
that combines the four is here and nowhere else. Everything that receives a call uses it: `attention.py`, which computes the
call, `PagedBatch`, which computes it on the engine's paged cache, and `Probe` and `info.py`, which only record the call.

Left out: any computation. `translate` reads shapes and never the contents of a tensor.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fa_serve.block_lists import BlockLists, CallSizes, as_block_lists
from fa_serve.hf.adapter.masks import ImplicitMask
from fa_serve.spec import AttentionSpec, Layout, UnsupportedModelError, arch_of

WINDOW_NOTE = "_fa_serve_window"
"""The attribute in which `Probe` notes how many keys before a query a module sees, if only its mask says so in transformers."""


class LayerCall(NamedTuple):
    """One attention layer's call.

    query:         (batch, num_heads, seqlen_q, head_dim), as transformers passes it: heads before tokens
    key:           (batch, num_kv_heads, seqlen_k, head_dim); value: the same with head_dim_v. The free room of a static cache
                   has been cut off
    mask:          an ImplicitMask, or (batch or 1, num_heads or 1, seqlen_q, seqlen_k) bool (True is seen) or float (added to
                   the scores), or the BlockLists of a BlockMask of FlexAttention, or None
    window_size:   (left, right), -1 unlimited: the layer's own window, apart from its mask. right is 0 if `is_causal`
    is_causal:     whether the layer asks for causality, apart from its mask
    softmax_scale: None stands for head_dim ** -0.5
    softcap:       0.0 is off
    sinks:         (num_heads,), or None
    position_bias: (batch or 1, num_heads, seqlen_q, seqlen_k), added to the scores, or None
    cu_seqlens_q:  (n + 1,), int32: a batch of 1 holds n sequences packed end to end, which do not see each other; or None
    cu_seqlens_k:  the same for the keys; None exactly if cu_seqlens_q is
    max_seqlen_q, max_seqlen_k: upper bounds of the packed sequences' lengths; 0 without packing
    attention_chunk: keys per chunk, 0 without chunks: the layer's own chunks, apart from its mask
    deterministic: whether repeated calls must give bitwise equal gradients (ModernBERT's deterministic_flash_attn)
    indices:       (batch, seqlen_q, topk), int: the keys that a query has chosen, or None. It sees only those of them that the
                   mask shows. A number below 0 is no key. The numbers are places in `key`, or the slots that the batch which
                   rides along has chosen
    block_indices: (batch, groups of heads, seqlen_q, topk), int64: the blocks of keys that a query has chosen, or None. It sees
                   only the keys of these blocks that the mask shows. A number below 0 is no block. The module's indexer has the
                   size of a block

    It is a named tuple, because every layer makes one for every token: a frozen dataclass of as many fields takes four times as
    long to make (1.7 us against 0.4 us on a 2-core VM).
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | ImplicitMask | BlockLists | None
    window_size: tuple[int, int]
    is_causal: bool
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    position_bias: Tensor | None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    attention_chunk: int = 0
    deterministic: bool = False
    indices: Tensor | None = None
    block_indices: Tensor | None = None

    @property
    def visible_window(self) -> tuple[int, int]:
        """The window (left, right) that the kernel applies: the mask's, or the layer's own window if there is no mask."""
        if self.mask is None:
            return self.window_size
        return self.mask.window_size if isinstance(self.mask, ImplicitMask) else (-1, -1)

    @property
    def visible_chunk(self) -> int:
        """The keys per chunk that the kernel applies: the mask's, or the layer's own chunks if there is no mask."""
        if self.mask is None:
            return self.attention_chunk
        return self.mask.attention_chunk if isinstance(self.mask, ImplicitMask) else 0


class AttendsBatch(Protocol):
    """A batch that may ride along in the model argument `fa_serve_batch`: it computes the attention of every layer."""

    def attend(self, call: LayerCall) -> Tensor:
        """Compute a call with batch 1 -> out (1, total, num_heads, head_dim_v)."""
        ...


@runtime_checkable
class AttendsBiased(Protocol):
    """A batch that also computes layers which add a bias to their scores."""

    def attend_biased(self, call: LayerCall) -> Tensor:
        """Compute a call with batch 1 and a position_bias -> out (1, total, num_heads, head_dim_v)."""
        ...


def translate(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **unused: Any,
) -> LayerCall:
    """Make the record of a layer's call from the arguments of transformers' attention functions.

    attention_mask: an ImplicitMask, a tensor of 4 dimensions, a BlockMask of FlexAttention, or None
    sliding_window: keys that a query sees on each side, the query itself included
    s_aux:          (num_heads,): one more logit per head in the softmax's denominator, gpt-oss's sinks
    position_bias:  (1 or batch, num_heads, seqlen_q, seqlen_k), added to the scores
    indices:        (batch, seqlen_q, topk): the keys that a query has chosen (DeepSeek V3.2)
    block_indices:  (batch, groups of heads, seqlen_q, topk): the key blocks that a query has chosen, -1 for none (MiniMax M3)
    cu_seq_lens_q:  (n + 1,), any integer dtype: the batch of 1 holds n packed sequences; cu_seq_lens_k defaults to it
    unused:         further arguments, which do not change the result; `models.check_class` refuses a model that passes others

    Raises UnsupportedModelError for a tensor that does not have 4 dimensions and for packed sequences in a batch other than 1.
    """
    if is_causal is None:
        # a module's attribute holds for a sequence that attends to itself, not for keys that come from elsewhere
        is_causal = getattr(module, "is_causal", False) and query.shape[2] == key.shape[2]
    left = vars(module).get(WINDOW_NOTE, -1) if sliding_window is None else sliding_window - 1
    only_last_queries = isinstance(attention_mask, ImplicitMask) and attention_mask.only_last_queries
    if isinstance(attention_mask, ImplicitMask):
        if cu_seq_lens_q is None:
            cu_seq_lens_q = attention_mask.cu_seqlens
        if attention_mask.num_keys is not None:
            key = key[:, :, : attention_mask.num_keys]
            value = value[:, :, : attention_mask.num_keys]
            position_bias = None if position_bias is None else position_bias[..., : attention_mask.num_keys]
    elif attention_mask is not None and not isinstance(attention_mask, Tensor):
        attention_mask = _lists_of(attention_mask, query, key)
    elif attention_mask is not None and attention_mask.dim() != 4:
        raise UnsupportedModelError(
            "the attention mask must have 4 dimensions, (batch, heads, queries, keys), got shape "
            f"{tuple(attention_mask.shape)} from {type(module).__name__}"
        )
    call = LayerCall(
        module,
        query,
        key,
        value,
        attention_mask,
        (left, 0 if is_causal else left),
        bool(is_causal),
        scaling,
        softcap or 0.0,
        s_aux,
        position_bias,
        attention_chunk=_chunk_of(module) if is_causal else 0,
        deterministic=bool(deterministic),
        indices=indices,
        block_indices=block_indices,
    )
    if cu_seq_lens_q is None:
        return call
    cu_seqlens_q = cu_seq_lens_q.to(torch.int32)
    cu_seqlens_k = cu_seqlens_q if cu_seq_lens_k is None else cu_seq_lens_k.to(torch.int32)
    if only_last_queries:
        # cu_seqlens_q still counts all queries of the sequences, but only the last ones were passed
        cu_seqlens_q = (cu_seqlens_q - cu_seqlens_q[-1] + query.shape[2]).clamp(min=0)
    return _packed(call, cu_seqlens_q, cu_seqlens_k, max_length_q, max_length_k)


def _packed(
    call: LayerCall, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_length_q: int | None, max_length_k: int | None
) -> LayerCall:
    """The same call, marked as a batch of 1 that holds packed sequences."""
    batch, _, total_q, _ = call.query.shape
    if batch != 1:
        raise UnsupportedModelError(
            f"packed sequences (cu_seq_lens_q) need a batch of 1 that holds them end to end, got a batch of {batch} "
            f"from {type(call.module).__name__}"
        )
    return call._replace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=int(max_length_q or total_q),
        max_seqlen_k=int(max_length_k or call.key.shape[2]),
    )


def _lists_of(block_mask: Any, query: Tensor, key: Tensor) -> BlockLists:
    """The block lists of a FlexAttention BlockMask. The first layer makes them, and the other layers reuse them."""
    sizes = CallSizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    return as_block_lists(block_mask, sizes, traced=torch.compiler.is_compiling())


def _chunk_of(module: nn.Module) -> int:
    """The keys per chunk of a layer that its config calls chunked, else 0. transformers tells only the mask (Llama 4)."""
    config: Any = getattr(module, "config", None)
    length = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if not length or not kinds or kinds[cast(int, module.layer_idx)] != "chunked_attention":
        return 0
    return int(length)


def spec_of(call: LayerCall, layout: Layout) -> AttentionSpec:
    """The spec of a call whose keys and values have this layout, for code that records calls and does not compute them."""
    mask: Literal["bool", "float"] | None = None
    if call.position_bias is not None or call.block_indices is not None:
        mask = "float"
    elif isinstance(call.mask, Tensor):
        mask = "bool" if call.mask.dtype == torch.bool else "float"
    return AttentionSpec(
        layout=layout,
        device=call.query.device.type,
        arch=arch_of(call.query.device),
        dtype=call.query.dtype,
        kv_dtype=call.key.dtype,
        head_dim=call.query.shape[-1],
        head_dim_v=call.value.shape[-1],
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        window_size=call.visible_window,
        softcap=call.softcap != 0.0,
        sinks=call.sinks is not None,
        mask=mask,
        attention_chunk=call.visible_chunk > 0,
        block_mask=mask is None and isinstance(call.mask, BlockLists),
    )
