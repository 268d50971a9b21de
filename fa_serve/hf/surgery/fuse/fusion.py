"""Finds decoder layers that are built like Llama's, proves that fusing them changes nothing, and fuses them.

    fused = fuse_model(model)    # the number of fused layers; the others run their own code, and the log says why

No layer is recognised by the name of its class. A kind of layer is given by its modules, their settings and the options of its
attention. Each kind is computed in float32 on the same input by its own code and by `FusedLayer`. It is fused only if queries,
keys, values, the cache and the output agree (surgery/proof.py). Routers and shared experts of mixtures are fused as well
(router.py, unit.py), and so are the sums of mixtures whose shared expert has a gate (mixture.py), the norm behind the last
layer (last_norm.py), and cos and sin of the rotary embedding (rotary_tables.py).

Layers with latent attention are proven twice, in the plain and in the absorbed form (latent.py). Once fused, they cache latent
keys, so `cached_layers` returns what each layer of the fused model stores in the cache.

A layer whose mixer keeps a state is compared on whole sequences. That its states are read and written correctly is proven
before (surgery/states.py). A gated delta net is fused as well, and `cached_states` returns what it keeps once it is fused.

If a layer is divided between ranks, each rank fuses its part without the other ranks: the original and the fused form are
compared before the parts of sums are added up.

Left out: the parts of a fused layer (parts.py), and how it computes (layer.py, latent.py, mixers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.hf.adapter.hub_kernels import restore_own_forwards
from fa_serve.hf.adapter.latent_keys import LatentKeys
from fa_serve.hf.adapter.step_cache import StateKey, StepCache, WholeSequence
from fa_serve.hf.adapter.translate import LayerCall
from fa_serve.hf.latent_layers import LatentSizes, latent_sizes, latent_spec
from fa_serve.hf.surgery.divide.weights import sums_paused
from fa_serve.hf.surgery.experts.scaled import ScaledExperts
from fa_serve.hf.surgery.fuse.last_norm import FusedNorm, fuse_last_norms
from fa_serve.hf.surgery.fuse.latent import LatentAttention, build_latent
from fa_serve.hf.surgery.fuse.layer import (
    FusedAttention,
    FusedLayer,
    LayerStep,
    Tables,
    build_heads,
    cos_and_sin,
    hooks_not_called,
)
from fa_serve.hf.surgery.fuse.mixers import DeltaMixer, MixerCall, OwnMixer, StateStep, build_mixer, find_mixer
from fa_serve.hf.surgery.fuse.mixture import fuse_mixtures
from fa_serve.hf.surgery.fuse.parts import FusedProduct, gated_unit, norm_of, product_of
from fa_serve.hf.surgery.fuse.rotary_tables import FusedRotaryTables, fuse_rotary_tables
from fa_serve.hf.surgery.fuse.router import FusedRouter, fuse_routers
from fa_serve.hf.surgery.fuse.unit import FusedUnit, fuse_units
from fa_serve.hf.surgery.latent_keys import patch_latent_keys, unpatch_latent_keys
from fa_serve.hf.surgery.proof import (
    AttentionRecorder,
    LayerInputs,
    NotReplacedError,
    check_untouched,
    float32_copy,
    kind_of,
    observe_inputs,
    repeat_heads,
    replace_forwards,
    results_agree,
)
from fa_serve.hf.surgery.towers import PaddedMlp
from fa_serve.ops import StateSpec
from fa_serve.spec import AttentionSpec

log = logging.getLogger("fa_serve.hf")

ROTATIONS = {
    "halves": "with rotary embedding",
    "half tables": "with rotary embedding from half as many angles",
    "neighbours": "with rotary embedding of neighbouring elements",
    "none": "without rotary embedding",
}
"""The forms of rotary embedding that a layer may have, and how messages describe them."""
TABLES: dict[str, Tables] = {"halves": "twice", "half tables": "once"}
"""The ROTATIONS of layers without latent attention that rotate, and how their tables hold the angles."""
_REPLACED = FusedLayer | FusedNorm | FusedRotaryTables | FusedRouter | FusedUnit | ScaledExperts | PaddedMlp
"""The forwards that an engine gives to modules of a model."""
FAR = 1 << 20
"""The number that the proof adds to the positions that a layer gets."""


def fuse_model(model: PreTrainedModel, *, deterministic: bool = False) -> int:
    """Fuse layers, routers and shared experts of a causal model that `model_layers` accepts. Returns how many layers got fused.

    Layers with latent attention that cannot be fused also cache latent keys if that changes nothing.

    deterministic: fuse only what computes each row independently of the others in deterministic mode and what `fa_serve.exact`
    can train: layers, and the routers and shared experts in fused layers whose weights share the memory of the parameters
    """
    fused = fuse_layers(model, deterministic=deterministic)
    layers = [module for module in model.modules() if isinstance(vars(module).get("forward"), FusedLayer)]
    if not deterministic:
        patch_latent_keys(module for module in model.modules() if module not in layers)
        fuse_mixtures(model)
        fuse_last_norms(model)
        fuse_rotary_tables(model)
    # deterministic: mixtures outside of fused layers run their own code, both in the engine and in exact forwards
    mixtures = nn.ModuleList(layers) if deterministic else model
    fuse_routers(mixtures, live=deterministic)
    fuse_units(mixtures)
    return fused


@torch.no_grad()
def fuse_layers(model: PreTrainedModel, *, deterministic: bool = False) -> int:
    """Give decoder layers the forward of `FusedLayer` if that changes nothing. Returns how many layers got it.

    deterministic: leave out latent attention, because the bits of its absorbed products depend on the number of rows

    The log gives the reason for each kind that cannot be fused. Left out: layers that do not run for a text, such as those of
    towers.
    """
    restore_own_forwards(model)
    layers: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "self_attn", None), nn.Module) or find_mixer(m)]
    recorder = AttentionRecorder()
    inputs = observe_inputs(model, layers, recorder)
    found = [layer for layer in layers if layer in inputs]
    calls: dict[nn.Module, LayerCall] = {
        layer: recorder.calls[layer.self_attn] for layer in found if getattr(layer, "self_attn", None) in recorder.calls
    }

    def prove(layer: nn.Module) -> Callable[[nn.Module], FusedLayer]:
        if layer not in calls and find_mixer(layer) and layer in inputs:
            call = _prove_mixer(layer, inputs[layer])
            return lambda other: build_mixed_layer(other, call)
        if layer not in calls:
            raise NotReplacedError("the layer computes no attention")
        if calls[layer].indices is not None or calls[layer].block_indices is not None:
            raise NotReplacedError("its queries choose keys, which the proof does not cover")
        if calls[layer].position_bias is not None:
            raise NotReplacedError("it adds a bias to its scores, which the proof does not cover")
        if deterministic and _latent_sizes(calls[layer]) is not None:
            raise NotReplacedError("the products of latent keys depend on the number of rows, and deterministic is True")
        rotation = _prove(layer, inputs[layer])
        return lambda other: build_layer(other, calls[other], rotation)

    def refuse(layer: nn.Module, reason: str) -> None:
        log.warning("%s layers are not fused: %s", type(layer).__name__, reason)

    def kind(layer: nn.Module) -> str:
        return kind_of(layer, _options_of(calls[layer]) if layer in calls else None)

    with sums_paused(model):
        fused = replace_forwards(found, prove, refuse, kind=kind)
    log.info("%d of %d layers are fused", fused, len(found))
    return fused


def unfuse_model(model: PreTrainedModel) -> None:
    """Give the modules that an earlier engine has fused in this model their own forward again, and those that compute with
    kernels of the Hub."""
    restore_own_forwards(model)
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _REPLACED):
            del module.forward
    unpatch_latent_keys(model)


def cached_layers(model: PreTrainedModel, layers: Mapping[int, AttentionSpec]) -> dict[int, AttentionSpec]:
    """The spec of each layer's KV cache after `fuse_model`. layers: the specs of the layers before they were fused"""
    cached = dict(layers)
    for module in model.modules():
        fused = module.forward
        if isinstance(fused, FusedLayer) and isinstance(fused.attention, LatentAttention):
            assert fused.index is not None
            cached[fused.index] = latent_spec(cached[fused.index], fused.attention.sizes)
        latent = vars(module).get("expand_kv")
        if isinstance(latent, LatentKeys):
            index = cast(int, module.layer_idx)
            cached[index] = latent_spec(cached[index], latent.sizes)
    return cached


