"""The engine's way into a transformers model: one forward over packed tokens whose keys and values live in pages.

The batch rides along as an argument of the model's forward, which transformers hands down to every attention function. So no
mask is built, nothing is read back from the device, and the model's own code runs as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from fa_serve.api import attention_paged, attention_varlen, store_kv
from fa_serve.hf.masks import Implicit
from fa_serve.hf.models import NAME, check_class, counts_positions
from fa_serve.spec import AttentionSpec, UnsupportedModelError, arch_of


@dataclass(frozen=True)
class PagedBatch:
    """What one step of the engine tells every attention layer; tensors on the model's device, shapes as in `fa_serve.api`.

    kv_caches: (k_cache, v_cache) by layer_idx
    fresh:     no sequence has keys in the cache but those of this step, so attention takes them as they come
    num_splits: as in `attention_paged`
    descales:  (k_descale, v_descale) by layer_idx, of float8 caches
    """

    kv_caches: Sequence[tuple[Tensor, Tensor]]
    slot_mapping: Tensor
    block_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    backend: str = "auto"
    fresh: bool = False
    num_splits: int = 0
    descales: Sequence[tuple[Tensor, Tensor]] | None = None

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | Implicit | None,
        *,
        causal: bool,
        left: int,
        **options: Any,
    ) -> Tensor:
        """Store this step's keys and values, then attend to all there are: (1, heads, total, dim) -> (1, total, heads, dim)."""
        if not isinstance(mask, Tensor) or mask.numel():
            raise UnsupportedModelError(
                f"{type(module).__name__} makes a mask of its own, which a paged cache has no place for"
            )
        k_cache, v_cache = self.kv_caches[module.layer_idx]
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        store_kv(k, v, k_cache, v_cache, self.slot_mapping, backend=self.backend, **self.descale(module.layer_idx))
        return self.attention(module.layer_idx, q, k, v, left=left, **options)[None]

    def attention(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, left: int, **options: Any) -> Tensor:
        """Attend to all there are when this step's keys and values are stored: (total, heads, dim), for each of q, k, v."""
        if self.fresh:
            return cast(
                Tensor,
                attention_varlen(
                    q,
                    k,
                    v,
                    cu_seqlens_q=self.cu_seqlens_q,
                    cu_seqlens_k=self.cu_seqlens_q,
                    max_seqlen_q=self.max_seqlen_q,
                    max_seqlen_k=self.max_seqlen_q,
                    causal=True,
                    window_size=(left, 0),
                    backend=self.backend,
                    **options,
                ),
            )
        k_cache, v_cache = self.kv_caches[layer_idx]
        return cast(
            Tensor,
            attention_paged(
                q,
                k_cache,
                v_cache,
                block_table=self.block_table,
                seqused_k=self.seqused_k,
                cu_seqlens_q=self.cu_seqlens_q,
                max_seqlen_q=self.max_seqlen_q,
                max_seqlen_k=self.max_seqlen_k,
                window_size=(left, 0),
                num_splits=self.num_splits,
                backend=self.backend,
                **self.descale(layer_idx),
                **options,
            ),
        )

    def descale(self, layer_idx: int) -> dict[str, Any]:
        """The arguments of `store_kv` and `attention_paged` for a float8 cache, none for another."""
        return {} if self.descales is None else dict(zip(("k_descale", "v_descale"), self.descales[layer_idx], strict=True))


def paged_forward(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, batch: PagedBatch, logits_indices: Tensor
) -> Tensor:
    """One forward of a causal model over packed tokens, its keys and values in a paged cache.

    input_ids, position_ids: (total,) int64, packed by batch.cu_seqlens_q; logits_indices: (n,) int64, rows of these
    Returns logits (n, vocab). No mask is built and nothing is read back from the device. It is right for the models that
    `check_model` lets pass.
    """
    # a mask of four dimensions goes through transformers untouched, so that it neither builds one nor looks for packing
    no_mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=input_ids.device)
    output = model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        attention_mask=no_mask,
        use_cache=False,
        logits_to_keep=logits_indices,
        fa_serve_batch=batch,
    )
    logits: Tensor = output.logits[0]
    return logits


