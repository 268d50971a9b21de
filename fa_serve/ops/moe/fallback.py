"""The experts of a mixture and their choice in plain PyTorch, for devices without kernels.

Each expert that any token takes computes its tokens in one product. To know these experts, the host reads the choice back from
the device. Quantised experts are dequantised first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.ops.ops_backend import ExpertWeights, Gate, Router, Weight
from fa_serve.ops.products.quantised.weight import QuantizedWeight


def torch_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: ExpertWeights,
    invariant: bool,
    kept: Tensor | None = None,
) -> Tensor:
    """Arguments and result are those of `OpsBackend.experts`."""
    if not invariant or len(x) == 0:
        return _mixed(x, top_k_index, top_k_weights, experts)
    # a library chooses its algorithm by the number of rows, so each row is computed by itself
    rows = [slice(i, i + 1) for i in range(len(x))]
    parts = [
        _mixed(x[row], top_k_index[row], top_k_weights[row], experts, kept=None if kept is None else kept[row]) for row in rows
    ]
    return torch.cat(parts)


class LowRankExperts(NamedTuple):
    """What is added to one product of each expert: scale * (x a^T) b^T.

    a: (num_experts, rank, columns); b: (num_experts, rows, rank)
    """

    a: Tensor
    b: Tensor
    scale: float


def torch_adapted_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: ExpertWeights,
    gate_up: LowRankExperts | None,
    down: LowRankExperts | None,
) -> Tensor:
    """As `fa_serve.ops.experts`, with an adapter of the first product of each expert, of the second, or of both."""
    return _mixed(x, top_k_index, top_k_weights, experts, gate_up, down)


def _mixed(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: ExpertWeights,
    gate_up_low: LowRankExperts | None = None,
    down_low: LowRankExperts | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    num_experts, hidden, width = experts.sizes
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = torch.zeros(*top_k_index.shape, hidden, dtype=wide, device=x.device)
    for expert in torch.unique(top_k_index).tolist():
        if not 0 <= expert < num_experts:
            continue
        gate_up_bias, down_bias = (None if b is None else b[expert] for b in (experts.gate_up_bias, experts.down_bias))
        tokens, places = torch.where(top_k_index == expert)
        gate_up = torch.nn.functional.linear(x[tokens], _matrix(experts.gate_up, expert, 2 * width, x.dtype), gate_up_bias)
        gate_up = _with_low_rank(gate_up, x[tokens], expert, gate_up_low)
        if kept is not None:
            kept[tokens, places] = gate_up
        h = gated(gate_up.to(wide), experts.gate).to(x.dtype)
        y = torch.nn.functional.linear(h, _matrix(experts.down, expert, hidden, x.dtype), down_bias)
        y = _with_low_rank(y, h, expert, down_low)
        parts[tokens, places] = y.to(wide) * top_k_weights[tokens, places, None].to(wide)
    return parts.sum(1).to(x.dtype)


def _with_low_rank(y: Tensor, x: Tensor, expert: int, low: LowRankExperts | None) -> Tensor:
    return y if low is None else y + (x @ low.a[expert].t()) @ low.b[expert].t() * low.scale


def _matrix(weight: Weight, expert: int, rows: int, dtype: torch.dtype) -> Tensor:
    """The matrix of one expert, (rows, columns)."""
    if isinstance(weight, QuantizedWeight):
        return weight.rows(expert * rows, (expert + 1) * rows).dequantize(dtype)
    return weight[expert]


def torch_route(logits: Tensor, bias: Tensor | None, router: Router, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Arguments and results are those of `fa_serve.ops.route`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = _scores(wide, router)
    choice = scores if bias is None else scores + bias
    if router.num_groups > 1:
        grouped = choice.view(len(choice), router.num_groups, -1)
        best = grouped.topk(2).values.sum(-1).topk(router.top_groups).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    index = choice.topk(router.top_k).indices
    return _weights(scores, index, router).to(dtype), index


def weights_of_choice(logits: Tensor, index: Tensor, router: Router) -> Tensor:
    """The weights of experts that have already been chosen, (tokens, top_k), differentiable, in float32 or wider."""
    return _weights(_scores(logits.to(torch.promote_types(logits.dtype, torch.float32)), router), index, router)


def _scores(logits: Tensor, router: Router) -> Tensor:
    return logits.sigmoid() if router.sigmoid else logits.softmax(-1)


def _weights(scores: Tensor, index: Tensor, router: Router) -> Tensor:
    weights = scores.gather(1, index)
    if router.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.scale


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """`ops.Gate` of products with the gate and up weights: (..., 2 * width) -> (..., width)."""
    if gate.interleaved:
        values = gate_up[..., ::2]
        up = gate_up[..., 1::2]
    else:
        values, up = gate_up.chunk(2, dim=-1)
    values = values.clamp(max=gate.limit) * gate.slope
    up = up.clamp(min=-gate.limit, max=gate.limit)
    return torch_activation(values, gate.activation) / gate.slope * (up + gate.offset)


def torch_activation(x: Tensor, activation: str) -> Tensor:
    """One of `fa_serve.ops.ACTIVATIONS`."""
    if activation == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
