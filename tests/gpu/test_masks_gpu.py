"""Masks of elements on the GPU: the cases of the emulator in 16 bits, longer ones by every kernel, graphs, and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mask_cases import BASE, CASES, MaskCase, check_masked, make_mask

import fa_serve
from fa_serve.backends.hopper.forward import plan
from fa_serve.backends.mask_blocks import SCANNED
from fa_serve.backends.triton.mask_blocks import MaskScan
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.launching.plans import PLANS
from fa_serve.testing import make_qkv, run_plan

PATTERNS = ("prefix", "documents", "images", "random", "everything", "unseen rows", "padding")
LONG = replace(BASE, batch=2, seqlen_q=1111, seqlen_k=2345, heads=8, kv_heads=2, head_dim=128)


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: MaskCase, backend: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check_masked(case, backend, dtype, "cuda")


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("over", ["qk", "bqk", "hqk", "bhqk", "bk", "q"])
@pytest.mark.parametrize("form", ["bool", "hidden", "bias"])
def test_long_masks_of_every_shape(form: str, over: str, backend: str) -> None:
    patterns = ("padding",) if over == "bk" else ("unseen rows",) if over == "q" else ("images", "random")
    for pattern in patterns:
        check_masked(replace(LONG, form=form, over=over, pattern=pattern), backend, torch.bfloat16, "cuda")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("form", ["bool", "bias"])
def test_head_sizes(form: str, head_dim: int) -> None:
    """Keys of even and of odd number: a float mask is loaded in pairs, or number by number."""
    for keys in (2048, 2047):
        check_masked(replace(LONG, form=form, head_dim=head_dim, seqlen_k=keys), "auto", torch.bfloat16, "cuda")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_give_what_every_element_gives(pattern: str) -> None:
    """The kernel that reads every element of the mask beside those that read mixed blocks."""
    case = replace(LONG, seqlen_q=2000, seqlen_k=2000, pattern=pattern)
    q, k, v = make_qkv(2, 2000, 2000, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    mask = make_mask(case, torch.bfloat16, "cuda")
    options = {"softmax_scale": 128**-0.5, "window_size": (-1, -1), "softcap": 0.0, "return_lse": True}
    dense, dense_lse = run_plan(plan_forward, q, k, v, mask=mask, **options, max_seqlen_q=2000, max_seqlen_k=2000)
    for backend in ("auto", "triton"):
        out, lse = fa_serve.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
        torch.testing.assert_close(out, dense, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, dense_lse, rtol=1e-3, atol=1e-3)


def test_the_scan_finds_what_the_mask_has() -> None:
    mask = torch.rand(2, 3, 1500, 4001, device="cuda") < 0.5
    mask[:, :, :512, 1024:] = False
    mask[:, :, 512:1024, :2048] = True
    lists = MaskScan(mask, 1500, 4001)(mask).lists
    assert lists.full_kv_num_blocks is not None
    padded = torch.nn.functional.pad(mask.float(), (0, -4001 % 128, 0, -1500 % 128), value=float("nan"))
    mean = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).transpose(3, 4).flatten(4).nanmean(-1)
    assert torch.equal(lists.kv_num_blocks, ((mean > 0) & (mean < 1)).sum(-1, dtype=torch.int32))
    assert torch.equal(lists.full_kv_num_blocks, (mean == 1).sum(-1, dtype=torch.int32))


def test_a_mask_may_change_below_a_captured_graph() -> None:
    """The scan is a part of the graph."""
    q, k, v = make_qkv(1, 1024, 1024, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    case = replace(BASE, seqlen_q=1024, seqlen_k=1024)
    mask = make_mask(case, torch.bfloat16, "cuda")
    other = make_mask(replace(case, pattern="documents"), torch.bfloat16, "cuda")
    fa_serve.attention(q, k, v, mask=mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa_serve.attention(q, k, v, mask=mask)
    mask.copy_(other)
    graph.replay()
    assert torch.equal(out, fa_serve.attention(q, k, v, mask=other))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sequences_that_share_a_bias_compute_the_same_in_any_order(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(LONG, batch=3, form="bias", over="hqk", head_dim=head_dim, pattern="images")
    q, k, v = make_qkv(3, 1111, 2345, 8, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    mask = make_mask(case, torch.bfloat16, "cuda")
    found = []
    for together in (False, True):
        monkeypatch.setattr(plan, "SHARE_BIAS", together)
        PLANS.clear()
        found.append(fa_serve.attention(q, k, v, mask=mask))
    PLANS.clear()
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_does_not_wait() -> None:
    q, k, v = make_qkv(1, 1024, 1024, 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    masks = [make_mask(replace(BASE, seqlen_q=1024, seqlen_k=1024, form=form), q.dtype, "cuda") for form in ("bool", "bias")]
    for mask in masks:
        fa_serve.attention(q, k, v, mask=mask)
    SCANNED.clear()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for mask in masks:
            fa_serve.attention(q, k, v, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", ["bool", "bias"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_those_of_sdpa(head_dim: int, form: str) -> None:
    case = replace(BASE, form=form, seqlen_q=777, seqlen_k=777, over="hqk", pattern="images")
    found = {}
    for backend in ("auto", "sdpa"):
        given = [x.requires_grad_() for x in make_qkv(2, 777, 777, 4, 2, head_dim, dtype=torch.float16, device="cuda")]
        mask = make_mask(case, torch.float16, "cuda")
        if form == "bias":
            given.append(mask.requires_grad_())
        out = fa_serve.attention(*given[:3], mask=mask, backend=backend)
        out.backward(torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).half())
        found[backend] = [x.grad for x in given]
    for ours, theirs in zip(found["auto"], found["sdpa"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
