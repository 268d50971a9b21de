"""The kernels of products, and which of them computes a product: the first row of the table that fits.

    choice = select_kernel(Product(values="int4", n=2048, k=4096, group=128, scales=torch.bfloat16, tokens=200, ...))
    choice.kernel.name                     # "dequantise"
    choice.tile                            # what the kernel is launched with
    choice.passed_over["one_expert"]       # "multiplies at least 4096 rows of weights, got 2048"
    kernels_by_tokens(product)             # "gemv for 1 token, unpack_wgmma for 2 to 128, dequantise for more"

All code that launches, describes, warms up or tests a product asks this table. For few tokens, a kernel unpacks the weights in
registers. For many tokens, PyTorch multiplies with the unpacked matrix, because the cost of unpacking it once is then small
compared with the product. From 2 tokens on, float8 weights with a scale for each row are multiplied with activations that are
rounded to float8 as well, on GPUs for which `torch._scaled_mm` does that. The order of the rows and the limits in them were
measured; crossovers.py names the lines of benchmarks/results.

This module imports no Triton, so that `fa-serve info` runs anywhere. Left out: tiles (the tiles.py of each family of kernels),
and how a product is computed (run.py, and moe/run.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fa_serve.ops.moe.tiles import (
    expert_row_tile,
    grouped_matrix_tile,
    grouped_tile,
    grouped_wgmma_tile,
    matrix_tile,
    one_expert_tile,
)
from fa_serve.ops.products.conditions import (
    refuses_dequantise,
    refuses_dequantise_experts,
    refuses_expert_matrices,
    refuses_expert_rows,
    refuses_expert_wgmma,
    refuses_float8_wgmma,
    refuses_gemv,
    refuses_invariant,
    refuses_invariant_rows,
    refuses_invariant_wgmma,
    refuses_nothing,
    refuses_one_expert,
    refuses_row,
    refuses_scaled_mm,
    refuses_unpack,
    refuses_unpack_row,
    refuses_unpack_wgmma,
)
from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.quantised.tiles import float8_tile, gemv_tile, unpack_linear_tile, unpack_row_tile, wgmma_tile
from fa_serve.ops.products.tiles import invariant_rows_tile, invariant_tile, invariant_wgmma_tile, matrix_row_tile

QUANTISED = ("int4", "float4", "float8")
ANY_VALUES = ("float", *QUANTISED)
MOST_TOKENS = 1 << 16
"""Up to this many tokens, `kernels_by_tokens` tells people the kernels. Existing mixtures have no crossover at more tokens."""


@dataclass(frozen=True)
class Kernel:
    """A row of the table: a kernel, or a function of PyTorch, and which products it computes.

    name:       name of the row
    about:      what it is, in a few words
    launches:   the kernels that multiply, by the names of their functions, or a function of PyTorch. Launches before and after
                them are not listed
    plan:       "module:function" that plans its launches. The module is imported when it is first needed: Gluon's names change
                with each release of Triton, so modules in Gluon are imported only where `Product.gluon` says that they can be
    values:     the kinds of weights that it reads
    refuses:    the reason why it does not compute a product with such a weight, or None
    tile:       returns the tile that it is launched with, or None if it has only one form
    grouped:    True: it multiplies only the weights of experts; False: only dense weights; None: both
    triton:     it needs Triton on the device
    invariant:  the bits of a row do not depend on the number of rows
    fused:      it normalises the input and gates the result in the same launch
    in_float8:  it multiplies input that was rounded to float8
    whole:      it computes both products of a mixture, from pairs in the order of their tokens
    listed:     it takes a list of its tiles, of up to `tile.block_m` pairs each
    """

    name: str
    about: str
    launches: tuple[str, ...]
    plan: str
    values: tuple[str, ...]
    refuses: Callable[[Product], str | None]
    tile: Callable[[Product], Any]
    grouped: bool | None = False
    triton: bool = True
    invariant: bool = False
    fused: bool = False
    in_float8: bool = False
    whole: bool = False
    listed: bool = False

    def fits(self, product: Product) -> str | None:
        """None if the kernel computes the product, else the reason why it does not."""
        if self.grouped not in (None, product.num_experts > 0):
            return (
                "multiplies the weights of experts only"
                if self.grouped
                else "multiplies dense weights only, not the weights of experts"
            )
        if product.values not in self.values:
            return f"multiplies {' and '.join(self.values)} weights, got {product.values}"
        if self.triton and not product.triton:
            return "needs Triton, which does not run on the device"
        if product.invariant and not self.invariant:
            return "its results for a row depend on the number of rows"
        if product.rounded and not self.in_float8:
            return "does not multiply input in float8"
        return self.refuses(product)

    def load(self) -> Any:
        """The function that plans launches."""
        module, _, function = self.plan.partition(":")
        return getattr(importlib.import_module(module), function)


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that computes a product.

    tile:        the tile that the kernel is launched with, or None
    passed_over: the names of the rows before it in the table, and why they do not compute the product
    """

    kernel: Kernel
    tile: Any
    passed_over: Mapping[str, str]


