"""The engine's way into a transformers model: one forward over packed tokens whose keys and values live in pages.

    layers = model_layers(model)             # what each layer keeps of a sequence, or the reason of a refusal
    logits = paged_forward(model, input_ids, position_ids, batch, rows)   # batch: a PagedBatch

The batch rides along as the argument `fa_serve_batch` of the model's forward, which transformers hands down to every attention
function, and in models that keep states also in the place of the cache (step_cache.py). So no mask is built, nothing is read
back from the device, and the model's own code runs as it is.

Left out: which pages a sequence has and which sequences a step computes, which is the engine's business.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from fa_serve.api import attention, attention_paged, attention_varlen, store_kv
from fa_serve.backends import explain
from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.composites import auto_class, make_served, text_model
from fa_serve.hf.adapter.masks import leaving_out_blocks
from fa_serve.hf.adapter.models import NAME, check_class, counts_positions
from fa_serve.hf.adapter.state_modules import SeatedMixer, find_state_modules
from fa_serve.hf.adapter.step_cache import PagedStates, StateKey, StateProbe, StepCache, WholeSequence, take_layer_idx
from fa_serve.hf.adapter.translate import WINDOW_NOTE, AttendsBatch, LayerCall, spec_of
from fa_serve.ops import StateSpec
from fa_serve.spec import AttentionSpec, ParameterError, Precision, UnsupportedModelError


class TwoWayBlock(NamedTuple):
    """Tokens of a step that attend to each other both ways, such as those of an image (Gemma 3).

    first, last: rows of the step, up to the end of the block; sequence: row of the block table
    begin, end:  places in the sequence of the whole block, whose first tokens may be in the cache already
    """

    first: int
    last: int
    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class PagedBatch:
    """What one step of the engine tells every attention layer. Tensors are on the model's device, shapes as in `fa_serve.api`.

    kv_caches:  (k_cache, v_cache) by layer_idx
    fresh:      no sequence has keys in the cache but those of this step, so attention takes them as they come
    num_splits: as in `attention_paged`
    descales:   (k_descale, v_descale) by layer_idx, for those caches that are float8; None if none is
    precision:  of the products of prompts, as in `attention_paged`
    states:     answers for the recurrences of the model; None for a model without
    blocks:     tokens that attend to each other both ways, whose last tokens are all in this step
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

    def attend(self, call: LayerCall) -> Tensor:
        """Store this step's keys and values, then attend to all keys of each sequence -> (1, total, num_heads, head_dim_v)."""
        if not isinstance(call.mask, Tensor) or call.mask.numel():
            raise UnsupportedModelError(
                f"{type(call.module).__name__} makes a mask itself, which attention on a paged cache cannot apply"
            )
        layer_idx = take_layer_idx(call.module, self.states)
        q = call.query[0].transpose(0, 1)
        k = call.key[0].transpose(0, 1)
        v = call.value[0].transpose(0, 1)
        k_cache, v_cache = self.kv_caches[layer_idx]
        store_kv(k, v, k_cache, v_cache, self.slot_mapping, backend=self.backend, **self.descale(layer_idx))
        out = self.attention(
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
        return out[None]

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
        """Attention to all keys of each sequence, causal but for `blocks`, after this step's keys and values have been stored.

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
        """Keys and values of a sequence up to the end of a block, (end, num_kv_heads, dim), and which of them each row sees."""
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
        out = attention_paged(
            q,
            k_cache,
            v_cache,
            block_table=self.block_table,
            seqused_k=self.seqused_k,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            softmax_scale=softmax_scale,
            window_size=(left, 0),
            attention_chunk=attention_chunk,
            softcap=softcap,
            sinks=sinks,
            num_splits=self.num_splits,
            precision=self.precision,
            backend=self.backend,
            **self.descale(layer_idx),
        )
        return cast(Tensor, out)

    def descale(self, layer_idx: int) -> dict[str, Any]:
        """The arguments k_descale and v_descale of `store_kv` and `attention_paged` for a float8 cache; none for another."""
        if self.descales is None or self.kv_caches[layer_idx][0].dtype != torch.float8_e4m3fn:
            return {}
        k_descale, v_descale = self.descales[layer_idx]
        return {"k_descale": k_descale, "v_descale": v_descale}


class OneSequence:
    """Takes the place of a PagedBatch: causal attention over the tokens of one sequence, without a cache."""

    def __init__(self) -> None:
        self.states = WholeSequence()

    def attend(self, call: LayerCall) -> Tensor:
        """Attend to all tokens -> (1, total, num_heads, head_dim_v)."""
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
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
    batch:                   a PagedBatch, or another object that answers for the attention of every layer
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
    """The whole output of that forward. inputs: what the model takes beside tokens, in its own shapes. No mask is
    built and nothing is read back from the device.
    """
    # transformers passes a mask of 4 dimensions on untouched: it builds none, and does not look for packed sequences
    no_mask: Tensor | None = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=input_ids.device)
    config: Any = model.config.get_text_config()
    name = state_argument(model)
    if name is not None or getattr(config, "attn_temperature_tuning", False):
        inputs = {
            **inputs,
            name or "past_key_values": StepCache(position_ids.view(-1, len(input_ids))[0], getattr(batch, "states", None)),
        }
    if name == "cache_params":
        no_mask = None  # there is no attention, and the mixers multiply their inputs with a mask
    keeping: AbstractContextManager[None] = nullcontext()
    if "logits_to_keep" in _parameters(type(model)):
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
def _parameters(model_class: type[PreTrainedModel]) -> Mapping[str, inspect.Parameter]:
    """The arguments of the forward of a class."""
    return inspect.signature(model_class.forward).parameters


@contextmanager
def _keeping_rows(model: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Inside, the head of a model whose forward takes no logits_to_keep computes the logits of these tokens alone."""
    head: Any = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, args: (args[0][:, rows], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def state_argument(model: PreTrainedModel) -> str | None:
    """What the model's forward calls the cache that keeps its states; None for a model without. It is looked for once."""
    if _STATE_ARGUMENT not in model.__dict__:
        name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
        model.__dict__[_STATE_ARGUMENT] = name if find_state_modules(model) else None
    return cast("str | None", model.__dict__[_STATE_ARGUMENT])


class Probe:
    """Rides along in the place of a PagedBatch: it writes down what each attention layer asks for, and computes nothing.

    layers: AttentionSpec by layer_idx
    states: the same for recurrences
    """

    def __init__(self) -> None:
        self.layers: dict[int, AttentionSpec] = {}
        self.states = StateProbe()

    def attend(self, call: LayerCall) -> Tensor:
        """Write the layer down -> zeros (1, total, num_heads, head_dim_v).

        The mask is that of an ordinary forward. `paged_forward` passes none, so the layer must ask for the same keys without
        it.
        """
        module = call.module
        layer_idx = take_layer_idx(module, self.states)
        if layer_idx in self.layers:
            raise UnsupportedModelError(f"layer {layer_idx} ({type(module).__name__}) attends more than once")
        if call.visible_window[1] == 0 <= call.visible_window[0] and call.window_size == (-1, 0):
            # transformers tells the window of this layer to the mask alone (Phi-3.5-MoE), and `paged_forward` makes no mask
            module.__dict__[WINDOW_NOTE] = call.visible_window[0]
            call = call._replace(window_size=call.visible_window)
        left, _ = call.window_size
        if call.visible_window != (left, 0) or call.visible_chunk != call.attention_chunk:
            raise UnsupportedModelError(
                f"layer {layer_idx} ({type(module).__name__}) needs a mask beyond causality and its sliding window"
            )
        self.layers[layer_idx] = spec_of(call, "paged")
        return call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])


