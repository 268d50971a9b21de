"""Finds, by one forward of a token, what each layer of a model keeps of a sequence, or why the engine cannot run the model.

    layers = model_layers(model)             # or model_layers(config), without weights
    check_model(config)                      # raises UnsupportedModelError with the reason

A `Probe` rides along in place of a `PagedBatch` and records what every attention layer asks for. So this module knows nothing
about model types: the model's own code shows what it needs. Left out: the forward of the engine itself (paged.py).
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from fa_serve.backends import explain
from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.composites import auto_class, blank_images, make_served, text_model
from fa_serve.hf.adapter.gathered_keys import adds_bias_of_places, computes_attention
from fa_serve.hf.adapter.gathered_keys_proof import steps_are_right
from fa_serve.hf.adapter.hub_kernels import has_hub_forward
from fa_serve.hf.adapter.indexers import IndexCall, IndexerRotation, PatchedIndexer, find_indexers, indexer_layer, require_parts
from fa_serve.hf.adapter.masks import ImplicitMask, leaving_out_blocks
from fa_serve.hf.adapter.models import NAME, check_class, counts_positions, handles_mask
from fa_serve.hf.adapter.own_masks import patch_mask_makers
from fa_serve.hf.adapter.paged import OneSequence, first_position, number_from_zero, paged_output, state_argument
from fa_serve.hf.adapter.releases import CHOOSING_LAYERS, PAGED_LAYERS
from fa_serve.hf.adapter.short_choices import patch_short_choices
from fa_serve.hf.adapter.state_modules import PatchedMixer, find_state_modules
from fa_serve.hf.adapter.step_cache import StateKey, StateProbe, StepCache, take_layer_idx
from fa_serve.hf.adapter.translate import WINDOW_NOTE, LayerCall, spec_of
from fa_serve.ops import StateSpec
from fa_serve.spec import AttentionSpec, FaServeError, ParameterError, Precision, UnsupportedModelError, arch_of

T = TypeVar("T")


class Probe:
    """Rides along in place of a PagedBatch: it records what each attention layer asks for, and computes nothing.

    layers: AttentionSpec by layer_idx
    indexers: AttentionSpec that describes the cache for an indexer's keys, by `indexers.indexer_layer`
    states: records what recurrences keep
    """

    def __init__(self) -> None:
        self.layers: dict[int, AttentionSpec] = {}
        self.indexers: dict[int, AttentionSpec] = {}
        self.states = StateProbe()

    def attend(self, call: LayerCall) -> Tensor:
        """Record the layer -> zeros (1, total, num_heads, head_dim_v).

        The call has the mask of an ordinary forward. `paged_forward` passes no mask, so the layer must ask for the same keys
        without it.
        """
        module = call.module
        layer_idx = take_layer_idx(module, self.states)
        if layer_idx in self.layers:
            raise UnsupportedModelError(f"layer {layer_idx} ({type(module).__name__}) attends more than once")
        if isinstance(call.mask, Tensor) and not call.mask.numel():
            # the model makes no masks in the engine's forward, because the batch determines which keys are seen
            call = call._replace(mask=None, indices=None)
        if call.visible_window[1] == 0 and call.window_size in ((-1, 0), (-1, -1)):
            # transformers tells causality (Kosmos) or the window (Phi-3.5-MoE) only to the mask, and `paged_forward` makes none
            if call.visible_window[0] >= 0:
                module.__dict__[WINDOW_NOTE] = call.visible_window[0]
            call = call._replace(window_size=call.visible_window)
        left, _ = call.window_size
        if call.visible_window != (left, 0) or call.visible_chunk != call.attention_chunk:
            raise UnsupportedModelError(
                f"layer {layer_idx} ({type(module).__name__}) needs a mask beyond causality and its sliding window"
            )
        self.layers[layer_idx] = spec_of(call, "paged")
        return call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])

    def attend_biased(self, call: LayerCall) -> Tensor:
        """`attend` for a layer that adds a bias, which must be computed from the places that `GatheredKeys` returns."""
        if not adds_bias_of_places(call.module):
            raise UnsupportedModelError(
                f"{type(call.module).__name__} adds a position_bias to its scores, which attention on a paged cache cannot do"
            )
        return self.attend(call._replace(position_bias=None))

    def gather(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Record a layer that computes its attention itself."""
        if layer_idx in self.layers:
            raise UnsupportedModelError(f"layer {layer_idx} attends more than once")
        self.layers[layer_idx] = AttentionSpec(
            layout="paged",
            device=key.device.type,
            arch=arch_of(key.device),
            dtype=key.dtype,
            kv_dtype=key.dtype,
            head_dim=key.shape[-1],
            head_dim_v=value.shape[-1],
            num_heads=key.shape[1],
            num_kv_heads=key.shape[1],
            window_size=(-1, 0),
        )
        return key, value

    def visible(self) -> Tensor:
        """The only token sees itself."""
        return torch.ones(1, 1, dtype=torch.bool)

    def places(self) -> None:
        """None, because there are no keys of other tokens."""

    def choose(self, call: IndexCall) -> Tensor:
        """Record the cache for an indexer's keys -> (1, total, 1) indices, which `attend` does not read."""
        dim = call.key.shape[-1]
        self.indexers[indexer_layer(cast(int, cast(Any, call.module).layer_idx))] = AttentionSpec(
            layout="paged",
            device=call.key.device.type,
            arch=arch_of(call.key.device),
            dtype=call.key.dtype,
            kv_dtype=call.key.dtype,
            head_dim=dim,
            head_dim_v=dim,
            num_heads=call.query.shape[1],
            num_kv_heads=1,
            window_size=(-1, 0),
            values_in_keys=True,
        )
        return call.key.new_zeros(1, len(call.key), 1, dtype=torch.int32)


