"""A decoder layer that is built like Llama's, computed by few fused kernels instead of many.

A layer has two parts, each of which adds to the residual stream. The first is attention, on q, k and v projections or on latent
keys (latent.py), or a mixer that keeps a state (mixers.py). The second is an MLP, which is a gated unit or any other module
called `mlp`. Norms come before a part (Llama, Mistral, Qwen, Granite, Phi), after it (OLMo 2), or both (Gemma). A fused layer
with q, k and v projections takes about ten launches: q/k/v and gate/up are one matrix product each; the norm of queries and
keys, the rotary embedding and the write to the cache are one kernel; and the output projections add to the residual stream.

Left out: which layers can be computed like this (fusion.py), how their projections and norms are found (parts.py), the kernels
(fa_serve.ops), the last norm (last_norm.py), the embedding and the head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.adapter.paged import PagedBatch
from fa_serve.hf.adapter.translate import LayerCall
from fa_serve.hf.lora.product import project
from fa_serve.hf.surgery.fuse.mixers import StateStep, state_cache
from fa_serve.hf.surgery.fuse.parts import FusedProduct, merge_products, norm_of
from fa_serve.hf.surgery.proof import NotReplacedError

log = logging.getLogger("fa_serve.hf")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (total, heads, head_dim) -> (total, num_heads, head_dim_v). The keys and values are already in the cache."""


class LayerStep(NamedTuple):
    """The arguments of a step for the attention of one layer.

    cos, sin:         the rotary embedding, (total, dims); see `cos_and_sin`
    k_cache, v_cache, slot_mapping: as in `fa_serve.store_kv`
    attend:           attention to all keys of each sequence
    fresh:            whether all keys of all sequences are those of this step, see `PagedBatch`
    descale:          k_descale and v_descale of a float8 cache; empty for other caches
    record:           computes `HeadsAttention.attend` so that autograd records it (hf/exact_gradients.py); None outside a
                      training forward
    """

    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    attend: Attend
    fresh: bool
    descale: dict[str, Any]
    record: Callable[[HeadsAttention, Tensor, LayerStep], Tensor] | None = None


