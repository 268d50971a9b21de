"""Decoder layers of the Llama kind, computed by few kernels instead of many: found by their structure, proven by their result.

    fused = fuse(model)          # how many of its layers; the others run as they are, and the log says why

A layer is two steps, each adding to the stream of hidden states: attention on q, k, v projections, and a gated unit (or any
module called `mlp`). Norms stand before a step (Llama, Mistral, Qwen, Granite, Phi), after it (OLMo 2), or both (Gemma). Fused,
it is some ten launches: q/k/v and gate/up are one product each, the norm of queries and keys, the rotary embedding and the
write to the cache are one kernel, and the output products add to the stream by themselves.

Nothing is recognised by name of class. Each kind of layer (modules, their settings, what it asks of attention) is computed by
its own code and by ours in float32 on the same input, and fused only if queries, keys, values, the cache and the result agree.
Merged weights take no more memory: the parts become views of the whole. A call that is not the engine's (`model.generate`)
goes through the model's own code. Left out: the kernels (layers.py), the embedding, the last norm and the head.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve import ops
from fa_serve.hf import LayerCall, PagedBatch, paged_forward

log = logging.getLogger("fa_serve.engine")

TOLERANCE = 1e-4  # of the largest number, in float32: another order of sums, and nothing more
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Product(NamedTuple):
    """x @ weight.T + bias"""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Stands in the place of a layer's `forward`; `options` are what the layer asks of attention."""

    original: Callable[..., Any]
    index: int
    num_heads: int
    head_dim: int
    options: dict[str, Any]
    before_attention: ops.Norm | None
    after_attention: ops.Norm | None
    before_mlp: ops.Norm | None
    after_mlp: ops.Norm | None
    q_norm: ops.Norm | None
    k_norm: ops.Norm | None
    qkv: Product
    o: Product
    gate_up: Product | None
    down: Product | None
    activation: str
    mlp: nn.Module
    rotary: bool
    multiplier: float

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs.get("fa_serve_batch")
        if not isinstance(batch, PagedBatch):
            return self.original(hidden_states, *args, **kwargs)
        attend = partial(batch.attention, self.index, **self.options)
        cos, sin = kwargs["position_embeddings"]
        given = hidden_states[0], cos[0], sin[0], *batch.kv_caches[self.index], batch.slot_mapping, attend
        return self.compute(*given, **batch.descale(self.index))[None]

    def compute(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        attend: Attend,
        **options: Any,
    ) -> Tensor:
        """x (total, hidden) is overwritten; options: of `rotary_store_kv`."""
        total = x.shape[0]
        num_kv_heads = k_cache.shape[2]
        qkv = ops.linear(x, *self.qkv, norm=self.before_attention)
        parts = [self.num_heads, num_kv_heads, num_kv_heads]
        if self.rotary:
            options |= {"cos": cos, "sin": sin}
        if self.q_norm is not None and self.k_norm is not None:
            if self.q_norm.weight.shape[0] == self.head_dim:
                options |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
            else:  # of all heads together
                widths = [n * self.head_dim for n in parts]
                for norm, part in zip((self.q_norm, self.k_norm), torch.split(qkv, widths, dim=1)[:2], strict=True):
                    ops.rms_norm(part, norm, out=part)
        ops.rotary_store_kv(qkv, k_cache, v_cache, slot_mapping, num_heads=self.num_heads, **options)
        heads = torch.split_with_sizes(qkv.view(total, -1, self.head_dim), parts, dim=1)
        x = self._add(x, attend(*heads).flatten(1), self.o, self.after_attention)
        if self.gate_up is not None and self.down is not None:
            h = ops.linear(x, *self.gate_up, norm=self.before_mlp, activation=self.activation)
            return self._add(x, h, self.down, self.after_mlp)
        h = self.mlp((x if self.before_mlp is None else ops.rms_norm(x, self.before_mlp))[None])
        h = (h[0] if isinstance(h, tuple) else h)[0]  # a mixture of experts may return its router's choice as well
        return x.add_(h, alpha=self.multiplier) if self.after_mlp is None else ops.rms_norm(h, self.after_mlp, residual=x)

    def _add(self, x: Tensor, h: Tensor, product: Product, norm: ops.Norm | None) -> Tensor:
        if norm is None:
            return ops.linear(h, *product, residual=x, alpha=self.multiplier)
        return ops.rms_norm(ops.linear(h, *product), norm, residual=x)


