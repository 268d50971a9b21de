"""The product of one token with a weight matrix, with the norm before it and the gate or the residual sum after it.

One row cannot use tensor cores; its time is that of reading the weights. A program therefore multiplies a few rows of the
weights over their whole length. On Hopper and later GPUs it requests the first weights before it waits for the kernel that
computes its input (programmatic launch), which keeps the memory busy between the launches of a layer. It requests the rest of
small weights at the same time, into the L2 cache. The norm needs no separate pass: it multiplies the row by one factor, which
the loop of the product computes as well. This module leaves out products of more than one token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import request_into_l2, wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.tiles import MatrixRowTile, columns_ahead

_NUM_WARPS = 4


@triton.jit
def _weights(w_ptr, first, rows, k, N: tl.constexpr, K: tl.constexpr):
    """[BLOCK_N, BLOCK_K]: the rows first + rows of the weights and their columns k."""
    keep = (rows < N)[:, None] & (k < K)[None, :]
    return tl.load(w_ptr + (first + rows).to(tl.int64)[:, None] * K + k[None, :], mask=keep, other=0.0)


@triton.jit
def store_product(y, out_ptr, residual_ptr, alpha, offsets, keep):
    """Store y, or residual + alpha * y, rounded once. Every kernel of a product ends with this, quantised or not."""
    if residual_ptr is not None:
        y = tl.load(residual_ptr + offsets, mask=keep, other=0.0).to(tl.float32) + alpha * y
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def first_weights(
    w_ptr, rows, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The first columns of these rows of the weights and, if GATED, of the rows N further down.

    No kernel writes weights, so they may be loaded before the previous kernel ends.
    """
    k = tl.arange(0, BLOCK_K)
    w = _weights(w_ptr, 0, rows, k, N, K)
    w_up = w
    if GATED:
        w_up = _weights(w_ptr, N, rows, k, N, K)
    return w, w_up


@triton.jit
def request_weights(w_ptr, rows, begin, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Request COLUMNS columns from `begin` on, of BLOCK_N rows of the weights, into the L2 cache (`tiles.columns_ahead`)."""
    PARTS: tl.constexpr = tl.extra.cuda.num_threads() // BLOCK_N
    WIDTH: tl.constexpr = COLUMNS // PARTS
    places = w_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + (begin + tl.arange(0, PARTS) * WIDTH)[None, :]
    request_into_l2(places.to(tl.int64), WIDTH * w_ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def multiply_row(
    x_ptr, w_ptr, norm_ptr, w, w_up, rows, eps, offset,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a token with these rows of the weights -> their sums over k; if GATED, the sums of the rows N further down; and
    the factor of the norm, by which the caller multiplies the sums. w, w_up: the first weights"""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_up = acc
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        cols = start + k
        x = tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
        # the next tile is loaded before this one is used
        next_w = w
        next_up = w_up
        if K > BLOCK_K:
            next_w = _weights(w_ptr, 0, rows, cols + BLOCK_K, N, K)
            if GATED:
                next_up = _weights(w_ptr, N, rows, cols + BLOCK_K, N, K)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + cols, mask=cols < K, other=0.0).to(tl.float32) + offset
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * x[None, :]
        w = next_w
        w_up = next_up
    y = tl.sum(acc, 1)
    factor = 1.0
    if norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    return y, tl.sum(acc_up, 1), factor


@triton.jit
def _linear_row(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    offset,
    alpha,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N elements of the output.

    GATED: the weights have 2 * N rows; the first N give the gates, the others what the gates are multiplied with.
    AHEAD: columns behind the first BLOCK_K ones that are requested into the L2 cache while the previous kernel runs
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w, w_up = first_weights(w_ptr, rows, N, K, GATED, BLOCK_N, BLOCK_K)
    if AHEAD > 0:
        request_weights(w_ptr, rows, BLOCK_K, N, K, AHEAD, BLOCK_N)
        if GATED:
            request_weights(w_ptr + N * K, rows, BLOCK_K, N, K, AHEAD, BLOCK_N)
    wait_for_previous_kernel(PDL)
    y, up, factor = multiply_row(x_ptr, w_ptr, norm_ptr, w, w_up, rows, eps, offset, N, K, GATED, BLOCK_N, BLOCK_K)
    y *= factor
    keep = rows < N
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=keep, other=0.0).to(tl.float32)
    if GATED:
        up *= factor
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + rows, mask=keep, other=0.0).to(tl.float32)
        y = activate(y, KIND) * up
    store_product(y, out_ptr, residual_ptr, alpha, rows, keep)


def plan_row(product: Product, tile: MatrixRowTile, details: Details) -> Multiply:
    """One launch for one token, of contiguous tensors."""
    n = product.outputs
    pdl = product.is_programmatic
    kind = ACTIVATION_KINDS[details.activation or "silu"]
    ahead = columns_ahead(product, tile.block_k, 32 * _NUM_WARPS // tile.block_n)
    launch = Launch(
        _linear_row,
        triton.cdiv(n, tile.block_n),
        varying=(details.eps, details.offset, details.alpha),
        fixed=(n, product.k, product.gated, kind, tile.block_n, tile.block_k, ahead, pdl),
        options=launch_options(pdl, _NUM_WARPS),
    )

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        out = x.new_empty(1, n) if residual is None else residual
        launch((x, weight, norm_weight, bias, residual, out))
        return out

    return multiply
