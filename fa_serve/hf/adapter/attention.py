"""The attention function of `attn_implementation="fa_serve"`: it translates a layer's call, then sends it one of six ways.

    out, _ = attention_forward(module, query, key, value, attention_mask, scaling=0.125)

- A batch that rides along in `fa_serve_batch` computes the call itself (the engine's paged cache, see `paged.py`).
- Requests of transformers' own continuous batching go to `paged_attention` (`continuous.py`, which reads their cache).
- Sequences that are packed end to end go to `attention_varlen`.
- A few queries that have chosen their keys go to `ops.sparse_attention`.
- A `BlockMask` of FlexAttention goes to `attention` as block lists.
- Every other call goes to `attention`.

Left out: the meaning of transformers' arguments (`translate.py`), and the making of masks (`masks.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from fa_serve import api, ops
from fa_serve.block_lists import BlockLists
from fa_serve.hf.adapter import masks
from fa_serve.hf.adapter.continuous import paged_attention
from fa_serve.hf.adapter.masks import ImplicitMask, PackedKeys
from fa_serve.hf.adapter.packs import check_layer
from fa_serve.hf.adapter.translate import AttendsBatch, AttendsBiased, LayerCall, translate
from fa_serve.spec import FEW_QUERIES, UnsupportedModelError


class _Riding(threading.local):
    # not a ContextVar, because torch.compile cannot trace one
    batch: AttendsBatch | None

    def __init__(self) -> None:
        self.batch = None  # torch.compile guards on whether an instance has it, see `packs._Running`


_riding = _Riding()
# The outputs that hooks collect in the running forward, by name. No argument of a layer tells which they are.
_collector: Any = output_capturing._active_collector


@contextmanager
def riding(batch: AttendsBatch) -> Iterator[None]:
    """Inside, the batch computes every attention layer, including layers to which a model does not hand its arguments down."""
    outer = _riding.batch
    _riding.batch = batch
    try:
        yield
    finally:
        _riding.batch = outer


def riding_batch() -> AttendsBatch | None:
    """The batch that computes the attention of the running forward, or None."""
    return _riding.batch


def asks_for_weights(output_attentions: bool | None) -> bool:
    """Whether attention weights are asked for, either by this argument or because hooks collect them in the running forward."""
    return bool(output_attentions) or "attentions" in (_collector.get() or ())


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    output_attentions: bool = False,
    cache: Any = None,
    fa_serve_batch: AttendsBatch | None = None,
    **words: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer; transformers calls this with its own argument names.

    query:          (batch, num_heads, seqlen_q, head_dim)
    key:            (batch, num_kv_heads, seqlen_k, head_dim), not repeated for the query heads; value: the same with head_dim_v
    attention_mask: an ImplicitMask, a bool or float tensor of 4 dimensions, or a BlockMask of FlexAttention, which a model
                    hands down as its caller gave it. Any of these fully determines which keys are seen. With None, the
                    arguments `is_causal` and `sliding_window` and the module's attribute `is_causal` determine it
    cache:          the paged cache of transformers' continuous batching, or None; always None in releases after 5.23
    fa_serve_batch: the batch that rode along as an argument of the model's forward; None: the one that `riding` has set, if any
    words:          further arguments, see `translate`
    Returns out (batch, seqlen_q, num_heads, head_dim_v), contiguous, and None instead of the attention weights.

    Raises UnsupportedModelError for dropout, for attention weights, for a mask that was made for more keys, and for what
    `translate` refuses.
    """
    if dropout:
        field = _field_of_dropout(module, dropout)
        raise UnsupportedModelError(
            f"attention dropout must be 0 with fa_serve, got {dropout} from {type(module).__name__}: call model.eval(), or, to "
            f"train, load the model with from_pretrained(..., {field}=0.0), because the layers of a loaded model ignore "
            "changes of its config"
        )
    if asks_for_weights(output_attentions):
        raise UnsupportedModelError(
            "fa_serve never forms the attention weights that output_attentions asks for: load the model with "
            'attn_implementation="eager" to get them'
        )
    if cache is not None or "read_index" in words:
        result: tuple[Tensor, None] = paged_attention(
            module, query, key, value, attention_mask, cache=cache, scaling=scaling, **words
        )
        return result
    if not query.dtype == key.dtype == value.dtype != torch.float32:
        query, key, value = _autocast(query, key, value)
    if fa_serve_batch is None:
        fa_serve_batch = _riding.batch
    if fa_serve_batch is None and isinstance(attention_mask, ImplicitMask):
        _check_keys(module, key, attention_mask)
    if fa_serve_batch is None and _needs_no_translation(attention_mask, words):
        check_layer(module, query, attention_mask, told=False)
        return _attend_directly(query, key, value, attention_mask, scaling, words), None
    call = translate(module, query, key, value, attention_mask, scaling, **words)
    if fa_serve_batch is None:
        check_layer(module, query, call.mask, call.cu_seqlens_q is not None, call.block_indices is not None)
        return _attend(call), None
    if getattr(module, "is_cross_attention", False):
        # cross-attention to a blank image, which no token sees (`composites.blank_images`)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None
    if call.position_bias is None:
        return fa_serve_batch.attend(call), None
    if not isinstance(fa_serve_batch, AttendsBiased):
        raise UnsupportedModelError(
            f"{type(module).__name__} adds a position_bias to its scores, which {type(fa_serve_batch).__name__} cannot do"
        )
    return fa_serve_batch.attend_biased(call), None


