"""The parts of a fused layer, taken from the modules of a decoder layer and merged.

    fused = build(layer, call, "halves")      # raises NotFusedError for a part that no fused layer can have

Modules are found by their names, and what they compute is guessed from their weights and settings. A wrong guess is found when
the layer is proven (fusion.py). Merged weights take no additional memory: the separate weights become views of the merged ones.
Left out: how a fused layer computes (layer.py, latent.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf import PartOfSum, expert_modules
from fa_serve.hf.latent_layers import LatentSizes, latent_sizes
from fa_serve.hf.surgery.fuse.latent import LatentAttention
from fa_serve.hf.surgery.fuse.layer import FusedAttention, FusedLayer, HeadsAttention, Product, Tables, cos_and_sin
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear

ROTATIONS = {
    "halves": "with rotary embedding",
    "half tables": "with rotary embedding from half as many angles",
    "neighbours": "with rotary embedding of neighbours",
    "none": "without rotary embedding",
}
"""What a layer may do to queries and keys, and how messages say it."""
TABLES: dict[str, Tables] = {"halves": "twice", "half tables": "once"}
"""Of ROTATIONS, those of heads, and the tables that they are given."""


TOLERANCE = 1e-4
"""Largest allowed difference in float32, relative to the largest number: another order of summation, and nothing more."""


class NotFusedError(Exception):
    """Why a layer is not fused."""


def agree(x: Tensor, y: Tensor) -> bool:
    """Whether a fused form has computed what the model's own code has."""
    return x.shape == y.shape and bool((x - y).abs().max() <= TOLERANCE * y.abs().max())


@dataclass(slots=True)
class Call:
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


def rotations(layer: nn.Module, call: Call) -> tuple[str, ...]:
    """Which of ROTATIONS the layer may have, in the order in which they are tried."""
    if _sizes(layer, call) is not None:
        return ("halves", "neighbours")
    cos, _ = cos_and_sin(call.kwargs["position_embeddings"])
    fits = 2 * cos.shape[1] <= call.heads[0].shape[2]
    return ("halves", "half tables", "none") if fits else ("halves", "none")


def _sizes(layer: nn.Module, call: Call) -> LatentSizes | None:
    _, num_heads, head_dim = call.heads[0].shape
    return latent_sizes(cast(nn.Module, layer.self_attn), num_heads, head_dim)


def build(layer: nn.Module, call: Call, rotation: str) -> FusedLayer:
    """The fused form of a layer, whose weights are merged on the way. rotation: one of `rotations`

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
    multiplier = float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))
    if multiplier != 1.0 and hasattr(layer, "post_feedforward_layernorm"):
        raise NotFusedError(f"it multiplies its parts by {multiplier} after they are normalised")
    sizes = _sizes(layer, call)
    unit = gated_unit(mlp)
    return FusedLayer(
        original=partial(type(layer).forward, layer),
        index=call.index,
        options=call.options if sizes is None else _latent_options(call),
        before_attention=norms[0],
        after_attention=norms[1],
        before_mlp=norms[2],
        after_mlp=norms[3],
        attention=_heads(attention, call, rotation) if sizes is None else _latent(attention, call, sizes, rotation),
        o=_product(attention.o_proj),
        gate_up=None if unit is None else unit.gate_up,
        down=None if unit is None else unit.down,
        activation="" if unit is None else unit.activation,
        mlp=mlp,
        multiplier=multiplier,
    )


class GatedUnit(NamedTuple):
    """The projections of a gated unit, and the activation of its gate."""

    gate_up: Product
    down: Product
    activation: str


def gated_unit(mlp: Any) -> GatedUnit | None:
    """The parts of a module that is a gated unit, whose gate and up projections are merged; None for another module."""
    if not isinstance(getattr(mlp, "down_proj", None), nn.Linear | QuantizedLinear):
        return None
    down = _product(mlp.down_proj)
    gate_up = _merge(mlp, "gate_up_proj") if hasattr(mlp, "gate_up_proj") else _merge(mlp, "gate_proj", "up_proj")
    return GatedUnit(gate_up, down, _activation(mlp))


def beside_experts(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(experts, module) for each module that stands beside a module of experts, such as their router."""
    experts = {*expert_modules(model), *(m for m in model.modules() if isinstance(m, QuantizedExperts))}
    for parent in model.modules():
        children = list(parent.children())
        found = [child for child in children if child in experts]
        for child in children if found else ():
            if child not in experts:
                yield found[0], child


def _heads(attention: Any, call: Call, rotation: str) -> FusedAttention:
    """Attention on q, k and v projections."""
    query, key, value = call.heads
    if key.shape != value.shape:
        raise NotFusedError(f"keys and values have different shapes, {tuple(key.shape)} and {tuple(value.shape)}")
    if key.shape[2] % 2:
        raise NotFusedError(f"head_dim must be even, got {key.shape[2]}")
    qkv = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    return HeadsAttention(
        num_heads=query.shape[1],
        head_dim=query.shape[2],
        q_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        qkv=_merge(attention, *qkv),
        tables=TABLES.get(rotation),
    )


def _latent(attention: Any, call: Call, sizes: LatentSizes, rotation: str) -> FusedAttention:
    """Attention on latent keys."""
    num_heads = call.heads[0].shape[1]
    kv_up = _product(attention.kv_b_proj)
    if not isinstance(kv_up.weight, Tensor) or kv_up.bias is not None:
        raise NotFusedError("the projection of latent vectors must be a plain matrix without bias")
    if sizes.rope % 2 or min(sizes) < 1:
        raise NotFusedError(f"the parts of its latent keys must be positive, and the rotated one even, got {sizes}")
    has_two = getattr(attention, "q_a_proj", None) is not None
    return LatentAttention(
        num_heads=num_heads,
        sizes=sizes,
        down=_merge(attention, "q_a_proj" if has_two else "q_proj", "kv_a_proj_with_mqa"),
        q_norm=_norm(attention.q_a_layernorm) if has_two else None,
        q_up=_product(attention.q_b_proj) if has_two else None,
        kv_norm=_norm(attention.kv_a_layernorm),
        kv_up=kv_up.weight.detach().view(num_heads, sizes.nope + sizes.head_dim_v, sizes.rank),
        pairing="halves" if rotation == "halves" else "neighbours",
    )


def _latent_options(call: Call) -> dict[str, Any]:
    """What the layer asks of attention. The default of the scale is that of its heads, which latent keys do not have."""
    options = dict(call.options)
    if options["left"] >= 0 or options["attention_chunk"] or options["softcap"] or options["sinks"] is not None:
        raise NotFusedError("latent attention with a window, chunks, softcap or sinks is not fused")
    if options["softmax_scale"] is None:
        options["softmax_scale"] = call.heads[0].shape[2] ** -0.5
    return options


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
    replaced = vars(linear).get("forward")
    if replaced is not None and not isinstance(replaced, PartOfSum):
        raise NotFusedError(f"the forward of a projection is replaced by {type(replaced).__name__}")
    all_reduce = None if replaced is None else replaced.all_reduce
    if isinstance(linear, QuantizedLinear):
        return Product(linear.weight, linear.bias, all_reduce)
    # a subclass of Parameter may keep its numbers in another way, as torchao does
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or not linear.weight.is_floating_point():
        raise NotFusedError(f"a projection must be a plain nn.Linear of floats, got {type(linear).__name__}")
    if not linear.weight.is_contiguous():
        raise NotFusedError(f"the weights of a projection must be contiguous, got strides {linear.weight.stride()}")
    return Product(linear.weight, linear.bias, all_reduce)


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
