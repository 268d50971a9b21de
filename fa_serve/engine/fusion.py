"""Finds decoder layers of the Llama kind by their structure, proves that fusing them changes nothing, and fuses them.

    fused = fuse(model)          # how many layers; the others run as they are, and the log says why

No layer is recognised by the name of its class. Each kind of layer (its modules, their settings, what it asks of attention) is
computed by its own code and by `FusedLayer` in float32 on the same input. It is fused only if queries, keys, values, the cache
and the output agree. Merged weights take no additional memory: the separate weights become views of the merged ones.

A layer that is divided between ranks is fused by each rank alone: both forms are compared before their parts are added up.

Left out: how a fused layer computes (fused_layer.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve import ops
from fa_serve.engine.fused_layer import FusedLayer, Product
from fa_serve.hf import LayerCall, PartOfSum, paged_forward, vocab_size
from fa_serve.hf.quantized_linear import QuantizedLinear

log = logging.getLogger("fa_serve.engine")

TOLERANCE = 1e-4
"""Largest allowed difference in float32, relative to the largest number: another order of summation, and nothing more."""


class NotFusedError(Exception):
    """Why a layer is not fused."""


@dataclass(slots=True)
class _Call:
    """What a layer was given, and what it asked of attention.

    index:   number of the layer, -1 if it has not called attention
    heads:   queries, keys and values, (total, heads, head_dim) each
    options: the other arguments of attention
    """

    hidden: Tensor
    kwargs: dict[str, Any]
    index: int = -1
    heads: tuple[Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class _Recorder:
    """Takes the place of a PagedBatch: notes each call of attention and returns the values, repeated for each query head."""

    def __init__(self, call: _Call | None = None) -> None:
        self.call = call

    def attend(self, call: LayerCall) -> Tensor:
        v = call.value[0].transpose(0, 1)
        if self.call is not None:
            self.call.index = cast(int, call.module.layer_idx)
            self.call.heads = (call.query[0].transpose(0, 1), call.key[0].transpose(0, 1), v)
            self.call.options = {
                "left": call.window_size[0],
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


def _fuse_each(found: Sequence[nn.Module], calls: Sequence[_Call]) -> int:
    """Fuse the layers that can be proven. Returns how many. calls: what each layer is given"""
    proofs: dict[str, bool | NotFusedError] = {}  # by kind: whether it is rotary, or why it is not fused
    fused = 0
    for layer, call in zip(found, calls, strict=True):
        kind = _kind(layer, call)
        try:
            if kind not in proofs:
                proofs[kind] = _prove(layer, call)
            proof = proofs[kind]
            if isinstance(proof, NotFusedError):
                continue
            layer.forward = _build(layer, call, rotary=proof)
            fused += 1
        except Exception as error:  # raised here, by the model's code or by a kernel's compiler
            reason = str(error)
            if reason not in map(str, proofs.values()):
                log.warning("%s layers are not fused: %s", type(layer).__name__, reason)
            proofs[kind] = NotFusedError(reason)
    return fused


def _observe(model: PreTrainedModel, found: Sequence[nn.Module]) -> list[_Call]:
    """Run one forward of a few tokens and note what each layer is given."""
    recorder = _Recorder()
    calls = [_Call(torch.empty(0), {}) for _ in found]

    def note(call: _Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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


def _kind(layer: nn.Module, call: _Call) -> str:
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


def _prove(layer: nn.Module, call: _Call) -> bool:
    """Compare a float32 copy of the layer with its fused form. Returns whether the layer rotates queries and keys."""
    if call.index < 0:
        raise NotFusedError("the layer computes no attention")
    if "position_embeddings" not in call.kwargs:
        raise NotFusedError("the layer is called without position_embeddings")
    if any(map(_has_hooks, layer.modules())):
        raise NotFusedError("the layer has hooks, which a fused layer would not call")
    original = copy.deepcopy(layer).float()
    expected = _expected(original, call)
    reasons = []
    for rotary in (True, False):
        wrong = _differences(_build(original, expected.call, rotary=rotary), expected)
        if not wrong:
            return rotary
        reasons.append(f"{'with' if rotary else 'without'} rotary embedding its {' and '.join(wrong)} would change")
    raise NotFusedError("; ".join(reasons))


class _Expected(NamedTuple):
    """What a layer's own code computes in float32."""

    call: _Call
    output: Tensor