class _ProbeCache(StepCache, DynamicCache):  # type: ignore[misc]
    """A StepCache that a model can make its masks from."""

    def __init__(self, config: PreTrainedConfig, states: StateProbe) -> None:
        DynamicCache.__init__(self, config=config)
        self.states = states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, position of the first one), also where no layer has attention."""
        return query_length, 0


class ModelLayers(NamedTuple):
    """What the layers of a model keep of a sequence.

    attention: what each attention layer asks of attention on a paged cache, by layer_idx, in the order of the layers
    states:    what each call of a recurrence keeps
    """

    attention: dict[int, AttentionSpec]
    states: dict[StateKey, StateSpec]


def model_layers(model_or_config: PreTrainedModel | PreTrainedConfig) -> ModelLayers:
    """What the layers of a causal model keep of a sequence, found by one forward of a single token.

    A config is tried out on the meta device, without weights.

    Raises UnsupportedModelError with the reason if the model cannot run on a paged cache, for example because it keeps a state
    by code that is not known, or because its masks are more than causality, windows and chunks.
    """
    if isinstance(model_or_config, PreTrainedModel):
        return _probe(model_or_config)
    config = copy.deepcopy(model_or_config)
    # the other implementations of experts read the router's choice, which has no values on the meta device
    config._experts_implementation = "batched_mm"
    auto = auto_class(config)
    with torch.device("meta"):
        model = make_served(config, lambda own, parts: auto.from_config(own, attn_implementation=parts))
        return _probe(text_model(model))


def check_attention_precision(layers: Iterable[AttentionSpec], page_size: int, precision: Precision) -> None:
    """Raise ParameterError, with the reasons of the backends, unless prompts of these layers have products in `precision`.

    layers: as from `model_layers`, whose products in q's dtype ("bf16") every device has
    """
    for layer in dict.fromkeys(layers) if precision != "bf16" else ():
        paged = replace(layer, layout="paged", page_size=page_size, precision=precision)
        for spec in (replace(paged, layout="varlen", page_size=0, kv_dtype=layer.dtype), paged):
            reasons = explain(spec)
            if None not in reasons.values():
                told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
                rule = f"be bf16 for a model and a device without float8 products ({spec}: {told})"
                raise ParameterError("attention_precision", rule, precision)


def check_model(model_or_config: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, with the reason, unless `paged_forward` computes this model right."""
    model_layers(model_or_config)


