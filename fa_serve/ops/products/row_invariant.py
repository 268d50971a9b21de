"""Kernels whose rows do not depend on the number of rows: a matrix product and a sum.

cuBLAS chooses its kernel by the number of rows, and PyTorch splits a sum depending on the number of rows, so the last bits of a
row change with the size of the batch. Here a row has the same sums in the same order in any batch.

A product sums over k in a chain of matrix instructions that starts from zero: one chain for all of k, or one for each of
`tile.segments` ranges of k, whose results are added in their order. The number of segments depends only on n and k. If there
are enough programs, a program computes all segments of its tile; otherwise each segment has its own program (`tile.apart`), and
`split_k` adds their results. Both ways do the same additions. What else may differ between tiles is in tiles.py.

Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference" (2025).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.launching.plans import PLANS
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.dequantise import plan_matrix
from fa_serve.ops.products.row import store_product
from fa_serve.ops.products.split_k import plan_sums
from fa_serve.ops.products.tiles import InvariantTile, segment_columns

_SUM_BLOCK = 1024
_GROUP_M = 8
"""How many tiles of one column are computed before the next column begins, so that they share its weights in the L2 cache."""


@triton.jit
def sum_chain(
    x_ptrs,
    w_ptrs,
    keep,
    begin,
    end,
    stride_xk,
    stride_wk,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum over [begin, end) of k: one accumulator [BLOCK_M, BLOCK_N], to which products are added in the order of k.

    keep: which rows and columns of the tile exist. EVEN_K: both ends are multiples of BLOCK_K
    """
    keep_rows, keep_cols = keep
    k = tl.arange(0, BLOCK_K)
    x_ptrs += begin.to(tl.int64) * stride_xk
    w_ptrs += begin.to(tl.int64) * stride_wk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=keep_rows[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=keep_cols[None, :], other=0.0)
        else:
            inside = k < end - start
            x = tl.load(x_ptrs, mask=keep_rows[:, None] & inside[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=keep_cols[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    return acc


@triton.jit(do_not_specialize=["M"])
def _invariant_linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    alpha,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    APART: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes one tile of the output; with APART, one segment of it, and out is (SEGMENTS, M, N) float32.

    Consecutive programs compute GROUP_M tiles of one column, then of the next one: they share weights and inputs in L2.
    """
    wait_for_previous_kernel(PDL)
    tiles_m = tl.cdiv(M, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    segment = pid * 0
    if APART:
        segment = pid % SEGMENTS
        pid = pid // SEGMENTS
    first = pid // in_group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    rows = (first + pid % in_group % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % in_group // height).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    keep = (rows < M, cols < N)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + k[None, :] * stride_xk
    w_ptrs = w_ptr + cols[None, :] * stride_wn + k[:, None] * stride_wk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for index in tl.range(0, 1 if APART else SEGMENTS, num_stages=1):
        begin = (segment + index) * WIDTH
        end = tl.minimum(begin + WIDTH, K)
        sums = sum_chain(x_ptrs, w_ptrs, keep, begin, end, stride_xk, stride_wk, PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
        acc = sums if APART or SEGMENTS == 1 else acc + sums
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    offsets = segment.to(tl.int64) * M * N + rows[:, None] * N + cols[None, :]
    store_product(acc, out_ptr, residual_ptr, alpha, offsets, inside)


@triton.jit
def _invariant_sum(x_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        acc += tl.load(x_ptr + row * stride + start + cols, mask=start + cols < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(acc, 0))


def plan_invariant(product: Product, tile: InvariantTile, details: Details) -> Multiply:
    """One launch for a matrix of any strides, or two if segments are apart. A quantised weight is dequantised first."""
    m = product.tokens
    n = product.n
    k = product.k
    strides = details.strides
    matrix_of = None
    if product.values != "float":
        matrix_of = plan_matrix(product)
        strides = (*strides[:2], k, 1)
    launch = Launch(
        _invariant_linear,
        triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n) * (tile.segments if tile.apart else 1),
        varying=(m, details.alpha),
        fixed=(
            n,
            k,
            *strides,
            "ieee",
            k % tile.block_k == 0,
            tile.segments,
            segment_columns(k, tile.segments),
            tile.apart,
            _GROUP_M,
            tile.block_m,
            tile.block_n,
            tile.block_k,
            product.is_programmatic,
        ),
        options={**launch_options(product.is_programmatic, tile.num_warps), "num_stages": tile.num_stages},
    )
    sums = plan_sums(launch, product, tile.segments if tile.apart else 1, details.alpha)

    def multiply(x: Tensor, weight: Any, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        return sums((x, weight if matrix_of is None else matrix_of(weight)), bias, residual)

    return multiply


def launch_invariant_sum(x: Tensor) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.invariant_sum`, with x of (m, width), rows contiguous. One launch."""
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    key = ("invariant_sum", x.shape, x.stride(0), x.dtype, x.get_device())
    run = PLANS.get(key)
    if run is None:
        if x.shape[0] == 0:
            return out
        fixed = (x.stride(0), x.shape[1], _SUM_BLOCK)
        run = PLANS.add(key, Launch(_invariant_sum, x.shape[0], varying=(), fixed=fixed, options={"num_warps": 4}))
    run((x, out))
    return out
