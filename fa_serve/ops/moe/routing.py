"""The choice of a mixture's experts: scores, the best groups, the best experts and their weights in one kernel.

A program handles one token. It holds the scores of the token in registers, and takes the largest score top_k times; of equal
scores it takes the first. On Hopper and later GPUs it is launched programmatically, see `primitives.wait_for_previous_kernel`.
This module leaves out the product that computes the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS, facts
from fa_serve.ops.elementwise.activation import sigmoid
from fa_serve.ops.ops_backend import Router


@triton.jit
def _in_best_groups(choice, NUM_GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """The values of the TOP_GROUPS best groups; others become -inf. Groups are ranked by the sum of their two largest."""
    grouped = tl.reshape(choice, [NUM_GROUPS, SIZE])
    best = tl.argmax(grouped, 1)
    others = tl.where(tl.arange(0, SIZE)[None, :] == best[:, None], float("-inf"), grouped)
    sums = tl.max(grouped, 1) + tl.max(others, 1)
    groups = tl.arange(0, NUM_GROUPS)
    kept = groups < 0
    for _ in tl.static_range(TOP_GROUPS):
        mine = groups == tl.argmax(sums, 0)
        kept = kept | mine
        sums = tl.where(mine, float("-inf"), sums)
    return tl.reshape(tl.where(kept[:, None], grouped, float("-inf")), [NUM_GROUPS * SIZE])


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    index_ptr,
    scale,
    stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    known = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * stride + experts, mask=known, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = sigmoid(logits)
    else:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + experts, mask=known, other=0.0).to(tl.float32)
    choice = tl.where(known, choice, float("-inf"))
    if NUM_GROUPS > 1:
        choice = _in_best_groups(choice, NUM_GROUPS, BLOCK_E // NUM_GROUPS, TOP_GROUPS)
    places = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], tl.float32)
    index = tl.zeros([BLOCK_K], tl.int32)
    for place in tl.static_range(TOP_K):
        # in a row of NaN no expert is the largest
        best = tl.minimum(tl.argmax(choice, 0), NUM_EXPERTS - 1)
        score = tl.sum(tl.where(experts == best, scores, 0.0), 0)
        weights = tl.where(places == place, score, weights)
        index = tl.where(places == place, best, index)
        choice = tl.where(experts == best, float("-inf"), choice)
    if RENORMALISE:
        weights = weights / tl.sum(weights, 0)
    weights = (weights * scale).to(weights_ptr.dtype.element_ty)
    tl.store(weights_ptr + row * TOP_K + places, weights, mask=places < TOP_K)
    tl.store(index_ptr + row * TOP_K + places, index.to(tl.int64), mask=places < TOP_K)


def launch_route(logits: Tensor, bias: Tensor | None, router: Router, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Arguments and results are those of `fa_serve.ops.route`. One launch."""
    tokens, num_experts = logits.shape
    top_k, uses_sigmoid, renormalise, scale, num_groups, top_groups = router
    weights = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    index = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    key = ("route", *facts(logits, bias), router, dtype)
    run = PLANS.get(key)
    if run is None:
        if tokens == 0:
            return weights, index
        sizes = (power_of_2(num_experts), power_of_2(top_k))
        pdl = spec.has_programmatic_launch(spec.arch_of(logits.device))
        fixed = (logits.stride(0), num_experts, top_k, uses_sigmoid, renormalise, num_groups, top_groups, *sizes, pdl)
        run = PLANS.add(key, Launch(_route, tokens, varying=(scale,), fixed=fixed, options=launch_options(pdl, 1)))
    run((logits, bias, weights, index))
    return weights, index