def _check_keys(module: nn.Module, key: Tensor, mask: ImplicitMask) -> None:
    """Raise UnsupportedModelError if a mask was made for more keys than a call has. The kernel would align it to the last key,
    and a tensor of eager attention would not have the shape of the scores."""
    if torch.compiler.is_compiling() or mask.kv_length is None or key.shape[2] >= mask.kv_length:
        return
    raise UnsupportedModelError(
        f"a mask for {mask.kv_length} keys needs a call with as many, got {key.shape[2]} from {type(module).__name__}: with "
        "gradient checkpointing, the layers of transformers leave out a cache in training, and so the virtual tokens of prefix "
        "tuning. Train without it (model.gradient_checkpointing_disable())"
    )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype of `torch.autocast` where it is enabled, as PyTorch's own attention casts them.

    With float32 weights, q and k come from rotary positions in float32, while v is in autocast's dtype.
    """
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _field_of_dropout(module: nn.Module, dropout: float) -> str:
    """The name of the config field that a layer's dropout comes from. T5 has one field for all dropouts of the model."""
    config = getattr(module, "config", None)
    fields = {} if config is None else vars(config)
    names = [name for name, value in fields.items() if "drop" in name and value == dropout]
    return min(names, key=lambda name: "att" not in name, default="attention_dropout")


def _needs_no_translation(mask: Any, words: dict[str, Any]) -> TypeGuard[ImplicitMask]:
    """Whether the mask alone determines which keys are seen, and nothing is packed, chosen or differentiated.

    This is true for nearly every layer and token of `generate`, where the device waits for the host, so that host time counts.
    """
    return (
        type(mask) is ImplicitMask
        and mask.is_dense
        and words.get("position_bias") is None
        and words.get("indices") is None
        and words.get("block_indices") is None
        and words.get("cu_seq_lens_q") is None
        and not torch.is_grad_enabled()
    )


def _attend_directly(
    query: Tensor, key: Tensor, value: Tensor, mask: ImplicitMask, scaling: float | None, words: dict[str, Any]
) -> Tensor:
    """The result of `translate` and `_attend` for a call that needs no translation, without making a `LayerCall`."""
    out = api.attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        softmax_scale=scaling,
        window_size=_needed_window(mask.window_size, key.shape[2]),
        attention_chunk=mask.attention_chunk,
        softcap=words.get("softcap") or 0.0,
        sinks=words.get("s_aux"),
        mask=mask.key_mask,
    )
    return out.contiguous()


