"""Deterministic mode: the tokens and log-probabilities of a request are bitwise the same alone and in any batch.

    with DeterministicMode():
        logits = paged_forward(...)

Inside, operators whose sums depend on the number of rows are computed row by row: matrix products, means, sums and logsumexp.
The other operators of a decoder work element by element, or already compute each row by itself. On a CPU, elementwise functions
are computed row by row as well, because vector instructions treat the end of a tensor differently. Attention sums by a fixed
tree of the keys (`spec.TREE_SPLITS`), which is the same for any number of queries. Therefore neither the chunks of a prompt,
nor prefix cache hits, nor preemption change a bit, and none of them is turned off.

Where `fa_serve.hf.take_experts` has taken the experts of a mixture, they are one operator, which has a row-by-row form. An
operator that depends on the batch and has no such form, for example the grouped products of other experts, raises
UnsupportedModelError. Left out: other machines, versions, page sizes and dtypes, which may change bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fa_serve import ops
from fa_serve.ops.modes import in_backward
from fa_serve.ops.moe import operator as experts_operator
from fa_serve.spec import UnsupportedModelError

aten: Any = torch.ops.aten


class DeterministicMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces operators whose results depend on the number of rows.

    It works below autograd, which still records the original operators and computes the gradients of these.

    backward: whether operators of a backward pass are replaced as well. Those of a forward that a checkpoint repeats in a
              backward pass always are
    """

    rows_are_independent = True
    """Read by `fa_serve.ops` (modes.py): its kernels are not operators of PyTorch, so the mode does not see them."""

    def __init__(self, *, backward: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.replaces_backward = backward

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.replaces_backward and in_backward():
            return func(*args, **kwargs)
        function = _REPLACEMENTS.get(func)
        if function is None:
            if func in _REFUSED:
                raise UnsupportedModelError(
                    f"deterministic must be False for this model: the results of its operator {func} depend on the batch"
                )
            return func(*args, **kwargs)
        result = function(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def deterministic_mode(enabled: bool) -> AbstractContextManager[object]:
    """A context with DeterministicMode if `enabled`, else one without any effect."""
    mode: Any = DeterministicMode
    return mode() if enabled else nullcontext()


def _matmul(x: Tensor, y: Tensor) -> Any:
    if y.dim() == 2:
        return ops.invariant_linear(x, y.t(), None)
    if x.shape[-1] == 1:
        return x * y  # nothing is summed, as for the angles of a rotary embedding
    if x.dim() == 4:
        return NotImplemented  # attention, which computes each sequence by itself
    if x.dim() == y.dim() == 3 and (y.shape[0] == 1 or y.stride(0) == 0):
        # one matrix for all sequences: PyTorch repeats a frozen weight if the rows are not contiguous in memory
        return ops.invariant_linear(x.flatten(0, 1), y[0].t(), None).reshape(*x.shape[:2], -1)
    raise UnsupportedModelError(
        f"deterministic must be False for this model: it multiplies tensors of shapes {tuple(x.shape)} and {tuple(y.shape)}, "
        "for which there is no row-invariant product"
    )


def _addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if bias.dim() != 1 or beta != 1 or alpha != 1:
        raise UnsupportedModelError("deterministic must be False for this model: it scales or accumulates matrix products")
    return ops.invariant_linear(x, y.t(), bias)


def _addmm_(total: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """The residual sum of a fused product, in PyTorch."""
    if beta != 1:
        raise UnsupportedModelError(
            "deterministic must be False for this model: it scales the tensor to which a matrix product is added"
        )
    return total.add_(ops.invariant_linear(x, y.t(), None) * alpha)


def _by_row(func: Any) -> Callable[..., Any]:
    """`func` on each row by itself, on a CPU.

    There the last elements of a tensor, if they do not fill a vector register, take another code path than the rest.
    """

    def function(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_cuda or x.dim() < 2 or not x.numel():
            return NotImplemented
        return torch.cat([func(row[None], *args, **kwargs) for row in x.reshape(-1, x.shape[-1])]).view(x.shape)

    return function


def _log1p(x: Tensor) -> Any:
    """Each number by itself on a CPU: Llama 4 takes the logarithms of a row of positions, one for each token."""
    if x.is_cuda or x.dim() != 1 or not x.numel():
        return NotImplemented
    return torch.stack([torch.log1p(number) for number in x])


def _polar(length: Tensor, angle: Tensor) -> Any:
    """Complex numbers of a rotary embedding, on a CPU row by row."""
    if angle.is_cuda or angle.dim() < 2 or not angle.numel():
        return NotImplemented
    return torch.complex(length * _by_row(torch.cos)(angle), length * _by_row(torch.sin)(angle))


def _mul(x: Any, y: Any) -> Any:
    """A product of complex numbers, on a CPU by real and imaginary parts: PyTorch's loop rounds differently at its end."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not (x.is_complex() and y.is_complex()) or x.is_cuda:
        return NotImplemented
    return torch.complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if dim is None or [d % x.dim() for d in dim] != [x.dim() - 1] or not x.is_floating_point():
        return NotImplemented
    dtype = dtype or x.dtype
    total = ops.invariant_sum(x.to(dtype)).to(dtype)
    return total.unsqueeze(-1) if keepdim else total


def _mean(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    total = _sum(x, dim, keepdim, dtype=dtype)
    return total if total is NotImplemented else total / x.shape[-1]


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    """The norm by its parts, which are the operators that autograd records instead of it outside of inference mode."""
    if len(shape) != 1 or not x.is_floating_point():
        return NotImplemented
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _mean(wide.pow(2), [-1], True)
    scale = mean + (torch.finfo(x.dtype).eps if eps is None else eps)
    by_row = _by_row(torch.rsqrt)(scale)
    y = wide * (scale.rsqrt() if by_row is NotImplemented else by_row)
    return (y if weight is None else y * weight).to(x.dtype)


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


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    """What the sampler computes: each number minus the logsumexp of its row."""
    if dim % x.dim() != x.dim() - 1:
        return NotImplemented
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    result = wide - _logsumexp(wide, [-1], True)
    return result if half_to_float else result.to(x.dtype)


_NAMES = "silu", "gelu", "relu", "elu", "mish", "softplus", "tanh", "sigmoid", "exp", "exp2", "log", "sin", "cos", "rsqrt"
_POINTWISE = [getattr(aten, name).default for name in _NAMES]
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.linear.default: lambda x, weight, bias=None: ops.invariant_linear(x, weight, bias),
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.addmm_.default: _addmm_,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _mean,
    aten.rms_norm.default: _rms_norm,
    aten.logsumexp.default: _logsumexp,
    aten._log_softmax.default: _log_softmax,
    aten.log1p.default: _log1p,
    aten.polar.default: _polar,
    aten.mul.Tensor: _mul,
    torch.ops.fa_serve.experts.default: partial(experts_operator.compute, invariant=True),
    **{func: _by_row(func) for func in _POINTWISE},
}
_REFUSED = {aten.baddbmm.default, aten._grouped_mm.default, aten._scaled_mm.default}
