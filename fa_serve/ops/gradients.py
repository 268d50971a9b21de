"""Ops that autograd records: each is computed by its kernel, so that it has the bits of the op, and has a backward pass.

    with DeterministicMode():                                       # in the forward of `fa_serve.exact`
        y = ops.linear(x, weight, norm=norm, activation="silu")     # is recorded_linear, because autograd records
    y.sum().backward()

A backward pass computes no product of the forward again. A product keeps its input before the norm, and with an activation its
result before the gate; norms and gates are computed again from these. What needs no gradient is neither kept nor computed.
Nothing is overwritten here, because autograd may need it: with `residual` the result is another tensor.

`fa_serve.ops` calls these functions where `modes.records_gradients` says so. Left out: attention (hf/exact_gradients.py), and
second derivatives, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_serve.ops.modes import modes_of_backward, repeated_forward
from fa_serve.ops.moe.fallback import weights_of_choice
from fa_serve.ops.ops_backend import GateActivation, Norm, Router
from fa_serve.ops.select import select_ops
from fa_serve.spec import UnsupportedError

NO_SECOND_DERIVATIVE = (
    "the gradients of an exact forward cannot be differentiated again: call backward() or torch.autograd.grad() without "
    "create_graph=True, or compute second derivatives with the plain model, outside of fa_serve.exact"
)


class OnceDifferentiable(torch.autograd.Function):
    """A function of autograd, defined by `compute` and `gradients`. Refuses to record its backward pass (create_graph=True)."""

    @classmethod
    def compute(cls, ctx: Any, *args: Any) -> Any:
        """The results. What the gradients need is kept by `ctx.save_for_backward`."""
        raise NotImplementedError

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        """The gradients of the arguments of `forward`. saved: the tensors that it has saved; grads: gradients of its results"""
        raise NotImplementedError

    @classmethod
    def forward(cls, ctx: Any, *args: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return cls.compute(ctx, *args)
        with repeated_forward():
            return cls.compute(ctx, *args)

    @classmethod
    def backward(cls, ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVE)
        # to get these, a checkpoint computes its forward again, which must run in the modes of a forward
        saved = ctx.saved_tensors
        with modes_of_backward():
            return cls.gradients(ctx, saved, *grads)


class _Product(NamedTuple):
    """The arguments of `_Linear` besides the tensors that have gradients.

    weight, bias: merged from those of the parts
    """

    weight: Tensor
    bias: Tensor | None
    norm: Norm | None
    activation: str | None
    alpha: float
    num_parts: int


def recorded_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
    parts: Sequence[tuple[Tensor, Tensor | None]],
) -> Tensor:
    """As `fa_serve.ops.linear`, with gradients.

    parts: the weights and biases of which `weight` and `bias` are merged. The parts get the gradients
    """
    weights = [part for part, _ in parts]
    biases = [part for _, part in parts]
    product = _Product(weight, bias, norm, activation, alpha, len(parts))
    norm_weight = None if norm is None else norm.weight
    y: Tensor = _Linear.apply(product, x, residual, norm_weight, *weights, *biases)  # type: ignore[no-untyped-call]
    return y


class _Linear(OnceDifferentiable):
    @classmethod
    def compute(
        cls, ctx: Any, product: _Product, x: Tensor, residual: Tensor | None, norm_weight: Tensor | None, *parts: Tensor | None
    ) -> Tensor:
        weight, bias, norm, activation, alpha, num_parts = product
        total = None if residual is None else residual.clone()
        backend = select_ops(weight.device)
        y = backend.linear(x, weight, bias, norm, None, total, alpha, None)
        assert isinstance(y, Tensor)
        _, _, _, *needs_parts = ctx.needs_input_grad[1:]
        reads_x = any(needs_parts[:num_parts]) or norm is not None
        ctx.product = product
        ctx.save_for_backward(x if reads_x else None, None if activation is None else y, norm_weight, *parts)
        return y if activation is None else backend.act_and_mul(y, activation)

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        weight, _, norm, activation, alpha, num_parts = ctx.product
        x, gated, _, *parts = saved
        needs_x, needs_residual, needs_norm, *needs_parts = ctx.needs_input_grad[1:]
        [dout] = grads
        backend = select_ops(dout.device)
        dy = dout if alpha == 1.0 else dout * alpha
        if activation is not None:
            dy = backend.act_and_mul_backward(dy.contiguous(), gated, activation)
        of_weights = needs_parts[:num_parts]
        found: list[Tensor | None] = [None] * (2 * num_parts)
        if any(of_weights):
            normed = x if norm is None else backend.rms_norm(x, norm, None, None)
            found[:num_parts] = _in_runs(parts[:num_parts], of_weights, dy, lambda rows: rows.t() @ normed)
        if any(needs_parts[num_parts:]):
            found[num_parts:] = _in_runs(parts[num_parts:], needs_parts[num_parts:], dy, lambda rows: rows.sum(0))
        dx = dy @ weight if needs_x or needs_norm else None
        dnorm = None
        if norm is not None and dx is not None:
            dx, dnorm = backend.rms_norm_backward(dx, x, norm, needs_norm)
        return (None, dx if needs_x else None, dout if needs_residual else None, dnorm, *found)


def _in_runs(
    parts: Sequence[Tensor], needed: Sequence[bool], dy: Tensor, compute: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """The gradients of the parts of a merged parameter. Neighbours that need one share one result, and get views of it.

    compute: maps columns of dy, (total, n), to the gradient of the n rows of these parts
    """
    found: list[Tensor | None] = []
    column = 0
    while len(found) < len(parts):
        first = len(found)
        last = first
        while last < len(parts) and needed[last]:
            last += 1
        sizes = [len(part) for part in parts[first:last]]
        if sizes:
            found += compute(dy[:, column : column + sum(sizes)]).split_with_sizes(sizes)
            column += sum(sizes)
        else:
            column += len(parts[first]) if parts[first] is not None else 0
            found.append(None)
    return found


def recorded_rms_norm(x: Tensor, norm: Norm, residual: Tensor | None) -> Tensor:
    """As `fa_serve.ops.rms_norm`, with gradients."""
    y: Tensor = _RmsNorm.apply(norm, x, norm.weight, residual)  # type: ignore[no-untyped-call]
    return y


class _RmsNorm(OnceDifferentiable):
    @classmethod
    def compute(cls, ctx: Any, norm: Norm, x: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(x, weight)
        return select_ops(x.device).rms_norm(x, norm, residual, None)

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        x, _ = saved
        [dy] = grads
        _, needs_x, needs_weight, needs_residual = ctx.needs_input_grad
        dx = None
        dweight = None
        if needs_x or needs_weight:
            dx, dweight = select_ops(dy.device).rms_norm_backward(dy.contiguous(), x, ctx.norm, needs_weight)
        return None, dx, dweight, dy if needs_residual else None


def recorded_add(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """As `fa_serve.ops.add`, with gradients."""
    total: Tensor = _Add.apply(x, y, alpha)  # type: ignore[no-untyped-call]
    return total


class _Add(OnceDifferentiable):
    @classmethod
    def compute(cls, ctx: Any, x: Tensor, y: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return select_ops(x.device).add(x.clone(), y, alpha)

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        [total] = grads
        return total, total if ctx.alpha == 1.0 else total * ctx.alpha, None


def recorded_gate_heads(x: Tensor, gate: Tensor, activation: GateActivation) -> Tensor:
    """As `fa_serve.ops.gate_heads` without a norm, with gradients."""
    y: Tensor = _GateHeads.apply(x, gate, activation)  # type: ignore[no-untyped-call]
    return y


class _GateHeads(OnceDifferentiable):
    @classmethod
    def compute(cls, ctx: Any, x: Tensor, gate: Tensor, activation: GateActivation) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(x, gate)
        return select_ops(x.device).gate_heads(x, gate, activation, None)

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        def compute(x: Tensor, gate: Tensor) -> Tensor:
            wide = torch.promote_types(x.dtype, torch.float32)
            act = torch.sigmoid if ctx.activation == "sigmoid" else torch.nn.functional.silu
            return (x.to(wide) * act(gate.to(wide))).to(x.dtype)

        return (*again(compute, saved, grads[0]), None)


def recorded_route(logits: Tensor, bias: Tensor | None, router: Router, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `fa_serve.ops.route`, with the gradient of the logits. The choice of experts has no gradient, so bias has none."""
    weights, index = _Route.apply(logits, bias, router, dtype)  # type: ignore[no-untyped-call]
    return weights, index


class _Route(OnceDifferentiable):
    @classmethod
    def compute(
        cls, ctx: Any, logits: Tensor, bias: Tensor | None, router: Router, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        weights, index = select_ops(logits.device).route(logits, bias, router, dtype)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        ctx.router = router
        ctx.save_for_backward(logits, index)
        return weights, index

    @classmethod
    def gradients(cls, ctx: Any, saved: Sequence[Any], *grads: Tensor) -> tuple[Any, ...]:
        logits, index = saved
        dweights = grads[0]
        if dweights is None:
            return None, None, None, None
        [dlogits] = again(lambda given: weights_of_choice(given, index, ctx.router).to(dweights.dtype), [logits], dweights)
        return dlogits, None, None, None


def again(compute: Callable[..., Tensor], tensors: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """The gradients of a function without products, which PyTorch computes again and differentiates."""
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(compute(*given), given, dy)
