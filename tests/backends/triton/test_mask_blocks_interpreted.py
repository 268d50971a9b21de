"""The scan of masks in Triton's interpreter: its lists and bits, calls over them against the float64 oracle, and gradients."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from mask_cases import BASE, CASES, MaskCase, check_masked, make_mask

import fa_serve
from fa_serve.backends.triton import mask_blocks
from fa_serve.backends.triton.mask_blocks import MaskScan
from fa_serve.testing import make_qkv

SMALL = replace(BASE, head_dim=16, heads=2, kv_heads=1)


@pytest.mark.parametrize("case", [CASES[i] for i in (1, 4, 8, 11)], ids=str)
def test_cases(case: MaskCase) -> None:
    check_masked(replace(case, heads=2, kv_heads=1, head_dim=16), "triton", torch.float32)


@pytest.mark.parametrize(
    "case",
    [BASE, replace(BASE, pattern="unseen rows", seqlen_k=400), replace(BASE, over="k"), replace(BASE, seqlen_k=391)],
    ids=str,
)
def test_lists_and_bits_are_those_of_the_mask(case: MaskCase) -> None:
    """Expanded to elements, lists with the bits moved to the places in the lists are the mask, and kinds are as they should."""
    mask = make_mask(case, torch.float32)
    lists = MaskScan(mask, case.seqlen_q, case.seqlen_k)(mask).lists
    assert lists.partial_bits is not None
    blocks = lists.kv_indices.shape[-1]
    listed = torch.arange(blocks) < lists.kv_num_blocks[..., None]
    places = torch.where(listed, lists.kv_indices, 0).long()
    moved = lists.partial_bits.gather(3, places[..., None, None].expand(lists.partial_bits.shape))
    found = lists._replace(partial_bits=moved).expanded(case.seqlen_q, case.seqlen_k, case.heads)
    expected = mask.expand(-1, -1, case.seqlen_q, case.seqlen_k)
    assert torch.equal(found, expected)
    padded = torch.nn.functional.pad(expected.float(), (0, -case.seqlen_k % 128, 0, -case.seqlen_q % 128), value=float("nan"))
    tiles = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).transpose(3, 4).flatten(4)
    mean = tiles.nanmean(-1)
    assert torch.equal(lists.kv_num_blocks, ((mean > 0) & (mean < 1)).sum(-1, dtype=torch.int32))
    assert torch.equal(lists.full_kv_num_blocks, (mean == 1).sum(-1, dtype=torch.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["hidden", "bias", "least"])
def test_kinds_of_float_blocks(form: str) -> None:
    """Blocks of numbers that hide everything are not listed, and those of zeros are full."""
    mask = make_mask(replace(BASE, pattern="documents", form=form, seqlen_q=256, seqlen_k=384), torch.bfloat16)
    mask[..., :128, 256:] = float("-inf") if form != "least" else torch.finfo(torch.bfloat16).min
    lists = MaskScan(mask, 256, 384)(mask).lists
    assert lists.partial_bits is None
    assert lists.full_kv_num_blocks is not None
    assert lists.full_kv_num_blocks[0, 0].tolist() == [1, 0]
    assert lists.kv_num_blocks[0, 0].tolist() == [1, 3]


def test_more_blocks_than_are_listed_at_a_time() -> None:
    mask = torch.ones(1, 1, 256, 640, dtype=torch.bool)
    mask[..., :128, 128:256] = False
    mask[..., 130, [5, 300, 600]] = False
    with mock.patch.object(mask_blocks, "_LISTED_AT_A_TIME", 2):
        lists = MaskScan(mask, 256, 640)(mask).lists
    assert lists.kv_num_blocks[0, 0].tolist() == [0, 3]
    assert lists.kv_indices[0, 0, 1, :3].tolist() == [0, 2, 4]
    assert lists.full_kv_indices is not None
    assert lists.full_kv_indices[0, 0, 0, :4].tolist() == [0, 2, 3, 4]
    assert lists.full_kv_indices[0, 0, 1, :2].tolist() == [1, 3]


def test_blocks_that_are_hidden_are_not_read() -> None:
    """NaN in every key block that the mask hides leaves no trace."""
    q, k, v = make_qkv(1, 256, 384, 2, 1, 16)
    mask = torch.ones(1, 1, 256, 384, dtype=torch.bool)
    mask[..., 128:256] = False
    expected = fa_serve.attention(q, k, v, mask=mask, backend="triton")
    for x in (k, v):
        x[:, 128:256] = float("nan")
    assert torch.equal(fa_serve.attention(q, k, v, mask=mask, backend="triton"), expected)
    assert bool(expected.isfinite().all())


def test_a_mask_is_scanned_once_until_it_changes() -> None:
    q, k, v = make_qkv(1, 256, 256, 2, 1, 16)
    mask = make_mask(replace(SMALL, seqlen_q=256, seqlen_k=256), torch.float32)
    scans = []
    run = MaskScan.__call__
    with mock.patch.object(MaskScan, "__call__", lambda self, x: scans.append(x) or run(self, x)):
        first = fa_serve.attention(q, k, v, mask=mask, backend="triton")
        assert torch.equal(fa_serve.attention(q, k, v, mask=mask, backend="triton"), first)
        assert len(scans) == 1
        mask[..., :128] = False
        second = fa_serve.attention(q, k, v, mask=mask, backend="triton")
        assert len(scans) == 2
    assert torch.equal(second, fa_serve.attention(q, k, v, mask=mask.clone(), backend="triton"))
    assert not torch.equal(second, first)


def test_an_unaligned_float_mask() -> None:
    case = replace(SMALL, form="bias")
    q, k, v = make_qkv(1, 300, 300, 2, 1, 16)
    mask = make_mask(case, torch.float32)
    wide = torch.zeros(1, 1, 300, 303)
    wide[..., 1:301] = mask
    shifted = wide[..., 1:301].expand(1, 2, 300, 300)
    assert shifted.data_ptr() % 16
    expected = fa_serve.attention(q, k, v, mask=mask, backend="triton")
    torch.testing.assert_close(fa_serve.attention(q, k, v, mask=shifted, backend="triton"), expected, rtol=1e-5, atol=1e-6)


GRADIENTS = {
    "bool": replace(SMALL, seqlen_q=256, seqlen_k=256),
    "bias": replace(SMALL, seqlen_q=256, seqlen_k=256, form="bias"),
    # blocks that are skipped on both sides, for each head, at lengths that leave a tail
    "documents": replace(SMALL, seqlen_q=400, seqlen_k=390, pattern="documents", over="hqk"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_sdpa(name: str) -> None:
    """Also the gradient of a float mask, which T5 trains."""
    case = GRADIENTS[name]
    results = {}
    for backend in ("triton", "sdpa"):
        given = [x.requires_grad_() for x in make_qkv(1, case.seqlen_q, case.seqlen_k, 2, 1, 16)]
        mask = make_mask(case, torch.float32)
        if case.form == "bias":
            given.append(mask.requires_grad_())
        out = fa_serve.attention(*given[:3], mask=mask, backend=backend)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
        results[backend] = [x.grad for x in given]
    for ours, theirs in zip(results["triton"], results["sdpa"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_hidden_blocks_are_not_computed() -> None:
    """NaN in the keys and queries of blocks outside of the span leaves no trace in the gradients of others."""
    mask = torch.zeros(1, 1, 256, 384, dtype=torch.bool)
    mask[..., :128, :128] = True
    mask[..., 128:, 256:] = True
    results = []
    for spoiled in (False, True):
        q, k, v = make_qkv(1, 256, 384, 2, 1, 16)
        if spoiled:
            k[:, 128:256] = float("nan")
            v[:, 128:256] = float("nan")
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = fa_serve.attention(*leaves, mask=mask, backend="triton")
        results.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for plain, other in zip(*results, strict=True):
        assert bool(other.isfinite().all())
        assert torch.equal(plain, other)
