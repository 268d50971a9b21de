"""The experts of a mixture on a GPU: each token takes top_k of them, and their results are weighted and summed.

    y = compute_experts(x, top_k_index, top_k_weights, experts, invariant)             # fa_serve.ops.experts

Many tokens take four launches, or five if a kernel needs a list of its tiles. The pairs of a token and an expert are sorted by
expert (order.py). For the pairs of each expert, one product multiplies by the gate and up weights and gates the results, and
another one multiplies these by the down weights. Then the pairs of each token are added. Few tokens take two launches without a
sort (rows.py). products/table.py chooses the kernels of both products. Nothing is read back to the host, so equal calls have
equal bits and may be captured in a CUDA graph.

On Hopper and later GPUs all launches are programmatic, see `primitives.wait_for_previous_kernel`: each layer of a mixture has
several short launches. Left out: the choice of experts, which is the model's router, and experts that every token takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fa_serve import spec
from fa_serve.launching.launch import multiprocessors
from fa_serve.launching.plans import PLANS, Run, facts
from fa_serve.ops.moe.order import Places, plan_list, plan_sort, plan_total
from fa_serve.ops.moe.primitives import weight_facts
from fa_serve.ops.ops_backend import ExpertWeights
from fa_serve.ops.products.problem import Product, products_with_experts
from fa_serve.ops.products.table import KernelChoice, select_kernel


def compute_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: ExpertWeights,
    invariant: bool,
    kept: Tensor | None = None,
) -> Tensor:
    """Arguments and result are those of `OpsBackend.experts`."""
    x = x.contiguous()
    index = top_k_index.contiguous()
    weights = top_k_weights.contiguous()
    out = torch.empty_like(x)
    tensors = (x, index, weights, experts.gate_up_bias, experts.down_bias)
    known = (weight_facts(experts.gate_up), weight_facts(experts.down))
    key = ("experts", *facts(*tensors), *known, experts.gate, invariant, kept is None)
    run = PLANS.get(key)
    if run is None:
        if out.shape[0] == 0:
            return out
        run = PLANS.add(key, plan_experts(products_of(x, index, experts, invariant, kept=kept is not None), experts))
    run((x, index, weights, experts, out) if kept is None else (x, index, weights, experts, out, kept))
    return out


def products_of(
    x: Tensor, index: Tensor, experts: ExpertWeights, invariant: bool, *, kept: bool = False
) -> tuple[Product, Product]:
    """Both products of a call, on the device of x: the gated one, then the one with the down weights."""
    tokens, top_k = index.shape
    arch = spec.arch_of(x.device)
    num_sms = multiprocessors(x.device, 1)
    return products_with_experts(
        experts, tokens=tokens, top_k=top_k, dtype=x.dtype, arch=arch, num_sms=num_sms, invariant=invariant, kept=kept
    )


def plan_experts(products: tuple[Product, Product], experts: ExpertWeights) -> Run:
    """Plan all calls that look like this one. experts: those of a call, for their strides and the gate"""
    first, second = (select_kernel(product) for product in products)
    if first.kernel.whole and second.kernel.whole:
        run: Run = first.kernel.load()(first, second, products, experts)
        return run
    return _plan_sorted(first, second, products, experts)


def _plan_sorted(first: KernelChoice, second: KernelChoice, products: tuple[Product, Product], experts: ExpertWeights) -> Run:
    gated_product, product = products
    sort = plan_sort(product)
    listed = [choice.tile for choice in (first, second) if choice.kernel.listed]
    list_tiles = plan_list(product, listed[0].block_m) if listed else None
    multiply_gated = first.kernel.load()(gated_product, first.tile, experts.gate_up, experts.gate_up_bias, experts.gate)
    multiply = second.kernel.load()(product, second.tile, experts.down, experts.down_bias, None)
    total = plan_total(product)
    pairs = product.pairs
    width = gated_product.outputs
    hidden = product.outputs

    def run(tensors: tuple[Any, ...]) -> None:
        x, index, weights, experts, out, *kept = tensors
        order, starts = sort(index)
        h = x.new_empty(pairs, width)
        parts = x.new_empty(pairs, hidden)
        places = Places(order, starts, None if list_tiles is None else list_tiles(starts))
        multiply_gated(x, experts.gate_up, experts.gate_up_bias, places, h, *kept)
        multiply(h, experts.down, experts.down_bias, places, parts)
        total((parts, index, weights, out))

    return run