class _ProbeCache(StepCache, DynamicCache):  # type: ignore[misc]
    """A StepCache that also has what a model needs to make its masks."""

    def __init__(self, config: PreTrainedConfig, states: StateProbe) -> None:
        DynamicCache.__init__(self, config=config)
        self.states = states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(number of keys, position of the first key), also for a model without attention layers."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the only token."""
        return 0


class ModelLayers(NamedTuple):
    """What the layers of a model keep of a sequence.

    attention: what each attention layer asks of attention on a paged cache, by layer_idx, in the order of the layers
    states:    what each call of a recurrence keeps
    indexers:  the spec of the cache for each indexer's keys, by `indexers.indexer_layer`
    """

    attention: dict[int, AttentionSpec]
    states: dict[StateKey, StateSpec]
    indexers: dict[int, AttentionSpec]


def model_layers(model_or_config: PreTrainedModel | PreTrainedConfig) -> ModelLayers:
    """What the layers of a causal model keep of a sequence, found by one forward of a single token.

    A config is tried out on the meta device without weights, or, if the model's code reads values, with zeros as weights.

    Raises UnsupportedModelError with the reason if the model cannot run on a paged cache, for example because it keeps a state
    by code that is not known here, or because its masks are more than causality, windows and chunks.
    """
    if isinstance(model_or_config, PreTrainedModel):
        return _probe(model_or_config)
    config = copy.deepcopy(model_or_config)
    # other implementations of experts read which experts the router chose, and tensors on the meta device have no values
    config._experts_implementation = "batched_mm"
    auto = auto_class(config)
    with torch.device("meta"):
        model = text_model(make_served(config, lambda own, parts: auto.from_config(own, attn_implementation=parts)))
    return run_without_weights(model, lambda: _probe(model))