class NotFusedError(Exception):
    """Why a layer stays as it is."""


@dataclass(slots=True)
class _Call:
    """What a layer was given, and what it asked of attention."""

    hidden: Tensor
    kwargs: dict[str, Any]
    index: int = -1
    heads: tuple[Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


class _Recorder:
    """Rides in the place of a PagedBatch, notes the calls and answers with the values themselves."""

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
        return _spread(v, call.query.shape[1])[None]


def _spread(v: Tensor, num_heads: int) -> Tensor:
    return v.repeat_interleave(num_heads // v.shape[1], dim=1)


@torch.no_grad()
def fuse(model: PreTrainedModel) -> int:
    """Give the decoder layers of a causal model, which `attention_layers` accepts, the forward of `FusedLayer`.

    Returns how many were fused. Each kind of layer is proven by itself; those that cannot be are logged with the reason.
    """
    found = [m for m in model.modules() if isinstance(getattr(m, "self_attn", None), nn.Module)]
    proven: dict[str, bool | str] = {}
    fused = 0
    for layer, call in zip(found, _observe(model, found), strict=True):
        kind = _kind(layer, call)
        try:
            if kind not in proven:
                proven[kind] = _prove(layer, call)
            if isinstance(rotary := proven[kind], str):
                raise NotFusedError(rotary)
            layer.forward = _build(layer, call, rotary=rotary)
            fused += 1
        except Exception as error:  # of the model's code or of a kernel's compiler
            if str(error) not in proven.values():
                log.warning("layers like %s run as they are: %s", type(layer).__name__, error)
            proven[kind] = str(error)
    log.info("%d of %d layers run fused", fused, len(found))
    return fused


def _observe(model: PreTrainedModel, found: Sequence[nn.Module]) -> list[_Call]:
    """One forward of a few tokens, and what each layer is given on it."""
    recorder = _Recorder()
    calls = [_Call(torch.empty(0), {}) for _ in found]

    def note(call: _Call, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call.hidden = (args[0] if args else kwargs["hidden_states"]).clone()
        call.kwargs = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "fa_serve_batch")}
        recorder.call = call

    hooks = [m.register_forward_pre_hook(partial(note, c), with_kwargs=True) for m, c in zip(found, calls, strict=True)]
    try:
        ids = torch.arange(1, 8, device=model.device) % int(cast(Any, model).get_input_embeddings().weight.shape[0])
        positions = torch.tensor([0, 1, 2, 13, 5, 30, 31], device=model.device)
        paged_forward(model, ids, positions, recorder, ids[:1] * 0)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _kind(layer: nn.Module, call: _Call) -> str:
    """Layers of one kind differ in their weights alone."""
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
    """Compare a float32 copy of the layer with what it would be fused. -> does it turn queries and keys?"""
    if call.index < 0:
        raise NotFusedError("it has no attention")
    if any(map(_has_hooks, layer.modules())):
        raise NotFusedError("it has hooks, which a fused layer would not call")
    original = copy.deepcopy(layer).float()
    kwargs = {
        name: tuple(x.float() for x in value) if name == "position_embeddings" else value for name, value in call.kwargs.items()
    }
    cos, sin = kwargs["position_embeddings"]
    theirs = _Call(call.hidden.float(), kwargs)
    expected = original(theirs.hidden.clone(), **kwargs, fa_serve_batch=_Recorder(theirs))
    if not isinstance(expected, Tensor):
        raise NotFusedError(f"it returns {type(expected).__name__}, not a tensor")
    q, k, v = theirs.heads
    if k.shape != v.shape:
        raise NotFusedError(f"its values are of another size than its keys, {tuple(v.shape)} and {tuple(k.shape)}")
    k_cache, v_cache = (torch.zeros(1, len(x), *x.shape[1:], device=x.device) for x in (k, v))
    slots = torch.arange(len(k), device=k.device)
    reasons = []
    for rotary in (True, False):
        mine = _build(original, theirs, rotary=rotary)
        heads: list[Tensor] = []

        def attend(*qkv: Tensor, heads: list[Tensor] = heads) -> Tensor:
            heads += [x.clone() for x in qkv]
            return _spread(qkv[2], qkv[0].shape[1])

        result = mine.compute(theirs.hidden[0].clone(), cos[0], sin[0], k_cache, v_cache, slots, attend)
        named = ("queries", "keys", "values", "cached keys", "cached values", "result")
        ours = (*heads, k_cache[0], v_cache[0], result)
        wrong = [name for name, x, y in zip(named, ours, (q, k, v, k, v, expected[0]), strict=True) if not _agree(x, y)]
        if not wrong:
            # one token takes kernels of its own
            alone = mine.compute(theirs.hidden[0, :1].clone(), cos[0, :1], sin[0, :1], k_cache, v_cache, slots[:1], attend)
            if not _agree(alone, expected[0, :1]):
                raise NotFusedError("a token by itself would give another result")
            return rotary
        reasons.append(f"{'with' if rotary else 'without'} rotary embedding its {' and '.join(wrong)} would be others")
    raise NotFusedError("; ".join(reasons))


def _agree(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x - y).abs().max() <= TOLERANCE * y.abs().max())


