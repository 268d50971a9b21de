"""A matrix product and a sum whose rows do not know how many others there are: tiles are fixed, and no sum is split.

cuBLAS chooses its kernel, and torch how it divides a sum, by the number of rows, so that a row's last bits change with its
neighbours. Here a row goes through the same instructions in the same order, whatever the batch. The price is a tile that is
the best for nobody. Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference" (2025).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.launch import on_device_of

_SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["M"])
def _linear(
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
    """Programs of one column of tiles come one after another, so that they share its weights in the cache."""
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
def _row_sum(x_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK):
        acc += tl.load(x_ptr + row * stride + start + cols, mask=start + cols < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(acc, 0))


def launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x (m, k) @ weight (n, k).T + bias (n,) -> out (m, n), contiguous."""
    (m, k), n = x.shape, weight.shape[0]
    block_m, block_n, block_k, warps, stages = (32, 32, 32, 4, 2) if x.element_size() == 4 else (64, 64, 128, 4, 3)
    with on_device_of(x):
        _linear[triton.cdiv(m, block_m) * triton.cdiv(n, block_n),](
            x,
            weight,
            bias,
            out,
            m,
            n,
            k,
            *x.stride(),
            *weight.stride(),
            "ieee",
            block_m,
            block_n,
            block_k,
            num_warps=warps,
            num_stages=stages,
        )


def launch_row_sum(x: Tensor, out: Tensor) -> None:
    """x (rows, width), its last dimension contiguous -> out (rows,) float32"""
    with on_device_of(x):
        _row_sum[x.shape[0],](x, out, x.stride(0), x.shape[1], _SUM_BLOCK, num_warps=4)