def run_without_weights(model: torch.nn.Module, forward: Callable[[], T]) -> T:
    """Call `forward` for a model on the meta device, and if the model's code reads values, call it again with zeros as weights.
    Returns the result.

    Some mixtures (Aria, JetMoE, LongCat-Flash) read which experts a router chose, and gated delta nets call `Tensor.item()`.
    On the meta device PyTorch refuses both with NotImplementedError or another RuntimeError. A forward that fails for another
    reason fails again with the zeros.
    """
    try:
        with torch.device("meta"):
            return forward()
    except RuntimeError as error:  # NotImplementedError is one
        if isinstance(error, FaServeError):  # fa_serve refuses the model
            raise
    _give_zeros(model)
    return forward()


def _give_zeros(model: torch.nn.Module) -> None:
    """Move a model from the meta device to the CPU, with weights that are all zero and take no memory."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            module.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros((), dtype=buffer.dtype).expand(buffer.shape))


def check_attention_precision(layers: Iterable[AttentionSpec], page_size: int, precision: Precision) -> None:
    """Raise ParameterError, with the backends' reasons, unless some backend computes prompts of each layer in `precision`.

    layers: specs from `model_layers`. "bf16" (products in q's dtype) is not checked, because every device has it
    """
    for layer in dict.fromkeys(layers) if precision != "bf16" else ():
        paged = replace(layer, layout="paged", page_size=page_size, precision=precision)
        for spec in (replace(paged, layout="varlen", page_size=0, kv_dtype=layer.dtype), paged):
            reasons = explain(spec)
            if None not in reasons.values():
                told = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
                rule = f"be bf16 for a model and a device without float8 products ({spec}: {told})"
                raise ParameterError("attention_precision", rule, precision)


def attention_backends(layers: Iterable[AttentionSpec], page_size: int, precision: Precision) -> dict[str, tuple[str, ...]]:
    """The backends that serve these layers on a paged cache, for "prompts" and for "decoding", by falling number of layers."""
    counts: dict[str, Counter[str]] = {"prompts": Counter(), "decoding": Counter()}
    for layer, count in Counter(layers).items():
        paged = replace(layer, layout="paged", page_size=page_size)
        for kind, spec in (("prompts", replace(paged, precision=precision)), ("decoding", replace(paged, op="decode"))):
            counts[kind][next((name for name, reason in explain(spec).items() if reason is None), "none")] += count
    return {kind: tuple(name for name, _ in found.most_common()) for kind, found in counts.items()}


def check_model(model_or_config: PreTrainedModel | PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, with the reason, unless `paged_forward` computes this model right."""
    model_layers(model_or_config)


# the arguments that `paged_forward` passes to the model's forward
_FORWARD_ARGUMENTS = {"input_ids", "position_ids", "attention_mask", "use_cache", "logits_to_keep"}


@torch.no_grad()
def _probe(model: PreTrainedModel) -> ModelLayers:
    config = model.config.get_text_config()
    if computes_attention(model):
        return _probe_own_attention(model)
    for part in (model, *model.modules()):
        # a tower that fa_serve cannot serve keeps the attention of transformers, and so does the config of the whole model:
        # neither is checked
        if isinstance(part, PreTrainedModel) and (part.config is config or part.config._attn_implementation == NAME):
            check_class(type(part))
    _check_before_a_forward(model, config)
    probe = Probe()
    name = state_argument(model)
    training = model.training
    try:
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        # with a padding mask transformers does not look for packed sequences, which it could not find on the meta device
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(token), **blank_images(model, 1)}
        # a model that computes with its masks gets tensors, which do not show a window: the config tells whether there is one
        makes_masks = patch_mask_makers(model) or (handles_mask(config) and getattr(config, "sliding_window", None) is None)
        chooses = patch_short_choices(model) is not None
        if find_indexers(model):
            inputs["attention_mask"] = _masks_of_choosing(model, config)
        elif makes_masks:
            # an empty mask stands for masks that say nothing but causality, because the modules would read their values
            inputs["attention_mask"] = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=model.device)
        if name is not None:
            inputs[name] = _ProbeCache(config, probe.states)
        # the engine's batch determines which tokens attend both ways; in text there are none
        with _patched(model), riding(probe), leaving_out_blocks():
            # without states, the cache that the model makes shows what its layers keep
            output = model.train(False)(input_ids=token, use_cache=name is None, fa_serve_batch=probe, **inputs)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {error}") from error
    except Exception as error:
        if name is None:
            raise
        # the code of a module that keeps states may need a part of transformers' cache that StepCache does not have
        told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run on a paged cache: its forward fails ({told})"
        ) from error
    finally:
        model.train(training)
    if name is None:
        kept = {type(layer) for value in output.values() for layer in getattr(value, "layers", ())}
        kept = {kind for kind in kept if not (chooses and hasattr(kind, "update_index"))}
        _refuse_if(kept - PAGED_LAYERS, model, "it keeps more than keys and values")
    if first_position(model) and model.device.type != "meta" and not _is_numbered(model):
        number_from_zero(model)
        _refuse_if(not _is_numbered(model), model, "it numbers its positions in an unknown way")
    found = sorted(probe.layers)
    missing = _missing_arguments(model) if found else set()
    _refuse_if(missing, model, f"its forward takes no {sorted(missing)}")
    if found and "position_ids" not in inspect.signature(model.forward).parameters and model.device.type != "meta":
        _refuse_if(not _hands_positions_down(model), model, "its forward does not pass position_ids on to its layers")
    # layers that attend to images do not run without images (Llama 3.2 Vision)
    without_images = set(getattr(config, "cross_attention_layers", None) or ())
    # in a model with states, a layer may have no attention, such as a layer that is only an MLP
    if name is None and found != [i for i in range(config.num_hidden_layers) if i not in without_images]:
        _refuse_if(True, model, f"only layers {found} of its {config.num_hidden_layers} layers use the attention interface")
    return ModelLayers({i: probe.layers[i] for i in found}, probe.states.found, probe.indexers)


