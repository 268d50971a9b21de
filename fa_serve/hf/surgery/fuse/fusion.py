"""Finds decoder layers of the Llama kind by their structure, proves that fusing them changes nothing, and fuses them.

    fused = fuse(model)          # how many layers; the others run as they are, and the log says why

No layer is recognised by the name of its class. Each kind of layer (its modules, their settings, what it asks of attention) is
computed by its own code and by `FusedLayer` in float32 on the same input. It is fused only if queries, keys, values, the cache
and the output agree. Merged weights take no additional memory: the separate weights become views of the merged ones.

Layers with latent attention are proven twice, with plain heads and with absorbed products (latent.py), and cache latent
keys from then on: `cached_layers` says what each layer of a model asks of the cache.

A layer that is divided between ranks is fused by each rank alone: both forms are compared before their parts are added up.

Left out: what a fused layer is made of (parts.py), and how it computes (layer.py, latent.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve.hf import LayerCall, PackedPositions, PartOfSum, ScaledExperts, paged_forward, vocab_size
from fa_serve.hf.latent_layers import latent_spec
from fa_serve.hf.surgery.fuse.latent import LatentAttention
from fa_serve.hf.surgery.fuse.layer import FusedLayer, LayerStep, cos_and_sin
from fa_serve.hf.surgery.fuse.parts import ROTATIONS, Call, NotFusedError, agree, build, rotations
from fa_serve.hf.surgery.fuse.router import FusedRouter
from fa_serve.hf.surgery.fuse.unit import FusedUnit
from fa_serve.spec import AttentionSpec

log = logging.getLogger("fa_serve.engine")

FAR = 1 << 20
"""What is added to the positions that a layer is told in the proof."""


class _Recorder:
    """Takes the place of a PagedBatch: notes each call of attention and returns the values, repeated for each query head."""

    def __init__(self, call: Call | None = None) -> None:
        self.call = call

    def attend(self, call: LayerCall) -> Tensor:
        v = call.value[0].transpose(0, 1)
        if self.call is not None:
            self.call.index = cast(int, call.module.layer_idx)
            self.call.heads = (call.query[0].transpose(0, 1), call.key[0].transpose(0, 1), v)
            self.call.options = {
                "left": call.window_size[0],
                "attention_chunk": call.attention_chunk,
                "softmax_scale": call.softmax_scale,
                "softcap": call.softcap,
                "sinks": call.sinks,
            }
        return _repeat_heads(v, call.query.shape[1])[None]


def _repeat_heads(v: Tensor, num_heads: int) -> Tensor:
    return v.repeat_interleave(num_heads // v.shape[1], dim=1)


@torch.no_grad()
def fuse(model: PreTrainedModel) -> int:
    """Give decoder layers of a causal model, which `attention_layers` accepts, the forward of `FusedLayer`.

    Returns how many layers are fused. Each kind of layer is proven once. For a kind that cannot be fused the log says why.
    """
    found = [m for m in model.modules() if isinstance(getattr(m, "self_attn", None), nn.Module)]
    calls = _observe(model, found)
    sums = [m.forward.all_reduce for m in model.modules() if isinstance(m.forward, PartOfSum)]
    # the proof of one rank may fail while that of another goes on
    with sums[0].paused() if sums else nullcontext():
        fused = _fuse_each(found, calls)
    log.info("%d of %d layers are fused", fused, len(found))
    return fused


def unfuse(model: PreTrainedModel) -> None:
    """Give what an earlier engine on this model has fused its own forward again."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FusedLayer | FusedRouter | FusedUnit | ScaledExperts):
            del module.forward


def cached_layers(model: PreTrainedModel, layers: Sequence[AttentionSpec]) -> list[AttentionSpec]:
    """What each layer asks of the KV cache, after `fuse`. layers: what they ask of attention by their own code"""
    cached = list(layers)
    for module in model.modules():
        fused = module.forward
        if isinstance(fused, FusedLayer) and isinstance(fused.attention, LatentAttention):
            cached[fused.index] = latent_spec(cached[fused.index], fused.attention.sizes)
    return cached


