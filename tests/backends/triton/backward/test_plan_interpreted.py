"""The backward kernels in Triton's interpreter, through autograd, against float64 autograd of the oracle.

A part of the forward pass's cases, each option at least once: the GPU suite has all of them. The rule for gradients in float32
has more roundings, see `fa_serve.testing.assert_matches_reference`.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import VARLEN, Case, check_gradients, check_gradients_of_nothing, params
from sampled_cases import each_nth

import fa_serve
from fa_serve.backends.calls import AttentionOptions, AttentionTensors, BackwardTensors, Gradients
from fa_serve.backends.triton.backward import plan as backward
from fa_serve.backends.triton.backward.plan import plan_backward
from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.backends.triton.tiles import BackwardTiles, TileConfig
from fa_serve.testing import make_qkv

BASE = Case((70,), (90,), heads=4, kv_heads=2, head_dim=32)
DENSE = [
    Case((1,), (2,), heads=2, kv_heads=1, causal=True),
    Case((63,), (63,), heads=2, kv_heads=2),
    replace(BASE, causal=True, kv_heads=1),
    replace(BASE, lengths_q=(1,), lengths_k=(130,)),
    replace(BASE, head_dim=80, head_dim_v=24, causal=True),
    replace(BASE, lengths_q=(40,), lengths_k=(50,), head_dim=192, head_dim_v=128, causal=True),
    replace(BASE, lengths_q=(30,), lengths_k=(40,), head_dim=256, heads=2),
    replace(BASE, window=(5, -1)),
    replace(BASE, window=(40, 9), softcap=20.0, sinks=True),
    replace(BASE, lengths_q=(90,), lengths_k=(50,), causal=True, sinks=True, window=(9, -1)),  # rows that see no key
    replace(BASE, lengths_q=(40, 40), lengths_k=(60, 60), mask="keys", causal=True),
    replace(BASE, lengths_q=(40, 40), lengths_k=(60, 60), mask="bool"),
    replace(BASE, lengths_q=(40, 40), lengths_k=(60, 60), mask="float", window=(20, 7), softcap=5.0, sinks=True),
]


@pytest.mark.parametrize("case", params(each_nth(2, DENSE)))
def test_dense(case: Case) -> None:
    check_gradients(case, "triton", torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case", params([VARLEN[1], VARLEN[3]]))
def test_varlen(case: Case) -> None:
    """Rows of no sequence hold NaN, and have no gradient."""
    check_gradients(case, "triton", torch.float32, layout="varlen")


def test_float16() -> None:
    check_gradients(replace(BASE, causal=True), "triton", torch.float16)


@pytest.mark.parametrize("layout", ["dense", "varlen"])
def test_a_loss_may_depend_on_lse(layout: str) -> None:
    check_gradients(replace(BASE, sinks=True, softcap=20.0), "triton", torch.float32, layout=layout, with_lse=True)


def _computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, tiles: BackwardTiles | None) -> Gradients:
    options = AttentionOptions(0.2, (37, 0), 0.0, q.shape[1], k.shape[1], True)
    given = AttentionTensors(q, k, v)
    out, lse = plan_forward(given, options)(given)
    tensors = BackwardTensors(q, k, v, None, None, None, None, out, lse, dout)
    gradients: Gradients = plan_backward(tensors, options, tiles)(tensors)
    return gradients


@pytest.mark.parametrize(
    ("keys", "queries"),
    [((16, 64, 4, 1), (64, 16, 4, 1)), ((64, 16, 4, 1, True), (16, 64, 4, 1)), ((128, 32, 4, 1, True), (32, 128, 4, 1, True))],
    ids=str,
)
def test_any_tile_gives_the_same(keys: tuple[int, ...], queries: tuple[int, ...]) -> None:
    """The band's edges fall elsewhere in each tiling. Tensor descriptors (the fifth number) read the same numbers."""
    q, k, v = make_qkv(1, 75, 150, 2, 1, 32)
    dout = torch.randn_like(q)
    expected = _computed(q, k, v, dout, None)
    actual = _computed(q, k, v, dout, BackwardTiles(TileConfig(*keys), TileConfig(*queries)))
    for name in ("q", "k", "v"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_any_strides_and_addresses() -> None:
    """Head-first storage, an expanded gradient, and an address that tensor descriptors cannot have."""
    q, k, v = make_qkv(1, 40, 50, 4, 2, 32)
    dout = torch.ones_like(q)
    tiles = BackwardTiles(TileConfig(32, 32, 4, 1, tma=True), TileConfig(32, 32, 4, 1, tma=True))
    expected = _computed(q, k, v, dout, tiles)
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    unaligned = torch.empty(q.numel() + 1)[1:].view_as(q).copy_(q)
    for given in (head_first, (unaligned, k, v)):
        for gradient in (dout, torch.ones(1, 1, 1, 1).expand_as(q)):
            actual = _computed(*given, gradient, tiles)
            assert all(torch.equal(getattr(actual, name), getattr(expected, name)) for name in "qkv")


def test_a_row_that_a_mask_hides_with_large_numbers_gets_no_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(1, 20, 20, 2, 2, 32))
    mask = torch.zeros(1, 1, 20, 20)
    mask[:, :, 3] = -1e32
    fa_serve.attention(q, k, v, mask=mask, backend="triton").sum().backward()
    assert q.grad is not None
    assert not q.grad[:, 3].any()
    assert q.grad[:, 4].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradient_of_a_mask_that_is_broadcast(deterministic: bool) -> None:
    """T5's position bias is shared by the sequences of a batch; a mask of keys by heads and queries as well."""
    given = make_qkv(2, 40, 50, 4, 2, 32)
    for shape in ((1, 4, 40, 50), (2, 1, 1, 50)):
        mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        found = []
        torch.use_deterministic_algorithms(deterministic)
        for backend in ("triton", "reference"):
            leaf = mask.clone().requires_grad_()
            out = fa_serve.attention(*given, mask=leaf, backend=backend)
            found.append(torch.autograd.grad((out * out).sum(), leaf)[0])
        torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)


def test_no_queries_and_no_keys() -> None:
    """Nothing is launched, because tensors without rows have no descriptors."""
    with mock.patch.object(backward, "Launch", side_effect=AssertionError):
        check_gradients_of_nothing("triton", torch.float32)
