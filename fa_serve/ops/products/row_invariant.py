"""Kernels whose rows do not depend on the number of rows: a matrix product and a sum. Tiles are fixed, and no sum is split.

cuBLAS chooses its kernel by the number of rows, and PyTorch divides a sum by the number of rows, so the last bits of a row
change with the size of the batch. Here a row is computed by the same instructions in the same order in any batch. The price is
a tile that is not the fastest for any size. Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference" (2025).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch
from fa_serve.launching.plans import PLANS

_SUM_BLOCK = 1024


class LinearTile(NamedTuple):
    """block_m rows by block_n columns of the output; block_k elements of the sum at once, num_stages of them in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int


# each is used for every size of its dtype: a choice by the number of rows would change the order of the sum
_TILE = LinearTile(64, 64, 128, 3)
_TILE_OF_FLOAT32 = LinearTile(32, 32, 32, 2)


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


def launch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.invariant_linear`, with x of (m, k). One launch."""
    m = x.shape[0]
    out = x.new_empty(m, weight.shape[0])
    key = (
        "invariant_linear",
        x.shape,
        x.stride(),
        weight.shape,
        weight.stride(),
        x.dtype,
        weight.dtype,
        None if bias is None else bias.dtype,
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        if m == 0:
            return out
        run = PLANS.add(key, _plan_linear(x, weight))
    run((x, weight, bias, out))
    return out


def _plan_linear(x: Tensor, weight: Tensor) -> Launch:
    m, k = x.shape
    n = weight.shape[0]
    tile = _TILE_OF_FLOAT32 if x.element_size() == 4 else _TILE
    return Launch(
        _invariant_linear,
        triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n),
        varying=(m,),
        fixed=(n, k, *x.stride(), *weight.stride(), "ieee", tile.block_m, tile.block_n, tile.block_k),
        options={"num_warps": 4, "num_stages": tile.num_stages},
    )


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
