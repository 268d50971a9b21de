"""Products with a weight matrix on a GPU: the one place that plans them, and that launches the kernels which table.py chooses.

    y = multiply(x, weight, bias, norm, activation, residual, alpha, next_weight)      # fa_serve.ops.linear
    y = multiply_invariant(x, weight, bias)                                            # fa_serve.ops.invariant_linear

One plan is made for all calls that look alike, and kept in `PLANS`. It has three steps: what is done with the input (a norm, or
a norm and a rounding to float8), the product, and what is done with its result (a gate, which may round for the next product).
The kernels for one token do all of this in one launch. Left out: the products of experts (moe/run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import multiprocessors
from fa_serve.launching.plans import PLANS, Run
from fa_serve.ops.elementwise.activation import plan_act_and_mul
from fa_serve.ops.elementwise.norm import plan_rms_norm
from fa_serve.ops.modes import rows_are_independent
from fa_serve.ops.ops_backend import Norm, RoundedRows, Weight
from fa_serve.ops.products import tiles
from fa_serve.ops.products.problem import Details, Product, product_with
from fa_serve.ops.products.quantised.rounding import MAX_GATED, RoundRows, plan_rounding
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.table import KernelChoice, select_kernel

Prepare = Callable[[Any, Tensor | None, Any], Any]
"""Maps (x, the weight of the norm, the weight of the product) to the input of the product."""
Finish = Callable[[Tensor, Any], Tensor | RoundedRows]
"""Maps (the result of a product, the weight of the next product) to the gated result, rounded if the next product rounds."""


def multiply(
    x: Tensor | RoundedRows,
    weight: Weight,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
    next_weight: Weight | None,
) -> Tensor | RoundedRows:
    """Arguments and result are those of `fa_serve.ops.linear`."""
    rows: Any = x
    quantised = isinstance(weight, QuantizedWeight)
    if quantised:
        rows = x.data if isinstance(x, RoundedRows) else x.contiguous()
        x = x if isinstance(x, RoundedRows) else rows
    shape = rows.shape
    tokens = shape[0]
    norm_weight = None
    around: Any = alpha
    if norm is not None:
        norm_weight, eps, offset = norm
        around = (alpha, eps, offset, norm_weight.dtype, 0 if tokens == 1 else rows.stride(0))
    invariant = rows_are_independent()
    if invariant:
        next_weight = None  # whether a gate rounds depends on the number of rows
    next_facts = None
    if activation is not None and tokens > 1 and isinstance(next_weight, QuantizedWeight):
        next_facts = _facts_of(next_weight)
    key: tuple[Any, ...]
    few = tiles.FEW_ROWS_IN_USUAL_MODE and tokens <= tiles.MOST_FEW_ROWS
    if not invariant and norm is None and activation is None and tokens > 1 and not quantised and not few:
        # the plan of such a product depends on nothing else, and building a longer key would slow down a layer noticeably
        key = ("matrices", alpha)
    else:
        key = (
            shape,
            x.dtype,
            rows.dtype,
            rows.get_device(),
            _facts_of(weight) if isinstance(weight, QuantizedWeight) else (weight.shape, weight.dtype),
            None if bias is None else bias.dtype,
            None if residual is None else residual.dtype,
            around,
            activation,
            next_facts,
            rows.stride() if invariant or few else None,
        )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan(x, weight, norm, activation, alpha, next_weight, invariant))
    y: Tensor | RoundedRows
    if next_facts is None:
        y = run(x, weight, bias, norm_weight, residual)
    else:
        y = run(x, weight, bias, norm_weight, residual, next_weight)
    return y


def _plan(
    x: Tensor | RoundedRows,
    weight: Weight,
    norm: Norm | None,
    activation: str | None,
    alpha: float,
    next_weight: Weight | None,
    invariant: bool,
) -> Run:
    _, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    rows = x.data if isinstance(x, RoundedRows) else x
    strides = (*rows.stride(), *(() if isinstance(weight, QuantizedWeight) else weight.stride()))
    details = Details(eps, offset, activation, alpha, strides)
    product = problem_of(x, weight, gated=activation is not None, invariant=invariant)
    run: Run = plan_product(x, product, details, norm is not None, next_weight)
    return run


def multiply_invariant(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.invariant_linear`, with x of (m, k)."""
    strides = () if isinstance(weight, QuantizedWeight) else weight.stride()
    of_weight = _facts_of(weight) if isinstance(weight, QuantizedWeight) else (weight.shape, weight.dtype)
    key = ("invariant", x.shape, x.stride(), x.dtype, x.get_device(), of_weight, strides, None if bias is None else bias.dtype)
    run = PLANS.get(key)
    if run is None:
        details = Details(strides=(*x.stride(), *strides))
        run = PLANS.add(key, plan_product(x, problem_of(x, weight, invariant=True), details))
    y: Tensor = run(x, weight, bias, None, None)
    return y


