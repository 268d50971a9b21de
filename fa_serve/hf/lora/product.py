"""A product of the model that adapters add to, and the step that says which token uses which adapter.

    y = project(product, x, norm=norm, activation="silu", next_weight=down)       # ops.linear, plus the adapters of the step

A `LoraMemory` sets the `site` of the projections of fused layers, and gives linear layers outside of fused layers the forward
of `AdaptedLinear`. If no token of a step has an adapter, both compute only the base.

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
    """The adapters of a step, for the products.

    tokens: which token has which adapter
    outer:  (slot, tokens, rows of the logits) of each adapter that has parts not kept in pages: int64 tensors
    """

    tokens: ops.LoraBatch
    outer: Sequence[tuple[int, Tensor, Tensor]] = ()


class StepHolder:
    """Holds the current step for all sites of a model. step: None if no token of the step has an adapter"""

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
    """One product, of one linear layer or of several merged ones.

    names:   names of its linear layers in the model, in the order of its rows
    k:       number of its columns
    widths:  number of rows of each linear layer
    modules: these linear layers
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
        """Which token of the step has which adapter; None if no token has an adapter."""
        step = self.holder.step
        return None if step is None else step.tokens

    def weights_for(self, x: Tensor, batch: ops.LoraBatch) -> ops.LoraWeights:
        """The adapters in memory. Raises RuntimeError unless x has as many rows as the step has tokens."""
        assert self.weights is not None
        if len(x) != len(batch.rows):
            names = ", ".join(self.names)
            raise RuntimeError(
                f"{names} multiplied {len(x)} rows in a step of {len(batch.rows)} tokens, so no row has an adapter"
            )
        return self.weights


class Projection(Protocol):
    """The interface of `FusedProduct` (surgery/fuse/parts.py)."""

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
    """`ops.linear` with the product's weight and bias, plus the adapters of the step.

    If autograd records the op, gradients go to the parameters of the linear layers that are merged into the product, and
    adapters are not applied.
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
    """Replaces the `forward` of a linear layer outside of fused layers.

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
    """(columns, rows) of the weight of a linear layer, a Conv1D or a quantised linear layer; None for other modules."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2:
        return weight.shape[0], weight.shape[1]
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return int(module.in_features), int(module.out_features)
    return None


def dense_weight(site: LoraSite, part: int) -> Tensor | None:
    """The matrix of one linear layer of a site, (rows, columns) in float32; None for a quantised layer."""
    module = site.modules[part]
    weight = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    matrix = weight.detach().to(torch.float32)
    return matrix.t() if type(module).__name__ == "Conv1D" else matrix
