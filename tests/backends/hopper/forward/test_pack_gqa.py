"""`hopper.forward.pack_gqa` in the emulator: the query heads of a KV head share a tile."""

from __future__ import annotations

import pytest
import torch
from hopper_cases import CAUSAL, DYNAMIC, FULL, Case, PagedCall, run_dense
from hopper_emulator import EmulationError, emulated

from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles
from fa_serve.testing import cu_seqlens, make_qkv

SMALL = HopperTiles(2, 64, 2, 2, DYNAMIC)
DENSE = [
    Case("four-heads", seqlen_q=9, seqlen_k=200, heads=(8, 2), batch=2),
    Case("two-heads-full", seqlen_q=16, seqlen_k=200, heads=(4, 2), window=FULL),
    Case("three-heads-are-not-packed", seqlen_q=9, seqlen_k=200, heads=(6, 2)),
    Case("more-than-a-tile", seqlen_q=16, seqlen_k=150, heads=(32, 1), tiles=SMALL),
    Case("sixty-four-heads", seqlen_q=3, seqlen_k=150, heads=(64, 1), tiles=SMALL),
    Case("window", window=(75, 0), seqlen_q=16, seqlen_k=410, heads=(4, 1), tiles=SMALL),
    Case("sinks-softcap", sinks=True, softcap=5.0, seqlen_q=16, seqlen_k=18, heads=(8, 2)),
    Case("d80-float16", head_dim=(80, 80), dtype=torch.float16, seqlen_q=8, seqlen_k=200, heads=(8, 1)),
    Case("d192-dv128", head_dim=(192, 128), seqlen_q=8, seqlen_k=200, heads=(8, 1)),
    Case("d256", head_dim=(256, 256), seqlen_q=8, seqlen_k=200, heads=(16, 2)),
    Case("rows-without-keys", seqlen_q=16, seqlen_k=7, heads=(4, 1)),
]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_dense(case: Case) -> None:
    run_dense(case)


@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (4, 1)], ids=str)
def test_pages(heads: tuple[int, int]) -> None:
    """Few queries of sequences of several lengths. Slots of pages that no sequence uses are NaN."""
    call = PagedCall.of(Case("", heads=heads, sinks=heads[0] == 8), [1, 16, 0, 5, 9], [90, 400, 30, 5, 0])
    out, lse = call.run()
    for sequence in (0, 1, 3):
        call.check(out, lse, sequence)
    assert (out[call.sequences[4][0]] == 0).all()


def test_packed_sequences_do_not_see_their_neighbours() -> None:
    """The neighbours are NaN, and rows after the last sequence are 0."""
    lengths_q = [16, 9, 0, 3]
    lengths_k = [300, 33, 40, 250]
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q) + 7, sum(lengths_k) + 7, 8, 2, 64, dtype=torch.bfloat16))
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[cu[-1] :] = float("nan")
        x[cu[1] : cu[2]] = float("nan")
    case = Case("", window=CAUSAL, heads=(8, 2))
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu_q, keys=cu_k, out=torch.full_like(q, 7.0))
    with emulated():
        out, lse = plan_hopper_forward(tensors, case.options(16, 300), SMALL)(tensors)
    assert out is tensors.out
    assert (out[cu_q[-1] :] == 0).all()
    assert (lse[:, cu_q[-1] :] == float("-inf")).all()
    for b in (0, 3):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        case.check(out[None, rows], lse[None, :, rows], q[None, rows], k[None, keys], v[None, keys])


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        (
            "four-heads",
            "rows = top + gl.arange(0, 64, layout=layout) // var.pack_gqa",
            "rows = top + gl.arange(0, 64, layout=layout)",
        ),
        ("four-heads", "return head * var.pack_gqa, head\n", "return head, head\n"),
        (
            "four-heads",
            "heads = (head + rows % var.pack_gqa)",
            "heads = (head + rows % 2)",
        ),
        ("more-than-a-tile", "row = tile.row + 64 * g // var.pack_gqa", "row = tile.row + 64 * g"),
        ("window", "top + 63 // var.pack_gqa - args.left", "top + 1 - args.left"),
        ("sinks-softcap", "gl.arange(0, 64, layout=layout) % var.pack_gqa", "gl.arange(0, 64, layout=layout) * 0"),
    ],
    ids=["queries-of-rows", "query-heads", "lse", "second-warpgroup", "first-block-without-a-mask", "sinks"],
)
def test_the_cases_catch_faults(case: str, old: str, new: str) -> None:
    with pytest.raises((AssertionError, EmulationError)):
        run_dense(next(c for c in DENSE if c.id == case), faults={old: new})
