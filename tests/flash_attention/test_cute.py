"""FlashAttention-4's functions: dense, packed, used rows, pages, gradients and refusals."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_serve import FaServeError, ParameterError
from fa_serve.backends.reference import attention_reference
from fa_serve.flash_attn import cute
from fa_serve.flash_attn import interface as fa3
from fa_serve.testing import cu_seqlens, make_qkv

LENGTHS = [4, 6, 3]
USED_K = [3, 6, 1]
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse in float64 of one dense batch."""
    out, lse = attention_reference(q.double(), k.double(), v.double(), softmax_scale=q.shape[-1] ** -0.5, **options)
    return out.float(), lse.float()


@pytest.mark.parametrize(
    ("options", "window"),
    [
        pytest.param({}, (-1, -1), id="full"),
        pytest.param({"causal": True}, (-1, 0), id="causal"),
        pytest.param({"window_size": (None, None)}, (-1, -1), id="none"),
        pytest.param({"window_size": (-1, -1)}, (-1, -1), id="two-negative"),
        pytest.param({"window_size": (2, None)}, (2, -1), id="left"),
        pytest.param({"window_size": (None, 1)}, (-1, 1), id="right"),
        pytest.param({"window_size": (2, 5), "causal": True}, (2, 0), id="left-causal"),
        pytest.param({"window_size": (2, None), "causal": True}, (2, 0), id="left-none-causal"),
    ],
)
def test_dense_windows(options: dict[str, Any], window: tuple[int, int]) -> None:
    q, k, v = make_qkv(2, 5, 7, 4, 2, 16, 8)
    sinks = torch.linspace(-1, 1, 4)
    wanted, wanted_lse = exact(q, k, v, window_size=window, sinks=sinks.double(), softcap=5.0)
    hints = {"num_splits": 3, "pack_gqa": True, "deterministic": True}
    out, lse = cute.flash_attn_func(q, k, v, learnable_sink=sinks, softcap=5.0, return_lse=True, **options, **hints)
    torch.testing.assert_close(out, wanted, **CLOSE)
    torch.testing.assert_close(lse, wanted_lse, **CLOSE)
    out, nothing = cute.flash_attn_func(q, k, v, learnable_sink=sinks, softcap=5.0, **options)
    torch.testing.assert_close(out, wanted, **CLOSE)
    assert nothing is None


@pytest.mark.parametrize("window", [(-1, None), (None, -2), (3, -1), (-2, 4)])
def test_a_window_without_the_position_of_its_query_is_refused(window: tuple[int | None, int | None]) -> None:
    q, k, v = make_qkv(1, 3, 3, 2, 2, 8)
    with pytest.raises(ParameterError, match="numbers >= 0 or None") as caught:
        cute.flash_attn_func(q, k, v, window_size=window)
    assert caught.value.field == "window_size"


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("max_seqlen", [None, 6])
def test_packed(used: bool, max_seqlen: int | None) -> None:
    """Without upper bounds, all rows are one. Keys that are not used hold NaN."""
    q = make_qkv(1, sum(LENGTHS), 1, 4, 2, 16)[0][0]
    k, v = (x[0] for x in make_qkv(1, 1, sum(LENGTHS), 4, 2, 16, seed=1)[1:])
    starts = cu_seqlens(LENGTHS)
    lengths = USED_K if used else LENGTHS
    poisoned = k.clone()
    for rows, length in zip(poisoned.split(LENGTHS), lengths, strict=True):
        rows[length:] = float("nan")
    words: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True, "return_lse": True}
    words |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    seqused = torch.tensor(lengths, dtype=torch.int32) if used else None
    out, lse = cute.flash_attn_varlen_func(q, poisoned, v, seqused_k=seqused, **words)
    begin = 0
    for length, keys in zip(LENGTHS, lengths, strict=True):
        rows = slice(begin, begin + length)
        part = slice(begin, begin + keys)
        wanted, wanted_lse = exact(q[None, rows], k[None, part], v[None, part], window_size=(-1, 0))
        torch.testing.assert_close(out[rows], wanted[0], **CLOSE)
        assert lse is not None
        torch.testing.assert_close(lse[:, rows], wanted_lse[0], **CLOSE)
        begin += length


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_keys_in_a_cache(paged: bool, packed: bool) -> None:
    """Dense rows or pages, of which each sequence uses its first; some queries are not used."""
    q, k, v = make_qkv(3, 4, 8, 4, 2, 16)
    lengths = torch.tensor([8, 5, 4], dtype=torch.int32)
    used_q = torch.tensor([4, 2, 4], dtype=torch.int32)
    words: dict[str, Any] = {"seqused_q": used_q, "seqused_k": lengths, "causal": True, "return_lse": True}
    if paged:
        order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
        pages = torch.empty(6, dtype=torch.int64)
        pages[order] = torch.arange(6)
        words["page_table"] = pages.view(3, 2).int()
        given = [x.view(6, 4, 2, 16)[order] for x in (k, v)]
    else:
        given = [k, v]
    if packed:
        words["cu_seqlens_q"] = cu_seqlens([4] * 3)
    out, lse = cute.flash_attn_varlen_func(q.flatten(0, 1) if packed else q, *given, **words)
    assert lse is not None
    if packed:
        out = out.view(3, 4, 4, 16)
        lse = lse.view(4, 3, 4).transpose(0, 1)
    for i, (keys, used) in enumerate(zip(lengths.tolist(), used_q.tolist(), strict=True)):
        wanted, wanted_lse = exact(q[i : i + 1, :used], k[i : i + 1, :keys], v[i : i + 1, :keys], window_size=(-1, 0))
        torch.testing.assert_close(out[i, :used], wanted[0], **CLOSE)
        torch.testing.assert_close(lse[i, :, :used], wanted_lse[0], **CLOSE)
        assert bool((out[i, used:] == 0).all())
        assert bool((lse[i, :, used:] == -torch.inf).all())


