"""Batch-invariant mode: a request's tokens and log-probabilities are bitwise the same alone and among any others.

    with BatchInvariant():
        logits = paged_forward(...)

Inside, the operators of a model whose sums depend on the number of rows are computed row by row: matrix products, means, sums
and logsumexp. The rest of a decoder is element by element (row by row on a CPU, whose vectors
have ends) or has a kernel for each row already. Attention takes each token for
a sequence of its own, cut in as many pieces whatever the batch (model_runner.py). So neither the chunks of a prompt, nor what
the prefix cache holds, nor a preemption changes a bit, and none of them is turned off.

What has no such form, like the grouped products of a mixture of experts, raises UnsupportedModelError. Left out: other
machines, other versions, another page size or dtype, which may change bits as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fa_serve import ops
from fa_serve.spec import UnsupportedModelError

aten: Any = torch.ops.aten
NUM_SPLITS = 4  # pieces of each sequence's keys in attention: enough for a lone sequence to occupy a good part of a GPU


class BatchInvariant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        function = _INVARIANT.get(func)
        if function is None:
            if func in _VARYING:
                raise UnsupportedModelError(f"deterministic must be False for this model: it computes {func}, which varies")
            return func(*args, **kwargs)
        result = function(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def invariant(wanted: bool) -> AbstractContextManager[object]:
    mode: Any = BatchInvariant
    return mode() if wanted else nullcontext()


def _matmul(x: Tensor, y: Tensor) -> Any:
    if y.dim() == 2:
        return ops.invariant_linear(x, y.t(), None)
    if x.shape[-1] == 1:
        return x * y  # like the angles of a rotary embedding: there is nothing to sum
    if x.dim() == 4:
        return NotImplemented  # attention, which computes each sequence by itself
    raise UnsupportedModelError(f"deterministic must be False for this model: it multiplies {x.shape} by {y.shape}")


def _addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if bias.dim() != 1 or beta != 1 or alpha != 1:
        raise UnsupportedModelError("deterministic must be False for this model: it scales or adds up its products")
    return ops.invariant_linear(x, y.t(), bias)


def _by_row(func: Any) -> Callable[..., Any]:
    """On a CPU the last elements of a tensor, fewer than a vector holds, go another way than the others."""

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_cuda or x.dim() < 2 or not x.numel():
            return NotImplemented
        return torch.cat([func(row[None], *args, **kwargs) for row in x.reshape(-1, x.shape[-1])]).view(x.shape)

    return function


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if dim is None or [d % x.dim() for d in dim] != [x.dim() - 1] or not x.is_floating_point():
        return NotImplemented
    dtype = dtype or x.dtype
    return ops.invariant_sum(x.to(dtype)).to(dtype).unsqueeze(-1) if keepdim else ops.invariant_sum(x.to(dtype)).to(dtype)


def _mean(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    total = _sum(x, dim, keepdim, dtype=dtype)
    return total if total is NotImplemented else total / x.shape[-1]


def _logsumexp(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Any:
    largest = x.amax(dim=-1, keepdim=True)
    differences = x - largest
    exponentials = _by_row(torch.exp)(differences)
    total = _sum(differences.exp() if exponentials is NotImplemented else exponentials, dim, True)
    if total is NotImplemented:
        return total
    logs = _by_row(torch.log)(total)
    result = largest + (total.log() if logs is NotImplemented else logs)
    return result if keepdim else result.squeeze(-1)


_POINTWISE = [
    getattr(aten, name).default for name in ("silu", "gelu", "relu", "tanh", "sigmoid", "exp", "log", "sin", "cos", "rsqrt")
]
_INVARIANT: dict[Any, Callable[..., Any]] = {
    aten.linear.default: lambda x, weight, bias=None: ops.invariant_linear(x, weight, bias),
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.logsumexp.default: _logsumexp,
    **{func: _by_row(func) for func in _POINTWISE},
}
_VARYING = {aten.baddbmm.default, aten._grouped_mm.default, aten._scaled_mm.default}
