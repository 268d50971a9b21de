"""Portable Triton kernels: any GPU that Triton compiles for, and its interpreter on a CPU.

`forward` is the FlashAttention-2 forward pass over dense, packed and paged keys; `decode` splits one sequence's keys, paged or
dense, among programs when the queries are few (`pieces` cuts and merges, `steps` keeps what steps share); `kv_cache` writes
the paged cache; `primitives` are the shared steps of the algorithm and `tiles` the choice of tile.
Left out: the backward pass, and everything that only Hopper has (see `backends.hopper`).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from fa_serve.backends.mixed import forward_mixed
from fa_serve.backends.triton.decode import launch_decode, launch_dense
from fa_serve.backends.triton.forward import launch_forward
from fa_serve.backends.triton.kv_cache import launch_store_kv
from fa_serve.backends.triton.steps import make_step
from fa_serve.spec import FEW_QUERIES, AttentionSpec

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonBackend:
    name = "triton"
    plans = True
    forward_varlen = staticmethod(launch_forward)
    step = staticmethod(make_step)

    def supports(self, spec: AttentionSpec) -> str | None:
        interpreted = triton.knobs.runtime.interpret
        if spec.device != "cuda" and not interpreted:
            return f"runs on CUDA and ROCm devices, got {spec.device}"
        if spec.device == "cuda" and 0 < spec.arch < 80 and torch.version.hip is None:
            return f"needs compute capability 8.0 or newer, got {spec.arch / 10}"
        if spec.dtype not in _DTYPES:
            return f"computes float16, bfloat16 and float32, got {str(spec.dtype)[6:]}"
        if spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn):
            return f"reads a cache of q's dtype or float8_e4m3fn, got {str(spec.kv_dtype)[6:]}"
        if spec.kv_dtype == torch.float8_e4m3fn and 0 < spec.arch < 89:
            return f"reads float8_e4m3fn from compute capability 8.9 on, got {spec.arch / 10}"
        if max(spec.head_dim, spec.head_dim_v) > 256:
            return f"head_dim up to 256, got {max(spec.head_dim, spec.head_dim_v)}"
        return "has no backward pass, and an input requires gradients" if spec.needs_grad else None

    def forward(self, q, k, v, *, mask, **options):
        over_keys = mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))
        if 0 < q.shape[1] <= FEW_QUERIES < k.shape[1] and over_keys:
            return launch_dense(q, k, v, mask=mask, **options)
        return launch_forward(q, k, v, mask=mask, **options)

    def forward_paged(self, q, k_cache, v_cache, **options):
        longest = options["max_seqlen_q"]
        if longest <= FEW_QUERIES or options["k_descale"] is not None or options["num_splits"] > 0:
            return launch_decode(q, k_cache, v_cache, **options)
        if q.shape[0] < options["seqused_k"].shape[0] * longest:
            return forward_mixed(launch_decode, launch_forward, q, k_cache, v_cache, **options)
        return launch_forward(q, k_cache, v_cache, **options)

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
    ) -> None:
        launch_store_kv(k, v, k_cache, v_cache, slot_mapping, k_descale, v_descale)
