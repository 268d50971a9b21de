"""The kernel that adds to the residual stream what no product kernel adds, such as the output of a mixture of experts.

It is PyTorch's `add_`, launched programmatically on Hopper and later GPUs: in a step of few tokens, an ordinary launch between
kernels that start early costs more than the addition, because nothing overlaps with its beginning and its end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options
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