def no_tile(product: Product) -> None:
    """The tile of a kernel that has only one form: none."""


_QUANTISED = "fa_serve.ops.products.quantised"
KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="row",
        about="one token, with its norm and gate",
        launches=("_linear_row",),
        plan="fa_serve.ops.products.row:plan_row",
        values=("float",),
        refuses=refuses_row,
        tile=matrix_row_tile,
        fused=True,
    ),
    Kernel(
        name="invariant_rows",
        about="few tokens on Hopper, with their norm and gate, bitwise equal to `invariant`",
        launches=("invariant_rows",),
        plan="fa_serve.ops.products.row_invariant_few:plan_invariant_rows",
        values=("float",),
        refuses=refuses_invariant_rows,
        tile=invariant_rows_tile,
        invariant=True,
        fused=True,
    ),
    Kernel(
        name="matmul",
        about="PyTorch's product",
        launches=("torch.nn.functional.linear",),
        plan="fa_serve.ops.products.pytorch:plan_matmul",
        values=("float",),
        refuses=refuses_nothing,
        tile=no_tile,
        triton=False,
    ),
    Kernel(
        name="gemv",
        about="one token on Hopper, with its norm and gate",
        launches=("_quantized_gemv",),
        plan=f"{_QUANTISED}.gemv:plan_gemv",
        values=("int4", "float8"),
        refuses=refuses_gemv,
        tile=gemv_tile,
        fused=True,
    ),
    Kernel(
        name="unpack_row",
        about="one token, with its norm and gate",
        launches=("_quantized_row",),
        plan=f"{_QUANTISED}.unpack:plan_unpack_row",
        values=QUANTISED,
        refuses=refuses_unpack_row,
        tile=unpack_row_tile,
        fused=True,
    ),
    Kernel(
        name="float8_wgmma",
        about="input rounded to float8, float8 weights; Hopper",
        launches=("_scaled_wgmma",),
        plan=f"{_QUANTISED}.float8_wgmma:plan_float8_wgmma",
        values=("float8",),
        refuses=refuses_float8_wgmma,
        tile=float8_tile,
        in_float8=True,
    ),
    Kernel(
        name="scaled_mm",
        about="input rounded to float8, float8 weights; PyTorch",
        launches=("torch._scaled_mm",),
        plan="fa_serve.ops.products.pytorch:plan_scaled_mm",
        values=("float8",),
        refuses=refuses_scaled_mm,
        tile=no_tile,
        in_float8=True,
    ),
    Kernel(
        name="unpack_wgmma",
        about="few tokens on Hopper",
        launches=("_quantized_wgmma",),
        plan=f"{_QUANTISED}.unpack_wgmma:plan_unpack_wgmma",
        values=("int4", "float8"),
        refuses=refuses_unpack_wgmma,
        tile=wgmma_tile,
    ),
    Kernel(
        name="one_expert",
        about="more tokens on Hopper, by the kernel for experts",
        launches=("_grouped_wgmma",),
        plan="fa_serve.ops.moe.unpack_wgmma:plan_one_expert",
        values=("int4", "float8"),
        refuses=refuses_one_expert,
        tile=one_expert_tile,
    ),
    Kernel(
        name="unpack",
        about="few tokens",
        launches=("_quantized_linear",),
        plan=f"{_QUANTISED}.unpack:plan_unpack",
        values=QUANTISED,
        refuses=refuses_unpack,
        tile=unpack_linear_tile,
    ),
    Kernel(
        name="dequantise",
        about="PyTorch's product with the unpacked matrix",
        launches=("_dequantize",),
        plan=f"{_QUANTISED}.dequantise:plan_dequantised_product",
        values=QUANTISED,
        refuses=refuses_dequantise,
        tile=no_tile,
    ),
    Kernel(
        name="invariant_wgmma",
        about="many tokens on Hopper, bitwise equal to `invariant`",
        launches=("invariant_matrix",),
        plan="fa_serve.ops.products.row_invariant_wgmma:plan_invariant_wgmma",
        values=("float",),
        refuses=refuses_invariant_wgmma,
        tile=invariant_wgmma_tile,
        invariant=True,
    ),
    Kernel(
        name="invariant",
        about="rows do not depend on the number of tokens",
        launches=("_invariant_linear",),
        plan="fa_serve.ops.products.row_invariant:plan_invariant",
        values=ANY_VALUES,
        refuses=refuses_invariant,
        tile=invariant_tile,
        invariant=True,
    ),
    Kernel(
        name="expert_rows",
        about="few tokens; each pair reads its expert's rows",
        launches=("_gated_rows", "_mixed_rows"),
        plan="fa_serve.ops.moe.rows:plan_rows",
        values=ANY_VALUES,
        refuses=refuses_expert_rows,
        tile=expert_row_tile,
        grouped=True,
        whole=True,
    ),
    Kernel(
        name="expert_matrices",
        about="many pairs with matrices on Hopper",
        launches=("experts_matrix",),
        plan="fa_serve.ops.moe.matrix_wgmma:plan_expert_matrices",
        values=("float",),
        refuses=refuses_expert_matrices,
        tile=matrix_tile,
        grouped=True,
        invariant=True,
        listed=True,
    ),
    Kernel(
        name="expert_wgmma",
        about="unpacked weights on Hopper",
        launches=("_grouped_wgmma",),
        plan="fa_serve.ops.moe.unpack_wgmma:plan_expert_wgmma",
        values=QUANTISED,
        refuses=refuses_expert_wgmma,
        tile=grouped_wgmma_tile,
        grouped=True,
        listed=True,
    ),
    Kernel(
        name="dequantise_experts",
        about="`grouped`, with unpacked matrices of some experts at a time",
        launches=("_dequantize", "_grouped_linear"),
        plan="fa_serve.ops.moe.grouped:plan_dequantised",
        values=QUANTISED,
        refuses=refuses_dequantise_experts,
        tile=grouped_matrix_tile,
        grouped=True,
    ),
    Kernel(
        name="grouped",
        about="pairs that are sorted by expert",
        launches=("_grouped_linear",),
        plan="fa_serve.ops.moe.grouped:plan_grouped",
        values=ANY_VALUES,
        refuses=refuses_nothing,
        tile=grouped_tile,
        grouped=True,
        invariant=True,
    ),
    Kernel(
        name="torch",
        about="PyTorch with dequantised weights",
        launches=("torch.nn.functional.linear",),
        plan="fa_serve.ops.products.pytorch:plan_torch",
        values=ANY_VALUES,
        refuses=refuses_nothing,
        tile=no_tile,
        grouped=None,
        triton=False,
        invariant=True,
    ),
)
"""The first row that fits computes a product."""


