"""Products with a weight matrix on a GPU: the one place that plans them, and that launches what table.py chooses.

    y = multiply(x, weight, bias, norm, activation, residual, alpha, next_weight)      # fa_serve.ops.linear
    y = multiply_invariant(x, weight, bias)                                            # fa_serve.ops.invariant_linear

A plan is made for calls that look alike, and kept in `PLANS`. It has three steps: what is done with the input (a norm, or a
norm and a rounding to float8), the product, and what is done with its result (a gate, which may round for the next product).
The kernels of one token do all of that in one launch. Left out: the products of experts (experts/run.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import multiprocessors
from fa_serve.launching.plans import PLANS, Run
from fa_serve.ops.elementwise.activation import plan_act_and_mul
from fa_serve.ops.elementwise.norm import plan_rms_norm
from fa_serve.ops.ops_backend import Norm, RoundedRows, Weight
from fa_serve.ops.products.problem import Details, Product, product_with
from fa_serve.ops.products.quantised.rounding import MAX_GATED, RoundRows, plan_rounding
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.products.table import Choice, select_kernel

Prepare = Callable[[Any, Tensor | None, Any], Any]
"""Makes the input of a product of x, the weight of a norm and the weight of the product."""
Finish = Callable[[Tensor, Any], Tensor | RoundedRows]
"""Gates the result of a product, for the product with the next weight."""


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
    if isinstance(x, RoundedRows):
        rows = x.data
    else:
        if isinstance(weight, QuantizedWeight):
            x = x.contiguous()
        rows = x
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    key = (
        "product",
        rows.shape,
        rows.stride(0),
        rows.dtype,
        x.dtype,
        rows.get_device(),
        _facts_of(weight),
        None if bias is None else bias.dtype,
        None if norm_weight is None else norm_weight.dtype,
        eps,
        offset,
        activation,
        None if residual is None else residual.dtype,
        alpha,
        _facts_of(next_weight) if activation is not None and isinstance(next_weight, QuantizedWeight) else None,
    )
    run = PLANS.get(key)
    if run is None:
        product = product_of(x, weight, gated=activation is not None)
        run = PLANS.add(key, plan_product(x, product, Details(eps, offset, activation, alpha), norm is not None, next_weight))
    y: Tensor | RoundedRows = run((x, weight, bias, norm_weight, residual, next_weight))
    return y


def multiply_invariant(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.invariant_linear`, with x of (m, k)."""
    strides = () if isinstance(weight, QuantizedWeight) else weight.stride()
    of_bias = None if bias is None else bias.dtype
    key = ("invariant", x.shape, x.stride(), x.dtype, x.get_device(), _facts_of(weight), strides, of_bias)
    run = PLANS.get(key)
    if run is None:
        details = Details(strides=(*x.stride(), *strides))
        run = PLANS.add(key, plan_product(x, product_of(x, weight, invariant=True), details))
    y: Tensor = run((x, weight, bias, None, None, None))
    return y


def _facts_of(weight: Weight) -> tuple[Any, ...]:
    """Everything about a weight that a plan depends on."""
    if not isinstance(weight, QuantizedWeight):
        return weight.shape, weight.dtype
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


def product_of(x: Tensor | RoundedRows, weight: Weight, **asked: Any) -> Product:
    """The product of a call, on the device of x. asked: names and values of `Product`"""
    rows = x.data if isinstance(x, RoundedRows) else x
    asked["rounded"] = isinstance(x, RoundedRows)
    arch = spec.arch_of(rows.device)
    return product_with(
        weight, tokens=rows.shape[0], dtype=x.dtype, arch=arch, num_sms=multiprocessors(rows.device, 1), **asked
    )


def plan_product(
    x: Tensor | RoundedRows,
    product: Product,
    details: Details,
    has_norm: bool = False,
    next_weight: Weight | None = None,
    choice: Choice | None = None,
) -> Run:
    """Decide about calls that look like this one.

    choice: overrides that of the table, for tuning and tests
    """
    if product.tokens == 0:
        return lambda tensors: _of_no_tokens(product, tensors)
    choice = select_kernel(product) if choice is None else choice
    kernel = choice.kernel
    compute = kernel.load()(product, choice.tile, details)
    prepare: Prepare | None = None
    if kernel.in_float8 and not product.rounded:
        prepare = _plan_rounded_input(product, details)
    elif has_norm and not kernel.fused:
        assert isinstance(x, Tensor), "rows that are rounded have been normalised"
        prepare = _plan_norm(x, details)
    finish = None
    if details.activation is not None and not kernel.fused:
        finish = _plan_gate(product, details.activation, next_weight)

    def run(tensors: tuple[Any, ...]) -> Tensor | RoundedRows:
        x, weight, bias, norm_weight, residual, next_weight = tensors
        if prepare is not None:
            x = prepare(x, norm_weight, weight)
        y = compute(x, weight, bias, norm_weight, residual)
        return y if finish is None else finish(y, next_weight)

    return run


def _of_no_tokens(product: Product, tensors: tuple[Any, ...]) -> Tensor:
    x, _, _, _, residual, _ = tensors
    rows: Tensor = x.data if isinstance(x, RoundedRows) else x
    return rows.new_empty(0, product.outputs, dtype=product.dtype) if residual is None else residual


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
    """activation(gate) * up, (m, n / 2), in one launch; in float8 if the product with `next_weight` rounds its input."""
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
    """The launch that gates and rounds, or None if the next product takes its input as it is."""
    next_product = product_with(
        next_weight, tokens=product.tokens, dtype=product.dtype, arch=product.arch, num_sms=product.num_sms
    )
    return plan_rounding(next_product, activation=activation) if select_kernel(next_product).kernel.in_float8 else None