def _probe_own_attention(model: PreTrainedModel) -> ModelLayers:
    """`_probe` for a model that computes its attention itself. If it has weights, logits of the engine's steps are compared."""
    config = model.config.get_text_config()
    _check_before_a_forward(model, config)
    probe = Probe()
    token = torch.zeros(1, dtype=torch.int64, device=model.device)
    try:
        paged_output(model, token, token, probe, token)
        found = sorted(probe.layers)
        if found != list(range(config.num_hidden_layers)):
            raise UnsupportedModelError(f"only its layers {found} of {config.num_hidden_layers} keep keys and values")
        if model.device.type != "meta" and not steps_are_right(model, probe.layers):
            raise UnsupportedModelError("it computes its attention itself, which does not follow a mask over gathered keys")
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {error}") from error
    except Exception as error:  # the code of a model may need a part of transformers' cache that is missing here
        told = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UnsupportedModelError(
            f"{type(model).__name__} computes its attention itself, and its forward fails on a paged cache ({told})"
        ) from error
    return ModelLayers(probe.layers, {}, {})


def _masks_of_choosing(model: PreTrainedModel, config: Any) -> Tensor | dict[str, Any]:
    """The masks of a model with indexers. Layers whose queries choose keys get empty ones: their masks would say nothing but
    causality, and the modules would read the values. Other layers get implicit masks that say what transformers' masks would
    say, so that `Probe` compares them with what the layers ask for.
    """
    empty = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=model.device)
    kinds = set(getattr(config, "layer_types", None) or ())
    others = kinds - CHOOSING_LAYERS
    unknown = others - {"full_attention", "sliding_attention"}
    _refuse_if(unknown, model, f"some of its layers choose keys, and others are of the kinds {sorted(unknown)}")
    if not others:
        return empty
    windows = {kind: (config.sliding_window - 1 if kind == "sliding_attention" else -1, 0) for kind in others}
    masks = {kind: ImplicitMask(window) for kind, window in windows.items()}
    return masks | dict.fromkeys(kinds & CHOOSING_LAYERS, empty)