def cached_states(model: PreTrainedModel, states: Mapping[StateKey, StateSpec]) -> dict[StateKey, StateSpec]:
    """What each recurrence keeps of a sequence after `fuse_model`. states: what it keeps before the modules are fused"""
    cached = dict(states)
    for module in model.modules():
        fused = module.forward
        if isinstance(fused, FusedLayer) and isinstance(fused.attention, DeltaMixer):
            cached |= fused.attention.kept(cached)
    return cached


def build_layer(layer: nn.Module, call: LayerCall, rotation: str) -> FusedLayer:
    """Build the fused form of a layer, which merges its weights. call: its call of attention; rotation: a key of ROTATIONS

    Raises NotReplacedError or AttributeError for a layer that lacks a part.
    """
    attention = cast(Any, layer.self_attn)
    sizes = _latent_sizes(call)
    options = _options_of(call)
    if sizes is None:
        built: Any = build_heads(attention, call, TABLES.get(rotation))
    else:
        built = build_latent(attention, call, sizes, "halves" if rotation == "halves" else "neighbours")
        # the default scale is that of the layer's own head_dim; latent keys have another size
        options["softmax_scale"] = call.softmax_scale or call.query.shape[-1] ** -0.5
    return _assemble(layer, built, product_of(attention.o_proj), cast(int, call.module.layer_idx), options)