def test_gradients_of_used_keys() -> None:
    q, k, v = (x.double().requires_grad_() for x in make_qkv(2, 4, 6, 4, 2, 16))
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    out, _ = cute.flash_attn_varlen_func(q, k, v, seqused_k=lengths)
    found = torch.autograd.grad(out.square().sum(), [q, k, v])
    parts = [
        attention_reference(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], softmax_scale=0.25)[0]
        for i, n in ((0, 6), (1, 3))
    ]
    wanted = torch.autograd.grad(torch.cat(parts).square().sum(), [q, k, v])
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_merging_is_that_of_flash_attention_3() -> None:
    parts = torch.randn(3, 2, 5, 4, 16, generator=torch.Generator().manual_seed(0))
    lses = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    out, lse = fa3.flash_attn_combine(parts, lses)
    found, found_lse = cute.flash_attn_combine(parts, lses)
    assert torch.equal(found, out)
    assert found_lse is not None
    assert torch.equal(found_lse, lse)
    assert cute.flash_attn_combine(parts, lses, return_lse=False)[1] is None


def test_merging_leaves_rows_out_that_are_not_used() -> None:
    parts = torch.randn(3, 2, 5, 4, 16, generator=torch.Generator().manual_seed(0))
    lses = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(1))
    whole, whole_lse = cute.flash_attn_combine(parts, lses)
    assert whole_lse is not None
    parts[:, 0, 3:] = torch.nan  # what memory held
    out = torch.ones(2, 5, 4, 16)
    found, lse = cute.flash_attn_combine(parts, lses, out=out, seqused=torch.tensor([3, 5], dtype=torch.int32))
    assert found is out
    assert lse is not None
    assert torch.equal(out[0, :3], whole[0, :3])
    assert torch.equal(out[1], whole[1])
    assert bool((out[0, 3:] == 0).all())
    assert torch.equal(lse[1], whole_lse[1])
    assert bool((lse[0, 3:] == -torch.inf).all())

    starts = torch.tensor([0, 5, 9], dtype=torch.int32)
    packed = (parts.flatten(1, 2), lses.flatten(1, 2))
    for seqused, rows in ((None, [5, 6, 7, 8]), (torch.tensor([2, 3], dtype=torch.int32), [0, 1, 5, 6, 7])):
        found, lse = cute.flash_attn_combine(*packed, cu_seqlens=starts, seqused=seqused)
        assert lse is not None
        others = [row for row in range(10) if row not in rows and not (seqused is None and row < 5)]
        assert torch.equal(found[rows], whole.flatten(0, 1)[rows])
        assert torch.equal(lse[rows], whole_lse.flatten(0, 1)[rows])
        assert bool((found[others] == 0).all())
        assert bool((lse[others] == -torch.inf).all())


def test_an_order_of_merging_is_refused() -> None:
    parts = torch.zeros(3, 2, 5, 4, 16)
    with pytest.raises(ParameterError, match="virtual_batch_idx must be None") as refused:
        cute.flash_attn_combine(parts, parts[..., 0], virtual_batch_idx=torch.tensor([1, 0], dtype=torch.int32))
    assert refused.value.code == "unsupported"


FUNCTIONS = [cute.flash_attn_func, cute.flash_attn_varlen_func]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qv", torch.zeros(1)),
        ("gather_kv_indices", torch.zeros(1)),
        ("score_mod", max),
        ("score_mod_bwd", max),
        ("mask_mod", max),
        ("aux_tensors", [torch.zeros(1)]),
        ("aux_scalars", (1,)),
        ("block_sparse_tensors", object()),
        ("block_sparse_tensors_bwd", object()),
        ("gather_bwd_recompute_p", True),
        ("gather_bwd_token_chunk", 64),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    q, k, v = make_qkv(1, 3, 3, 2, 2, 8)
    takers = [function for function in FUNCTIONS if name in inspect.signature(function).parameters]
    assert len(takers) == (1 if name == "block_sparse_tensors_bwd" else 2)
    for function in takers:
        with pytest.raises(FaServeError, match=f"^{name} must ") as caught:
            function(q, k, v, **{name: value})
        assert caught.value.field == name  # type: ignore[attr-defined]


def test_pages_and_packed_keys_exclude_each_other() -> None:
    q, k, v = make_qkv(1, 3, 3, 2, 2, 8)
    with pytest.raises(ParameterError, match="cu_seqlens_k must be None with page_table"):
        cute.flash_attn_varlen_func(q, k, v, cu_seqlens_k=cu_seqlens([3]), page_table=torch.zeros(1, 1, dtype=torch.int32))
