"""Rows behind the last sequence of a packed call on the GPU: out is 0, lse is -inf and gradients are 0, with every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tail_cases import PAGED, VARLEN, TailCase, attend, check_tail, check_tail_gradients, make_tail, params

import fa_serve

D128 = {"heads": (8, 2), "head_dim": 128}
WIDE = [replace(case, **D128) for case in (*VARLEN, *PAGED) if not case.latent]
LATENT = [
    replace(case, heads=(64, 1), head_dim=head_dim) for case in PAGED if case.latent for head_dim in (40, 528)
]  # values of 24 numbers, and of 512 as the Hopper kernel reads them
OTHER = [
    TailCase((700, 300), (700, 300), tail=5000, **D128),
    TailCase((4,) * 16, (2000,) * 16, tail=64, layout="paged", **D128),  # query heads share tiles on Hopper
    TailCase((256,), (4000,), tail=3, layout="paged", **D128),  # keys are split
    TailCase((300, 90), (300, 90), precision="qk8", **D128),
    TailCase((300, 90), (300, 90), precision="fp8", layout="paged", **D128),
]


def _check(case: TailCase, backend: str, dtype: torch.dtype) -> None:
    try:
        check_tail(case, attend(case, backend), dtype, "cuda")
    except fa_serve.UnsupportedError as error:
        if backend == "triton" and case.precision == "bf16":
            raise
        pytest.skip(str(error).splitlines()[-1].strip())


@pytest.mark.parametrize("backend", ["auto", "triton", "hopper", "sdpa"])
@pytest.mark.parametrize("case", params([*VARLEN, *PAGED, *WIDE, *LATENT, *OTHER]))
def test_rows_behind_the_last_sequence(case: TailCase, backend: str) -> None:
    _check(case, backend, torch.bfloat16)


@pytest.mark.parametrize("case", params([*VARLEN, *PAGED]))
def test_float32(case: TailCase) -> None:
    _check(case, "triton", torch.float32)


@pytest.mark.parametrize("backend", ["auto", "triton", "sdpa"])
@pytest.mark.parametrize("head_dim", [16, 128, 192])
def test_gradients(head_dim: int, backend: str) -> None:
    check_tail_gradients(backend, torch.bfloat16, "cuda", head_dim)


@pytest.mark.parametrize("layout", ["varlen", "paged"])
def test_a_captured_graph_follows_the_lengths(layout: str) -> None:
    """A graph that was captured with full sequences is replayed with shorter ones, as the engine's steps are."""
    case = TailCase((64, 64), (64, 64), tail=0, layout=layout, **D128)
    q, k, v, given = make_tail(case, torch.bfloat16, "cuda")
    out = torch.full_like(q, 7.0)
    call = attend(case, "auto")
    call(q, k, v, **given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(q, k, v, **given, out=out)
    for end in (128, 100, 64):
        given["cu_seqlens_q"].copy_(torch.tensor([0, min(end, 64), end]))
        out.fill_(7.0)
        lse.fill_(7.0)
        graph.replay()
        assert (out[end:] == 0).all()
        assert (lse[:, end:] == float("-inf")).all()
        assert torch.isfinite(out[:end]).all()
        assert not (out[:end] == 7.0).all(dim=-1).any()
