"""Kernels for Hopper (sm90) alone, in Gluon: TMA, warp specialisation, wgmma.

`forward` is attention over dense, packed and paged keys; `producer` and `consumer` are its two kinds of warps and `shared` what
they share; `schedule` deals tiles, `tiles` chooses their shape. Left out: few queries over a paged cache, float8 caches and
explicit masks, which the portable kernels have, and the backward pass.

Gluon is Triton's experimental layer and changes with every release, so the kernel modules are imported only under the release
that they are written for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from fa_serve.backends.hopper.tiles import HEAD_DIMS
from fa_serve.spec import FEW_QUERIES, AttentionSpec

GLUON_OF_TRITON = "3.6."


class HopperBackend:
    name = "hopper"
    plans = True

    def supports(self, spec: AttentionSpec) -> str | None:
        if spec.device != "cuda" or spec.arch != 90:
            got = f"compute capability {spec.arch / 10}" if spec.arch else spec.device
            return f"runs on Hopper (compute capability 9.0) alone, got {got}"
        if not triton.__version__.startswith(GLUON_OF_TRITON):
            return f"is written in the Gluon of Triton {GLUON_OF_TRITON}x, got Triton {triton.__version__}"
        if triton.knobs.runtime.interpret:
            return "has no interpreter: TRITON_INTERPRET is set"
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"computes float16 and bfloat16, got {str(spec.dtype)[6:]}"
        if spec.few_queries:
            return f"leaves up to {FEW_QUERIES} queries per sequence, and fixed splits, to the decoding kernels"
        if spec.layout == "paged" and (reason := _cannot_page(spec)):
            return reason
        if (spec.head_dim, spec.head_dim_v) not in HEAD_DIMS:
            known = ", ".join(str(d) if d == dv else f"{d} with head_dim_v {dv}" for d, dv in HEAD_DIMS)
            got = str(spec.head_dim) if spec.head_dim == spec.head_dim_v else f"{spec.head_dim} with {spec.head_dim_v}"
            return f"has head_dim {known}, got {got}"
        if spec.mask is not None:
            return "takes causality and windows, not an explicit mask"
        return "has no backward pass, and an input requires gradients" if spec.needs_grad else None

    # the kernels' module is imported when it is first asked for: where Gluon differs it cannot be
    @property
    def forward(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        from fa_serve.backends.hopper.forward import launch_forward

        return launch_forward

    forward_varlen = forward_paged = forward

    @property
    def step(self) -> Callable[..., object]:
        from fa_serve.backends.hopper.forward import make_step

        return make_step

    def store_kv(self, *args, **options):
        raise NotImplementedError("the Hopper backend does not write a paged cache; supports() says so")


def _cannot_page(spec: AttentionSpec) -> str | None:
    if spec.kv_dtype != spec.dtype:
        return f"reads a cache of q's dtype, got {str(spec.kv_dtype)[6:]}"
    if spec.page_size % 16:
        return f"reads pages of a multiple of 16 tokens, got {spec.page_size}"
    if not spec.whole_rows:
        return "reads caches whose tokens and heads are multiples of 16 bytes apart, and pages a whole number of tokens"
    return None