def _expected(original: nn.Module, call: _Call) -> _Expected:
    """Run a float32 layer by its own code on the input of `call`."""
    kwargs = {
        name: tuple(x.float() for x in value) if name == "position_embeddings" else value for name, value in call.kwargs.items()
    }
    own = _Call(call.hidden.float(), kwargs)
    output = original(own.hidden.clone(), **kwargs, fa_serve_batch=_Recorder(own))
    if not isinstance(output, Tensor):
        raise NotFusedError(f"the layer returns a {type(output).__name__}, not a tensor")
    _, k, v = own.heads
    if k.shape != v.shape:
        raise NotFusedError(f"keys and values have different shapes, {tuple(k.shape)} and {tuple(v.shape)}")
    return _Expected(own, output)


def _differences(fused: FusedLayer, expected: _Expected) -> list[str]:
    """What the fused layer computes differently. Raises NotFusedError if only a single token gives another result."""
    q, k, v = expected.call.heads
    hidden = expected.call.hidden[0]
    cos, sin = (x[0] for x in expected.call.kwargs["position_embeddings"])
    k_cache = torch.zeros(1, *k.shape, device=k.device)
    v_cache = torch.zeros(1, *v.shape, device=v.device)
    slots = torch.arange(len(k), device=k.device)
    heads: list[Tensor] = []

    def attend(*qkv: Tensor) -> Tensor:
        heads.extend(x.clone() for x in qkv)
        return _repeat_heads(qkv[2], qkv[0].shape[1])

    output = fused.compute(hidden.clone(), cos, sin, k_cache, v_cache, slots, attend)
    names = ("queries", "keys", "values", "cached keys", "cached values", "output")
    actual = (*heads, k_cache[0], v_cache[0], output)
    wanted = (q, k, v, k, v, expected.output[0])
    wrong = [name for name, x, y in zip(names, actual, wanted, strict=True) if not _agree(x, y)]
    if not wrong:
        # a single token takes other kernels
        alone = fused.compute(hidden[:1].clone(), cos[:1], sin[:1], k_cache, v_cache, slots[:1], attend)
        if not _agree(alone, expected.output[0, :1]):
            raise NotFusedError("the output for a single token would change")
    return wrong


def _agree(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x - y).abs().max() <= TOLERANCE * y.abs().max())


def _build(layer: nn.Module, call: _Call, *, rotary: bool) -> FusedLayer:
    """The fused form of a layer, whose weights are merged on the way.

    Raises NotFusedError or AttributeError for a layer that lacks a part.
    """
    attention = cast(Any, layer.self_attn)
    mlp = cast(Any, layer).mlp
    names: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    if hasattr(layer, "post_feedforward_layernorm"):
        before = ("input_layernorm", "pre_feedforward_layernorm")
        first, second = (name if hasattr(layer, name) else None for name in before)
        names = (first, "post_attention_layernorm", second, "post_feedforward_layernorm")
    norms = [None if name is None else _norm(getattr(layer, name)) for name in names]
    query, key, _ = call.heads
    multiplier = float(getattr(layer, "residual_multiplier", 1.0))
    if multiplier != 1.0 and hasattr(layer, "post_feedforward_layernorm"):
        raise NotFusedError(f"it multiplies its parts by {multiplier} after they are normalised")
    if key.shape[2] % 2:
        raise NotFusedError(f"head_dim must be even, got {key.shape[2]}")
    gate_up = down = None
    if isinstance(getattr(mlp, "down_proj", None), nn.Linear | QuantizedLinear):
        down = _product(mlp.down_proj)
        gate_up = _merge(mlp, "gate_up_proj") if hasattr(mlp, "gate_up_proj") else _merge(mlp, "gate_proj", "up_proj")
    qkv = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    return FusedLayer(
        original=partial(type(layer).forward, layer),
        index=call.index,
        num_heads=query.shape[1],
        head_dim=query.shape[2],
        options=call.options,
        before_attention=norms[0],
        after_attention=norms[1],
        before_mlp=norms[2],
        after_mlp=norms[3],
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        qkv=_merge(attention, *qkv),
        o=_product(attention.o_proj),
        gate_up=gate_up,
        down=down,
        activation="" if gate_up is None else _activation(mlp),
        mlp=mlp,
        rotary=rotary,
        multiplier=multiplier,
    )