def _fuse_each(found: Sequence[nn.Module], calls: Sequence[Call]) -> int:
    """Fuse the layers that can be proven. Returns how many. calls: what each layer is given"""
    proofs: dict[str, str | NotFusedError] = {}  # by kind: which of ROTATIONS it has, or why it is not fused
    fused = 0
    for layer, call in zip(found, calls, strict=True):
        kind = _kind(layer, call)
        try:
            if kind not in proofs:
                proofs[kind] = _prove(layer, call)
            proof = proofs[kind]
            if isinstance(proof, NotFusedError):
                continue
            layer.forward = build(layer, call, proof)
            fused += 1
        except Exception as error:  # raised here, by the model's code or by a kernel's compiler
            reason = str(error)
            if reason not in map(str, proofs.values()):
                log.warning("%s layers are not fused: %s", type(layer).__name__, reason)
            proofs[kind] = NotFusedError(reason)
    return fused


def _observe(model: PreTrainedModel, found: Sequence[nn.Module]) -> list[Call]:
    """Run one forward of a few tokens and note what each layer is given."""
    recorder = _Recorder()
    calls = [Call(torch.empty(0), {}) for _ in found]

    def note(call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        call.kwargs = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "fa_serve_batch")}
        recorder.call = call

    hooks = [m.register_forward_pre_hook(partial(note, c), with_kwargs=True) for m, c in zip(found, calls, strict=True)]
    try:
        ids = torch.arange(1, 8, device=model.device) % vocab_size(model)
        positions = torch.tensor([0, 1, 2, 13, 5, 30, 31], device=model.device)
        paged_forward(model, ids, positions, recorder, ids[:1] * 0)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _kind(layer: nn.Module, call: Call) -> str:
    """A text that is equal for layers which differ only in the values of their weights."""
    settings = [
        (
            name,
            type(module).__name__,
            _has_hooks(module),
            [
                (key, value)
                for key, value in sorted(vars(module).items())
                if isinstance(value, bool | int | float | str | None) and key != "layer_idx"
            ],
        )
        for name, module in layer.named_modules()
    ]
    options = [(key, value if isinstance(value, int | float | None) else "tensor") for key, value in call.options.items()]
    return repr((settings, options, [(name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters()]))


def _has_hooks(module: nn.Module) -> bool:
    return bool(hasattr(module, "_hf_hook") or module._forward_hooks or module._forward_pre_hooks)


def _prove(layer: nn.Module, call: Call) -> str:
    """Compare a float32 copy of the layer with its fused form. Returns which of ROTATIONS the layer has."""
    if call.index < 0:
        raise NotFusedError("the layer computes no attention")
    if "position_embeddings" not in call.kwargs:
        raise NotFusedError("the layer is called without position_embeddings")
    if any(map(_has_hooks, layer.modules())):
        raise NotFusedError("the layer has hooks, which a fused layer would not call")
    original = copy.deepcopy(layer).float()
    expected = _expected(original, call)
    reasons = []
    for rotation in rotations(original, expected.call):
        wrong = _differences(build(original, expected.call, rotation), expected)
        if not wrong:
            return rotation
        reasons.append(f"{ROTATIONS[rotation]} its {' and '.join(wrong)} would change")
    raise NotFusedError("; ".join(reasons))


class _Expected(NamedTuple):
    """What a layer's own code computes in float32."""

    call: Call
    output: Tensor


def _expected(original: nn.Module, call: Call) -> _Expected:
    """Run a float32 layer by its own code on the input of `call`.

    The layer is told positions that are far beyond those of its rotary embedding. One that reads them, as to scale queries
    (Ministral, Llama 4), then differs from its fused form.
    """
    kwargs = dict(call.kwargs)
    kwargs["position_embeddings"] = _in_float32(kwargs["position_embeddings"])
    if isinstance(kwargs.get("position_ids"), Tensor):
        kwargs["position_ids"] = kwargs["position_ids"] + FAR
    if isinstance(kwargs.get("past_key_values"), PackedPositions):
        kwargs["past_key_values"] = PackedPositions(kwargs["past_key_values"].position_ids + FAR)
    own = Call(call.hidden.float(), kwargs)
    output = original(own.hidden.clone(), **kwargs, fa_serve_batch=_Recorder(own))
    if not isinstance(output, Tensor):
        raise NotFusedError(f"the layer returns a {type(output).__name__}, not a tensor")
    return _Expected(own, output)


def _in_float32(position_embeddings: Any) -> Any:
    if isinstance(position_embeddings, Tensor):
        return position_embeddings.to(torch.complex64)
    return tuple(x.float() for x in position_embeddings)


class _Seen(NamedTuple):
    """What attention is given by a fused layer, what is in the cache then, and the output of the layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    output: Tensor


def _run(fused: FusedLayer, expected: _Expected, total: int, *, fresh: bool) -> _Seen:
    """Compute the first `total` tokens. Attention returns the values of each token, as `_Recorder` does."""
    cos, sin = (x[:total] for x in cos_and_sin(expected.call.kwargs["position_embeddings"]))
    k_cache, v_cache = _cache_of(fused, expected)
    slots = torch.arange(total, device=cos.device)
    given: list[Tensor] = []

    def attend(*qkv: Tensor) -> Tensor:
        given.extend(x.clone() for x in qkv)
        return _repeat_heads(qkv[2], qkv[0].shape[1])

    step = LayerStep(cos, sin, k_cache, v_cache, slots, attend, fresh, {})
    output = fused.compute(expected.call.hidden[0, :total].clone(), step)
    q, k, v = given
    return _Seen(q, k, v, k_cache[0, :total], v_cache[0, :total], output)


def _cache_of(fused: FusedLayer, expected: _Expected) -> tuple[Tensor, Tensor]:
    """An empty page for the tokens of the proof."""
    _, k, v = expected.call.heads
    if isinstance(fused.attention, LatentAttention):
        rank, rope, _, _ = fused.attention.sizes
        page = torch.zeros(1, len(k), 1, rank + rope, device=k.device)
        return page, page[..., :rank]
    return torch.zeros(1, *k.shape, device=k.device), torch.zeros(1, *v.shape, device=v.device)


def _differences(fused: FusedLayer, expected: _Expected) -> list[str]:
    """What the fused layer computes differently. Raises NotFusedError if only a single token gives another result."""
    forms = (True, False) if isinstance(fused.attention, LatentAttention) else (False,)
    for fresh in forms:
        seen = _run(fused, expected, len(expected.output[0]), fresh=fresh)
        wrong = [name for name, x, y in _compared(seen, expected) if not agree(x, y)]
        if wrong:
            return wrong
    for fresh in forms:
        # a single token takes other kernels
        if not agree(_run(fused, expected, 1, fresh=fresh).output, expected.output[0, :1]):
            raise NotFusedError("the output for a single token would change")
    return []


def _compared(seen: _Seen, expected: _Expected) -> list[tuple[str, Tensor, Tensor]]:
    """(name, actual, wanted) of all that must agree.

    Latent attention may have the numbers of queries and keys in another order, and another number of them: their products are
    compared. Its values are part of the output.
    """
    q, k, v = expected.call.heads
    output = ("output", seen.output, expected.output[0])
    if seen.k_cache.shape[1:] == k.shape[1:] and seen.v_cache.shape[1:] == v.shape[1:]:
        return [
            ("queries", seen.q, q),
            ("keys", seen.k, k),
            ("values", seen.v, v),
            ("cached keys", seen.k_cache, k),
            ("cached values", seen.v_cache, v),
            output,
        ]
    own = [("cached keys", seen.k_cache, seen.k)] if seen.k.shape == seen.k_cache.shape else [("values", seen.v, v)]
    return [("scores", _scores(seen.q, seen.k), _scores(q, k)), *own, output]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """(num_heads, total, total): the products of all queries and keys."""
    return torch.einsum("qhd,khd->hqk", q, _repeat_heads(k, q.shape[1]))
