"""The product of 1 to 8 tokens on Hopper with its norm and gate, bitwise equal to `row_invariant.py` with separate launches.

`_invariant_linear` needs one launch for the norm before it and another one for the gate behind it, and reads no weights before
the previous kernel has completed. Here one launch does all of that, as that of row.py does for one token in the usual mode:

- the norm: the sum of squares of a row is that of `_rms_norm`, in a tile of the same shape and with the same number of warps.
  The product reads the normalised row in the input's dtype, as if it had been stored;
- the product: a chain of `wgmma … k16` over all of k from zero, with 64 rows (tiles.py). These rows are 8 tokens, repeated, so
  that the input is read and normalised for few rows alone;
- the gate: both results are rounded to the input's dtype before the activation, as if they had been stored.

While the previous kernel runs, the first columns of the weights are requested into the L2 cache. A first tile in registers, as
in row.py, would be another product before the loop, for which Triton chooses another layout of the accumulators. Left out:
quantised weights, experts, and input whose rows are not contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options
from fa_serve.launching.sizes import norm_warps, power_of_2
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.elementwise.norm import norm_factor
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.row import request_weights, store_product
from fa_serve.ops.products.tiles import MOST_FEW_ROWS, InvariantRowsTile

_TILE_ROWS = tl.constexpr(64)
"""The rows of one wgmma instruction."""
_TOKENS = tl.constexpr(MOST_FEW_ROWS)
"""The rows of the tile that is read. The instruction's rows are these, repeated."""


@triton.jit
def _norm_factors(x_ptr, M, eps, stride_x, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """[_TOKENS]: the factor of the norm for each of the first ROWS tokens."""
    tokens = tl.arange(0, _TOKENS)
    cols = tl.arange(0, BLOCK)
    factors = tl.zeros([_TOKENS], tl.float32)
    for i in tl.static_range(ROWS):
        row = tl.minimum(i, M - 1).to(tl.int64)
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < K, other=0.0).to(tl.float32)
        factors = tl.where(tokens == i, norm_factor(x, eps, K), factors)
    return factors


@triton.jit
def _load_input(x_ptr, norm_ptr, start, M, offset, stride_x, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns from `start` on of the tokens, [_TOKENS, BLOCK_K], and of the norm's weight in float32, [BLOCK_K]."""
    tokens = tl.arange(0, _TOKENS)
    cols = start + tl.arange(0, BLOCK_K)
    inside = cols < K
    x = tl.load(x_ptr + tokens[:, None] * stride_x + cols[None, :], mask=(tokens < M)[:, None] & inside[None, :], other=0.0)
    weight = tl.zeros([BLOCK_K], tl.float32)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + cols, mask=inside, other=0.0).to(tl.float32) + offset
    return x, weight


@triton.jit
def _weight_tile(w_ptr, cols, start, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K, BLOCK_N]: the columns from `start` on of these rows of the weights, transposed. `cols` are below N."""
    k = start + tl.arange(0, BLOCK_K)
    places = w_ptr + cols.to(tl.int64)[:, None] * K + k[None, :]
    if K % BLOCK_K != 0:
        return tl.trans(tl.load(places, mask=(k < K)[None, :], other=0.0))
    return tl.trans(tl.load(places))


@triton.jit
def _normalise(x, weight, factors):
    """The tokens in x's dtype, as `_rms_norm` stores them."""
    return (x.to(tl.float32) * factors[:, None] * weight[None, :]).to(x.dtype)


