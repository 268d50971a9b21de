"""Words with tags, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from fa_serve.ops.decode_step.words import poll_eights, poll_three, store_words


class _Portable:
    """The part of a layout that words read."""

    bulk = False


@triton.jit
def _store_and_poll(
    words_ptr, x_ptr, out_ptr, squares_ptr, three_ptr, tag, count, WIDTH: tl.constexpr, var: tl.constexpr
) -> None:  # type: ignore[no-untyped-def]
    k = tl.arange(0, WIDTH)
    store_words(words_ptr + k, tl.load(x_ptr + k), tag, k < count, x_ptr.dtype.element_ty)
    places = tl.arange(0, WIDTH // 8)[None, :] * 8
    x, squares = poll_eights(words_ptr, places, tag, places < count, var)
    tl.store(out_ptr + k[None, :], x)
    tl.store(squares_ptr + tl.arange(0, WIDTH // 8)[None, :], squares)
    keep = k < count
    a, b, c = poll_three(words_ptr + k, words_ptr + k // 2, words_ptr + k // 4, tag, keep, var)
    tl.store(three_ptr + k, a + 2 * b + 4 * c)


@pytest.mark.parametrize(("dtype", "word"), [(torch.float32, torch.int64), (torch.bfloat16, torch.int32)])
@pytest.mark.parametrize("tag", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_numbers_come_back_with_their_tag(dtype: torch.dtype, word: torch.dtype, tag: int) -> None:
    """All numbers of the dtype do, with any tag, and none is read behind the count."""
    x = torch.randn(32, generator=torch.Generator().manual_seed(tag)).to(dtype)
    x[:6] = torch.tensor([0.0, -0.0, 2.0, 3.0, 1e-30, -1e18])
    words = torch.full((32,), -1 if tag != 0xFFFF else 0, dtype=word)
    out = torch.empty(32)
    squares = torch.empty(4)
    three = torch.empty(32)
    call: Any = _store_and_poll[(1,)]
    call(words, x, out, squares, three, tag, 24, WIDTH=32, var=_Portable())
    expected = x.float()
    expected[24:] = 0
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))
    torch.testing.assert_close(squares, expected.square().view(4, 8).sum(1))
    index = torch.arange(24)
    torch.testing.assert_close(three[:24], expected[index] + 2 * expected[index // 2] + 4 * expected[index // 4])
    assert not three[24:].any()
    shift = 0 if word == torch.int32 else 32
    assert bool((words[:24].long() >> shift & 0xFFFF == tag).all())
    assert bool((words[24:] == words[-1]).all())


def test_words_of_infinities_come_back() -> None:
    words = torch.zeros(32, dtype=torch.int64)
    x = torch.full((32,), float("-inf"))
    out = torch.empty(32)
    call: Any = _store_and_poll[(1,)]
    call(words, x, out, torch.empty(4), torch.empty(32), 7, 32, WIDTH=32, var=_Portable())
    assert torch.equal(out, x)