@runtime_checkable
class TrainsLayers(Protocol):
    """A batch that computes fused layers itself, because it needs their gradients (hf/exact_forward.py)."""

    def train_layer(self, layer: FusedLayer, hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The output of `layer.compute` on the arguments of the layer's forward, with gradients."""
        ...


Tables = Literal["twice", "once"]
"""How often a row of cos or sin contains each angle: transformers repeats it for both halves of a head, except in gpt-oss."""


class FusedAttention(Protocol):
    """The attention of a fused layer, or a mixer instead of it, without its output projection."""

    def compute(self, x: Tensor, norm: ops.Norm | None, step: Any) -> Tensor:
        """Normalise x (total, hidden), project it, write keys and values to the cache and attend -> (total, heads * dim).

        step: a LayerStep; for a mixer, a StateStep
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadsAttention:
    """Attention on q, k and v projections.

    num_heads, head_dim: sizes of the queries
    q_norm, k_norm: norms of queries and keys, of each head or of all heads together; None without norms
    qkv:    the merged projection
    tables: how often the tables of the rotary embedding contain each angle; None if queries and keys are not rotated
    gated:  whether each query head of the projection is followed by a gate; the head's output is multiplied by its sigmoid
            (Qwen3-Next)
    """

    num_heads: int
    head_dim: int
    q_norm: ops.Norm | None
    k_norm: ops.Norm | None
    qkv: FusedProduct
    tables: Tables | None
    gated: bool = False

    @property
    def num_kv_heads(self) -> int:
        queries = self.num_heads * (2 if self.gated else 1)
        return (self.qkv.weight.shape[0] // self.head_dim - queries) // 2

    def compute(self, x: Tensor, norm: ops.Norm | None, step: LayerStep) -> Tensor:
        qkv = project(self.qkv, x, norm=norm)
        out = self.attend(qkv, step) if step.record is None else step.record(self, qkv, step)
        if self.gated:
            gate = qkv.view(qkv.shape[0], -1, self.head_dim)[:, 1 : 2 * self.num_heads : 2]
            out = ops.gate_heads(out, gate, "sigmoid")
        return out.flatten(1)

    def attend(self, qkv: Tensor, step: LayerStep) -> Tensor:
        """Normalise and rotate queries and keys in place, write keys and values to the cache and attend.

        qkv: (total, rows of the projection) -> (total, num_heads, head_dim)
        """
        num_kv_heads = step.k_cache.shape[2]
        options = dict(step.descale)
        if self.tables is not None:
            cos, sin = self.angles(step)
            options |= {"cos": cos, "sin": sin}
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_heads:
                options |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
            else:
                q, k = self.columns(qkv, num_kv_heads)
                ops.rms_norm(q, self.q_norm, out=q)
                ops.rms_norm(k, self.k_norm, out=k)
        ops.rotary_store_kv(qkv, step.k_cache, step.v_cache, step.slot_mapping, num_heads=self.num_heads, **options)
        return step.attend(*self.heads(qkv, num_kv_heads))

    @property
    def norms_heads(self) -> bool:
        """Whether each head is normalised by itself, and not all heads together."""
        return self.q_norm is not None and self.q_norm.weight.shape[0] == self.head_dim

    def angles(self, step: LayerStep) -> tuple[Tensor, Tensor]:
        """cos and sin of a step with each angle once, (total, rotary_dim / 2)."""
        angles = step.cos.shape[1] // (2 if self.tables == "twice" else 1)
        return step.cos[:, :angles], step.sin[:, :angles]

    def columns(self, qkv: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        """The columns of all queries and of all keys, (total, heads * head_dim) each, as views."""
        parts = [n * self.head_dim for n in self._heads_of(num_kv_heads)]
        q, k, _ = torch.split(qkv, parts, dim=1)
        return q, k

    def heads(self, qkv: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """The heads of q, k and v, (total, heads, head_dim) each, as views."""
        parts = self._heads_of(num_kv_heads)
        q, k, v = torch.split_with_sizes(qkv.view(qkv.shape[0], -1, self.head_dim), parts, dim=1)
        return q[:, :: parts[0] // self.num_heads], k, v

    def _heads_of(self, num_kv_heads: int) -> list[int]:
        return [self.num_heads * (2 if self.gated else 1), num_kv_heads, num_kv_heads]


def build_heads(attention: Any, call: LayerCall, tables: Tables | None) -> HeadsAttention:
    """Build the fused form of an attention module and merge its q, k and v projections. call: its call of attention"""
    if call.key.shape != call.value.shape:
        shapes = f"{tuple(call.key.shape[1:])} and {tuple(call.value.shape[1:])}"
        raise NotReplacedError(f"keys and values have different shapes, {shapes}")
    _, num_heads, _, head_dim = call.query.shape
    if head_dim % 2:
        raise NotReplacedError(f"head_dim must be even, got {head_dim}")
    names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    qkv = merge_products(attention, *names)
    rows = (num_heads + 2 * call.key.shape[1]) * head_dim
    return HeadsAttention(
        num_heads=num_heads,
        head_dim=head_dim,
        q_norm=norm_of(attention.q_norm) if hasattr(attention, "q_norm") else None,
        k_norm=norm_of(attention.k_norm) if hasattr(attention, "k_norm") else None,
        qkv=qkv,
        tables=tables,
        gated=qkv.weight.shape[0] == rows + num_heads * head_dim,
    )


class AddsParts(Protocol):
    """A mixture that adds its parts to the residual stream in one launch (mixture.py)."""

    @property
    def adds_parts(self) -> bool:
        """Whether `add` computes what the mixture computes now."""
        ...

    def add(self, x: Tensor, h: Tensor, alpha: float) -> Tensor:
        """Add alpha times the output for h to x, in place. x, h: (total, hidden). Returns x."""
        ...


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Replaces the `forward` of a decoder layer.

    A call without a `PagedBatch` or a `TrainsLayers` batch, for example in `model.generate`, runs the layer's own code.

    original:   the layer's own forward
    index:      number of the layer, which selects its cache; None for a layer with a mixer
    options:    options of its attention, such as the window
    before_*, after_*: norms before and after the two parts; None without such a norm
    attention:  attention or mixer, without the output projection
    o:          the output projection; None for a mixer whose own code includes it
    gate_up, down: projections of the gated unit, gate and up merged; None for an MLP that is not a gated unit
    activation: activation of the gated unit
    multiplier: factor of the output of each part when it is added to the residual stream
    mixture:    how the parts of an MLP are added if it is a mixture; None if it is called as a whole
    hooks:      the hooks of the modules that the fused layer does not call, see `hooks_not_called`
    """

    original: Callable[..., Any]
    index: int | None
    options: dict[str, Any]
    before_attention: ops.Norm | None
    after_attention: ops.Norm | None
    before_mlp: ops.Norm | None
    after_mlp: ops.Norm | None
    attention: FusedAttention
    o: FusedProduct | None
    gate_up: FusedProduct | None
    down: FusedProduct | None
    activation: str
    mlp: nn.Module
    multiplier: float
    mixture: AddsParts | None = None
    hooks: tuple[Mapping[int, Any], ...] = ()

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs.get("fa_serve_batch")
        if batch is not None and any(self.hooks):  # 0.3 us
            _warn_of_hooks(type(self.module).__name__)
        if not isinstance(batch, PagedBatch):  # checked first, because checking a protocol takes 7 us
            if isinstance(batch, TrainsLayers):
                return batch.train_layer(self, hidden_states, args, kwargs)
            return self.original(hidden_states, *args, **kwargs)
        if self.index is None:
            return self.compute(hidden_states[0], StateStep(state_cache(kwargs).states, kwargs))[None]
        step = self.step(batch, self.index, *cos_and_sin(kwargs["position_embeddings"]))
        return self.compute(hidden_states[0], step)[None]

    def step(self, batch: PagedBatch, index: int, cos: Tensor, sin: Tensor) -> LayerStep:
        """The arguments of a step for the attention of this layer. index: number of the layer; cos, sin: (total, dims)"""
        return LayerStep(
            cos,
            sin,
            *batch.kv_caches[index],
            batch.slot_mapping,
            partial(batch.attention, index, **self.options),
            batch.fresh,
            batch.descale(index),
        )

    @property
    def module(self) -> nn.Module:
        """The decoder layer."""
        return cast(nn.Module, cast(Any, self.original).args[0])

    def compute(self, x: Tensor, step: LayerStep | StateStep) -> Tensor:
        """The layer's output. x: (total, hidden), which is overwritten unless autograd records the layer."""
        h = self.attention.compute(x, self.before_attention, step)
        x, h, norm = self._add(x, h, self.o, self.after_attention, self.before_mlp)
        if self.gate_up is not None and self.down is not None:
            gated = project(self.gate_up, h, norm=norm, activation=self.activation, next_weight=self.down.weight)
            return self._add(x, gated, self.down, self.after_mlp, None)[0]
        h = h if norm is None else ops.rms_norm(h, norm)
        if self.mixture is not None and self.mixture.adds_parts:
            return self.mixture.add(x, h, self.multiplier)
        h = self.mlp(h[None])
        h = (h[0] if isinstance(h, tuple) else h)[0]  # a mixture of experts may also return its router's choice
        return ops.add(x, h, alpha=self.multiplier) if self.after_mlp is None else ops.rms_norm(h, self.after_mlp, residual=x)

    def _add(
        self,
        x: Tensor,
        h: Tensor | ops.RoundedRows,
        product: FusedProduct | None,
        after: ops.Norm | None,
        before: ops.Norm | None,
    ) -> tuple[Tensor, Tensor, ops.Norm | None]:
        """Project h, if there is a projection, and add it to the residual stream x.

        Returns the new x, the input of the next part, and the norm `before` if it must still be applied to this input. A sum
        over ranks applies it at once. Otherwise the norm is left to the next product, whose kernel may include it.
        """
        if product is None:
            assert isinstance(h, Tensor)
            x = ops.add(x, h, alpha=self.multiplier) if after is None else ops.rms_norm(h, after, residual=x)
            return x, x, before
        if product.all_reduce is not None:
            x, normed = product.all_reduce.add(x, project(product, h), alpha=self.multiplier, after=after, before=before)
            return x, x if normed is None else normed, None
        if after is None:
            x = project(product, h, residual=x, alpha=self.multiplier)
        else:
            x = ops.rms_norm(project(product, h), after, residual=x)
        return x, x, before


def hooks_not_called(layer: nn.Module, called: Iterable[nn.Module]) -> tuple[Mapping[int, Any], ...]:
    """The hooks of a layer's parts, which are empty when it is fused. They are not copied, so hooks that come later are seen.

    called: the parts that the fused layer calls
    """
    others = {layer, *(part for each in called for part in each.modules())}
    parts = [part for part in layer.modules() if part not in others]
    return tuple(hooks for part in parts for hooks in (part._forward_pre_hooks, part._forward_hooks))


@lru_cache(maxsize=64)
def _warn_of_hooks(name: str) -> None:
    """Say once for each type of layer that hooks are not called."""
    log.warning(
        "hooks were added to parts of %s after it was fused, and are not called: add hooks before the engine or fa_serve.exact "
        "is made, or make it with fusion=False",
        name,
    )


def beside_fused_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules without parts that have the same parent module as a list of fused layers."""
    for parent in model.modules():
        children = list(parent.children())
        lists = [child for child in children if isinstance(child, nn.ModuleList)]
        if any(isinstance(vars(layer).get("forward"), FusedLayer) for layers in lists for layer in layers):
            yield from (child for child in children if not [*child.children()])


def cos_and_sin(position_embeddings: Any) -> tuple[Tensor, Tensor]:
    """The rotary embedding of a batch of one -> cos and sin, (total, dims). position_embeddings: as in `tables_of`"""
    cos, sin = tables_of(position_embeddings)
    return cos[0], sin[0]


def tables_of(position_embeddings: Any) -> tuple[Tensor, Tensor]:
    """The rotary embedding of a batch -> cos and sin.

    position_embeddings: the argument of a layer: (cos, sin), (batch, total, rotary_dim) each, or complex numbers (batch, total,
                         rotary_dim / 2) with cos as real and sin as imaginary part (DeepSeek V2). batch may be 1 for all rows
    """
    if isinstance(position_embeddings, Tensor):
        return position_embeddings.real, position_embeddings.imag
    cos, sin = position_embeddings
    return cos, sin
