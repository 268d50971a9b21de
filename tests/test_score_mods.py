"""A score_mod of FlexAttention computes what FlexAttention computes, by the options of a call, or is refused."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fa_serve
from fa_serve import BlockLists, ParameterError, UnsupportedError, api, kept_values, score_mods
from fa_serve.block_lists import CallSizes, as_block_lists
from fa_serve.score_mods import translate_score_mod
from fa_serve.testing import make_qkv

HEADS = 4
LENGTH = 140
SIZES = CallSizes(2, HEADS, LENGTH, LENGTH, torch.device("cpu"))
SLOPES = torch.tensor([2.0 ** -(i + 1) for i in range(HEADS)])
BATCH_SLOPES = SLOPES * torch.tensor([[1.0], [3.0]])
TABLE = torch.randn(HEADS, 32, generator=torch.Generator().manual_seed(0))


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + SLOPES[h] * (j - i)


def alibi_of_both_sides(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - (i - j).abs() * BATCH_SLOPES[b, h]


def softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20 * torch.tanh(s / 20)


def scaled_softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, 30.0 * torch.tanh(s * 2.0 / torch.tensor(30.0)), -float("inf"))


def t5(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + TABLE[h][(i - j).abs().clamp(max=31)]


def window(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where((i - j).abs() > 20 * (h + 1), torch.full_like(s, -math.inf), s)


def of_even_rows(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i % 2 == 0, s.float().neg() * -1, (0.01 * j + s) - 1)


def negated_softcap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return -20 * torch.tanh(s / -20)


def filled(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (s * 0.5).masked_fill(j > i + 3, float("-inf"))


class Expected(NamedTuple):
    """factor and softcap, and the shapes of slopes and mask in a call without a mask of blocks, and in a causal one."""

    factor: float = 1.0
    softcap: float = 0.0
    slopes: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    slopes_in_causal: tuple[int, ...] | None = None
    mask_in_causal: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32


ONE = (1, 1, LENGTH, LENGTH)
EACH = (1, HEADS, LENGTH, LENGTH)
SCORE_MODS: dict[Callable[..., Tensor], Expected] = {
    alibi: Expected(mask=EACH, slopes_in_causal=(HEADS,)),
    alibi_of_both_sides: Expected(slopes=(2, HEADS), slopes_in_causal=(2, HEADS)),
    softcap: Expected(softcap=20.0),
    negated_softcap: Expected(softcap=20.0),
    scaled_softcap: Expected(factor=2.0, softcap=30.0, mask=ONE, dtype=torch.bool),
    t5: Expected(mask=EACH, mask_in_causal=EACH),
    window: Expected(mask=EACH, mask_in_causal=EACH, dtype=torch.bool),
    of_even_rows: Expected(mask=ONE, mask_in_causal=ONE),
    filled: Expected(factor=0.5, mask=ONE, dtype=torch.bool),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("score_mod", SCORE_MODS)
def test_the_result_is_that_of_flex_attention(score_mod: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask of blocks, with a BlockMask, and with the function of that mask. A bias is evaluated in two parts."""
    monkeypatch.setattr(score_mods, "_EVALUATED_ELEMENTS", 1)
    q, k, v = make_qkv(2, LENGTH, LENGTH, HEADS, 2, 32)
    blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    for theirs, ours in ((None, [None]), (blocks, [blocks, causal])):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        expected = flex_attention(*heads_first, score_mod=score_mod, block_mask=theirs, enable_gqa=True).transpose(1, 2)
        for given in ours:
            out = fa_serve.attention(q, k, v, score_mod=score_mod, block_mask=given)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score_mod", SCORE_MODS)
def test_the_options_that_a_function_comes_to(score_mod: Callable[..., Tensor]) -> None:
    expected = SCORE_MODS[score_mod]
    alone = translate_score_mod(score_mod, SIZES, causal=False)
    assert alone[:2] == expected[:2]
    assert (alone.alibi_slopes is None, alone.mask is None) == (expected.slopes is None, expected.mask is None)
    for lists, is_causal in ((as_block_lists(causal, SIZES), False), (None, True)):
        found = translate_score_mod(score_mod, SIZES, causal=is_causal, lists=lists)
        shapes = [None if x is None else tuple(x.shape) for x in found[2:]]
        assert shapes == [expected.slopes_in_causal, expected.mask_in_causal]
        assert found.mask is None or found.mask.dtype == (expected.dtype if lists is None else found.mask.dtype)
    if expected.mask is not None:
        assert alone.mask is not None
        assert (tuple(alone.mask.shape), alone.mask.dtype) == (expected.mask, expected.dtype)