def _attend(call: LayerCall) -> Tensor:
    """Compute a call from its own keys and values -> out (batch, seqlen_q, num_heads, head_dim_v), contiguous."""
    needs_grad = torch.is_grad_enabled() and (call.query.requires_grad or call.key.requires_grad or call.value.requires_grad)
    mask = call.mask
    packed_keys = None
    if isinstance(mask, BlockLists):
        chosen = call.indices is not None or call.block_indices is not None
        if call.cu_seqlens_q is None and call.position_bias is None and not chosen:
            return _attend_listed(call, mask)
        mask = mask.expanded(call.query.shape[2], call.key.shape[2], call.query.shape[1])
    if isinstance(mask, ImplicitMask):
        packed_keys = mask.packed_keys
        mask = mask.key_mask
    if call.block_indices is not None:
        if not needs_grad and _lists_blocks(call, call.block_indices):
            lists = BlockLists.from_chosen_blocks(call.block_indices, _size_of_blocks(call), call.key.shape[2], mask)
            return _attend_listed(call, lists)
        call = call._replace(position_bias=_bias_of_blocks(call, call.block_indices))
    if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
        if mask is None and call.position_bias is None and call.indices is None:
            return _attend_packed(call, call.cu_seqlens_q, call.cu_seqlens_k)
        same = _same_sequence(call.cu_seqlens_q, call.cu_seqlens_k, call.query.shape[2], call.key.shape[2])
        if call.indices is not None and (mask is None or bool((_shown(mask) & ~same).any())):
            raise UnsupportedModelError(
                f"{type(call.module).__name__} lets its queries choose keys by a mask, which must tell packed sequences apart, "
                "got one that does not: pass position_ids that start again with each sequence, and use_cache=False"
            )
        mask = _combine(mask, same)
    elif packed_keys is not None and call.position_bias is None and call.indices is None and not needs_grad:
        return _attend_packed_keys(call, packed_keys)
    if call.position_bias is not None:
        mask = _combine(call.position_bias, mask)
    if call.indices is not None:
        if not needs_grad and _gathers_keys(call, mask):
            return _attend_chosen(call, call.indices, mask)
        mask = _combine(mask, _chosen_keys(call.indices, call.key.shape[2]))
    out = api.attention(
        call.query.transpose(1, 2),
        call.key.transpose(1, 2),
        call.value.transpose(1, 2),
        mask=mask,
        sinks=call.sinks,
        softmax_scale=call.softmax_scale,
        window_size=_needed_window(call.visible_window, call.key.shape[2]),
        attention_chunk=call.visible_chunk,
        softcap=call.softcap,
        deterministic=call.deterministic,
    )
    return out.contiguous()  # models view it as they like, and the sdpa backend may compute heads before tokens


def _attend_listed(call: LayerCall, lists: BlockLists) -> Tensor:
    """Attention with block lists, which come from a caller's BlockMask or from the blocks that queries have chosen."""
    out = api.attention(
        call.query.transpose(1, 2),
        call.key.transpose(1, 2),
        call.value.transpose(1, 2),
        block_mask=lists,
        window_size=_needed_window(call.visible_window, call.key.shape[2]),
        attention_chunk=call.visible_chunk,
        sinks=call.sinks,
        softmax_scale=call.softmax_scale,
        softcap=call.softcap,
        deterministic=call.deterministic,
    )
    return out.contiguous()


def _lists_blocks(call: LayerCall, block_indices: Tensor) -> bool:
    """Whether the chosen blocks are passed as block lists; otherwise they are passed as a bias.

    The bias of a few queries is small, and a call with a bias needs only one plan for all lengths. A call that also needs a
    value for each pair of query and key gets a bias too.
    """
    mask = call.mask
    groups = block_indices.shape[1]
    return (
        call.query.shape[2] > FEW_QUERIES
        and groups in (1, call.key.shape[1], call.query.shape[1])
        and (mask is None or isinstance(mask, ImplicitMask) or (isinstance(mask, Tensor) and _masks_groups(mask, groups)))
        and call.cu_seqlens_q is None
        and call.position_bias is None
        and call.indices is None
        and not torch.compiler.is_compiling()
    )


def _masks_groups(mask: Tensor, groups: int) -> bool:
    """Whether a mask only hides keys, and does so alike for all heads or for all heads of each group."""
    return mask.dtype == torch.bool and mask.shape[1] in (1, groups)


def _size_of_blocks(call: LayerCall) -> int:
    """The number of keys in each block that the module's indexer chooses."""
    module: Any = call.module
    return int(module.indexer.block_size)


