"""How the engine runs a transformers model: one forward over packed tokens whose keys and values are in pages.

    logits = paged_forward(model, input_ids, position_ids, batch, rows)   # batch: a PagedBatch

The batch rides along as the argument `fa_serve_batch` of the model's forward, which transformers hands down to every attention
function. Models that keep states get a `StepCache` with the batch's states in place of their cache (step_cache.py). So no mask
is built, nothing is read back from the device, and the model's own code runs as it is.

Left out: for which models the result is right (probe.py), which pages a sequence has and which sequences a step computes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from fa_serve import ops
from fa_serve.api import attention, attention_paged, attention_varlen, store_kv
from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.common_prefix import CommonPrefixes
from fa_serve.hf.adapter.composites import blank_images
from fa_serve.hf.adapter.gathered_keys import GatheredKeys, computes_attention, gathers_keys
from fa_serve.hf.adapter.indexers import IndexCall, indexer_layer
from fa_serve.hf.adapter.latent_keys import LatentKeys
from fa_serve.hf.adapter.models import counts_positions
from fa_serve.hf.adapter.releases import cache_argument
from fa_serve.hf.adapter.state_modules import find_state_modules
from fa_serve.hf.adapter.step_cache import PagedStates, StepCache, WholeSequence, take_layer_idx
from fa_serve.hf.adapter.translate import AttendsBatch, LayerCall
from fa_serve.ops.modes import without_row_order
from fa_serve.spec import Precision, UnsupportedModelError

# the attribute of a model that keeps the answer of `state_argument`
_STATE_ARGUMENT = "_fa_serve_state_argument"
# the attribute of a model that keeps the answer of `first_position`
_FIRST_POSITION = "_fa_serve_first_position"


class TwoWayBlock(NamedTuple):
    """Tokens of a step that attend to each other both ways, such as those of an image (Gemma 3).

    first, last: rows of the step that belong to the block, without `last`; the last of them is the block's last token
    sequence:    row of the block table
    begin, end:  places of the whole block in its sequence, without `end`; its first tokens may already be in the cache
    """

    first: int
    last: int
    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class PagedBatch:
    """What one step of the engine tells every attention layer. Tensors are on the model's device, shapes as in `fa_serve.api`.

    kv_caches:  (k_cache, v_cache) by layer_idx; the caches for an indexer's keys by `indexers.indexer_layer`
    fresh:      no sequence has keys from earlier steps, so attention takes this step's keys directly and not from the cache
    num_splits: as in `attention_paged`
    descales:   (k_descale, v_descale) by layer_idx, for the caches that are float8; None if no cache is
    precision:  of the products in prompts, as in `attention_paged`
    states:     computes the recurrences of the model; None for a model without recurrences
    blocks:     blocks of tokens that attend to each other both ways; the last token of each block is in this step
    common:     groups of sequences that share leading pages, which layers that see all keys read once; None without groups
    lse:        (num_heads, total), receives the lse of `attention_paged` for a backward pass; None if it is not needed
    """

    kv_caches: Mapping[int, tuple[Tensor, Tensor]]
    slot_mapping: Tensor
    block_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    backend: str = "auto"
    fresh: bool = False
    num_splits: int = 0
    descales: Mapping[int, tuple[Tensor, Tensor]] | None = None
    precision: Precision = "bf16"
    states: PagedStates | None = None
    blocks: Sequence[TwoWayBlock] = ()
    common: CommonPrefixes | None = None
    lse: Tensor | None = None

    def attend(self, call: LayerCall) -> Tensor:
        """Store this step's keys and values, then attend to all keys of each sequence -> (1, total, num_heads, head_dim_v)."""
        if call.block_indices is not None:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} chooses blocks of keys, which attention on a paged cache cannot apply"
            )
        if not isinstance(call.mask, Tensor) or call.mask.numel():
            raise UnsupportedModelError(
                f"{type(call.module).__name__} makes a mask itself, which attention on a paged cache cannot apply"
            )
        layer_idx = take_layer_idx(call.module, self.states)
        latent = vars(call.module).get("expand_kv")
        if isinstance(latent, LatentKeys) and latent.takes(call.key):
            return self._attend_latent(call, layer_idx, latent)
        q = call.query[0].transpose(0, 1)
        k = call.key[0].transpose(0, 1)
        v = call.value[0].transpose(0, 1)
        k_cache, v_cache = self.kv_caches[layer_idx]
        store_kv(k, v, k_cache, v_cache, self.slot_mapping, backend=self.backend, **self.descale(layer_idx))
        if call.indices is not None and call.indices.shape[-1]:
            return self._attend_chosen(call, call.indices[0], q, k_cache, v_cache)[None]
        return self._attend_all(call, layer_idx, q, k, v)[None]

    def _attend_latent(self, call: LayerCall, layer_idx: int, latent: LatentKeys) -> Tensor:
        """`attend` for a call whose keys are latent.

        If all keys are new and queries choose none, expanding them to the keys and values of all heads takes fewer products
        (surgery/fuse/latent.py).
        """
        call = call._replace(softmax_scale=call.softmax_scale or call.query.shape[-1] ** -0.5)
        q = call.query[0].transpose(0, 1)
        k = call.key[0].transpose(0, 1)
        rank = latent.sizes.rank
        k_cache, v_cache = self.kv_caches[layer_idx]
        # one call writes both parts of a key, as if the second part were the value
        parts = (k[..., :rank], k[..., rank:], k_cache[..., :rank], k_cache[..., rank:])
        store_kv(*parts, self.slot_mapping, backend=self.backend, **self.descale(layer_idx))
        if call.indices is not None and call.indices.shape[-1]:
            return latent.values(self._attend_chosen(call, call.indices[0], latent.absorbed(q), k_cache, v_cache))[None]
        if self.fresh:
            keys, values = latent.expanded(call.key[..., :rank], call.key[..., rank:])
            return self._attend_all(call, layer_idx, q, keys[0].transpose(0, 1), values[0].transpose(0, 1))[None]
        return latent.values(self._attend_all(call, layer_idx, latent.absorbed(q), k, k[..., :rank]))[None]

    def _attend_all(self, call: LayerCall, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attention` with the options of a call."""
        return self.attention(
            layer_idx,
            q,
            k,
            v,
            left=call.window_size[0],
            attention_chunk=call.attention_chunk,
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def gather(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `GathersKeys`. The result has as many places for each sequence as its row of the block table covers."""
        k_cache, v_cache = self.kv_caches[layer_idx]
        total = len(self.slot_mapping)
        new_keys, new_values = (x[0, :, :total].transpose(0, 1) for x in (key, value))
        store_kv(new_keys, new_values, k_cache, v_cache, self.slot_mapping, backend=self.backend)
        places = torch.arange(self._places_of_a_sequence, device=key.device)
        # slots that no sequence has written may contain anything
        written = (places < self.seqused_k[:, None]).flatten()[:, None, None]
        all_keys, all_values = (cache[self.block_table].flatten(0, 2) for cache in (k_cache, v_cache))
        return tuple(x.where(written, 0.0).transpose(0, 1)[None] for x in (all_keys, all_values))  # type: ignore[return-value]

    def visible(self, left: int = -1) -> Tensor:
        """See `GathersKeys`. left: keys before a token that it sees, -1 unlimited"""
        rows = torch.arange(len(self.slot_mapping), dtype=torch.int32, device=self.slot_mapping.device)
        last = len(self.seqused_k) - 1  # the tokens that pad a step belong to no sequence
        sequence = torch.searchsorted(self.cu_seqlens_q[1:], rows, right=True).clamp(max=last)
        place = rows - self.cu_seqlens_q[sequence + 1] + self.seqused_k[sequence]
        width = self._places_of_a_sequence
        keys = torch.arange(len(self.seqused_k) * width, device=rows.device)
        seen = (keys // width == sequence[:, None]) & (keys % width <= place[:, None])
        return seen if left < 0 else seen & (keys % width >= place[:, None] - left)

    def places(self) -> Tensor:
        """See `GathersKeys`."""
        return torch.arange(self._places_of_a_sequence, device=self.slot_mapping.device).repeat(len(self.seqused_k))

    def attend_biased(self, call: LayerCall) -> Tensor:
        """`attend` for a call with gathered keys, whose bias (1, num_heads, total, n) was computed from the keys' places."""
        assert call.position_bias is not None
        seen = self.visible(call.window_size[0])
        return attention(
            call.query.transpose(1, 2),
            call.key.transpose(1, 2),
            call.value.transpose(1, 2),
            mask=call.position_bias.masked_fill(~seen, float("-inf")),
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            sinks=call.sinks,
            backend=self.backend,
        )

    @property
    def _places_of_a_sequence(self) -> int:
        page_size = next(iter(self.kv_caches.values()))[0].shape[1]
        return self.block_table.shape[1] * page_size

    def choose(self, call: IndexCall) -> Tensor:
        """Store the keys of an indexer, then choose the slots that each query attends to -> (1, total, n).

        n is 0 if no sequence has more keys than a query may choose. Every query then attends to all keys, as in other models.
        """
        cache, _ = self.kv_caches[indexer_layer(take_layer_idx(call.module, None))]
        half = call.key.shape[1] // 2
        parts = [(x[..., :half], x[..., half:]) for x in (call.key[:, None], cache)]
        store_kv(*parts[0], *parts[1], self.slot_mapping, backend=self.backend)
        if self.max_seqlen_k <= call.topk:
            return call.key.new_empty(1, len(call.key), 0, dtype=torch.int32)
        return ops.select_slots(
            call.query,
            cache,
            call.weights,
            block_table=self.block_table,
            seqused_k=self.seqused_k,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            topk=call.topk,
        )[None]

    def _attend_chosen(self, call: LayerCall, slots: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Attention to the keys in `slots` (total, topk) -> (total, num_heads, head_dim_v)."""
        if call.window_size[0] >= 0 or call.attention_chunk or call.softcap:
            raise UnsupportedModelError(
                f"{type(call.module).__name__} lets its queries choose keys in a window or chunk, or with a softcap, which "
                "attention on a paged cache cannot do"
            )
        scale = call.query.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
        return ops.sparse_attention(q, k_cache, v_cache, slots, softmax_scale=scale, sinks=call.sinks)

    def attention(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        left: int,
        attention_chunk: int = 0,
        softmax_scale: float | None,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention to all keys of each sequence, causal except in `blocks`. This step's keys and values must have been stored.

        q: (total, num_heads, head_dim); k, v: this step's, (total, num_kv_heads, head_dim or head_dim_v)
        left: keys before a query that it sees, -1 unlimited; attention_chunk: as in `fa_serve.api`
        Returns (total, num_heads, head_dim_v).
        """
        out = self._causal(layer_idx, q, k, v, left, attention_chunk, softmax_scale, softcap, sinks)
        for block in self.blocks:
            keys, values, mask = self._seen_by(block, layer_idx, left)
            rows = q[None, block.first : block.last]
            out[block.first : block.last] = attention(
                rows,
                keys[None],
                values[None],
                mask=None if mask is None else mask[None, None],
                softmax_scale=softmax_scale,
                softcap=softcap,
                sinks=sinks,
                backend=self.backend,
            )[0]
        return out

    def _seen_by(self, block: TwoWayBlock, layer_idx: int, left: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values of a block's sequence up to the end of the block, (end, num_kv_heads, dim), and which of these
        keys each row of the block sees, (rows, end) bool, or None if it sees all."""
        k_cache, v_cache = self.kv_caches[layer_idx]
        pages = self.block_table[block.sequence, : -(-block.end // k_cache.shape[1])]
        keys, values = (cache[pages].flatten(0, 1)[: block.end] for cache in (k_cache, v_cache))
        if left < 0:
            return keys, values, None
        places = torch.arange(block.end, device=keys.device)
        queries = places[block.end - (block.last - block.first) :, None]
        return keys, values, ((places <= queries) & (places >= queries - left)) | (places >= block.begin)

    def _causal(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        left: int,
        attention_chunk: int,
        softmax_scale: float | None,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        if self.fresh:
            out = attention_varlen(
                q,
                k,
                v,
                cu_seqlens_q=self.cu_seqlens_q,
                cu_seqlens_k=self.cu_seqlens_q,
                max_seqlen_q=self.max_seqlen_q,
                max_seqlen_k=self.max_seqlen_q,
                causal=True,
                softmax_scale=softmax_scale,
                window_size=(left, 0),
                attention_chunk=attention_chunk,
                softcap=softcap,
                sinks=sinks,
                precision=self.precision,
                backend=self.backend,
            )
            return cast(Tensor, out)
        k_cache, v_cache = self.kv_caches[layer_idx]
        options = {
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_k": self.max_seqlen_k,
            "softmax_scale": softmax_scale,
            "softcap": softcap,
            "sinks": sinks,
            "num_splits": self.num_splits,
            "precision": self.precision,
            "backend": self.backend,
            **self.descale(layer_idx),
        }
        if self.common is not None and left < 0 and not attention_chunk:
            return self.common.attend(q, k_cache, v_cache, **options)
        options |= {"block_table": self.block_table, "seqused_k": self.seqused_k, "max_seqlen_q": self.max_seqlen_q}
        options |= {"window_size": (left, 0), "attention_chunk": attention_chunk, "return_lse": self.lse is not None}
        with without_row_order():  # the order of sums over keys is that of `num_splits`, also in operators of PyTorch
            found = attention_paged(q, k_cache, v_cache, **options)
        if self.lse is None:
            return cast(Tensor, found)
        self.lse.copy_(found[1])
        return found[0]

    def descale(self, layer_idx: int) -> dict[str, Any]:
        """The arguments k_descale and v_descale of `store_kv` and `attention_paged` if the cache is float8; else none."""
        if self.descales is None or self.kv_caches[layer_idx][0].dtype != torch.float8_e4m3fn:
            return {}
        k_descale, v_descale = self.descales[layer_idx]
        return {"k_descale": k_descale, "v_descale": v_descale}


class OneSequence:
    """A substitute for a PagedBatch: causal attention over the tokens of one sequence, without a cache."""

    def __init__(self) -> None:
        self.states = WholeSequence()

    def choose(self, call: IndexCall) -> Tensor:
        """The places of the keys that each token attends to -> (1, total, n), -1 for none."""
        total = len(call.key)
        ends = torch.tensor([0, total], dtype=torch.int32, device=call.key.device)
        one_page = torch.zeros(1, 1, dtype=torch.int32, device=call.key.device)
        return ops.select_slots(
            call.query,
            call.key[None, :, None],
            call.weights,
            block_table=one_page,
            seqused_k=ends[1:],
            cu_seqlens_q=ends,
            max_seqlen_q=total,
            max_seqlen_k=total,
            topk=call.topk,
        )[None]

    def attend(self, call: LayerCall) -> Tensor:
        """Attend causally, or only to the tokens that each token has chosen -> (1, total, num_heads, head_dim_v)."""
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        if call.indices is not None:
            scale = q.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
            chosen = call.indices[0]
            return ops.sparse_attention(q, k[None], v[None], chosen, softmax_scale=scale, sinks=call.sinks)[None]
        ends = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        out = attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=len(q),
            max_seqlen_k=len(q),
            causal=True,
            window_size=(call.window_size[0], 0),
            attention_chunk=call.attention_chunk,
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return cast(Tensor, out)[None]


def paged_forward(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, batch: AttendsBatch, logits_indices: Tensor
) -> Tensor:
    """One forward of a causal model over packed tokens, with keys and values in a paged cache.

    input_ids, position_ids: (total,) int64, packed as the batch says; position_ids may be (axes, total)
    batch:                   a PagedBatch, or another object that computes the attention of every layer
    logits_indices:          (n,) int64, the tokens whose logits are computed
    Returns logits (n, vocab). The result is right for the models that `check_model` accepts.
    """
    logits: Tensor = paged_output(model, input_ids, position_ids, batch, logits_indices).logits[0]
    return logits


def paged_output(
    model: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    batch: AttendsBatch,
    logits_indices: Tensor,
    **inputs: Any,
) -> Any:
    """The whole output of the forward of `paged_forward`. No mask is built and nothing is read back from the device.

    inputs: further arguments of the model's forward, in the shapes that it takes
    """
    # transformers hands a mask of 4 dimensions on untouched: then it builds none, and does not look for packed sequences
    no_mask: Tensor | None = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=input_ids.device)
    config: Any = model.config.get_text_config()
    name = state_argument(model)
    inputs = {**blank_images(model, len(input_ids)), **inputs}
    attends_itself = computes_attention(model)
    if attends_itself and len(input_ids) == 1:
        # the model's code may take a single token for a decode step on transformers' cache (GIT), so it is computed twice
        input_ids = input_ids.repeat(2)
        position_ids = position_ids.repeat_interleave(2, dim=-1)
    if gathers_keys(model):
        cache = GatheredKeys(position_ids.view(-1, len(input_ids))[0], batch)
        inputs[cache_argument(type(model).forward)] = cache
        if attends_itself:
            no_mask = cache.mask(model.dtype)
    elif name is not None or getattr(config, "attn_temperature_tuning", False):
        inputs = {
            **inputs,
            name or cache_argument(type(model).forward): StepCache(
                position_ids.view(-1, len(input_ids))[0], getattr(batch, "states", None)
            ),
        }
    if name is not None and "position_ids" not in _parameters(type(model).forward):
        no_mask = None  # such a model has no attention, and its mixers would multiply their inputs with the mask
    first = first_position(model)
    if first:
        position_ids = position_ids + first
    keeping: AbstractContextManager[None] = nullcontext()
    if "logits_to_keep" in _parameters(type(model).forward):
        inputs["logits_to_keep"] = logits_indices
    else:
        keeping = _keeping_rows(model, logits_indices)
    with riding(batch), keeping:
        return model(
            input_ids=input_ids[None],
            position_ids=position_ids.unsqueeze(-2),
            attention_mask=no_mask,
            use_cache=False,
            fa_serve_batch=batch,
            **inputs,
        )


@functools.lru_cache(maxsize=64)
def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a class's forward."""
    return inspect.signature(forward).parameters


@contextmanager
def _keeping_rows(model: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Inside, the head of a model whose forward takes no logits_to_keep computes only the logits of these tokens. A model
    without a head computes no logits."""
    head: Any = cast(Any, model).get_output_embeddings()
    if head is None:
        yield
        return
    hook = head.register_forward_pre_hook(lambda module, args: (args[0][:, rows], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def first_position(model: PreTrainedModel) -> int:
    """The position of the first token: 0, or one more than the padding token's id in models that count as fairseq does.

    It is found once per model. `probe.py` proves it.
    """
    if _FIRST_POSITION not in model.__dict__:
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        model.__dict__[_FIRST_POSITION] = padding + 1 if counts_positions(type(model)) and padding is not None else 0
    return cast(int, model.__dict__[_FIRST_POSITION])


def number_from_zero(model: PreTrainedModel) -> None:
    """Note that the first position is 0, because the code that counts positions as fairseq does belongs to a tower (Evolla)."""
    model.__dict__[_FIRST_POSITION] = 0


def state_argument(model: PreTrainedModel) -> str | None:
    """The name of the forward's argument for the cache that keeps states; None for a model without states. It is found once."""
    if _STATE_ARGUMENT not in model.__dict__:
        model.__dict__[_STATE_ARGUMENT] = cache_argument(type(model).forward) if find_state_modules(model) else None
    return cast("str | None", model.__dict__[_STATE_ARGUMENT])