def test_the_slopes_are_those_of_the_function() -> None:
    found = translate_score_mod(alibi_of_both_sides, SIZES, causal=False).alibi_slopes
    assert found is not None
    torch.testing.assert_close(found, BATCH_SLOPES, rtol=1e-6, atol=0)


def test_a_bias_that_bends_is_no_alibi() -> None:
    """It falls with the distance in all rows but the first ones."""

    def bends(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i == 1) & (j == 0), s - 0.4, s + SLOPES[h] * (j - i))

    assert translate_score_mod(bends, SIZES, causal=True).alibi_slopes is None


def test_a_table_has_gradients() -> None:
    """As a bias that PyTorch adds. The function is translated anew at each call, and after a step of an optimizer."""
    table = TABLE.clone().requires_grad_()
    q, k, v = make_qkv(1, 64, 64, HEADS, 2, 32)
    distance = (torch.arange(64)[:, None] - torch.arange(64)).abs().clamp(max=31)

    def biased(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, (i - j).abs().clamp(max=31)]

    for _ in range(2):
        with torch.no_grad():
            before = fa_serve.attention(q, k, v, score_mod=biased)
        (expected,) = torch.autograd.grad(fa_serve.attention(q, k, v, mask=table[None][:, :, distance]).square().sum(), table)
        out = fa_serve.attention(q, k, v, score_mod=biased)
        (found,) = torch.autograd.grad(out.square().sum(), table)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-5)  # the fallback has another order of sums with gradients
        with torch.no_grad():
            table += found


def test_a_function_is_translated_once_for_what_it_reads() -> None:
    slopes = SLOPES.clone()

    def falling(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s - slopes[h] * (i - j)

    first = translate_score_mod(falling, SIZES, causal=True)
    assert translate_score_mod(falling, SIZES, causal=True) is first
    slopes *= 2
    second = translate_score_mod(falling, SIZES, causal=True).alibi_slopes
    assert first.alibi_slopes is not None
    assert second is not None
    assert torch.equal(second, 2 * first.alibi_slopes)


def test_lists_that_change_are_seen() -> None:
    """In place, in the size of their blocks, and without versions."""
    lists = BlockLists.from_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool))

    def of_lists(given: BlockLists) -> Any:
        return translate_score_mod(t5, SIZES, causal=False, lists=given)

    first = of_lists(lists)
    assert of_lists(lists) is first
    assert of_lists(BlockLists(*lists)) is first
    assert of_lists(lists._replace(block_size=(64, 64))) is not first
    lists.kv_num_blocks.fill_(1)
    assert of_lists(lists).mask[..., 128:].isneginf().all()
    with torch.inference_mode():
        unversioned = BlockLists.from_blocks(torch.ones(1, 1, 3, 3, dtype=torch.bool))
        assert of_lists(unversioned) is not of_lists(unversioned)


def test_a_mask_is_gone_with_lists_that_no_call_can_have_again() -> None:
    lists = BlockLists.from_blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool))
    mask = translate_score_mod(t5, SIZES, causal=False, lists=lists).mask
    assert mask is not None
    gone = weakref.ref(mask)
    del mask, lists
    assert gone() is None


def test_one_large_mask_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_mods, "_LARGE_MASK", 4 * HEADS * LENGTH**2 - 1)
    masks = []
    for _ in range(3):
        table = TABLE.clone()

        def biased(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor = table) -> Tensor:
            return s + table[h, (i - j).abs().clamp(max=31)]

        first = translate_score_mod(biased, SIZES, causal=False)
        assert translate_score_mod(biased, SIZES, causal=False) is first
        masks.append((biased, weakref.ref(first.mask)))  # type: ignore[arg-type]
        del first
    assert [mask() is None for _, mask in masks] == [True, True, False]