def _bias_of_blocks(call: LayerCall, block_indices: Tensor) -> Tensor:
    """(batch, num_heads, seqlen_q, seqlen_k), added to the scores: 0 for the keys of the chosen blocks, -inf for the others."""
    size = _size_of_blocks(call)
    seqlen_k = call.key.shape[2]
    # blocks in the free room of a static cache, and numbers that are no block, go to a column past the last block
    num_blocks = -(-seqlen_k // size)
    places = torch.where(block_indices < 0, num_blocks, block_indices).clamp(max=num_blocks)
    bias = call.query.new_full((*block_indices.shape[:3], num_blocks + 1), float("-inf")).scatter(3, places, 0.0)
    of_keys = bias[..., :num_blocks].repeat_interleave(size, dim=3)[..., :seqlen_k]
    return of_keys.repeat_interleave(call.query.shape[1] // block_indices.shape[1], dim=1)


def _gathers_keys(call: LayerCall, mask: Tensor | None) -> bool:
    """Whether a call reads only the chosen keys, as calls with few queries may. Many queries choose many different keys. For
    them a mask over all keys is faster, because a tile reads each key once for many queries."""
    return (
        call.query.shape[2] <= FEW_QUERIES
        and call.query.device.type in masks.KERNELS_ON
        and (mask is None or mask.dtype == torch.bool)
        and call.visible_window == (-1, -1)
        and not call.softcap
        and not torch.compiler.is_compiling()
    )


def _attend_chosen(call: LayerCall, indices: Tensor, mask: Tensor | None) -> Tensor:
    """Attention to the keys in `indices` that the mask shows, read one by one."""
    batch, seqlen_q, _ = indices.shape
    seen = indices >= 0
    places = indices.long().clamp(min=0)
    if mask is not None:
        seen = seen & mask[:, 0].expand(batch, seqlen_q, -1).gather(2, places)
    # each row of the batch is one page of keys
    first = torch.arange(batch, device=indices.device)[:, None, None] * call.key.shape[2]
    slots = torch.where(seen, first + places, -1).to(torch.int32)
    scale = call.query.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    out = ops.sparse_attention(
        call.query.transpose(1, 2).flatten(0, 1),
        call.key.transpose(1, 2),
        call.value.transpose(1, 2),
        slots.flatten(0, 1),
        softmax_scale=scale,
        sinks=call.sinks,
    )
    return out.view(batch, seqlen_q, *out.shape[1:])


def _chosen_keys(indices: Tensor, seqlen_k: int) -> Tensor:
    """(batch, seqlen_q, topk) -> (batch, 1, seqlen_q, seqlen_k) bool: whether a query has chosen a key."""
    # numbers that are no key go to a column past the last key
    places = torch.where(indices < 0, seqlen_k, indices).long()
    chosen = torch.zeros(*indices.shape[:2], seqlen_k + 1, dtype=torch.bool, device=indices.device)
    return chosen.scatter(2, places, True)[:, None, :, :seqlen_k]


def _shown(mask: Tensor) -> Tensor:
    """Which keys a mask shows, as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def _attend_packed(call: LayerCall, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Attention for sequences packed end to end in a batch of 1."""
    out: Any = api.attention_varlen(
        call.query[0].transpose(0, 1),
        call.key[0].transpose(0, 1),
        call.value[0].transpose(0, 1),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=call.max_seqlen_q,
        max_seqlen_k=call.max_seqlen_k,
        sinks=call.sinks,
        softmax_scale=call.softmax_scale,
        window_size=_needed_window(call.visible_window, call.key.shape[2]),
        attention_chunk=call.visible_chunk,
        softcap=call.softcap,
        deterministic=call.deterministic,
    )
    packed: Tensor = out[None]
    return packed


def _attend_packed_keys(call: LayerCall, keys: PackedKeys) -> Tensor:
    """Attention for a padded batch: of all queries, to the keys that are not padding, gathered and packed end to end."""
    q = call.query.transpose(1, 2)
    batch, seqlen_q = q.shape[:2]
    out: Any = api.attention_varlen(
        q.flatten(0, 1),
        call.key.transpose(1, 2)[keys.rows, keys.columns],
        call.value.transpose(1, 2)[keys.rows, keys.columns],
        cu_seqlens_q=keys.cu_seqlens_q,
        cu_seqlens_k=keys.cu_seqlens_k,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=keys.max_seqlen_k,
        sinks=call.sinks,
        softmax_scale=call.softmax_scale,
        window_size=_needed_window(call.visible_window, call.key.shape[2]),
        attention_chunk=call.visible_chunk,
        softcap=call.softcap,
    )
    padded: Tensor = out.view(batch, seqlen_q, *out.shape[1:])
    return padded


def _needed_window(window_size: tuple[int, int], seqlen_k: int) -> tuple[int, int]:
    """The window, made unlimited on each side where it covers all keys anyway, because kernels are faster without a window."""
    left, right = window_size
    if left < 0 and right <= 0:
        return window_size
    return (-1 if left + 1 >= seqlen_k else left, -1 if right >= seqlen_k else right)


def _same_sequence(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """(1, 1, seqlen_q, seqlen_k) bool: whether a query and a key belong to the same packed sequence."""
    positions_q = torch.arange(seqlen_q, dtype=torch.int32, device=cu_seqlens_q.device)
    positions_k = torch.arange(seqlen_k, dtype=torch.int32, device=cu_seqlens_k.device)
    q = torch.searchsorted(cu_seqlens_q, positions_q, right=True)
    k = torch.searchsorted(cu_seqlens_k, positions_k, right=True)
    return (q[:, None] == k[None, :])[None, None]


def _combine(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Both masks at once. Each is bool (True is seen) or float (added to the scores), and they broadcast to each other."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == torch.bool and second.dtype == torch.bool:
        return first & second
    if first.dtype == torch.bool:
        first, second = second, first
    return torch.where(second, first, float("-inf")) if second.dtype == torch.bool else first + second
