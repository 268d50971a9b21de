"""A decoder layer of the Llama kind, computed by few fused kernels instead of many.

A layer has two parts, each of which adds to the residual stream: attention on q, k and v projections, and an MLP, which is a
gated unit or any other module called `mlp`. Norms stand before a part (Llama, Mistral, Qwen, Granite, Phi), after it (OLMo 2),
or both (Gemma). Fused, a layer takes about ten launches: q/k/v and gate/up are one matrix product each; the norm of queries and
keys, the rotary embedding and the write to the cache are one kernel; and the output projections add to the residual stream.

Left out: which layers can be computed like this (fusion.py), the kernels (fa_serve.ops), the embedding, the last norm and the
head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf import PagedBatch
from fa_serve.ops.all_reduce import AllReduce

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (total, heads, head_dim) -> (total, num_heads, head_dim); the keys and values are in the cache already."""


class Product(NamedTuple):
    """A linear projection: x @ weight.T + bias, which `all_reduce` adds up over the ranks if it is given."""

    weight: ops.Weight
    bias: Tensor | None
    all_reduce: AllReduce | None = None


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Replaces the `forward` of a decoder layer.

    A call without a `PagedBatch`, for example in `model.generate`, runs the layer's own code.

    original:   the layer's own forward
    index:      its number, by which its cache is found
    options:    what the layer asks of attention, such as its window
    before_*, after_*: norms before and after the two parts; None where there is none
    q_norm, k_norm: norms of queries and keys, of each head or of all heads together; None where there are none
    qkv, gate_up: merged projections; gate_up and down are None for an MLP that is not a gated unit
    activation: of the gated unit
    rotary:     whether queries and keys are rotated
    multiplier: what each part is multiplied by before it is added to the residual stream
    """

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
        k_cache, v_cache = batch.kv_caches[self.index]
        descale = batch.descale(self.index)
        return self.compute(hidden_states[0], cos[0], sin[0], k_cache, v_cache, batch.slot_mapping, attend, **descale)[None]

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
        """The layer's output. x: (total, hidden), which is overwritten; options: further ones of `ops.rotary_store_kv`."""
        qkv = ops.linear(x, self.qkv.weight, self.qkv.bias, norm=self.before_attention)
        heads = self._rotate_and_store(qkv, cos, sin, k_cache, v_cache, slot_mapping, options)
        x = self._add(x, attend(*heads).flatten(1), self.o, self.after_attention)
        if self.gate_up is not None and self.down is not None:
            weight, bias, _ = self.gate_up
            h = ops.linear(x, weight, bias, norm=self.before_mlp, activation=self.activation)
            return self._add(x, h, self.down, self.after_mlp)
        h = self.mlp((x if self.before_mlp is None else ops.rms_norm(x, self.before_mlp))[None])
        h = (h[0] if isinstance(h, tuple) else h)[0]  # a mixture of experts may return its router's choice as well
        return x.add_(h, alpha=self.multiplier) if self.after_mlp is None else ops.rms_norm(h, self.after_mlp, residual=x)

    def _rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        options: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        """Normalise and rotate queries and keys in place and write keys and values to the cache. Returns q, k and v."""
        num_kv_heads = k_cache.shape[2]
        parts = [self.num_heads, num_kv_heads, num_kv_heads]
        if self.rotary:
            options |= {"cos": cos, "sin": sin}
        if self.q_norm is not None and self.k_norm is not None:
            if self.q_norm.weight.shape[0] == self.head_dim:
                options |= {"q_norm": self.q_norm, "k_norm": self.k_norm}
            else:  # norms of all heads together
                q, k, _ = torch.split(qkv, [n * self.head_dim for n in parts], dim=1)
                ops.rms_norm(q, self.q_norm, out=q)
                ops.rms_norm(k, self.k_norm, out=k)
        ops.rotary_store_kv(qkv, k_cache, v_cache, slot_mapping, num_heads=self.num_heads, **options)
        return torch.split_with_sizes(qkv.view(qkv.shape[0], -1, self.head_dim), parts, dim=1)

    def _add(self, x: Tensor, h: Tensor, product: Product, norm: ops.Norm | None) -> Tensor:
        """Project h and add it to the residual stream x."""
        weight, bias, all_reduce = product
        if all_reduce is None and norm is None:
            return ops.linear(h, weight, bias, residual=x, alpha=self.multiplier)
        y = ops.linear(h, weight, bias)
        if all_reduce is not None:
            y = all_reduce(y)
        return x.add_(y, alpha=self.multiplier) if norm is None else ops.rms_norm(y, norm, residual=x)
