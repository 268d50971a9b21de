"""The product of one token with a weight matrix, the norm before it and the sum or the gate after it included.

One row makes no use of tensor cores: what counts is that every byte of the weights is on its way all the time. A program takes
a few rows of the weights over their whole length. On Hopper and later it asks for the first of them before it waits for the
kernel that makes its input (programmatic launch), so that the memory is busy across the launches of a layer. The norm needs no
pass of its own: its factor is one number for the row, and comes out of the loop that multiplies. Left out: more than one token.
"""

from __future__ import annotations

import math
from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.launch import launch, multiprocessors
from fa_serve.backends.triton.layers import ACTIVATIONS, activate
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.backends.triton.tiles import launch_options


@triton.jit
def _weights(w_ptr, first, rows, k, N: tl.constexpr, K: tl.constexpr):
    """Rows first + rows, columns k: [BLOCK_N, BLOCK_K]."""
    keep = (rows < N)[:, None] & (k < K)[None, :]
    return tl.load(w_ptr + (first + rows).to(tl.int64)[:, None] * K + k[None, :], mask=keep, other=0.0)


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
    """GATED: the weights are those of N gates and then of N that they gate."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # weights belong to nobody's output: they may be asked for before the previous kernel is done
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
        # one tile ahead
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
    if residual_ptr is not None:
        y = tl.load(residual_ptr + rows, mask=keep, other=0.0).to(tl.float32) + alpha * y
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=keep)


def launch_linear_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float, float] | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
    out: Tensor,
) -> None:
    """x (1, k), weight (n, k), all contiguous. norm: (weight, eps, offset) of the RMS norm of x; out may be `residual`."""
    n = out.shape[1]
    k = x.shape[1]
    gated = activation is not None
    block_n, block_k = row_tiles(multiprocessors(x.device, 1), n, k, gated)
    norm_weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    pdl = spec.arch_of(x.device) >= 90
    launch(
        _linear_row,
        -(-n // block_n),
        (x, weight, norm_weight, bias, residual, out),
        (eps, offset, alpha),
        (n, k, gated, ACTIVATIONS[activation or "silu"], block_n, block_k, pdl),
        launch_options(pdl, 4),
    )


@lru_cache(maxsize=4096)
def row_tiles(num_sms: int, n: int, k: int, gated: bool) -> tuple[int, int]:
    """Rows and columns of a program's tile.

    Measured on one H200, us for tiles of 8 x 1024 (3 programs live on an SM) and 8 x 512 (5 of them): 6144 x 4096 16.1, 17.8;
    4096 x 4096 12.5, 10.8; 4096 x 14336 39.5, 35.1; 2 x 14336 x 4096 64.8, 66.9; 4096 x 1024 4.0, 3.8; 2 x 3072 x 1024 5.6,
    4.8; 1024 x 3072 3.6, 4.6: the one that fills its last wave better, but short rows want halves. A fixed number of
    programs that go on across rows was slower.
    """
    tiles = []
    for block_k, resident in ((1024, 3), (512, 5)):
        block_n = 4 if gated else 8
        while block_n > 1 and n // block_n < 256:
            block_n //= 2  # rather less in flight than SMs without a program
        waves = triton.cdiv(n, block_n) / (num_sms * resident)
        tiles.append((waves / math.ceil(waves), block_n, min(block_k, triton.next_power_of_2(k))))
    return tiles[1][1:] if k <= 1024 or tiles[1][0] > tiles[0][0] + 0.05 else tiles[0][1:]
