"""A product with adapters, one op after the other: for any backend, and for adapters that no kernel merges with their product.

The base product comes first, then the adapters, then the gate or the residual sum.
"""

from __future__ import annotations

from torch import Tensor

from fa_serve.ops.lora.problem import LoraBatch, LoraWeights
from fa_serve.ops.ops_backend import Norm, OpsBackend, Weight


def separate_linear_lora(
    backend: OpsBackend,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    weights: LoraWeights,
    batch: LoraBatch,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.linear_lora`."""
    if norm is not None and len(x) > 1:
        x = backend.rms_norm(x, norm, None, None)
        norm = None
    y = backend.linear(x, weight, bias, norm, None, None, 1.0, None)
    assert isinstance(y, Tensor)
    y = backend.add_lora(y, x, weights, batch, norm, bias)
    if activation is not None:
        return backend.act_and_mul(y, activation)
    return y if residual is None else backend.add(residual, y, alpha)