def _build(layer: nn.Module, call: _Call, *, rotary: bool) -> FusedLayer:
    """Merges weights on the way. Raises NotFusedError or AttributeError for a layer that lacks a part."""
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
        raise NotFusedError(f"it multiplies what it has normed by {multiplier}")
    if key.shape[2] % 2:
        raise NotFusedError(f"its heads are of an odd size, {key.shape[2]}")
    gate_up = down = None
    if isinstance(getattr(mlp, "down_proj", None), nn.Linear):
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
    """Weights around 1 or around 0: whichever gives what the module gives; the proof has the last word."""
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
    raise NotFusedError(f"its activation {type(function).__name__} is none of {ops.ACTIVATIONS}")


def _product(linear: Any) -> Product:
    if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
        raise NotFusedError(f"a projection is a {type(linear).__name__}, not a plain Linear")
    if not linear.weight.is_contiguous():
        raise NotFusedError(f"a projection's weights are not contiguous, strides {linear.weight.stride()}")
    return Product(linear.weight, linear.bias)


def _merge(module: nn.Module, *names: str) -> Product:
    """The rows of several products as one; each becomes a view of it."""
    linears = [getattr(module, name) for name in names]
    parts = [_product(linear) for linear in linears]
    if len(parts) == 1:
        return parts[0]
    whole: list[Tensor | None] = [None, None]
    for place, name in enumerate(("weight", "bias")):
        tensors = [getattr(part, name) for part in parts]
        if any(x is None for x in tensors) != all(x is None for x in tensors):
            raise NotFusedError(f"of {names} some have a bias and some have not")
        if tensors[0] is None:
            continue
        whole[place] = merged = torch.cat([x.detach() for x in tensors])
        start = 0
        for linear, old in zip(linears, tensors, strict=True):
            view = merged[start : start + old.shape[0]]
            setattr(linear, name, nn.Parameter(view, requires_grad=old.requires_grad))
            start += old.shape[0]
    assert whole[0] is not None
    return Product(whole[0], whole[1])
