"""The sdpa backend on a CPU against the float64 oracle, by the 2x rule, over the whole matrix; and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from block_sparse_cases import BASE, SparseCase, check_sparse, make_lists
from block_sparse_cases import CASES as SPARSE
from cases import (
    DENSE,
    PAGED,
    VARLEN,
    Case,
    check,
    check_gradients_of_nothing,
    check_without_keys,
    check_without_queries,
    params,
)
from torch import Tensor

import fa_serve
from fa_serve.backends import sdpa
from fa_serve.backends.calls import AttentionOptions
from fa_serve.testing import cu_seqlens, eager_attention, make_paged, make_qkv


@pytest.mark.parametrize("case", params(DENSE))
def test_dense(case: Case) -> None:
    check(case, "sdpa", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("case", params(DENSE[::7]))
def test_dense_dtypes(case: Case, dtype: torch.dtype) -> None:
    check(case, "sdpa", dtype)


@pytest.mark.parametrize("case", params(VARLEN))
def test_varlen(case: Case) -> None:
    check(case, "sdpa", torch.float32, layout="varlen")


@pytest.mark.parametrize("case", params(PAGED))
def test_paged(case: Case) -> None:
    check(case, "sdpa", torch.float32, layout="paged")


@pytest.mark.parametrize("case", SPARSE, ids=str)
def test_block_sparse(case: SparseCase) -> None:
    check_sparse(case, "sdpa", torch.float32)


def test_gradients_of_a_block_mask_match_the_reference() -> None:
    q, k, v = make_qkv(1, 150, 210, 4, 2, 32, dtype=torch.float64)
    lists, _ = make_lists(BASE)
    grads = []
    for backend in ("auto", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = fa_serve.attention(*leaves, causal=True, block_mask=lists, backend=backend)
        out.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, exact in zip(*grads, strict=True):
        assert bool((exact != 0).any())
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


def test_many_queries_are_cut_in_chunks() -> None:
    """Longer than a chunk: the masks of later chunks start where the window does."""
    check(Case((1100,), (1300,), heads=2, kv_heads=1, causal=True, window=(300, -1)), "sdpa", torch.float32)
    check(Case((1100,), (1100,), heads=2, kv_heads=1, causal=True, softcap=20.0), "sdpa", torch.float32)


def test_without_keys_or_queries() -> None:
    check_without_keys("sdpa", torch.float32)
    check_without_queries("sdpa", torch.float32)


def test_a_sink_that_is_nan_shows_and_one_of_minus_infinity_takes_no_part() -> None:
    q, k, v = make_qkv(1, 3, 2, 4, 2, 16)  # the first of three queries sees no key
    sinks = torch.tensor([float("nan"), float("-inf"), float("inf"), 0.5])
    out, lse = fa_serve.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, backend="sdpa")
    assert out[:, 1:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    expected = fa_serve.attention(q, k, v, causal=True, return_lse=True, backend="reference")
    torch.testing.assert_close((out[:, :, 1], lse[:, 1]), (expected[0][:, :, 1], expected[1][:, 1]))
    assert (out[:, 0, 1] == 0).all()
    assert (out[:, :, 2] == 0).all()
    exact = fa_serve.attention(q, k, v, causal=True, sinks=sinks, backend="reference")
    torch.testing.assert_close(out[:, :, 3], exact[:, :, 3])


def test_gradients_of_alibi_slopes_match_the_reference() -> None:
    q, k, v = make_qkv(2, 20, 33, 4, 2, 16, dtype=torch.float64)
    grads = []
    for backend in ("sdpa", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, torch.linspace(0.1, 0.8, 8).view(2, 4))]
        out = fa_serve.attention(*leaves[:3], alibi_slopes=leaves[3], causal=True, attention_chunk=12, backend=backend)
        out.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)


def test_gradients_match_the_reference() -> None:
    q, k, v = make_qkv(2, 20, 33, 4, 2, 16, dtype=torch.float64)
    sinks = torch.randn(4, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 33) > 0.3
    mask[1] = False  # a whole sequence that sees nothing must not give NaN gradients
    grads = []
    for backend in ("sdpa", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out = fa_serve.attention(*leaves[:3], sinks=leaves[3], mask=mask, window_size=(9, 3), backend=backend)
        out.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_query_heads_that_share_keys_have_their_gradients_added_in_float32(seed: int) -> None:
    """PyTorch's fused function adds them in bfloat16, with up to 2.3 times the error of eager attention."""
    inputs = make_qkv(2, 113, 203, 6, 1, 64, seed=seed)
    weights = torch.randn(2, 113, 6, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()

    def gradients(attention: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        return torch.autograd.grad(attention(*leaves), leaves, weights.to(dtype))

    plain = partial(eager_attention, softmax_scale=0.125)
    exact = gradients(plain, torch.float64)
    eager = gradients(plain, torch.bfloat16)
    ours = gradients(partial(fa_serve.attention, backend="sdpa"), torch.bfloat16)
    for found, wanted, usual in zip(ours, exact, eager, strict=True):
        assert (found - wanted).abs().max() <= 1.3 * (usual - wanted).abs().max()


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_head_dim_that_is_not_contiguous(which: str, causal: bool) -> None:
    """As a convolution over the sequence leaves it."""
    tensors = dict(zip("qkv", make_qkv(2, 9, 9, 4, 2, 16), strict=True))
    expected = fa_serve.attention(*tensors.values(), causal=causal, backend="reference")
    tensors[which] = tensors[which].transpose(1, 3).contiguous().transpose(1, 3)
    assert tensors[which].stride(-1) != 1
    torch.testing.assert_close(fa_serve.attention(*tensors.values(), causal=causal, backend="sdpa"), expected)


def test_a_learned_mask_gets_its_gradient() -> None:
    q, k, v = make_qkv(1, 7, 9, 4, 2, 16)
    weights = torch.randn(1, 7, 4, 16, generator=torch.Generator().manual_seed(1))
    gradients = []
    for backend in ("sdpa", "reference"):
        bias = torch.linspace(-1, 1, 4 * 63).view(1, 4, 7, 9).requires_grad_()
        (fa_serve.attention(q, k, v, mask=bias, backend=backend) * weights).sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.01


def test_gradients_without_queries_or_keys_are_zeros() -> None:
    check_gradients_of_nothing("sdpa", torch.float32)


def test_packed_sequences_have_gradients() -> None:
    tensors = [x[0] for x in make_qkv(1, 12, 15, 4, 2, 16, dtype=torch.float64)]
    packing = {
        "cu_seqlens_q": cu_seqlens([5, 0, 6]),
        "cu_seqlens_k": cu_seqlens([5, 3, 7]),
        "max_seqlen_q": 6,
        "max_seqlen_k": 7,
    }
    grads = []
    for backend in ("sdpa", "reference"):
        leaves = [x.clone().requires_grad_() for x in tensors]
        fa_serve.attention_varlen(*leaves, **packing, causal=True, backend=backend).square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_lse_is_float32_whatever_the_default_dtype_is() -> None:
    """transformers changes the default dtype while it loads a model."""
    (q,), k, v = make_qkv(1, 3, 5, 4, 2, 16)
    k_cache, v_cache, table, used = make_paged(k, v, page_size=4)
    paged = {"block_table": table, "seqused_k": used, "cu_seqlens_q": cu_seqlens([3]), "max_seqlen_q": 3}
    torch.set_default_dtype(torch.bfloat16)
    try:
        out, lse = fa_serve.attention_paged(q, k_cache, v_cache, **paged, return_lse=True, backend="sdpa")
    finally:
        torch.set_default_dtype(torch.float32)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    exact = fa_serve.attention_paged(q, k_cache, v_cache, **paged, return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), exact)


@pytest.mark.parametrize("queries", [[1], [5], [2, 3]], ids=str)
def test_pages_that_follow_each_other_are_read_where_they_are(queries: list[int]) -> None:
    torch.manual_seed(0)
    keys, values = ([torch.randn(10 + 3 * n, 2, 16) for n in range(len(queries))] for _ in "kv")
    k_cache, v_cache, table, used = make_paged(keys, values, page_size=4)
    order = torch.cat([torch.tensor([0]), *(table[row, : -(-int(n) // 4)] for row, n in enumerate(used))])
    in_order = torch.full_like(table, 2**28)
    start = 1
    for row, length in enumerate(used.tolist()):
        count = -(-length // 4)
        in_order[row, :count] = torch.arange(start, start + count)
        start += count
    q = torch.randn(sum(queries), 4, 16)
    outs = []
    for caches, pages in (((k_cache, v_cache), table), ((k_cache[order], v_cache[order]), in_order)):
        outs.append(
            fa_serve.attention_paged(
                q,
                *caches,
                block_table=pages,
                seqused_k=used,
                cu_seqlens_q=cu_seqlens(queries),
                max_seqlen_q=max(queries),
                return_lse=True,
                backend="sdpa",
            )
        )
        view = sdpa._keys([(caches[0], None)], pages[0], int(used[0]), q.dtype)[0]
        assert (view.data_ptr() == caches[0][pages[0, 0]].data_ptr()) == (pages is in_order)
        assert torch.equal(view[0], keys[0])
    for shuffled, ordered in zip(*outs, strict=True):
        assert torch.equal(shuffled, ordered)


def test_a_row_of_the_lowest_number_is_the_mean_as_eager_has_it() -> None:
    """transformers hides keys by adding finfo.min: a row of nothing else is no row without keys."""
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    mask = torch.zeros(1, 1, 5, 5)
    mask[:, :, 2] = torch.finfo(torch.float32).min
    mean = v.mean(dim=1)
    for backend in ("reference", "sdpa"):
        for options in ({}, {"softcap": 5.0}, {"mask": mask.clone().requires_grad_()}):
            out = fa_serve.attention(q, k, v, **({"mask": mask} | options), backend=backend)
            torch.testing.assert_close(out[:, 2], mean)


def test_a_row_without_keys_is_nothing_whatever_the_sinks() -> None:
    q, k, v = (torch.randn(1, 1, 2, 8) for _ in range(3))
    for backend in ("reference", "sdpa"):
        hidden = {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool), "sinks": torch.full((2,), -torch.inf)}
        assert not fa_serve.attention(q, k, v, **hidden, backend=backend).any()
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        fa_serve.attention(*given, **hidden, backend=backend).sum().backward()
        assert backend == "reference" or all(x.grad.isfinite().all() for x in given)


@pytest.mark.parametrize("seqlen", [40, 600])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_repeat_are_of_products_of_matrices(seqlen: int, device: str, deterministic: bool) -> None:
    """The fused operators of other devices than a CPU add to gradients in any order. "meta" stands for such a device."""
    q = torch.empty(1, seqlen, 2, 16, device=device, requires_grad=True)
    options = AttentionOptions(0.25, (-1, 0), 0.0, seqlen, seqlen, False, deterministic=deterministic)
    rows = []
    with_scores = sdpa._with_scores

    def watch(part: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        rows.append(part.shape[2])
        return with_scores(part, *given)

    with mock.patch.object(sdpa, "_with_scores", watch):
        sdpa._attend(q, q, q, options, None)
    chunks = [min(sdpa.CHUNK, seqlen - start) for start in range(0, seqlen, sdpa.CHUNK)]
    assert rows == (chunks if deterministic and device == "meta" else [])
