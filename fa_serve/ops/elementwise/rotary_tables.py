"""The kernel that computes cos and sin of a rotary embedding from positions, which transformers computes by nine small kernels.

It is launched once in a step, before the first layer. Angles are products of float32 numbers, as in transformers, so that far
positions have the same angles. On Hopper and later GPUs it is launched programmatically, see
`primitives.wait_for_previous_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS


@triton.jit(do_not_specialize=["scale"])
def _rotary_tables(
    positions_ptr,
    frequencies_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    ANGLES: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes the angles of one position, and writes each of them REPEATS times."""
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    keep = columns < ANGLES
    position = tl.load(positions_ptr + row).to(tl.float32)
    angles = tl.load(frequencies_ptr + columns, mask=keep, other=0.0).to(tl.float32) * position
    cos = (tl.cos(angles) * scale).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angles) * scale).to(sin_ptr.dtype.element_ty)
    for repeat in tl.static_range(REPEATS):
        place = row * (REPEATS * ANGLES) + repeat * ANGLES + columns
        tl.store(cos_ptr + place, cos, mask=keep)
        tl.store(sin_ptr + place, sin, mask=keep)


def launch_rotary_tables(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, repeats: int
) -> tuple[Tensor, Tensor]:
    """Arguments and results are those of `fa_serve.ops.rotary_tables`. One launch."""
    positions = positions.contiguous()
    total = len(positions)
    angles = len(frequencies)
    cos, sin = positions.new_empty(2, total, repeats * angles, dtype=dtype)
    key = ("rotary_tables", total, positions.dtype, angles, frequencies.dtype, scale, dtype, repeats, positions.get_device())
    run = PLANS.get(key)
    if run is None:
        if total == 0:
            return cos, sin
        block = power_of_2(angles)
        pdl = spec.has_programmatic_launch(spec.arch_of(positions.device))
        run = Launch(
            _rotary_tables,
            total,
            varying=(scale,),
            fixed=(angles, repeats, block, pdl),
            options=launch_options(pdl, 1),
        )
        run = PLANS.add(key, run)
    run((positions, frequencies, cos, sin))
    return cos, sin
