"""The product of one token with a weight matrix, with the norm before it and the gate or the residual sum after it.

One row cannot use tensor cores; its time is that of reading the weights. A program therefore multiplies a few rows of the
weights over their whole length. On Hopper and later GPUs it requests the first weights before it waits for the kernel that
computes its input (programmatic launch), which keeps the memory busy between the launches of a layer. The norm needs no
separate pass: it multiplies the row by one factor, which the loop of the product computes as well. This module leaves out
products of more than one token.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, multiprocessors
from fa_serve.launching.plans import PLANS
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.ops_backend import Norm


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
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N elements of the output.

    GATED: the weights have 2 * N rows; the first N give the gates, the others what the gates are multiplied with.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # no kernel writes weights, so they may be loaded before the previous kernel ends
    w = _weights(w_ptr, 0, rows, k, N, K)
    w_up = w
    if GATED:
        w_up = _weights(w_ptr, N, rows, k, N, K)
    wait_for_previous_kernel(PDL)
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
    y *= factor
    keep = rows < N
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=keep, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(acc_up, 1) * factor
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + rows, mask=keep, other=0.0).to(tl.float32)
        y = activate(y, KIND) * up
    store_product(y, out_ptr, residual_ptr, alpha, rows, keep)


def launch_linear_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.linear`, with x of (1, k) and all tensors contiguous. One launch."""
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    out = residual
    if out is None:
        n = weight.shape[0]
        out = x.new_empty(1, n if activation is None else n // 2)
    key = (
        "linear_row",
        weight.shape,
        activation,
        eps,
        offset,
        alpha,
        x.get_device(),
        x.dtype,
        weight.dtype,
        out.dtype,
        None if norm_weight is None else norm_weight.dtype,
        None if bias is None else bias.dtype,
        residual is None,
    )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan(x, out, activation, eps, offset, alpha))
    run((x, weight, norm_weight, bias, residual, out))
    return out


def _plan(x: Tensor, out: Tensor, activation: str | None, eps: float, offset: float, alpha: float) -> Launch:
    n = out.shape[1]
    k = x.shape[1]
    gated = activation is not None
    block_n, block_k = row_tiles(multiprocessors(x.device, 1), n, k, gated)
    pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
    return Launch(
        _linear_row,
        -(-n // block_n),
        varying=(eps, offset, alpha),
        fixed=(n, k, gated, ACTIVATION_KINDS[activation or "silu"], block_n, block_k, pdl),
        options=launch_options(pdl, 4),
    )


def row_tiles(num_sms: int, n: int, k: int, gated: bool) -> tuple[int, int]:
    """The rows and columns of the weights in one program's tile.

    Two tiles are considered: 8 x 1024, of which an SM holds 3 programs at once, and 8 x 512, of which it holds 5. The one that
    fills its last wave of programs better is chosen; rows of up to 1024 elements take the narrow one.

    Measured on one H200, us for tiles of 8 x 1024 and 8 x 512: 6144 x 4096 16.1, 17.8; 4096 x 4096 12.5, 10.8; 4096 x 14336
    39.5, 35.1; 2 x 14336 x 4096 64.8, 66.9; 4096 x 1024 4.0, 3.8; 2 x 3072 x 1024 5.6, 4.8; 1024 x 3072 3.6, 4.6. A fixed
    number of programs that each compute several tiles was slower.
    """
    tiles = []
    for block_k, resident in ((1024, 3), (512, 5)):
        block_n = 4 if gated else 8
        # a smaller tile has less in flight, which costs less than SMs without a program
        while block_n > 1 and n // block_n < 256:
            block_n //= 2
        waves = triton.cdiv(n, block_n) / (num_sms * resident)
        tiles.append((waves / math.ceil(waves), block_n, min(block_k, triton.next_power_of_2(k))))
    wide, narrow = tiles
    return narrow[1:] if k <= 1024 or narrow[0] > wide[0] + 0.05 else wide[1:]
