"""A product of the model that adapters add to, and the step that says which token takes which adapter.

    y = project(product, x, norm=norm, activation="silu", next_weight=down)       # ops.linear, and the adapters of the step

The projections of a fused layer are products whose `site` is set when there is a `LoraMemory`, and a linear layer outside of
one gets the forward of `AdaptedLinear`. Where no token of a step has an adapter, both compute the base as if there were none.

Left out: how sites are found and filled (memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.ops import gradients
from fa_serve.ops.modes import has_gradients, records_gradients


@dataclass(frozen=True, slots=True)
class LoraStep:
    """What a step tells the products.

    tokens: which token has which adapter
    outer:  (slot, tokens, rows of the logits) of adapters that change the embedding or the head: int64 tensors
    """

    tokens: ops.LoraBatch
    outer: Sequence[tuple[int, Tensor, Tensor]] = ()


class StepHolder:
    """What all sites of a model read: the step that is computed, or None if no token of it has an adapter."""

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step: LoraStep | None = None

    @contextmanager
    def serving(self, step: LoraStep | None) -> Iterator[None]:
        """Inside, the model computes this step."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


@dataclass(slots=True, eq=False)
class LoraSite:
    """One product, possibly merged of several linear layers.

    names:   of its linear layers in the model, in the order of its rows
    k:       its columns
    widths:  rows of each linear layer
    modules: these layers
    weights: the adapters in memory, set by `LoraMemory`
    """

    names: tuple[str, ...]
    k: int
    widths: tuple[int, ...]
    holder: StepHolder
    modules: tuple[Any, ...] = field(repr=False)
    weights: ops.LoraWeights | None = field(default=None, repr=False)

    @property
    def batch(self) -> ops.LoraBatch | None:
        """Which token of the step has which adapter; None if none has one."""
        step = self.holder.step
        return None if step is None else step.tokens

    def weights_for(self, x: Tensor, batch: ops.LoraBatch) -> ops.LoraWeights:
        """The adapters in memory. Raises RuntimeError unless x has the rows of the step."""
        assert self.weights is not None
        if len(x) != len(batch.rows):
            names = ", ".join(self.names)
            raise RuntimeError(
                f"{names} multiplied {len(x)} rows in a step of {len(batch.rows)} tokens, so no row has an adapter"
            )
        return self.weights


class Projection(Protocol):
    """A product as layers have it (surgery/fuse/parts.py)."""

    @property
    def weight(self) -> ops.Weight: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def site(self) -> LoraSite | None: ...
    @property
    def modules(self) -> Sequence[Any]: ...


def project(
    product: Projection,
    x: Tensor | ops.RoundedRows,
    *,
    norm: ops.Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    next_weight: ops.Weight | None = None,
) -> Any:
    """As `ops.linear` with the product's weight and bias, and with the adapters of the step.

    Where ops are recorded by autograd, the linear layers that the product is made of get the gradients. There are no adapters.
    """
    weight = product.weight
    bias = product.bias
    site = product.site
    batch = None if site is None else site.batch
    if has_gradients() and isinstance(x, Tensor) and isinstance(weight, Tensor):
        parts = [(module.weight, module.bias) for module in product.modules] or [(weight, bias)]
        trained = [parameter for part in parts for parameter in part]
        if records_gradients(x, residual, None if norm is None else norm.weight, *trained):
            return gradients.recorded_linear(x, weight, bias, norm, activation, residual, alpha, parts)
    if site is None or batch is None:
        options: dict[str, Any] = {} if activation is None else {"activation": activation, "next_weight": next_weight}
        return ops.linear(x, weight, bias, norm=norm, residual=residual, alpha=alpha, **options)
    assert isinstance(x, Tensor), "what adapters multiply is not rounded"
    weights = site.weights_for(x, batch)
    return ops.linear_lora(x, weight, bias, weights, batch, norm=norm, activation=activation, residual=residual, alpha=alpha)


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """Replaces the `forward` of a linear layer that is not part of a fused one.

    original: the layer's own forward
    """

    original: Callable[..., Tensor]
    site: LoraSite
    bias: Tensor | None

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = self.original(x, *args, **kwargs)
        batch = self.site.batch
        if batch is None:
            return y
        rows = y.reshape(-1, y.shape[-1]).contiguous()
        given = x.reshape(-1, x.shape[-1]).contiguous()
        ops.add_lora(rows, given, self.site.weights_for(given, batch), batch, bias=self.bias)
        return rows.view(y.shape)


def linear_sizes(module: Any) -> tuple[int, int] | None:
    """(columns, rows) of the weights of a linear layer, of Conv1D and of a quantised linear layer; None for other modules."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def dense_weight(site: LoraSite, part: int) -> Tensor | None:
    """The matrix of a linear layer of a site, (rows, columns) in float32; None for a quantised one."""
    module = site.modules[part]
    weight = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    matrix = weight.detach().to(torch.float32)
    return matrix.t() if type(module).__name__ == "Conv1D" else matrix
