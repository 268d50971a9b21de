"""The kernel that merges two parts of attention: results for the same queries over two disjoint sets of keys.

A part is an output and its log-sum-exp. The parts are weighted like the splits of keys that `combine` adds
(`backends.triton.splits`). On Hopper and later GPUs the kernel is launched programmatically, see
`primitives.wait_for_previous_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import LOG2E, wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS

MERGED_HEADS = 8
"""Heads of a program."""


@triton.jit(do_not_specialize=["total", "blocks", "heads"])
def _merge_parts(
    out_ptr,
    lse_ptr,
    other_ptr,
    other_lse_ptr,
    total,
    blocks,
    heads,
    DIM: tl.constexpr,
    MERGED_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program merges MERGED_HEADS heads of one token; `blocks` programs share a token. All tensors are contiguous."""
    wait_for_previous_kernel(PDL)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * MERGED_HEADS + tl.arange(0, MERGED_HEADS)
    live = head < heads
    cols = tl.arange(0, BLOCK)
    place = (token * heads + head)[:, None] * DIM + cols[None, :]
    keep = live[:, None] & (cols < DIM)[None, :]
    of_row = head.to(tl.int64) * total + token
    lse = tl.load(lse_ptr + of_row, mask=live, other=float("-inf"))
    other_lse = tl.load(other_lse_ptr + of_row, mask=live, other=float("-inf"))
    largest = tl.maximum(lse, other_lse)
    # For a row without keys both results are 0, and any finite weights keep them 0.
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp2((lse - largest) * LOG2E)  # exactly 1 for the larger one
    other_weight = tl.exp2((other_lse - largest) * LOG2E)
    total_weight = weight + other_weight
    inverse = 1.0 / tl.where(total_weight == 0.0, 1.0, total_weight)
    x = tl.load(out_ptr + place, mask=keep, other=0.0).to(tl.float32)
    y = tl.load(other_ptr + place, mask=keep, other=0.0).to(tl.float32)
    merged = x * (weight * inverse)[:, None] + y * (other_weight * inverse)[:, None]
    tl.store(out_ptr + place, merged.to(out_ptr.dtype.element_ty), mask=keep)


def launch_merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.merge_attention`. One launch."""
    total, heads, dim = out.shape
    key = ("merge_attention", out.shape, out.dtype, other.dtype, out.get_device())
    run = PLANS.get(key)
    if run is None:
        if total == 0:
            return out
        blocks = -(-heads // MERGED_HEADS)
        pdl = spec.has_programmatic_launch(spec.arch_of(out.device))
        launch = Launch(
            _merge_parts,
            total * blocks,
            varying=(total, blocks, heads),
            fixed=(dim, MERGED_HEADS, power_of_2(dim), pdl),
            options=launch_options(pdl, 4),
        )
        run = PLANS.add(key, launch)
    run((out, lse, other, other_lse))
    return out
