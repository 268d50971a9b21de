"""Float8 products in the portable forward kernel: what differs from 16 bits, after FlashAttention-3 (section 3.3).

The kernel reads the copies that `float8_inputs` makes. A score is a product of float8 numbers times the scale of its row of q
and the scale of its group of keys. Both are part of the factor that turns products into exponents of 2.

With "fp8", P is multiplied by 2^PROBABILITY_SHIFT before it is rounded, so that its maximum is 256 and numbers down to 2^-17 of
the maximum are kept. O is kept in units of the scale of the values that were added last. Tensor cores add float8 products in
fewer than 24 bits (Ada 13, Hopper 14), so the product of a block starts from zero and is added to O in float32.

This module leaves out how the copies are made, and the products of the Hopper kernel (`hopper.forward.float8_scales`).
"""

from __future__ import annotations

import triton
import triton.language as tl

PROBABILITY_SHIFT = tl.constexpr(8.0)


@triton.jit
def load_keys(k_ptr, n, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] of a copy: keys from key n on, rows `stride` apart.

    A copy is zero from the end of a sequence to the end of its last group, so the load needs no mask.
    """
    rows = n.to(tl.int64) * stride + tl.arange(0, ROWS) * stride
    return tl.load(k_ptr + rows[:, None] + tl.arange(0, COLS)[None, :])


@triton.jit
def load_transposed_values(v_ptr, n, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] of the transposed copy of v: columns of v, `stride` apart, and keys from key n on in the copy's order."""
    rows = tl.arange(0, ROWS).to(tl.int64) * stride
    return tl.load(v_ptr + n + rows[:, None] + tl.arange(0, COLS)[None, :])


@triton.jit
def softmax_update_by_scales(s, factor, row_max, row_sum, SHIFT: tl.constexpr):
    """`primitives.online_softmax_update` with a factor for each row, [BLOCK_M, 1], or one for all; p and row_sum are 2^SHIFT
    times as large."""
    new_max = tl.maximum(row_max, tl.max(tl.max(s, 1, keep_dims=True) * factor, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * factor - (safe_max - SHIFT)[:, None])
    alpha = tl.exp2(row_max - safe_max)
    return p, new_max, row_sum * alpha + tl.sum(p, 1), alpha


@triton.jit
def in_order_of_values(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """P with its keys in the order of the copy of v: of every 16 keys, key 8 h + 2 t + i is at position 4 t + 2 h + i.

    After the product with K, a thread holds keys 2 t and 2 t + 1 of every 8; for the product with V, it needs four neighbours.
    In this order, its four keys of every 16 are neighbours, so it exchanges nothing with other threads.
    """
    return p.reshape([BLOCK_M, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([BLOCK_M, BLOCK_N])