def _is_numbered(model: PreTrainedModel) -> bool:
    """Whether a model that makes its own positions computes the same with positions that start at `first_position`."""
    first = first_position(model)
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(first, first + 5, device=model.device)[None] % embeddings.num_embeddings
    places = torch.arange(5, device=model.device)[None] + first
    with riding(OneSequence()):
        own, ours = (model(input_ids=ids, use_cache=False, **given).logits for given in ({}, {"position_ids": places}))
    return torch.equal(own, ours)


def _hands_positions_down(model: PreTrainedModel) -> bool:
    """Whether the positions that a forward takes among its **kwargs change what it computes."""
    places = torch.arange(5, device=model.device)[None]
    with riding(OneSequence()):
        # consecutive positions, and positions that are far apart
        near, far = (model(input_ids=places, position_ids=x, use_cache=False).logits for x in (places, places * 7))
    return not torch.equal(near, far)


@contextmanager
def _patched(model: PreTrainedModel) -> Iterator[None]:
    """Inside, modules with states have a `PatchedMixer` as forward, and indexers a `PatchedIndexer`.

    Raises UnsupportedModelError for a module that cannot have one.
    """
    before: dict[torch.nn.Module, Any] = {}

    def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        before[module] = vars(module).get("forward")
        module.forward = forward

    def is_untouched(module: torch.nn.Module) -> bool:
        return "forward" not in vars(module) or has_hub_forward(module)

    try:
        for module in find_indexers(model):
            if is_untouched(module):
                require_parts(module)
                # which numbers are rotated does not matter here, because no result is read
                replace_forward(module, PatchedIndexer(module, IndexerRotation("halves")))
        for number, module in enumerate(find_state_modules(model)):
            if is_untouched(module):
                replace_forward(module, PatchedMixer(module, number))
        yield
    finally:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _missing_arguments(model: PreTrainedModel) -> set[str]:
    """The arguments that `paged_forward` passes and that the model's forward does not take."""
    parameters = inspect.signature(model.forward).parameters
    missing = _FORWARD_ARGUMENTS - set(parameters)
    whole: Any = model
    if whole.get_output_embeddings() is not None:
        missing -= {"logits_to_keep"}  # `_keeping_rows` does not need it
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return missing | {"**kwargs"}
    inner = inspect.signature(whole.base_model.forward).parameters
    missing -= {"position_ids"} & set(inner)  # Evolla hands it down; `_hands_positions_down` checks this
    return missing - {"use_cache"}  # Granite's mixtures hand it on; an unused cache would not change the result


def _check_before_a_forward(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError for a model that its class and config alone rule out."""
    missing = _missing_arguments(model)
    if state_argument(model) is not None:
        missing -= {"position_ids"}  # a model without attention layers needs none; `_probe` checks again if it has some
    _refuse_if(config.is_encoder_decoder, model, "it is an encoder-decoder, whose cross-attention has no place in the cache")
    stateful = getattr(model, "_is_stateful", False)  # transformers 5.25 has no such attribute
    _refuse_if(stateful and state_argument(model) is None, model, "it keeps more than keys and values")
    _refuse_if(missing, model, f"its forward takes no {sorted(missing)}")
    padding = getattr(config, "pad_token_id", None)
    counts = counts_positions(type(model)) and padding is None
    _refuse_if(counts, model, "it numbers its positions from the padding token's id, but its config has no pad_token_id")
    changing = _rope_types(config) & {"dynamic", "longrope"}
    _refuse_if(changing, model, f"its {changing} rotary embedding depends on the longest sequence of the batch")


def _refuse_if(condition: object, model: PreTrainedModel, reason: str) -> None:
    if condition:
        raise UnsupportedModelError(f"{type(model).__name__} cannot run on a paged cache: {reason}")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding in a config. A config has one set of parameters, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    return {p.get("rope_type", "default") for p in nested or [parameters]}