def _facts_of(weight: QuantizedWeight) -> tuple[Any, ...]:
    """Everything about a weight that a plan depends on."""
    data = weight.data
    return (
        data.shape,
        data.dtype,
        data.data_ptr() % 16,
        weight.scales.dtype,
        weight.group_size,
        weight.width,
        weight.zeros is None,
        weight.columns is None,
        weight.input_scale is None,
    )


def problem_of(x: Tensor | RoundedRows, weight: Weight, **asked: Any) -> Product:
    """The product of a call, on the device of x. asked: names and values of `Product`"""
    rows = x.data if isinstance(x, RoundedRows) else x
    asked["rounded"] = isinstance(x, RoundedRows)
    arch = spec.arch_of(rows.device)
    product = product_with(
        weight, tokens=rows.shape[0], dtype=x.dtype, arch=arch, num_sms=multiprocessors(rows.device, 1), **asked
    )
    return product if rows.stride(1) == 1 else replace(product, contiguous=False)


def plan_product(
    x: Tensor | RoundedRows,
    product: Product,
    details: Details,
    has_norm: bool = False,
    next_weight: Weight | None = None,
    choice: KernelChoice | None = None,
) -> Run:
    """Plan all calls that look like this one.

    choice: overrides the choice of the table, for tuning and tests
    """
    if product.tokens == 0:
        return _plan_nothing(product)
    choice = select_kernel(product) if choice is None else choice
    kernel = choice.kernel
    if has_norm and not kernel.fused and details.strides:
        details = details._replace(strides=(product.k, 1, *details.strides[2:]))  # the norm writes rows without gaps
    compute: Run = kernel.load()(product, choice.tile, details)
    if kernel.fused:
        return compute
    prepare: Prepare | None = None
    if kernel.in_float8 and not product.rounded:
        prepare = _plan_rounded_input(product, details)
    elif has_norm:
        assert isinstance(x, Tensor), "rows that are rounded have been normalised"
        prepare = _plan_norm(x, details)
    finish = None if details.activation is None else _plan_gate(product, details.activation, next_weight)

    def run(
        x: Tensor | RoundedRows,
        weight: Weight,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        residual: Tensor | None,
        next_weight: Weight | None = None,
    ) -> Tensor | RoundedRows:
        if prepare is not None:
            x = prepare(x, norm_weight, weight)
        y = compute(x, weight, bias, norm_weight, residual)
        return y if finish is None else finish(y, next_weight)

    return run


def _plan_nothing(product: Product) -> Run:
    """The product of no tokens."""
    outputs = product.outputs
    dtype = product.dtype

    def run(x: Tensor | RoundedRows, weight: Weight, bias: object, norm_weight: object, residual: Tensor | None) -> Tensor:
        rows = x.data if isinstance(x, RoundedRows) else x
        return rows.new_empty(0, outputs, dtype=dtype) if residual is None else residual

    return run


def _plan_norm(x: Tensor, details: Details) -> Prepare:
    launch = plan_rms_norm(x, None, torch.empty_like(x), details.eps, details.offset)

    def normalise(x: Tensor, norm_weight: Tensor | None, weight: Weight) -> Tensor:
        out = torch.empty_like(x)
        launch((x, norm_weight, None, out))
        return out

    return normalise


def _plan_rounded_input(product: Product, details: Details) -> Prepare:
    round_rows = plan_rounding(product, details)
    return lambda x, norm_weight, weight: round_rows(x, norm_weight, weight.input_scale)


def _plan_gate(product: Product, activation: str, next_weight: Weight | None) -> Finish:
    """One launch for activation(gate) * up, (m, n / 2), in float8 if the product with `next_weight` rounds its input."""
    width = product.outputs
    round_rows = None
    if product.tokens > 1 and isinstance(next_weight, QuantizedWeight) and width <= MAX_GATED:
        round_rows = _plan_rounding_gate(product, activation, next_weight)
    if round_rows is not None:
        return lambda y, next_weight: round_rows(y, None, next_weight.input_scale)
    launch = plan_act_and_mul(product.tokens, width, product.n, activation, product.is_programmatic)

    def gate(y: Tensor, next_weight: Weight | None) -> Tensor:
        out = y.new_empty(y.shape[0], width)
        launch((y, out))
        return out

    return gate


def _plan_rounding_gate(product: Product, activation: str, next_weight: QuantizedWeight) -> RoundRows | None:
    """The launch that gates and rounds, or None if the next product does not round its input."""
    next_product = product_with(
        next_weight, tokens=product.tokens, dtype=product.dtype, arch=product.arch, num_sms=product.num_sms
    )
    return plan_rounding(next_product, activation=activation) if select_kernel(next_product).kernel.in_float8 else None
