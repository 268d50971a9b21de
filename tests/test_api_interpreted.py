"""The public functions over Triton's kernels: small tensors with gaps, windows beyond all keys, gradients of any input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fa_serve
from fa_serve.spec import UnsupportedError
from fa_serve.testing import cu_seqlens, make_paged, make_qkv

Q, K, V = make_qkv(2, 5, 7, 4, 2, 16)
K_CACHE, V_CACHE, TABLE, USED = make_paged(list(K), list(V), 4)
FLOAT8 = torch.float8_e4m3fn
SCALES = torch.tensor([0.5, 2.0])
DENSE = (fa_serve.attention, {"q": Q, "k": K, "v": V, "causal": True, "sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])})
VARLEN = (
    fa_serve.attention_varlen,
    {
        "q": Q.flatten(0, 1),
        "k": K.flatten(0, 1),
        "v": V.flatten(0, 1),
        "cu_seqlens_q": cu_seqlens([5, 5]),
        "cu_seqlens_k": cu_seqlens([7, 7]),
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    },
)
PAGED = (
    fa_serve.attention_paged,
    {
        "q": Q.flatten(0, 1),
        "k_cache": K_CACHE.to(FLOAT8),
        "v_cache": V_CACHE.to(FLOAT8),
        "block_table": TABLE,
        "seqused_k": USED,
        "cu_seqlens_q": cu_seqlens([5, 5]),
        "max_seqlen_q": 5,
        "k_descale": SCALES,
        "v_descale": SCALES,
    },
)


def with_gaps(x: Tensor) -> Tensor:
    """The same values, their last dimension in every second place."""
    wide = x.new_full((*x.shape, 2), 9)
    wide[..., 0] = x
    return wide[..., 0]


@pytest.mark.parametrize(
    ("call", "name"),
    [(DENSE, "sinks"), (VARLEN, "cu_seqlens_q"), (VARLEN, "cu_seqlens_k")]
    + [(PAGED, name) for name in ("block_table", "seqused_k", "cu_seqlens_q", "k_descale", "v_descale")],
)
def test_gaps_between_numbers_change_nothing(call: tuple[Callable[..., Any], dict[str, Any]], name: str) -> None:
    function, good = call
    expected = function(**good, backend="triton")
    assert torch.equal(function(**(good | {name: with_gaps(good[name])}), backend="triton"), expected)


def test_slots_with_gaps_are_written_where_they_say() -> None:
    slots = torch.tensor([3, -1, 8, 0, 5])
    plain, gaps = ([torch.zeros(3, 4, 2, 16) for _ in range(2)] for _ in range(2))
    fa_serve.store_kv(K[0, :5], V[0, :5], *plain, slots, backend="triton")
    fa_serve.store_kv(K[0, :5], V[0, :5], *gaps, with_gaps(slots), backend="triton")
    assert all(map(torch.equal, plain, gaps))
    assert plain[0].any()


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (2**40, 0)], ids=str)
def test_a_window_beyond_all_keys_is_none(window: tuple[int, int]) -> None:
    expected = fa_serve.attention(Q, K, V, window_size=(-1, 0 if window[1] == 0 else -1), backend="triton")
    actual = fa_serve.attention(Q, K, V, window_size=window, backend="triton")
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "mask"])
def test_gradients_are_computed_if_asked_for(name: str) -> None:
    given = {"q": Q, "k": K, "v": V, "sinks": torch.zeros(4), "mask": torch.zeros(2, 4, 5, 7)}
    given[name] = given[name].clone().requires_grad_()
    found = []
    for backend in ("auto", "triton", "sdpa"):
        out = fa_serve.attention(**given, backend=backend)
        found.append(torch.autograd.grad((out * out).sum(), given[name])[0])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shape", [(0, 1, 4, 16), (2, 0, 4, 16)], ids=["no-sequences", "no-queries"])
def test_few_queries_may_be_none(shape: tuple[int, ...]) -> None:
    k = torch.zeros(shape[0], 32, 2, 16)
    v = torch.zeros(shape[0], 32, 2, 8)
    out, lse = fa_serve.attention(torch.zeros(shape), k, v, return_lse=True, backend="triton")
    assert out.shape == (*shape[:3], 8)
    assert lse.shape == (shape[0], shape[2], shape[1])


def test_bfloat16_is_left_to_pytorch() -> None:
    """The interpreter would multiply its bits as integers."""
    q, k, v = (x.bfloat16() for x in (Q, K, V))
    expected = fa_serve.attention(q, k, v, causal=True, backend="sdpa")
    assert torch.equal(fa_serve.attention(q, k, v, causal=True), expected)
    with pytest.raises(
        UnsupportedError, match="computes only float16 and float32 in Triton's interpreter, which treats bfloat16"
    ):
        fa_serve.attention(q, k, v, causal=True, backend="triton")
    cache = torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16)
    fa_serve.store_kv(k[0], v[0], cache, torch.zeros_like(cache), torch.arange(7), backend="triton")  # copies alone
    assert torch.equal(cache.flatten(0, 1)[:7], k[0])


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_the_least_numbers_sees_no_key(dtype: torch.dtype) -> None:
    """In base 2 these numbers are -inf. Eager attention, and PyTorch's operators, take the mean of the values."""
    mask = torch.zeros(1, 1, 5, 7, dtype=dtype)
    mask[:, :, 0] = torch.finfo(dtype).min
    mask[:, :, 1, :3] = torch.finfo(dtype).min
    out, lse = fa_serve.attention(Q, K, V, mask=mask, return_lse=True, backend="triton")
    mean = fa_serve.attention(Q, K, V, mask=mask, backend="sdpa")
    assert (out[:, 0] == 0).all()
    assert (lse[:, :, 0] == float("-inf")).all()
    torch.testing.assert_close(mean[:, 0], V.mean(1).repeat_interleave(2, dim=1))
    torch.testing.assert_close(out[:, 1:], mean[:, 1:])