_CALLED_WITH = {"input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep"}


class Probe:
    """Rides in the place of a PagedBatch and writes down what each attention layer asks for; computes nothing."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionSpec] = {}

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | Implicit | None,
        *,
        causal: bool,
        left: int,
        softmax_scale: float | None,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Note the layer. The mask is the one of an ordinary forward: without it the layer must still do what it says."""
        window_size = (left, 0)
        if module.layer_idx in self.layers:
            raise UnsupportedModelError(f"layer {module.layer_idx} ({type(module).__name__}) attends more than once")
        if not (mask.window_size == window_size if isinstance(mask, Implicit) else mask is None and causal):
            raise UnsupportedModelError(f"layer {module.layer_idx} ({type(module).__name__}) needs a mask of its own")
        self.layers[module.layer_idx] = AttentionSpec(
            layout="paged",
            device=query.device.type,
            arch=arch_of(query.device),
            dtype=query.dtype,
            kv_dtype=key.dtype,
            head_dim=query.shape[-1],
            head_dim_v=value.shape[-1],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            window_size=window_size,
            softcap=softcap != 0.0,
            sinks=sinks is not None,
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


def attention_layers(model_or_config: PreTrainedModel | PreTrainedConfig) -> list[AttentionSpec]:
    """What each attention layer of a causal model needs from the paged attention, found by one forward of a single token.

    A config is tried out on the meta device, without weights. Raises UnsupportedModelError with the reason if the model cannot
    run on a paged cache: its state is not keys and values alone, its masks are more than causality and windows, ...
    """
    if isinstance(model_or_config, PreTrainedModel):
        return _probe(model_or_config)
    config = copy.deepcopy(model_or_config)
    # the other implementations of a mixture of experts look at the router's choice, which the meta device has not
    config._experts_implementation = "batched_mm"
    auto: Any = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        raise UnsupportedModelError(f"{type(config).__name__} is not the config of a causal language model in transformers")
    with torch.device("meta"):
        return _probe(auto.from_config(config, attn_implementation=NAME))


def check_model(model_or_config: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, with the reason, unless `paged_forward` computes this model right."""
    attention_layers(model_or_config)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> list[AttentionSpec]:
    check_class(type(model))
    config = model.config.get_text_config()
    probe = Probe()
    training = model.training
    parameters = inspect.signature(model.forward).parameters
    missing = _CALLED_WITH - set(parameters)
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        missing |= {"**kwargs"}
    _refuse(model, config.is_encoder_decoder, "it is an encoder-decoder, whose cross-attention has no place there")
    _refuse(model, model._is_stateful, "it keeps more than keys and values")
    _refuse(model, missing, f"its forward takes no {sorted(missing)}")
    _refuse(model, counts_positions(type(model)), "it numbers its positions from its padding token")
    changing = _rope_types(config) & {"dynamic", "longrope"}
    _refuse(model, changing, f"its {changing} rotary embedding depends on the longest sequence of the batch")
    try:
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        # with a mask of padding transformers does not look for packed sequences, which the meta device could not show it
        padding = torch.ones_like(token)
        output = model.train(False)(input_ids=token, attention_mask=padding, use_cache=True, fa_serve_batch=probe)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {error}") from error
    finally:
        model.train(training)
    kinds = {type(layer) for layer in getattr(output.get("past_key_values"), "layers", ())}
    # later than 5.17 a layer that shares the keys of another keeps a dummy, which holds nothing
    known = {DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer)}
    _refuse(model, kinds - known, "it keeps more than keys and values")
    complete = sorted(probe.layers) == list(range(config.num_hidden_layers))
    _refuse(model, not complete, f"of its {config.num_hidden_layers} layers only {sorted(probe.layers)} reach it")
    return [probe.layers[i] for i in sorted(probe.layers)]


def _refuse(model: PreTrainedModel, condition: object, reason: str) -> None:
    if condition:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {reason}")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding in a config, which has one set of parameters or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return {p.get("rope_type", "default") for p in nested or [parameters]}
