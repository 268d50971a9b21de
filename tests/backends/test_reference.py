"""The oracle is right: PyTorch's operator in float64 gives the same results, and the definitions hold where it has none."""

from __future__ import annotations

import pytest
import torch
from block_sparse_cases import CASES, SparseCase, check_sparse
from torch.nn.functional import scaled_dot_product_attention

from fa_serve.backends.reference import attention_reference, visible_keys
from fa_serve.testing import make_qkv

SCALE = 0.3


def inputs(seqlen_q: int = 5, seqlen_k: int = 9, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    return make_qkv(2, seqlen_q, seqlen_k, heads, kv_heads, 8, 6, dtype=torch.float64)


def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """PyTorch's attention; q, k, v are (batch, seqlen, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (3, 1), (-1, 2), (0, 0)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 7), (5, 9), (6, 6)])
def test_windows(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    q, k, v = inputs(seqlen_q, seqlen_k)
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)[None, :]
    left = window[0] if window[0] >= 0 else seqlen_k
    right = window[1] if window[1] >= 0 else seqlen_k
    mask = (j >= i - left) & (j <= i + right)
    assert torch.equal(visible_keys(seqlen_q, seqlen_k, window, q.device), mask)
    out, _ = attention_reference(q, k, v, softmax_scale=SCALE, window_size=window)
    torch.testing.assert_close(out, operator(q, k, v, mask))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_block_sparse_as_a_backend(case: SparseCase) -> None:
    """The lists of each sequence are expanded to the mask that the cases expand block by block."""
    check_sparse(case, "reference", torch.float64)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(kind: str) -> None:
    q, k, v = inputs()
    draw = torch.randn(2, 4, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = draw > -0.5 if kind == "bool" else draw
    out, _ = attention_reference(q, k, v, softmax_scale=SCALE, mask=mask)
    torch.testing.assert_close(out, operator(q, k, v, mask))


def test_softcap_and_sinks_follow_their_equations() -> None:
    """One query of one head, written out."""
    q, k, v = (x[0, :, 0] for x in inputs(1, 9, 1, 1))
    sink = torch.tensor([0.7], dtype=torch.float64)
    scores = 2.0 * torch.tanh(SCALE * (k @ q[0]) / 2.0)
    total = scores.exp().sum() + sink.exp()
    out, lse = attention_reference(
        q[None, :, None], k[None, :, None], v[None, :, None], softmax_scale=SCALE, softcap=2.0, sinks=sink
    )
    torch.testing.assert_close(lse.flatten(), total.log())
    torch.testing.assert_close(out.flatten(), (scores.exp() / total) @ v)


def test_a_row_that_sees_no_key_is_zero_and_its_lse_is_minus_infinity() -> None:
    q, k, v = inputs(4, 2)
    out, lse = attention_reference(q, k, v, softmax_scale=SCALE, window_size=(-1, 0))
    assert (out[:, :2] == 0).all()
    assert (lse[:, :, :2] == float("-inf")).all()
    assert lse[:, :, 2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_a_row_that_a_mask_hides_has_gradients_of_zero(dtype: torch.dtype) -> None:
    tensors = [x.requires_grad_() for x in inputs(3, 4)]
    seen = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    seen[:, :, 1] = False
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf")).requires_grad_()
    bias = seen if dtype == torch.bool else added
    out, lse = attention_reference(*tensors, softmax_scale=SCALE, mask=bias)
    assert (lse[:, :, 1] == float("-inf")).all()
    out.square().sum().backward()
    others = [x.detach()[:, [0, 2]].requires_grad_() if n == 0 else x.detach().requires_grad_() for n, x in enumerate(tensors)]
    attention_reference(*others, softmax_scale=SCALE)[0].square().sum().backward()
    q, k, v = (x.grad for x in tensors)
    assert q is not None
    assert (q[:, 1] == 0).all()
    torch.testing.assert_close((q[:, [0, 2]], k, v), tuple(x.grad for x in others))
    if dtype != torch.bool:
        assert added.grad is not None
        assert (added.grad[:, :, 1] == 0).all()
        assert added.grad.isfinite().all()


def test_it_computes_in_float32_or_wider() -> None:
    q, k, v = inputs()
    assert attention_reference(q, k, v, softmax_scale=SCALE)[0].dtype == torch.float64
    halves = (x.bfloat16() for x in (q, k, v))
    assert attention_reference(*halves, softmax_scale=SCALE)[0].dtype == torch.float32


def test_chunks_are_counted_from_the_first_key() -> None:
    """Three queries behind four keys, in chunks of three: positions 4, 5 and 6, of which 6 begins a chunk."""
    keep = visible_keys(3, 7, (-1, 0), torch.device("cpu"), attention_chunk=3)
    assert [row.nonzero().flatten().tolist() for row in keep] == [[3, 4], [3, 4, 5], [6]]


def test_alibi_falls_with_the_distance() -> None:
    """With keys of zeros only the bias is left, and its softmax can be written down."""
    q, k, v = inputs(2, 3)
    slopes = torch.tensor([0.5, 1.0, 2.0, -1.0], dtype=torch.float64)[: q.shape[2]]
    out, lse = attention_reference(q, k * 0, v, softmax_scale=SCALE, alibi_slopes=slopes)
    distance = torch.tensor([[1, 0, 1], [2, 1, 0]], dtype=torch.float64)
    bias = -slopes[:, None, None] * distance
    torch.testing.assert_close(lse, bias.logsumexp(-1).expand_as(lse))
    values = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2).transpose(1, 2)
    torch.testing.assert_close(out.transpose(1, 2), bias.softmax(-1) @ values)
