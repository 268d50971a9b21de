"""Kernels whose rows do not depend on the number of rows: a matrix product and a sum. Tiles are fixed, and no sum is split.

cuBLAS chooses its kernel by the number of rows, and PyTorch divides a sum by the number of rows, so the last bits of a row
change with the size of the batch. Here a row is computed by the same instructions in the same order in any batch. The price is
a tile that is not the fastest for any size. Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference" (2025).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch
from fa_serve.launching.plans import PLANS
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.quantised.dequantise import plan_matrix
from fa_serve.ops.products.tiles import InvariantTile

_SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["M"])
def _invariant_linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program computes one tile of the output.

    Consecutive programs compute the tiles of one column, so that they share its weights in the L2 cache.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0).to(tl.int64)
    rows = pid % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * stride_xm + k[None, :] * stride_xk
    w_ptrs = w_ptr + cols[None, :] * stride_wn + k[:, None] * stride_wk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        left = K - start
        x = tl.load(x_ptrs, mask=(rows < M)[:, None] & (k < left)[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=(cols < N)[None, :] & (k < left)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    keep = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _invariant_sum(x_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        acc += tl.load(x_ptr + row * stride + start + cols, mask=start + cols < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(acc, 0))


def plan_invariant(product: Product, tile: InvariantTile, details: Details) -> Multiply:
    """One launch for a matrix of any strides. A quantised weight is dequantised before."""
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
        triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),
        varying=(m,),
        fixed=(n, k, *strides, "ieee", tile.block_m, tile.block_n, tile.block_k),
        options={"num_warps": 4, "num_stages": tile.num_stages},
    )

    def multiply(x: Tensor, weight: Any, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        out = x.new_empty(m, n)
        launch((x, weight if matrix_of is None else matrix_of(weight), bias, out))
        return out

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