def test_a_bias_is_evaluated_before_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap needs no device, so it may be found in the capture."""
    made = translate_score_mod(alibi, SIZES, causal=True)
    score_mods._TRANSLATED._captured.clear()
    for module in (score_mods, kept_values):
        monkeypatch.setattr(module, "is_capturing", lambda device: True)
    assert translate_score_mod(alibi, SIZES, causal=True) is made
    assert [value[0] for value in score_mods._TRANSLATED._captured.values()] == [made]
    halved = TABLE.half()
    halved_bias = lambda s, b, h, i, j: s + halved[h, (i - j).clamp(0, 31)]  # noqa: E731
    capped = lambda s, b, h, i, j: 3 * torch.tanh(s / 3)  # noqa: E731
    assert translate_score_mod(capped, SIZES, causal=True).softcap == 3
    divided = lambda s, b, h, i, j: s / torch.tensor(3.0)  # noqa: E731
    for score_mod in (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), halved_bias, divided):
        with pytest.raises(ParameterError, match="score_mod must be evaluated before a CUDA graph captures the call"):
            translate_score_mod(score_mod, SIZES, causal=True)


@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_a_call_without_queries_or_keys_needs_no_score(empty: str) -> None:
    batch, seqlen_q, seqlen_k = ((0 if empty == name else n) for name, n in (("batch", 2), ("seqlen_q", 9), ("seqlen_k", 9)))
    q, k, v = make_qkv(batch, seqlen_q, seqlen_k, HEADS, 2, 32)
    expected = fa_serve.attention(q, k, v)
    for given in (None, causal):
        assert torch.equal(fa_serve.attention(q, k, v, score_mod=t5, block_mask=given), expected)


REFUSED: dict[str, Callable[..., Any]] = {
    "multiplies its score by a value that is not a fixed number": lambda s, b, h, i, j: s * SLOPES[h],
    "divides by its score": lambda s, b, h, i, j: 1 / s,
    "adds two values that both depend on its score": lambda s, b, h, i, j: s + s,
    "replaces its score with a number other than -inf": lambda s, b, h, i, j: torch.where(i >= j, s, -1e4),
    "applies exp to its score": lambda s, b, h, i, j: torch.exp(s),
    r"reads the attribute \.sigmoid of its score": lambda s, b, h, i, j: s.sigmoid(),
    "caps its score after it has capped or biased it already": lambda s, b, h, i, j: torch.tanh(s + j),
    "chooses between different factors or caps for its score": lambda s, b, h, i, j: torch.where(i > j, s, 2 * s),
    "does not return its score": lambda s, b, h, i, j: i - j,
    "applies gt to its score": lambda s, b, h, i, j: torch.where(s > 0, s, 0),
    "applies bool to its score": lambda s, b, h, i, j: s if s else i,
    "applies pow to its score": lambda s, b, h, i, j: s**2,
    "multiplies its score by -2, which is not positive": lambda s, b, h, i, j: s * -2,
    "multiplies its score by 0, which is not positive": lambda s, b, h, i, j: s * 0,
    "multiplies its score by -1, which is not positive": lambda s, b, h, i, j: -20 * torch.tanh(s / 20),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_option_stands_for_is_refused(reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"score_mod may multiply.*<lambda> {reason}.*: compute the call with torch"):
        translate_score_mod(REFUSED[reason], SIZES, causal=False)


def test_a_call_says_each_thing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(1, 8, 8, HEADS, 2, 32)
    for name, value in (("mask", torch.ones(1, 1, 8, 8)), ("alibi_slopes", SLOPES), ("softcap", 2.0)):
        with pytest.raises(ParameterError, match=f"{name} must not be passed together with score_mod"):
            fa_serve.attention(q, k, v, score_mod=softcap, **{name: value})  # type: ignore[call-overload]
    monkeypatch.setattr(api, "is_traced", lambda *tensors: True)
    with pytest.raises(ParameterError, match="score_mod must be None while the call is compiled"):
        fa_serve.attention(q, k, v, score_mod=softcap)