def _norm(module: Any) -> ops.Norm:
    """The RMS norm that a module computes. Its weights are meant as they are or with 1 added: what fits better is taken.

    A wrong guess is found when the layer is proven.
    """
    if "forward" in vars(module):
        raise NotFusedError(f"the forward of a norm is replaced by {type(module.forward).__name__}")
    weight = module.weight
    eps = float(getattr(module, "variance_epsilon", None) or module.eps)
    x = torch.linspace(-1.0, 2.0, weight.shape[0], dtype=weight.dtype, device=weight.device)[None]
    expected = module(x).float()
    tried = [ops.Norm(weight, eps, offset) for offset in (0.0, 1.0)]
    return min(tried, key=lambda norm: float((ops.rms_norm(x, norm).float() - expected).abs().max()))


def _activation(mlp: Any) -> str:
    function = getattr(mlp, "act_fn", None) or mlp.activation_fn
    x = torch.linspace(-5.0, 5.0, 64, device=mlp.down_proj.weight.device)[None]
    expected = function(x)
    pairs = torch.cat([x, torch.ones_like(x)], dim=1)
    for name in ops.ACTIVATIONS:
        if float((ops.act_and_mul(pairs, name) - expected).abs().max()) < 1e-5:
            return name
    raise NotFusedError(f"its activation must be one of {ops.ACTIVATIONS}, got {type(function).__name__}")


def _product(linear: Any) -> Product:
    if isinstance(linear, QuantizedLinear):
        return Product(linear.weight, linear.bias)
    # a subclass of Parameter may keep its numbers in another way, as torchao does
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or not linear.weight.is_floating_point():
        raise NotFusedError(f"a projection must be a plain nn.Linear of floats, got {type(linear).__name__}")
    if not linear.weight.is_contiguous():
        raise NotFusedError(f"the weights of a projection must be contiguous, got strides {linear.weight.stride()}")
    replaced = vars(linear).get("forward")
    if replaced is not None and not isinstance(replaced, PartOfSum):
        raise NotFusedError(f"the forward of a projection is replaced by {type(replaced).__name__}")
    return Product(linear.weight, linear.bias, None if replaced is None else replaced.all_reduce)


def _merge(module: nn.Module, *names: str) -> Product:
    """Merge the rows of several projections into one. The weights of each become a view of the merged ones."""
    linears = [getattr(module, name) for name in names]
    parts = [_product(linear) for linear in linears]
    if len(parts) == 1:
        return parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)):
        raise NotFusedError(f"all or none of {names} must have a bias")
    weight = _concatenate([part.weight for part in parts])
    bias = torch.cat([x.detach() for x in biases]) if biases else None
    start = 0
    for linear, part in zip(linears, parts, strict=True):
        stop = start + part.weight.shape[0]
        if isinstance(weight, Tensor):
            linear.weight = nn.Parameter(weight[start:stop], requires_grad=linear.weight.requires_grad)
        else:
            linear.weight = weight.rows(start, stop)
        if bias is not None:
            linear.bias = nn.Parameter(bias[start:stop], requires_grad=linear.bias.requires_grad)
        start = stop
    return Product(weight, bias)


def _concatenate(weights: Sequence[ops.Weight]) -> ops.Weight:
    """The rows of several weights as one weight. Raises NotFusedError for weights that are not kept in the same way."""
    plain = [weight.detach() for weight in weights if isinstance(weight, Tensor)]
    quantized = [weight for weight in weights if isinstance(weight, ops.QuantizedWeight)]
    if plain and quantized:
        raise NotFusedError("all or none of the projections that are merged must be quantised")
    try:
        return torch.cat(plain) if plain else ops.merge_rows(quantized)
    except ValueError as error:
        raise NotFusedError(str(error)) from None
