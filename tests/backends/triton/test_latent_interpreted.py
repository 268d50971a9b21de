"""Latent attention in Triton's interpreter against the float64 oracle: decoding, verify steps, prompts and mixed batches.

Pages that belong to nobody hold NaN. The interpreter computes in NumPy, which has no bfloat16: that is left to the GPU suite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

import fa_serve
from fa_serve.backends.reference import attention_reference
from fa_serve.backends.triton import latent
from fa_serve.backends.triton.latent import plan_latent
from fa_serve.backends.triton.triton_tiles import DecodeTiles
from fa_serve.testing import assert_lse_matches, assert_matches_reference, cu_seqlens, eager_attention, make_paged, run_plan


@dataclass(frozen=True)
class Case:
    q_lens: tuple[int, ...] = (1, 1, 1)
    kv_lens: tuple[int, ...] = (17, 1, 70)
    heads: tuple[int, int] = (16, 1)
    dims: tuple[int, int] = (40, 24)  # of a key, of its value
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    num_splits: int = 0
    head_major: bool = False
    causal: bool = True


def make(case: Case):
    """q, the cache, what the call needs beside them, and the keys of each sequence in float64."""
    generator = torch.Generator().manual_seed(sum(case.kv_lens))
    num_heads, num_kv_heads = case.heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    q = draw(sum(case.q_lens), num_heads, case.dims[0])
    keys = [draw(n, num_kv_heads, case.dims[0]) for n in case.kv_lens]
    cache, _, block_table, seqused_k = make_paged(keys, keys, case.page_size)
    if case.head_major:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    options = {
        "block_table": block_table,
        "seqused_k": seqused_k,
        "cu_seqlens_q": cu_seqlens(case.q_lens),
        "max_seqlen_q": max(case.q_lens),
        "max_seqlen_k": max(*case.kv_lens, 1),
        "softmax_scale": 0.11,
        "num_splits": case.num_splits,
        "return_lse": True,
    }
    return q, cache, [k.double() for k in keys], options


def check(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a call of the public function with the equation."""
    q, cache, keys, options = make(case)
    dim_v = case.dims[1]
    actual, lse = fa_serve.attention_paged(q, cache, cache[..., :dim_v], causal=case.causal, backend="triton", **options)
    assert_right(case, actual, lse, q, keys)
    return actual, lse


def assert_right(case: Case, actual, lse, q, keys) -> None:
    exact = torch.zeros(*actual.shape, dtype=torch.float64)
    exact_lse = torch.full(lse.shape, float("-inf"), dtype=torch.float64)
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
    Case(),
    Case(dtype=torch.float16, dims=(72, 64), heads=(24, 1), kv_lens=(33, 90, 0)),
    Case(heads=(20, 2), kv_lens=(17, 1, 40), head_major=True, page_size=7),
    Case(q_lens=(3, 0, 4), kv_lens=(17, 1, 66), heads=(8, 1), num_splits=3),
    Case(q_lens=(5, 5), kv_lens=(90, 60), heads=(8, 1), page_size=64, dims=(48, 32)),
    Case(q_lens=(1,), kv_lens=(300,), page_size=128),
    Case(q_lens=(2, 2), kv_lens=(20, 9), causal=False),
    Case(q_lens=(20,), kv_lens=(75,), heads=(4, 1)),
    Case(q_lens=(1, 19, 0, 30, 1), kv_lens=(50, 34, 3, 30, 5), heads=(6, 1)),
    Case(q_lens=(33, 1), kv_lens=(40, 17), heads=(6, 2), dims=(24, 16), head_major=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latent_attention(case: Case) -> None:
    check(case)


def test_the_kernel_computes_what_it_serves(monkeypatch) -> None:
    """Keys of 40 numbers, which other kernels could read as well, whole values, and a window, which this kernel has not."""
    calls: list[bool] = []
    plan = plan_latent
    monkeypatch.setattr(latent, "plan_latent", lambda *args, decodes: calls.append(decodes) or plan(*args, decodes=decodes))
    fa_serve.backends.plan.PLANS.clear()
    check(Case())
    check(Case(q_lens=(17,), kv_lens=(18,), heads=(4, 1)))
    check(Case(q_lens=(1, 17), kv_lens=(20, 17), heads=(4, 1)))
    assert calls == [True, False, False, True]
    q, cache, keys, options = make(Case())
    other = fa_serve.attention_paged(q, cache, cache[..., :24].clone(), backend="triton", **options)
    windowed = fa_serve.attention_paged(q, cache, cache[..., :24], backend="triton", window_size=(9, 0), **options)
    assert len(calls) == 4
    assert_right(Case(), *other, q, keys)
    assert not torch.equal(other[0], windowed[0])


def test_a_fixed_number_of_splits_does_not_depend_on_the_batch() -> None:
    case = Case(q_lens=(1, 1, 1, 1), kv_lens=(150, 17, 64, 5), heads=(8, 1), num_splits=4)
    q, cache, _, options = make(case)
    together, _ = fa_serve.attention_paged(q, cache, cache[..., :24], backend="triton", **options)
    for row in range(4):
        own = options | {
            "block_table": options["block_table"][row : row + 1],
            "seqused_k": options["seqused_k"][row : row + 1],
            "cu_seqlens_q": cu_seqlens((1,)),
            "max_seqlen_k": 160,
        }
        alone, _ = fa_serve.attention_paged(q[row : row + 1], cache, cache[..., :24], backend="triton", **own)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("decodes", [True, False])
def test_sequences_of_another_kernel_are_left_alone(decodes: bool) -> None:
    """Decoding leaves those with more queries than its bound, prompts those with few, and `out` may have any strides."""
    case = Case(q_lens=(1, 19, 2), kv_lens=(50, 34, 20), heads=(4, 1))
    q, cache, _, options = make(case)
    out = torch.full((22, 4, 40), 7.0)[..., :24]
    bounds = {"max_seqlen_q": 2} if decodes else {"skip_q": 2}
    given = options | bounds | {"window_size": (-1, 0), "softcap": 0.0, "out": out}
    tiles = DecodeTiles(16, 16, 4, 1, 3, balanced=True, min_blocks=2)
    run_plan(partial(plan_latent, decodes=decodes), q, cache, cache[..., :24], tiles=tiles, **given)
    ours = torch.ones(22, dtype=torch.bool)
    ours[1:20] = False
    if not decodes:
        ours = ~ours
    assert bool((out[~ours] == 7.0).all())
    whole, _ = check(case)
    torch.testing.assert_close(out[ours], whole[ours])