# where a model notes the answer of `state_argument`
_STATE_ARGUMENT = "_fa_serve_state_argument"
# arguments of the model's forward that `paged_forward` passes
_FORWARD_ARGUMENTS = {"input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep"}


@torch.no_grad()
def _probe(model: PreTrainedModel) -> ModelLayers:
    config = model.config.get_text_config()
    for part in (model, *model.modules()):
        # a tower that fa_serve cannot serve keeps the attention of transformers, and so does the model that holds it
        if isinstance(part, PreTrainedModel) and (part.config is config or part.config._attn_implementation == NAME):
            check_class(type(part))
    _check_before_a_forward(model, config)
    probe = Probe()
    name = state_argument(model)
    training = model.training
    try:
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        # with a padding mask transformers does not look for packed sequences, which it could not read on the meta device
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(token)}
        if name is not None:
            inputs[name] = _ProbeCache(config, probe.states)
        # a batch says itself which tokens attend both ways, and text has none
        with _seated(model), riding(probe), leaving_out_blocks():
            output = model.train(False)(input_ids=token, use_cache=True, fa_serve_batch=probe, **inputs)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {error}") from error
    except Exception as error:
        if name is None:
            raise
        # the code of a module that keeps states may ask for a part of transformers' cache which StepCache does not have
        told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run on a paged cache: its forward fails ({told})"
        ) from error
    finally:
        model.train(training)
    if name is None:
        kinds = {type(layer) for layer in getattr(output.get("past_key_values"), "layers", ())}
        # from some release after 5.17 on, a layer that shares the keys of another one keeps a DummyLayer, which holds nothing
        known = {DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer)}
        _refuse_if(kinds - known, model, "it keeps more than keys and values")
    found = sorted(probe.layers)
    missing = _missing_arguments(model) if found else set()
    _refuse_if(missing, model, f"its forward takes no {sorted(missing)}")
    # beside states, a layer may be an MLP alone
    if name is None and found != list(range(config.num_hidden_layers)):
        _refuse_if(True, model, f"only layers {found} of its {config.num_hidden_layers} layers use the attention interface")
    return ModelLayers({i: probe.layers[i] for i in found}, probe.states.found)


@contextmanager
def _seated(model: PreTrainedModel) -> Iterator[None]:
    """Inside, every module with a state is seated. Raises UnsupportedModelError for one that cannot be."""
    seated = []
    try:
        for number, module in enumerate(find_state_modules(model)):
            if "forward" not in vars(module):
                module.forward = SeatedMixer(module, number)
                seated.append(module)
        yield
    finally:
        for module in seated:
            del module.forward


def _missing_arguments(model: PreTrainedModel) -> set[str]:
    """The arguments of `paged_forward` that the model's forward does not take."""
    parameters = inspect.signature(model.forward).parameters
    missing = _FORWARD_ARGUMENTS - set(parameters)
    if model.get_output_embeddings() is not None:
        missing -= {"logits_to_keep"}  # `_keeping_rows` does without
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return missing | {"**kwargs"}
    return missing - {"use_cache"}  # Granite's mixtures hand it on; a cache that nobody asked for would change no number


def _check_before_a_forward(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuse what the model's class and config alone rule out."""
    missing = _missing_arguments(model)
    if state_argument(model) is not None:
        missing -= {"position_ids"}  # a model whose layers all keep states needs none; `_probe` looks again
    _refuse_if(config.is_encoder_decoder, model, "it is an encoder-decoder, whose cross-attention has no place in the cache")
    _refuse_if(model._is_stateful and state_argument(model) is None, model, "it keeps more than keys and values")
    _refuse_if(missing, model, f"its forward takes no {sorted(missing)}")
    _refuse_if(counts_positions(type(model)), model, "it numbers its positions from its padding token")
    changing = _rope_types(config) & {"dynamic", "longrope"}
    _refuse_if(changing, model, f"its {changing} rotary embedding depends on the longest sequence of the batch")


def _refuse_if(condition: object, model: PreTrainedModel, reason: str) -> None:
    if condition:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {reason}")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding in a config, which has one set of parameters, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return {p.get("rope_type", "default") for p in nested or [parameters]}
