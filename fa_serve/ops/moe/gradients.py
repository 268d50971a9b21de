"""The experts of a mixture as autograd records them: with rows that do not depend on each other, and with a backward pass.

    y = experts_with_gradients(x, top_k_index, top_k_weights, experts)

The forward keeps its input and the values before the gate, 2 * width numbers for each pair of a token and an expert. The
backward pass computes the gated values again, and sorts the pairs by expert. Each of its four products has a part for each
expert. One call computes all parts where PyTorch has grouped products for the dtype and the device. Left out: quantised
experts, which are not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.ops.gradients import OnceDifferentiable
from fa_serve.ops.modes import without_row_order
from fa_serve.ops.moe.fallback import gated
from fa_serve.ops.ops_backend import ExpertWeights, Gate
from fa_serve.ops.select import select_ops


def experts_with_gradients(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.experts`, with matrices and invariant rows."""
    # tensors are passed one by one, because autograd does not look into tuples
    y: Tensor = _Experts.apply(x, top_k_index, top_k_weights, *experts)  # type: ignore[no-untyped-call]
    return y


class _Experts(OnceDifferentiable):
    @classmethod
    def compute(
        cls,
        ctx: Any,
        x: Tensor,
        index: Tensor,
        scores: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        gate: Gate,
    ) -> Tensor:
        kept = x.new_empty(*index.shape, gate_up.shape[1]) if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(x, index, scores, gate_up, down, down_bias, kept)
        ctx.gate = gate
        weights = ExpertWeights(gate_up, gate_up_bias, down, down_bias, gate)
        return select_ops(x.device).experts(x, index, scores, weights, True, kept)

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        with without_row_order():  # for the same choice of experts, these products have the same order of sums in any mode
            return (*_gradients_of(saved, ctx.needs_input_grad, ctx.gate, grads[0]), None)


def _gradients_of(
    saved: Sequence[Tensor], needed: Sequence[bool], gate: Gate, dy: Tensor
) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of the weights of the router, and of the weights of the experts."""
    x, index, scores, gate_up, down, down_bias, kept = saved
    needs_x, _, needs_scores, needs_gate_up, needs_gate_up_bias, needs_down, needs_down_bias = needed[:7]
    tokens, top_k = index.shape
    pairs = _Pairs.of(index, len(down))
    token = pairs.order // top_k
    dout = dy[token]
    wide = torch.promote_types(x.dtype, torch.float32)
    # multiplied by the score, this is the gradient of h; multiplied by h, it is the gradient of the score
    dgated = pairs.times(dout, down)
    score = scores.flatten()[pairs.order].to(wide).masked_fill(~pairs.known, 0.0)[:, None]
    with torch.enable_grad():
        given = kept.view(tokens * top_k, -1)[pairs.order].masked_fill(~pairs.known[:, None], 0.0).requires_grad_()
        h = gated(given.to(wide), gate).to(x.dtype)
    [dgate_up] = torch.autograd.grad(h, [given], (dgated.to(wide) * score).to(x.dtype))
    h = h.detach()
    dscores = None
    if needs_scores:
        share = (dgated.to(wide) * h.to(wide)).sum(-1)
        if down_bias is not None:
            share = share + (dout.to(wide) * down_bias[pairs.expert].to(wide)).sum(-1)
        share = share.masked_fill(~pairs.known, 0.0)
        dscores = torch.empty_like(share).index_copy_(0, pairs.order, share).view_as(scores).to(scores.dtype)
    weighted = (dout.to(wide) * score).to(x.dtype)
    dx = None
    if needs_x:
        parts = pairs.times(dgate_up, gate_up).masked_fill(~pairs.known[:, None], 0.0)
        by_pair = torch.empty_like(parts).index_copy_(0, pairs.order, parts)
        dx = by_pair.view(tokens, top_k, -1).sum(1, dtype=wide).to(x.dtype)
    return (
        dx,
        None,
        dscores,
        pairs.outer(dgate_up, x[token]) if needs_gate_up else None,
        pairs.sums(dgate_up) if needs_gate_up_bias else None,
        pairs.outer(weighted, h) if needs_down else None,
        pairs.sums(weighted) if needs_down_bias else None,
    )


class _Pairs(NamedTuple):
    """The pairs of a token and an expert, sorted by expert. Pairs without an expert come last.

    order:  (pairs,) int64, the pair in each place
    expert: (pairs,) int64, the expert of that pair, 0 if it has none; known: whether it has one
    ends:   (num_experts,) int32, the place after the last pair of each expert
    """

    order: Tensor
    expert: Tensor
    known: Tensor
    ends: Tensor

    @staticmethod
    def of(index: Tensor, num_experts: int) -> _Pairs:
        flat = index.flatten().long()
        flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
        expert, order = flat.sort(stable=True)
        known = expert < num_experts
        experts = torch.arange(num_experts, device=flat.device)
        ends = torch.searchsorted(expert, experts, right=True).int()
        return _Pairs(order, expert.where(known, 0), known, ends)

    def times(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Each row (pairs, n) by the matrix (n, k) of its expert -> (pairs, k). Arbitrary for rows without an expert."""
        if _has_grouped(rows, weights):
            return torch.nn.functional.grouped_mm(rows, weights, offs=self.ends)
        result = rows.new_zeros(len(rows), weights.shape[2])
        for expert, place in self._runs():
            torch.mm(rows[place], weights[expert], out=result[place])
        return result

    def outer(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The sums over the pairs of each expert of rows (pairs, n) by columns (pairs, k) -> (num_experts, n, k)."""
        if _has_grouped(rows, columns):
            return torch.nn.functional.grouped_mm(rows.t(), columns, offs=self.ends)
        result = rows.new_zeros(len(self.ends), rows.shape[1], columns.shape[1])
        for expert, place in self._runs():
            torch.mm(rows[place].t(), columns[place], out=result[expert])
        return result

    def sums(self, rows: Tensor) -> Tensor:
        """The sums over the pairs of each expert of rows (pairs, n) -> (num_experts, n)."""
        kept = rows.masked_fill(~self.known[:, None], 0.0)
        return rows.new_zeros(len(self.ends), rows.shape[1]).index_add_(0, self.expert, kept)

    def _runs(self) -> list[tuple[int, slice]]:
        """(expert, its places) for each expert that has pairs, read back from the device."""
        ends = [0, *self.ends.tolist()]
        return [(expert, slice(first, last)) for expert, (first, last) in enumerate(pairwise(ends)) if first < last]


def _has_grouped(rows: Tensor, other: Tensor) -> bool:
    """Whether PyTorch multiplies the rows of all experts in one call: in bfloat16 on a GPU, rows of multiples of 16 bytes."""
    widths = (rows.shape[-1], other.shape[-1], other.shape[-2] if other.dim() == 3 else 8)
    return rows.is_cuda and rows.dtype == torch.bfloat16 and not any(width % 8 for width in widths)