def build_mixed_layer(layer: nn.Module, call: MixerCall) -> FusedLayer:
    """Build the fused form of a layer whose mixer keeps a state. call: its call of the mixer. Raises as `build_layer`."""
    mixer, output = build_mixer(layer, call)
    return _assemble(layer, mixer, output, None, {})


def _assemble(
    layer: Any, attention: FusedAttention, output: FusedProduct | None, index: int | None, options: dict[str, Any]
) -> FusedLayer:
    """Build the fused form of a layer around its attention or mixer. The arguments are fields of `FusedLayer` (output: `o`)."""
    mlp = layer.mlp
    names: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    if hasattr(layer, "post_feedforward_layernorm"):
        before = ("input_layernorm", "pre_feedforward_layernorm")
        first, second = (name if hasattr(layer, name) else None for name in before)
        names = (first, "post_attention_layernorm", second, "post_feedforward_layernorm")
    norms = [None if name is None else norm_of(getattr(layer, name)) for name in names]
    multiplier = float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))
    if multiplier != 1.0 and hasattr(layer, "post_feedforward_layernorm"):
        raise NotReplacedError(f"it multiplies its parts by {multiplier} after they are normalised")
    unit = gated_unit(mlp)
    called = [*([mlp] if unit is None else []), *([attention.module] if isinstance(attention, OwnMixer) else [])]
    return FusedLayer(
        original=partial(type(layer).forward, layer),
        index=index,
        options=options,
        before_attention=norms[0],
        after_attention=norms[1],
        before_mlp=norms[2],
        after_mlp=norms[3],
        attention=attention,
        o=output,
        gate_up=None if unit is None else unit.gate_up,
        down=None if unit is None else unit.down,
        activation="" if unit is None else unit.activation,
        mlp=mlp,
        multiplier=multiplier,
        hooks=hooks_not_called(layer, called),
    )


def _options_of(call: LayerCall) -> dict[str, Any]:
    """The options of a layer's attention, without its tensors: arguments of `PagedBatch.attention`."""
    return {
        "left": call.window_size[0],
        "attention_chunk": call.attention_chunk,
        "softmax_scale": call.softmax_scale,
        "softcap": call.softcap,
        "sinks": call.sinks,
    }


