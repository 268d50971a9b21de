"""The description of a product with a weight matrix: everything that decides which kernel computes it.

    Product(values="int4", n=4096, k=4096, group=128, scales=torch.bfloat16, tokens=8, dtype=torch.bfloat16, arch=90)
    replace(product, tokens=1)                                  # the same product of one token
    product_with(weight, tokens=8, dtype=torch.bfloat16, arch=90)

A `Product` holds only facts that the host knows, so its kernel can be chosen without a GPU and without weights. The kernels,
and the choice among them, are in table.py. This module imports no Triton, so that `fa-serve info` runs anywhere. Left out: how
a product is computed (run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fa_serve.ops.ops_backend import ExpertWeights, Weight
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.spec import has_programmatic_launch

WeightValues = Literal["float", "int4", "float4", "float8"]
"""What a weight consists of: numbers of a floating dtype, or one of the kinds of a QuantizedWeight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """x @ weight.T for the tokens of x; for experts, the products of pairs of a token and an expert.

    values:      what the weight consists of
    n, k:        rows and columns of the weight, or of the weight of one expert
    tokens:      rows of x
    dtype:       dtype of x and of the result
    matrix_dtype: dtype of a weight of floats; None for a quantised weight
    group:       columns that share a scale, at least k if a row has one scale; 0 for a weight of floats
    scales:      dtype of the scales; None for a weight of floats
    gated:       the results of half of the rows are gates: their activation is multiplied with the results of the other half
    rounded:     x is in float8 already
    invariant:   the bits of a row must not depend on the number of rows
    kept:        the results before the gate are stored as well, which gradients need
    num_experts: number of experts in the weight; 0 for a dense weight
    top_k:       experts that each token takes
    by_rows:     in both weights of a mixture, rows are contiguous
    contiguous:  the matrices of all experts are contiguous, by rows or by columns; or the weight of a dense product is
                 contiguous by rows, and each row of x is contiguous
    aligned:     the weight's address is a multiple of 16 bytes
    triton:      Triton's kernels run on the device
    gluon:       the release of Triton has the Gluon that the kernels for Hopper are written in
    arch:        10 * major + minor of an NVIDIA device, else 0
    num_sms:     multiprocessors of the device
    """

    values: WeightValues
    n: int
    k: int
    tokens: int
    dtype: torch.dtype
    matrix_dtype: torch.dtype | None = None
    group: int = 0
    scales: torch.dtype | None = None
    gated: bool = False
    rounded: bool = False
    invariant: bool = False
    kept: bool = False
    num_experts: int = 0
    top_k: int = 0
    by_rows: bool = True
    contiguous: bool = True
    aligned: bool = True
    triton: bool = True
    gluon: bool = True
    arch: int = 0
    num_sms: int = 132

    @property
    def is_packed(self) -> bool:
        """Whether the values have 4 bits."""
        return self.values in ("int4", "float4")

    @property
    def has_row_scales(self) -> bool:
        """Whether a row of the weight has one scale."""
        return 0 < self.k <= self.group

    @property
    def outputs(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.gated else self.n

    @property
    def pairs(self) -> int:
        """Pairs of a token and an expert."""
        return self.tokens * self.top_k

    @property
    def pairs_per_expert(self) -> float:
        """The average by which kernels and tiles of experts are chosen. With `invariant`, only those that give rows the same
        bits may be chosen by it."""
        return self.pairs / self.num_experts

    @property
    def is_programmatic(self) -> bool:
        """Whether launches are programmatic."""
        return has_programmatic_launch(self.arch)

    @property
    def reads_float8(self) -> bool:
        """Whether Triton converts the weight's values on this device."""
        return self.values != "float8" or converts_float8(self.arch)


class Details(NamedTuple):
    """What a call asks for in addition to its product: values that a plan keeps, but that do not affect the choice of the
    kernel.

    eps, offset: fields of the norm, see `Norm`
    activation:  the activation of a gated product
    alpha:       factor of the product before it is added to a residual
    strides:     strides of x and of the weight, which the row-invariant kernels need
    """

    eps: float = 0.0
    offset: float = 0.0
    activation: str | None = None
    alpha: float = 1.0
    strides: tuple[int, ...] = ()


Multiply = Callable[[Any, Any, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""The plan of a kernel: a function of x, the weight, the bias, the weight of the norm and the residual of a call, which returns
the product. Only `fused` kernels read the weight of the norm."""


def converts_float8(arch: int) -> bool:
    """Whether Triton converts float8_e4m3fn on this architecture. Otherwise PyTorch does, or kernels read bytes."""
    return arch >= 89


@cache
def compiles_gluon() -> bool:
    """Whether the installed release of Triton has the Gluon that the kernels for Hopper are written in."""
    try:
        import triton

        from fa_serve.backends.hopper import RELEASES
    except ImportError:
        return False
    return triton.__version__.startswith(RELEASES) and not triton.knobs.runtime.interpret


def product_with(
    weight: Weight,
    *,
    tokens: int,
    dtype: torch.dtype,
    arch: int,
    num_sms: int = 132,
    gated: bool = False,
    rounded: bool = False,
    invariant: bool = False,
    num_experts: int = 0,
    top_k: int = 0,
    by_rows: bool = True,
    triton: bool = True,
) -> Product:
    """The product of tokens of a dtype with a weight. The names are those of `Product`.

    weight: a matrix (n, k), or (num_experts, n, k) for experts; or a QuantizedWeight, which has the rows of all experts
    """
    asked: dict[str, Any] = {
        "tokens": tokens,
        "dtype": dtype,
        "gated": gated,
        "rounded": rounded,
        "invariant": invariant,
        "num_experts": num_experts,
        "top_k": top_k,
        "by_rows": by_rows,
        "aligned": not weight.data.data_ptr() % 16,
        "triton": triton,
        "gluon": compiles_gluon(),
        "arch": arch,
        "num_sms": num_sms,
    }
    n, k = weight.shape[-2:]
    if isinstance(weight, QuantizedWeight):
        n //= max(num_experts, 1)
        return Product(values=weight.values, n=n, k=k, group=weight.group_size, scales=weight.scales.dtype, **asked)
    contiguous = weight.stride() in ((n * k, k, 1), (n * k, 1, n)) if num_experts else weight.is_contiguous()
    return Product(values="float", n=n, k=k, matrix_dtype=weight.dtype, contiguous=contiguous, **asked)


def products_with_experts(experts: ExpertWeights, *, kept: bool = False, **asked: Any) -> tuple[Product, Product]:
    """Both products of a mixture: the gated one, then the one with the down weights.

    kept: whether the first one stores its results before the gate; asked: arguments of `product_with`
    """
    matrices = [weight for weight in (experts.gate_up, experts.down) if isinstance(weight, Tensor)]
    asked["num_experts"] = experts.sizes.num_experts
    asked["by_rows"] = all(weight.stride(2) == 1 for weight in matrices)
    return replace(product_with(experts.gate_up, gated=True, **asked), kept=kept), product_with(experts.down, **asked)
