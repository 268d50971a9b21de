"""Calls of latent attention, for the interpreter and the GPU, and their check against the float64 oracle.

Pages that belong to nobody hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.testing import assert_lse_matches, assert_matches_reference, cu_seqlens, eager_attention, make_paged


@dataclass(frozen=True)
class LatentCase:
    q_lens: tuple[int, ...] = (1, 1, 1)
    kv_lens: tuple[int, ...] = (17, 1, 70)
    heads: tuple[int, int] = (16, 1)
    dims: tuple[int, int] = (40, 24)  # of a key, of its value
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    num_splits: int = 0
    head_major: bool = False
    float8: bool = False
    causal: bool = True


def make_latent(case: LatentCase, device: str = "cpu") -> tuple[Tensor, Tensor, list[Tensor], dict[str, Any]]:
    """q, the cache, the keys of each sequence in float64, and what the call needs beside them."""
    generator = torch.Generator().manual_seed(sum(case.kv_lens))
    num_heads, num_kv_heads = case.heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    q = draw(sum(case.q_lens), num_heads, case.dims[0])
    keys = [draw(n, num_kv_heads, case.dims[0]) for n in case.kv_lens]
    cache, _, block_table, seqused_k = make_paged(keys, keys, case.page_size)
    options: dict[str, Any] = {}
    if case.float8:
        descale = torch.linspace(0.01, 0.02, num_kv_heads).to(device)
        cache = (cache.float() / descale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        keys = [
            (k.float() / descale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).double() * descale[:, None] for k in keys
        ]
        options = {"k_descale": descale, "v_descale": descale}
    if case.head_major:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    options |= {
        "block_table": block_table,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_seqlens(case.q_lens, device),
        "max_seqlen_q": max(case.q_lens),
        "max_seqlen_k": max(*case.kv_lens, 1),
        "softmax_scale": 0.11,
        "num_splits": case.num_splits,
        "return_lse": True,
    }
    return q, cache, [k.double() for k in keys], options


def check_latent(case: LatentCase, backend: str = "triton", device: str = "cpu") -> Tensor:
    """Compare a call of the public function with the equation -> its result."""
    q, cache, keys, options = make_latent(case, device)
    dim_v = case.dims[1]
    actual, lse = fa_serve.attention_paged(q, cache, cache[..., :dim_v], causal=case.causal, backend=backend, **options)
    assert_right(case, actual, lse, q, keys)
    return actual


def assert_right(case: LatentCase, actual: Tensor, lse: Tensor, q: Tensor, keys: list[Tensor]) -> None:
    exact = torch.zeros(*actual.shape, dtype=torch.float64, device=actual.device)
    exact_lse = torch.full(lse.shape, float("-inf"), dtype=torch.float64, device=lse.device)
    eager = torch.zeros_like(actual)
    options = {"softmax_scale": 0.11, "window_size": (-1, 0 if case.causal else -1)}
    row = 0
    for n, k in zip(case.q_lens, keys, strict=True):
        if n and len(k):
            own = q[row : row + n][None]
            values = k[..., : case.dims[1]]
            out, out_lse = attention_reference(own.double(), k[None], values[None], **options)
            exact[row : row + n] = out[0]
            exact_lse[:, row : row + n] = out_lse[0]
            eager[row : row + n] = eager_attention(own, k.to(q.dtype)[None], values.to(q.dtype)[None], **options)[0]
        row += n
    assert_matches_reference(actual, exact, eager)
    assert_lse_matches(lse, exact_lse)


CASES = [
    LatentCase(),
    LatentCase(dtype=torch.float16, dims=(72, 64), heads=(24, 1), kv_lens=(33, 90, 0)),
    LatentCase(heads=(20, 2), kv_lens=(17, 1, 40), head_major=True, page_size=7),
    LatentCase(q_lens=(3, 0, 4), kv_lens=(17, 1, 66), heads=(8, 1), num_splits=3),
    LatentCase(q_lens=(5, 5), kv_lens=(90, 60), heads=(8, 1), page_size=64, dims=(48, 32)),
    LatentCase(q_lens=(1,), kv_lens=(300,), page_size=128),
    LatentCase(q_lens=(2, 2), kv_lens=(20, 9), causal=False),
    LatentCase(q_lens=(1, 19, 0, 30, 1), kv_lens=(50, 34, 3, 30, 5), heads=(6, 1)),
    LatentCase(float8=True),
    LatentCase(float8=True, dtype=torch.float16, dims=(72, 64), heads=(24, 1), kv_lens=(33, 90, 0), num_splits=2),
    LatentCase(float8=True, q_lens=(1, 19), kv_lens=(20, 19), heads=(2, 2), dims=(24, 16), head_major=True),
    LatentCase(q_lens=(33, 1), kv_lens=(40, 17), heads=(6, 2), dims=(24, 16), head_major=True),
    # more than one slice of columns, the last of which is not full
    LatentCase(q_lens=(1, 2), kv_lens=(33, 60), dtype=torch.float16, dims=(160, 144), heads=(10, 1)),
    LatentCase(q_lens=(19, 1), kv_lens=(21, 3), dtype=torch.float16, dims=(160, 144), heads=(2, 1)),
]