def _latent_sizes(call: LayerCall) -> LatentSizes | None:
    _, num_heads, _, head_dim = call.query.shape
    return latent_sizes(call.module, num_heads, head_dim)


def tried_rotations(call: LayerCall, cos: Tensor) -> tuple[str, ...]:
    """The ROTATIONS that a layer may have, in the order in which they are tried. cos: (total, dims), of its rotary embedding"""
    if _latent_sizes(call) is not None:
        return ("halves", "neighbours")
    fits = 2 * cos.shape[1] <= call.query.shape[-1]
    return ("halves", "half tables", "none") if fits else ("halves", "none")


def _prove(layer: nn.Module, inputs: LayerInputs) -> str:
    """Compare a float32 copy of the layer with its fused form. Returns the layer's key in ROTATIONS."""
    if "position_embeddings" not in inputs.kwargs:
        raise NotReplacedError("the layer is called without position_embeddings")
    # building the parts refuses replaced forwards where they matter, and the mlp may have one
    check_untouched(layer, forwards=False)
    original = float32_copy(layer)
    expected = _expected(original, inputs)
    reasons = []
    for rotation in tried_rotations(expected.call, expected.cos):
        wrong = _differences(build_layer(original, expected.call, rotation), expected)
        if not wrong:
            return rotation
        reasons.append(f"{ROTATIONS[rotation]}, its {' and '.join(wrong)} would change")
    raise NotReplacedError("; ".join(reasons))


