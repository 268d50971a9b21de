"""The gradients of the short convolution of packed sequences, in two launches.

1. `_conv_weight_gradients`, a program for some channels and several blocks of rows. It computes the sums before the activation
   again, stores their gradients, and adds up the gradients of the weight and of the bias over its rows. PyTorch adds the parts
   of the programs in a fixed order, so that gradients have the same bits each time.
2. `_conv_input_gradients` adds up the gradient of each input over the rows of its sequence that read it: the input's own row
   and the width - 1 rows after it. The inputs in an initial state come before the rows of their sequence. The gradients of a
   final state are added to those of the inputs that it holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.primitives import sequences_of_rows

GRADIENT_ROWS = 32
"""Rows of a block."""
GRADIENT_CHANNELS = 64
"""Channels of a program."""
MAX_WEIGHT_PARTS = 128
"""The most partial sums of the weight's gradients for one channel: with more rows, a program takes more blocks of rows."""


@triton.jit
def _inputs_of_tap(
    x_ptr, state_ptr, row, begin, seq, live, c, in_c, tap, stride_x, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):
    """The inputs [BLOCK_M, BLOCK_C] that rows read with one tap, in float32; 0 before the first row if there is no state."""
    at = row - (WIDTH - 1) + tap
    inside = live & (at >= begin)
    y = tl.load(x_ptr + at.to(tl.int64)[:, None] * stride_x + c[None, :], mask=inside[:, None] & in_c[None, :], other=0.0)
    y = y.to(tl.float32)
    if state_ptr is not None:
        before = live & (at < begin)
        place = seq.to(tl.int64) * (WIDTH - 1) + at - begin + (WIDTH - 1)
        old = tl.load(state_ptr + place[:, None] * CHANNELS + c[None, :], mask=before[:, None] & in_c[None, :], other=0.0)
        y += old.to(tl.float32)
    return y