def select_kernel(product: Product) -> KernelChoice:
    """What computes the product: the first row of the table that fits."""
    passed_over = dict[str, str]()
    for kernel in KERNELS:
        reason = kernel.fits(product)
        if reason is None:
            return KernelChoice(kernel, kernel.tile(product), passed_over)
        passed_over[kernel.name] = reason
    raise AssertionError(f"no row of the table computes {product}")


def kernel_named(name: str) -> Kernel:
    """The row of this name."""
    return next(kernel for kernel in KERNELS if kernel.name == name)


def changes_of_kernel(product: Product, most: int = MOST_TOKENS) -> list[tuple[int, Kernel]]:
    """(number of tokens, kernel) for 1 token, and for each number up to `most` at which the kernel changes.

    The table is asked at powers of two. At most one change is found between two of them, because limits are further apart.
    """

    def kernel_of(tokens: int) -> Kernel:
        return select_kernel(replace(product, tokens=tokens)).kernel

    changes = [(1, kernel_of(1))]
    low = 1
    while low < most:
        high = min(2 * low, most)
        last = kernel_of(high)
        if last is not changes[-1][1]:
            first = low
            end = high
            while end - first > 1:
                middle = (first + end) // 2
                if kernel_of(middle) is changes[-1][1]:
                    first = middle
                else:
                    end = middle
            changes.append((end, last))
        low = high
    return changes


def kernels_by_tokens(product: Product) -> str:
    """For people: "gemv for 1 token, unpack_wgmma for 2 to 128, dequantise for more"."""
    changes = changes_of_kernel(product)
    parts = []
    for (first, kernel), following in zip(changes, [*changes[1:], None], strict=True):
        if following is None:
            parts.append(kernel.name if first == 1 else f"{kernel.name} for more")
            continue
        last = following[0] - 1
        count = str(last) if first == last else f"{first} to {last}"
        unit = "" if parts else " token" if last == 1 else " tokens"
        parts.append(f"{kernel.name} for {count}{unit}")
    return ", ".join(parts)


def kernels_of_experts(products: tuple[Product, Product]) -> str:
    """For people, as `kernels_by_tokens`. Both products of a mixture are named if they are computed by different kernels."""
    first, second = map(kernels_by_tokens, products)
    return first if first == second else f"{first}; down: {second}"