@triton.jit
def _repeat(x, BLOCK_K: tl.constexpr):
    """[_TOKENS, BLOCK_K] -> [_TILE_ROWS, BLOCK_K]: the tokens, repeated."""
    repeated = tl.broadcast_to(x[None, :, :], [_TILE_ROWS // _TOKENS, _TOKENS, BLOCK_K])
    return tl.reshape(repeated, [_TILE_ROWS, BLOCK_K])


@triton.jit(do_not_specialize=["M"])
def _invariant_rows(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    eps,
    offset,
    alpha,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes BLOCK_N columns of the output for all M tokens, of which there are at most ROWS.

    GATED: the weights have 2 * N rows; the first N give the gates, the others what the gates are multiplied with.
    BLOCK: a power of 2, at least K: the tile of the norm
    AHEAD: columns of the weights that are requested into the L2 cache while the previous kernel runs
    """
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = cols
    if N % BLOCK_N != 0:
        near = tl.minimum(cols, N - 1)
    if AHEAD > 0:
        request_weights(w_ptr, cols, 0, N, K, AHEAD, BLOCK_N)
        if GATED:
            request_weights(w_ptr + N * K, cols, 0, N, K, AHEAD, BLOCK_N)
    wait_for_previous_kernel(PDL)
    NORM: tl.constexpr = norm_ptr is not None
    factors = tl.zeros([_TOKENS], tl.float32)
    if NORM:
        factors = _norm_factors(x_ptr, M, eps, stride_x, K, BLOCK, ROWS)
    acc = tl.zeros([_TILE_ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([_TILE_ROWS, BLOCK_N], tl.float32)
    x, weight = _load_input(x_ptr, norm_ptr, 0, M, offset, stride_x, K, BLOCK_K)
    y = x
    if NORM:
        y = _normalise(x, weight, factors)
        x, weight = _load_input(x_ptr, norm_ptr, BLOCK_K, M, offset, stride_x, K, BLOCK_K)
    for start in tl.range(0, K, BLOCK_K):
        # input is loaded one step before its product; with a norm two steps, and normalised one step before
        if NORM:
            tile = _repeat(y, BLOCK_K)
            y = _normalise(x, weight, factors)
            x, weight = _load_input(x_ptr, norm_ptr, start + 2 * BLOCK_K, M, offset, stride_x, K, BLOCK_K)
        else:
            tile = _repeat(x, BLOCK_K)
            x, weight = _load_input(x_ptr, norm_ptr, start + BLOCK_K, M, offset, stride_x, K, BLOCK_K)
        acc = tl.dot(tile, _weight_tile(w_ptr, near, start, N, K, BLOCK_N, BLOCK_K), acc, input_precision="ieee")
        if GATED:
            up = tl.dot(tile, _weight_tile(w_ptr + N * K, near, start, N, K, BLOCK_N, BLOCK_K), up, input_precision="ieee")
    inside = cols < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if bias_ptr is not None:
            up += tl.load(bias_ptr + N + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        acc = activate(acc.to(dtype).to(tl.float32), KIND) * up.to(dtype).to(tl.float32)
    rows = tl.arange(0, _TILE_ROWS)
    keep = (rows < M)[:, None] & inside[None, :]
    store_product(acc, out_ptr, residual_ptr, alpha, rows[:, None] * N + cols[None, :], keep)


def plan_invariant_rows(product: Product, tile: InvariantRowsTile, details: Details) -> Multiply:
    """One launch for up to 8 tokens, of a contiguous weight. Rows of the input may have gaps between them."""
    m = product.tokens
    n = product.outputs
    k = product.k
    pdl = product.is_programmatic
    kind = ACTIVATION_KINDS[details.activation or "silu"]
    stride_x = details.strides[0] if details.strides else k
    block = power_of_2(k)
    warps = norm_warps(block)
    registers = min(255, (1 << 15) // (32 * warps))  # of a thread, so that two programs fit on a multiprocessor
    launch = Launch(
        _invariant_rows,
        triton.cdiv(n, tile.block_n),
        varying=(m, details.eps, details.offset, details.alpha),
        fixed=(stride_x, n, k, product.gated, kind, power_of_2(m), block, tile.block_n, tile.block_k, tile.ahead, pdl),
        options={**launch_options(pdl, warps), "num_stages": tile.num_stages, "maxnreg": registers},
    )

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        out = x.new_empty(m, n) if residual is None else residual
        launch((x, weight, norm_weight, bias, residual, out))
        return out

    return multiply
