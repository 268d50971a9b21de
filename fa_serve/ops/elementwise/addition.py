"""The kernels that add to the residual stream what no product kernel adds: the output of a mixture of experts.

`_add` is PyTorch's `add_`, launched programmatically on Hopper and later GPUs: in a step of few tokens, an ordinary launch
between kernels that start early costs more than the addition, because nothing overlaps with its beginning and its end.
`_add_gated` adds the sum over the experts, and the shared expert times the sigmoid of its gate. The gate is a product with one
row of weights, which each program computes for its row of the input.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS

_BLOCK = 1024


@triton.jit(do_not_specialize=["numel", "alpha"])
def _add(x_ptr, y_ptr, numel, alpha, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous_kernel(PDL)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = offsets < numel
    x = tl.load(x_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
    tl.store(x_ptr + offsets, (x + alpha * y).to(x_ptr.dtype.element_ty), mask=keep)


def launch_add(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.add`. One launch."""
    y = y.contiguous()
    key = ("add", x.shape, x.dtype, y.dtype, alpha, x.get_device())
    run = PLANS.get(key)
    if run is None:
        if x.numel() == 0:
            return x
        pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
        run = Launch(
            _add,
            triton.cdiv(x.numel(), _BLOCK),
            varying=(x.numel(), alpha),
            fixed=(_BLOCK, pdl),
            options=launch_options(pdl, 4),
        )
        run = PLANS.add(key, run)
    run((x, y))
    return x


@triton.jit(do_not_specialize=["alpha"])
def _add_gated(
    x_ptr,
    y_ptr,
    shared_ptr,
    rows_ptr,
    gate_ptr,
    alpha,
    stride_y,
    stride_shared,
    stride_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    keep = columns < WIDTH
    gate = tl.load(gate_ptr + columns, mask=keep, other=0.0).to(tl.float32)
    wait_for_previous_kernel(PDL)
    given = tl.load(rows_ptr + row * stride_rows + columns, mask=keep, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + row * stride_shared + columns, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * stride_y + columns, mask=keep, other=0.0).to(tl.float32)
    place = x_ptr + row * WIDTH + columns
    x = tl.load(place, mask=keep, other=0.0).to(tl.float32)
    share = tl.sigmoid(tl.sum(given * gate, 0))
    tl.store(place, (x + alpha * (y + share * shared)).to(x_ptr.dtype.element_ty), mask=keep)


def launch_add_gated(x: Tensor, y: Tensor, shared: Tensor, rows: Tensor, gate: Tensor, alpha: float) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.add_gated`. One launch."""
    y, shared, rows = (with_unit_stride(each) for each in (y, shared, rows))
    strides = (y.stride(0), shared.stride(0), rows.stride(0))
    key = ("add_gated", x.shape, *strides, x.dtype, y.dtype, shared.dtype, rows.dtype, gate.dtype, alpha, x.get_device())
    run = PLANS.get(key)
    if run is None:
        if x.numel() == 0:
            return x
        total, width = x.shape
        block = power_of_2(width)
        pdl = spec.has_programmatic_launch(spec.arch_of(x.device))
        run = Launch(
            _add_gated,
            total,
            varying=(alpha,),
            strides=strides,
            fixed=(width, block, pdl),
            options=launch_options(pdl, min(8, max(1, block // 256))),
        )
        run = PLANS.add(key, run)
    run((x, y, shared, rows, gate))
    return x
