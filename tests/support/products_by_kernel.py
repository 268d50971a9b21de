"""Products by a kernel of the table that a test names, with its own tile or another one; and how often each kernel is launched.

y = multiply_by("unpack_wgmma", x, weight, residual=residual, tile=WgmmaTile(16, 64, 3, 1))
with counted_launches() as launched, a_gpu(arch=90): ...       # launched is ["_rms_norm", "_quantized_wgmma"]
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fa_serve import ops, spec
from fa_serve.launching.launch import Launch
from fa_serve.launching.plans import PLANS
from fa_serve.ops.moe import run as experts_run
from fa_serve.ops.products import run as products_run
from fa_serve.ops.products import table
from fa_serve.ops.products.problem import Details, Product, product_with
from fa_serve.ops.products.quantised.dequantise import plan_matrix
from fa_serve.ops.products.quantised.rounding import plan_rounding
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.run import plan_product, problem_of
from fa_serve.ops.products.table import KernelChoice, kernel_named, select_kernel


def multiply_by(
    name: str,
    x: Tensor | ops.RoundedRows,
    weight: ops.Weight,
    bias: Tensor | None = None,
    norm: ops.Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    *,
    tile: Any = None,
    num_sms: int = 0,
) -> Any:
    """`fa_serve.ops.linear` by a row of the table.

    tile:    the row's own for this product if None
    num_sms: of the GPU that the tile is chosen for, that of x if 0
    """
    product = problem_of(x, weight, gated=activation is not None)
    product = replace(product, num_sms=num_sms or product.num_sms)
    kernel = kernel_named(name)
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    choice = KernelChoice(kernel, kernel.tile(product) if tile is None else tile, {})
    details = Details(eps, offset, activation, alpha)
    run = plan_product(x, product, details, norm is not None, None, choice)
    return run(x, weight, bias, norm_weight, residual)


def kernel_for(x: Tensor, weight: ops.Weight) -> str:
    """The row of the table that computes x @ weight.T."""
    return select_kernel(problem_of(x, weight)).kernel.name


def dequantised_by_kernel(weight: QuantizedWeight, dtype: torch.dtype, calls: int = 1) -> Tensor:
    """The matrix of a weight, by the last of several launches of one plan."""
    matrix_of = plan_matrix(problem_of(torch.empty(1, weight.width, dtype=dtype, device=weight.device), weight))
    return [matrix_of(weight) for _ in range(calls)][-1]


def rounded_by_kernel(
    x: Tensor, norm: ops.Norm | None = None, input_scale: Tensor | None = None, activation: str | None = None
) -> ops.RoundedRows:
    """Rows rounded to float8, after their norm or their gate."""
    width = x.shape[1] // (1 if activation is None else 2)
    product = problem_of(x[:, :width], torch.empty(1, width, device=x.device))
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    return plan_rounding(product, Details(eps, offset), activation)(x, norm_weight, input_scale)


@contextlib.contextmanager
def only_kernels(*names: str) -> Iterator[None]:
    """Within this context, the table has these rows alone, in their order, and each computes all that its weights allow."""
    rows = tuple(replace(kernel_named(name), refuses=lambda product: None) for name in names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "KERNELS", rows)
        PLANS.clear()
        yield
    PLANS.clear()


@contextlib.contextmanager
def without_kernels(*names: str) -> Iterator[None]:
    """Within this context, the table does not have these rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "KERNELS", tuple(kernel for kernel in table.KERNELS if kernel.name not in names))
        PLANS.clear()
        yield
    PLANS.clear()


@contextlib.contextmanager
def a_gpu(arch: int, num_sms: int = 132) -> Iterator[None]:
    """Within this context, tensors of a CPU or of "meta" seem to be on a GPU. Their launches need `counted_launches`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "arch_of", lambda device: arch)
        for module in (products_run, experts_run):
            patch.setattr(module, "multiprocessors", lambda device, otherwise: num_sms)
        PLANS.clear()
        yield
    PLANS.clear()


_OF_PYTORCH = {"mm": "matmul", "addmm": "matmul", "addmm_": "matmul", "_scaled_mm": "scaled_mm"}


class Launched(list[str]):
    """The names of what was launched.

    constants, strides: of the kernels, by their names; the last launch of each
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[str, tuple[Any, ...]] = {}
        self.strides: dict[str, tuple[int, ...]] = {}


class _Products(TorchDispatchMode):
    """Notes PyTorch's own products."""

    def __init__(self, launched: Launched) -> None:
        super().__init__()
        self.launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name := _OF_PYTORCH.get(func.overloadpacket.__name__):
            self.launched.append(name)
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def counted_launches() -> Iterator[Launched]:
    """The functions of the kernels that are launched within this context, in their order, and PyTorch's own products.

    They are counted at the one place where launches happen, `Launch.__call__`, and do not run.
    """
    launched = Launched()

    def count(self: Launch, tensors: Any, *late: int) -> None:
        name = self._kernel.fn.__name__
        launched.append(name)
        launched.constants[name] = tuple(self._fixed)
        launched.strides[name] = tuple(self._strides)

    with pytest.MonkeyPatch.context() as patch, _Products(launched):
        patch.setattr(Launch, "__call__", count)
        yield launched


def product_of_experts(
    x: Tensor, weight: ops.Weight, num_experts: int, top_k: int, gate: ops.Gate | None, tokens: int
) -> Product:
    """One product of a mixture on Hopper, for kernels that a test launches by themselves."""
    asked = {"num_experts": num_experts, "top_k": top_k, "gated": gate is not None}
    return product_with(weight, tokens=tokens, dtype=x.dtype, arch=90, **asked)