@triton.jit(do_not_specialize=["total", "num_seqs", "blocks"])
def _conv_weight_gradients(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    cu_ptr,
    dout_ptr,
    inner_ptr,
    parts_ptr,
    total,
    num_seqs,
    blocks,
    stride_x,
    stride_w,
    stride_d,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """inner_ptr (total, CHANNELS) float32: gradients of the sums before the activation.
    parts_ptr (programs, WIDTH + 1, CHANNELS) float32: partial gradients of the weight, followed by those of the bias."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    part = tl.program_id(0) // COLUMNS
    c = tl.program_id(0) % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < CHANNELS
    taps = tl.arange(0, BLOCK_W)
    sums = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    for block in range(blocks):
        row = (part * blocks + block) * BLOCK_M + tl.arange(0, BLOCK_M)
        seq = sequences_of_rows(row, cu_ptr, num_seqs, BLOCK_SEQS)
        stop = tl.load(cu_ptr + seq + 1, mask=seq >= 0, other=0)
        live = (row < stop) & (row < total)
        begin = tl.load(cu_ptr + seq, mask=live, other=0)
        keep = live[:, None] & in_c[None, :]
        d = tl.load(dout_ptr + row.to(tl.int64)[:, None] * stride_d + c[None, :], mask=keep, other=0.0).to(tl.float32)
        if SILU:
            acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
            if bias_ptr is not None:
                acc += tl.load(bias_ptr + c, mask=in_c, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(WIDTH):
                y = _inputs_of_tap(x_ptr, state_ptr, row, begin, seq, live, c, in_c, tap, stride_x, CHANNELS, WIDTH)
                acc += y * tl.load(weight_ptr + c * stride_w + tap, mask=in_c, other=0.0).to(tl.float32)[None, :]
            sigmoid = 1.0 / (1.0 + tl.exp(-acc))
            d *= sigmoid * (1.0 + acc * (1.0 - sigmoid))
        place = row.to(tl.int64)[:, None] * CHANNELS + c[None, :]
        tl.store(inner_ptr + place, d, mask=(row < total)[:, None] & in_c[None, :])
        sums += tl.where((taps == WIDTH)[:, None], tl.sum(d, 0)[None, :], 0.0)
        for tap in tl.static_range(WIDTH):
            y = _inputs_of_tap(x_ptr, state_ptr, row, begin, seq, live, c, in_c, tap, stride_x, CHANNELS, WIDTH)
            sums += tl.where((taps == tap)[:, None], tl.sum(d * y, 0)[None, :], 0.0)
    place = (part * (WIDTH + 1) + taps)[:, None] * CHANNELS + c[None, :]
    tl.store(parts_ptr + place, sums, mask=(taps <= WIDTH)[:, None] & in_c[None, :])


@triton.jit(do_not_specialize=["total", "num_seqs"])
def _conv_input_gradients(
    inner_ptr,
    weight_ptr,
    cu_ptr,
    dfinal_ptr,
    dx_ptr,
    dstate_ptr,
    total,
    num_seqs,
    stride_w,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Row numbers from `total` on stand for the inputs in the initial states, WIDTH - 1 for each sequence."""
    COLUMNS: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    REACH: tl.constexpr = WIDTH - 1
    row = tl.program_id(0) // COLUMNS * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(0) % COLUMNS * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = c < CHANNELS
    old = row - total  # number of the input among those of the initial states
    is_old = old >= 0
    seq = tl.where(is_old, old // REACH, sequences_of_rows(row, cu_ptr, num_seqs, BLOCK_SEQS))
    exists = (seq >= 0) & (seq < num_seqs)
    begin = tl.load(cu_ptr + seq, mask=exists, other=0)
    stop = tl.load(cu_ptr + seq + 1, mask=exists, other=0)
    row = tl.where(is_old, begin - REACH + old % REACH, row)
    live = exists & (row < stop)
    acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for tap in tl.static_range(WIDTH):
        at = row + REACH - tap
        keep = (exists & (at >= begin) & (at < stop))[:, None] & in_c[None, :]
        d = tl.load(inner_ptr + at.to(tl.int64)[:, None] * CHANNELS + c[None, :], mask=keep, other=0.0)
        acc += d * tl.load(weight_ptr + c * stride_w + tap, mask=in_c, other=0.0).to(tl.float32)[None, :]
    kept = row - (stop - REACH)  # the row of the final state that holds this input
    place = seq.to(tl.int64) * REACH + kept
    keep = (live & (kept >= 0))[:, None] & in_c[None, :]
    acc += tl.load(dfinal_ptr + place[:, None] * CHANNELS + c[None, :], mask=keep, other=0.0).to(tl.float32)
    new = (is_old == 0)[:, None] & in_c[None, :]
    tl.store(dx_ptr + row.to(tl.int64)[:, None] * CHANNELS + c[None, :], acc.to(dx_ptr.dtype.element_ty), mask=new)
    if dstate_ptr is not None:
        place = old.to(tl.int64)[:, None] * CHANNELS + c[None, :]
        keep = (is_old & exists)[:, None] & in_c[None, :]
        tl.store(dstate_ptr + place, acc.to(dstate_ptr.dtype.element_ty), mask=keep)


def causal_conv_gradients(
    state: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    bounds: Tensor,
    dout: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """Gradients of the initial states, x, weight and bias.

    x, dout:       (total, channels)
    state, dfinal: (num_seqs, width - 1, channels)
    bounds:        (num_seqs + 1,) int32
    """
    x = with_unit_stride(x)
    weight = with_unit_stride(weight)
    bias = None if bias is None else bias.contiguous()
    dout = with_unit_stride(dout)
    state = None if state is None else state.contiguous()
    total, channels = x.shape
    width = weight.shape[1]
    num_seqs = len(bounds) - 1
    blocks = -(-total // (GRADIENT_ROWS * MAX_WEIGHT_PARTS))
    parts = x.new_empty(-(-total // (GRADIENT_ROWS * blocks)), width + 1, channels, dtype=torch.float32)
    inner = x.new_empty(total, channels, dtype=torch.float32)
    dx = torch.empty_like(inner, dtype=x.dtype)
    dstate = None if state is None else torch.empty_like(state)
    of_weights = (x, weight, bias, state, bounds, dout, inner, parts)
    of_inputs = (inner, weight, bounds, dfinal.contiguous(), dx, dstate)
    dtypes = tuple([None if y is None else y.dtype for y in (*of_weights, *of_inputs)])
    strides = (x.stride(0), weight.stride(0), dout.stride(0))
    key = ("causal_conv_gradients", x.shape, weight.shape, strides, num_seqs, activation, dtypes, x.get_device())
    plans = PLANS.get(key)
    if plans is None:
        columns = -(-channels // GRADIENT_CHANNELS)
        block_seqs = min(128, power_of_2(max(num_seqs, 16)))
        weights = Launch(
            _conv_weight_gradients,
            len(parts) * columns,
            varying=(total, num_seqs, blocks),
            strides=strides,
            fixed=(channels, width, activation == "silu", block_seqs, power_of_2(width + 1), GRADIENT_ROWS, GRADIENT_CHANNELS),
            options={"num_warps": 4},
        )
        rows = total + (0 if state is None else num_seqs * (width - 1))
        inputs = Launch(
            _conv_input_gradients,
            -(-rows // GRADIENT_ROWS) * columns,
            varying=(total, num_seqs),
            strides=strides[1:2],
            fixed=(channels, width, block_seqs, GRADIENT_ROWS, GRADIENT_CHANNELS),
            options={"num_warps": 4},
        )

        def run(of_weights: tuple[Tensor | None, ...], of_inputs: tuple[Tensor | None, ...]) -> None:
            weights(of_weights)
            inputs(of_inputs)

        plans = PLANS.add(key, run)
    plans(of_weights, of_inputs)
    sums = parts.sum(0)
    dbias = None if bias is None else sums[width].to(bias.dtype)
    return dstate, dx, sums[:width].T.to(weight.dtype), dbias
