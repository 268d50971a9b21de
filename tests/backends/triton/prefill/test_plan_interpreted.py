"""The portable forward kernel in Triton's interpreter against the float64 oracle, over the whole matrix.

The interpreter computes in NumPy, so bfloat16 and float16 are left to the GPU suite, which runs the same cases. It takes 20
seconds for a thousand queries and keys: here the longest have 300.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import DENSE, PAGED, VARLEN, Case, check, check_without_keys, check_without_queries, params
from sampled_cases import each_nth

from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.backends.triton.tiles import TileConfig
from fa_serve.testing import make_qkv, run_plan

SHORT = [replace(case, lengths_q=(300,), lengths_k=(300,)) if case.lengths_q == (1000,) else case for case in DENSE]


@pytest.mark.parametrize("case", params(each_nth(3, SHORT)))
def test_dense(case: Case) -> None:
    check(case, "triton", torch.float32)


@pytest.mark.parametrize("case", params(VARLEN))
def test_varlen(case: Case) -> None:
    check(case, "triton", torch.float32, layout="varlen")


@pytest.mark.parametrize("case", params([case for case in PAGED if max(case.lengths_q) > 16]))
def test_paged(case: Case) -> None:
    check(case, "triton", torch.float32, layout="paged")


def test_without_keys_or_queries() -> None:
    check_without_keys("triton", torch.float32)
    check_without_queries("triton", torch.float32)


def test_float16() -> None:
    check(Case((70,), (90,), heads=4, kv_heads=2, causal=True), "triton", torch.float16)


def test_strided_inputs_and_out() -> None:
    """Head-first storage, as transformers has it, and a slice of a wider buffer as `out`: no copy is needed or made wrong."""
    options = {"softmax_scale": 0.125, "window_size": (-1, 0), "softcap": 0.0, "sinks": None, "return_lse": False}
    q, k, v = make_qkv(2, 40, 50, 4, 2, 64)
    plain, _ = run_plan(plan_forward, q, k, v, out=None, **options)
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = torch.full((2, 40, 4, 96), float("nan"))
    out, _ = run_plan(plan_forward, *head_first, out=wide[..., :64], **options)
    torch.testing.assert_close(out, plain, rtol=0, atol=0)
    assert out.data_ptr() == wide.data_ptr()
    assert wide[..., 64:].isnan().all()


@pytest.mark.parametrize("tile", [(16, 32), (32, 16), (128, 64)], ids=str)
def test_any_tile_gives_the_same(tile: tuple[int, int]) -> None:
    """The band's edges fall elsewhere in each tiling."""
    q, k, v = make_qkv(1, 75, 150, 2, 1, 32)
    options = {"softmax_scale": 0.2, "window_size": (37, 0), "softcap": 0.0, "sinks": None, "out": None, "return_lse": True}
    expected, expected_lse = run_plan(plan_forward, q, k, v, **options)
    out, lse = run_plan(plan_forward, q, k, v, tiles=TileConfig(*tile, num_warps=4, num_stages=1), **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)
