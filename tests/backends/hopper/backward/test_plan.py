"""`hopper.backward` in the emulator: its gradients by the 2x rule, with every option, layout, tile and address."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_backward_cases import GradientCall, GradientCase, run_backward
from hopper_emulator import emulated

from fa_serve.backends.calls import BackwardTensors
from fa_serve.backends.hopper.backward.plan import plan_hopper_backward
from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig

CAUSAL = (-1, 0)
WIDE = GradientCase("", head_dim=(128, 128))
STAGGER = BackwardTileConfig(64, 2, stagger=True)
DENSE = [
    GradientCase("default"),
    replace(WIDE, id="d128"),
    GradientCase("causal", window=CAUSAL, batch=2, heads=(4, 2)),
    replace(WIDE, id="d128-causal-float16", window=CAUSAL, dtype=torch.float16, seqlen_q=300, seqlen_k=300),
    GradientCase("d40-dv24", head_dim=(40, 24), window=CAUSAL),
    GradientCase("d80", head_dim=(80, 80)),
    GradientCase("d64-dv128", head_dim=(64, 128)),
    GradientCase("d128-dv64", head_dim=(128, 64), window=CAUSAL),
    GradientCase("one-query", seqlen_q=1, seqlen_k=300, heads=(4, 1)),
    GradientCase("one-row-per-key-block", seqlen_q=300, seqlen_k=2),
    replace(WIDE, id="rows-without-keys", window=CAUSAL, seqlen_q=300, seqlen_k=100),
    GradientCase("keys-without-rows", window=(20, -1), seqlen_q=40, seqlen_k=400),
    GradientCase("window-both", window=(30, 10), seqlen_q=150, seqlen_k=310),
    replace(WIDE, id="d128-window", window=(100, 0), seqlen_q=400, seqlen_k=400, heads=(4, 2)),
    GradientCase("window-left", window=(70, -1), seqlen_q=150, seqlen_k=310),
    GradientCase("softcap", softcap=5.0, scale=1.0, window=CAUSAL),
    GradientCase("sinks-lse", sinks=True, with_lse=True, window=CAUSAL, seqlen_q=180, seqlen_k=180),
    # where both keys have a score far below zero, P of a key past the end would be infinite
    replace(WIDE, id="far-below-zero", seqlen_q=300, seqlen_k=2, scale=10.0),
    replace(WIDE, id="stagger", tiles=STAGGER, seqlen_q=400, seqlen_k=400, heads=(4, 2)),
    replace(WIDE, id="stagger-causal", tiles=STAGGER, window=CAUSAL, seqlen_q=400, seqlen_k=400),
    GradientCase("one-stage", tiles=BackwardTileConfig(128, 1, 1), seqlen_q=400, seqlen_k=130),
]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_dense(case: GradientCase) -> None:
    run_backward(case)


LENGTHS = ((70, 70), (33, 33), (0, 40), (1, 9), (150, 150), (20, 20), (130, 260), (5, 0))


@pytest.mark.parametrize("window", [(-1, -1), CAUSAL, (40, 0)], ids=str)
def test_packed_sequences_do_not_see_their_neighbours(window: tuple[int, int]) -> None:
    """Every other sequence is NaN, and its neighbours must be right; rows of no sequence have no gradient."""
    call = GradientCall(GradientCase("", window=window, lengths=LENGTHS))
    tensors = call.tensors
    for number in (1, 3, 5):
        for name in ("q", "k", "v", "out", "dout"):
            getattr(tensors, name)[call.rows("k" if name in ("k", "v") else "q", number)] = float("nan")
    wide = [torch.cat([x, torch.full_like(x[:9], float("nan"))]) for x in (tensors.q, tensors.k, tensors.v)]
    call.tensors = tensors._replace(
        q=wide[0],
        k=wide[1],
        v=wide[2],
        out=torch.cat([tensors.out, tensors.out[:9]]),
        dout=torch.cat([tensors.dout, tensors.dout[:9]]),
        lse=torch.cat([tensors.lse, tensors.lse[:, :9]], 1),
    )
    found = call.run()
    for number in (0, 4, 6):
        call.check(found, number)
    assert not any(x[-9:].any() for x in found[:3])
    assert not found.k[call.rows("k", 2)].any()


def test_packed_sinks_and_lse() -> None:
    run_backward(GradientCase("", sinks=True, with_lse=True, lengths=((70, 90), (40, 40)), heads=(4, 2), head_dim=(96, 96)))


@pytest.mark.slow
def test_any_strides_and_addresses() -> None:
    """Heads before tokens are addressed directly; odd strides, an unaligned address and an expanded dO are copied."""
    call = GradientCall(GradientCase("", heads=(4, 2), batch=2))
    tensors = call.tensors
    flat = torch.ones(1, 1, 1, 1, dtype=tensors.q.dtype)
    expected = call.run()
    head_first = tensors.q.transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.zeros(*tensors.k.shape[:-1], 67, dtype=tensors.k.dtype)[..., 1:65].copy_(tensors.k)
    unaligned = torch.empty(tensors.v.numel() + 1, dtype=tensors.v.dtype)[1:].view_as(tensors.v).copy_(tensors.v)
    for change in ({"q": head_first}, {"k": odd}, {"v": unaligned}):
        call.tensors = tensors._replace(**change)
        for actual, plain in zip(call.run()[:3], expected[:3], strict=True):
            torch.testing.assert_close(actual, plain, rtol=2e-2, atol=1e-2)
    found = []
    for dout in (flat.expand_as(tensors.dout), torch.ones_like(tensors.dout)):
        call.tensors = tensors._replace(dout=dout)
        found.append(call.run())
    assert torch.equal(found[0].v, found[1].v)


def test_an_unaligned_address_is_right_with_a_plan_for_aligned_ones() -> None:
    call = GradientCall(GradientCase(""))
    tensors = call.tensors
    unaligned = torch.empty(tensors.k.numel() + 1, dtype=tensors.k.dtype)[1:].view_as(tensors.k).copy_(tensors.k)
    with emulated():
        run = plan_hopper_backward(tensors, call.case.options)
        run(tensors)
        found = run(tensors._replace(k=unaligned))
    call.check(found, 0)


@pytest.mark.parametrize("lengths", [(0, 7), (7, 0), (0, 0)], ids=str)
def test_no_queries_and_no_keys(lengths: tuple[int, int]) -> None:
    rows, keys = lengths
    q = torch.ones(1, rows, 2, 64, dtype=torch.bfloat16)
    k = torch.ones(1, keys, 1, 64, dtype=torch.bfloat16)
    lse = torch.full((1, 2, rows), float("-inf"))
    tensors = BackwardTensors(q, k, k, None, None, None, None, torch.zeros_like(q), lse, q)
    with emulated():
        found = plan_hopper_backward(tensors, GradientCase("", seqlen_q=rows, seqlen_k=keys).options)(tensors)
    for name in "qkv":
        assert getattr(found, name).shape == getattr(tensors, name).shape
        assert not getattr(found, name).any()