def _prove_mixer(layer: nn.Module, inputs: LayerInputs) -> MixerCall:
    """Compare a float32 copy of a layer that has a mixer with its fused form. Returns how the layer calls its mixer."""
    check_untouched(layer, forwards=False)
    original = float32_copy(layer)
    wide = inputs.in_float32()
    name = find_mixer(original)
    assert name is not None
    found: list[MixerCall] = []

    def observe(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        others = {key: value for key, value in given.items() if key not in ("hidden_states", "fa_serve_batch")}
        if len(args) + ("hidden_states" in given) != 1:
            raise NotReplacedError("its mixer is called with several positional arguments")
        for key, value in others.items():
            if isinstance(value, Tensor) and wide.kwargs.get(key) is not value:
                raise NotReplacedError(f"its mixer gets the tensor {key}, which the layer itself computes")
        found.append(MixerCall(name, others))

    handle = getattr(original, name).register_forward_pre_hook(observe, with_kwargs=True)
    try:
        expected = wide.run(original, AttentionRecorder())
    finally:
        handle.remove()
    if not isinstance(expected, Tensor) or len(found) != 1:
        raise NotReplacedError("its mixer is not called exactly once, or the layer returns more than one tensor")
    fused = build_mixed_layer(original, found[0])
    for total in (expected.shape[1], 1):  # a single token uses other kernels
        actual = fused.compute(wide.hidden[0, :total].clone(), StateStep(WholeSequence(), wide.kwargs))
        if not results_agree(actual, expected[0, :total]):
            raise NotReplacedError("its output would change" if total > 1 else "the output for a single token would change")
    return found[0]


class _Expected(NamedTuple):
    """The results of a layer's own code in float32.

    hidden:   (total, hidden), the input of the layer
    cos, sin: its rotary embedding
    call:     its call of attention
    q, k, v:  (total, heads, head_dim), the inputs of attention
    output:   (total, hidden), the output of the layer
    """

    hidden: Tensor
    cos: Tensor
    sin: Tensor
    call: LayerCall
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor


def _expected(original: nn.Module, inputs: LayerInputs) -> _Expected:
    """Run the own code of a layer in float32.

    The layer gets positions that are far beyond those of its rotary embedding. A layer that reads the positions itself, for
    example to scale queries (Ministral, Llama 4), then differs from its fused form.
    """
    wide = inputs.in_float32()
    changes: dict[str, Any] = {}
    if isinstance(wide.kwargs.get("position_ids"), Tensor):
        changes["position_ids"] = wide.kwargs["position_ids"] + FAR
    caches = {name: value for name, value in wide.kwargs.items() if isinstance(value, StepCache)}
    changes |= {name: StepCache(cache.position_ids + FAR) for name, cache in caches.items()}
    recorder = AttentionRecorder()
    output = replace(wide, kwargs=wide.kwargs | changes).run(original, recorder)
    if not isinstance(output, Tensor):
        raise NotReplacedError(f"the layer returns a {type(output).__name__}, not a tensor")
    call = recorder.calls[cast(nn.Module, original.self_attn)]
    q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
    return _Expected(wide.hidden[0], *cos_and_sin(wide.kwargs["position_embeddings"]), call, q, k, v, output[0])


class _Seen(NamedTuple):
    """The inputs of attention in a fused layer, the contents of the cache afterwards, and the output of the layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    output: Tensor


def _run(fused: FusedLayer, expected: _Expected, total: int, *, fresh: bool) -> _Seen:
    """Compute the first `total` tokens. Attention returns the values of each token, as in `AttentionRecorder`."""
    k_cache, v_cache = _cache_of(fused, expected)
    slots = torch.arange(total, device=expected.cos.device)
    given: list[Tensor] = []

    def attend(*qkv: Tensor) -> Tensor:
        given.extend(x.clone() for x in qkv)
        return repeat_heads(qkv[2], qkv[0].shape[1])

    step = LayerStep(expected.cos[:total], expected.sin[:total], k_cache, v_cache, slots, attend, fresh, {})
    output = fused.compute(expected.hidden[:total].clone(), step)
    q, k, v = given
    return _Seen(q, k, v, k_cache[0, :total], v_cache[0, :total], output)


def _cache_of(fused: FusedLayer, expected: _Expected) -> tuple[Tensor, Tensor]:
    """An empty page for the tokens of the proof."""
    if isinstance(fused.attention, LatentAttention):
        rank, rope, _, _ = fused.attention.sizes
        page = expected.k.new_zeros(1, len(expected.k), 1, rank + rope)
        return page, page[..., :rank]
    return expected.k.new_zeros(1, *expected.k.shape), expected.v.new_zeros(1, *expected.v.shape)


def _differences(fused: FusedLayer, expected: _Expected) -> list[str]:
    """The names of the results in which the fused layer differs. Raises NotReplacedError if only a single token differs."""
    forms = (True, False) if isinstance(fused.attention, LatentAttention) else (False,)
    for fresh in forms:
        seen = _run(fused, expected, len(expected.output), fresh=fresh)
        wrong = [name for name, actual, wanted in _compared(seen, expected) if not results_agree(actual, wanted)]
        if wrong:
            return wrong
    for fresh in forms:
        # a single token uses other kernels
        if not results_agree(_run(fused, expected, 1, fresh=fresh).output, expected.output[:1]):
            raise NotReplacedError("the output for a single token would change")
    return []


def _compared(seen: _Seen, expected: _Expected) -> list[tuple[str, Tensor, Tensor]]:
    """(name, actual, wanted) for all tensors that must agree.

    In latent attention, queries and keys may have their elements in another order, and another number of elements, so scores
    are compared instead. In the absorbed form, values are compared only through the output.
    """
    output = ("output", seen.output, expected.output)
    if seen.k_cache.shape[1:] == expected.k.shape[1:] and seen.v_cache.shape[1:] == expected.v.shape[1:]:
        return [
            ("queries", seen.q, expected.q),
            ("keys", seen.k, expected.k),
            ("values", seen.v, expected.v),
            ("cached keys", seen.k_cache, expected.k),
            ("cached values", seen.v_cache, expected.v),
            output,
        ]
    is_absorbed = seen.k.shape == seen.k_cache.shape
    own = ("cached keys", seen.k_cache, seen.k) if is_absorbed else ("values", seen.v, expected.v)
    return [("scores", _scores(seen.q, seen.k), _scores(expected.q, expected.k)), own, output]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """The products of all queries and keys, (num_heads, total, total)."""
    return torch.einsum("qhd,khd->hqk", q, repeat_heads(k, q.shape[1]))
