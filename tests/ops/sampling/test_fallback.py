"""Sampling in plain PyTorch draws from the right distribution, from exactly the allowed tokens, and by a row's key alone."""

from __future__ import annotations

import pytest
import torch
from chi_square import assert_distribution
from rounded_once import dtype_id

from fa_serve import ops
from fa_serve.ops.sampling.exponential_race import BLOCK
from fa_serve.ops.sampling.fallback import kept_tokens, most_likely

DRAWS = 6_000


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


def draw(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> torch.Tensor:
    """Draw DRAWS tokens from one row of logits and count each token."""
    tokens = ops.sample_rows(
        logits.expand(DRAWS, -1),
        keys(DRAWS),
        torch.full((DRAWS,), temperature),
        top_k=None if top_k is None else torch.full((DRAWS,), top_k),
        top_p=None if top_p is None else torch.full((DRAWS,), top_p),
        min_p=None if min_p is None else torch.full((DRAWS,), min_p),
    )
    return torch.bincount(tokens, minlength=logits.shape[-1])


@pytest.mark.parametrize(
    ("vocab", "temperature"), [(2, 1.0), (17, 0.5), (17, 1.0), (17, 2.0), (BLOCK, 1.0), (BLOCK + 1, 0.5), (1000, 2.0)]
)
def test_the_distribution_is_the_softmax(vocab: int, temperature: float) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    assert_distribution(draw(logits, temperature=temperature), (logits / temperature).softmax(-1))


def test_the_bound_tells_a_wrong_distribution() -> None:
    logits = torch.randn(17, generator=torch.Generator().manual_seed(17)) * 2
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distribution(draw(logits, temperature=1.1), logits.softmax(-1))


@pytest.mark.parametrize("top_k", [1, 2, 10, 300, 10_000])
def test_top_k_keeps_exactly_the_k_most_likely(top_k: int) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1))
    kept = torch.zeros(300, dtype=torch.bool)
    kept[logits.topk(min(top_k, 300)).indices] = True
    counts = draw(logits, top_k=top_k)
    assert not counts[~kept].any()
    if top_k <= 10:
        assert counts[kept].all()
    if top_k > 1:
        assert_distribution(counts, logits.masked_fill(~kept, float("-inf")).softmax(-1))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_exactly_the_nucleus(top_p: float) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    ordered = logits.double().softmax(-1).sort(descending=True)
    count = int((ordered.values.cumsum(0) < top_p).sum()) + 1
    kept = torch.zeros(300, dtype=torch.bool)
    kept[ordered.indices[:count]] = True
    counts = draw(logits, top_p=top_p)
    assert not counts[~kept].any()
    if count > 1:
        assert_distribution(counts, logits.masked_fill(~kept, float("-inf")).softmax(-1))


def test_top_p_is_of_what_top_k_leaves() -> None:
    # top_k leaves 0.4 and 0.3, which are 4/7 and 3/7 of their sum, so the first alone reaches 0.5
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert draw(logits, top_k=2, top_p=0.5).tolist() == [DRAWS, 0, 0, 0]
    assert draw(logits, top_p=0.5)[:2].all()


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 3, 5]),
        ({"top_k": 4}, [0, 1, 3, 5]),
        ({"top_k": 5}, [0, 1, 2, 3, 5]),
        ({"top_p": 1e-6}, [1]),
        ({"top_p": 0.5}, [1, 3]),  # 0.27, 0.54
        ({"top_p": 0.85}, [0, 1, 3, 5]),  # 0.81, 0.91
        ({"top_k": 4, "top_p": 0.95}, [0, 1, 3, 5]),
        ({"top_k": 5, "top_p": 0.1}, [1]),
        ({"min_p": 1.0}, [1, 3, 5]),  # a bound of the probability, which tokens that tie have in common
        ({"min_p": 0.3}, [0, 1, 2, 3, 5]),
        ({"top_k": 4, "min_p": 0.3}, [0, 1, 3, 5]),
    ],
    ids=str,
)
def test_of_tokens_that_tie_those_with_the_lowest_ids_are_kept(limits: dict[str, float], kept: list[int]) -> None:
    logits = torch.tensor([-1.0, 0.0, -1.0, -0.0, -5.0, 0.0])
    assert draw(logits, **limits).nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_the_most_likely_tokens_are_in_the_order_of_the_limits(dtype: torch.dtype) -> None:
    logits = (torch.randn(40, 700, generator=torch.Generator().manual_seed(9)) * 2).round().to(dtype)
    logits[3] = 0.0
    logits[4, 2:] = float("-inf")
    for count in (0, 1, 7, 20):
        values, ids = most_likely(logits, count)
        expected = [sorted(range(700), key=lambda token, row=row: (-row[token], token))[:count] for row in logits.tolist()]
        assert ids.tolist() == expected
        assert torch.equal(values, logits.gather(1, ids))


@pytest.mark.parametrize("ties", [False, True])
def test_few_candidates_give_what_sorting_all_gives(ties: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(64, 500, generator=generator) * 2
    if ties:
        logits = logits.round()
    top_k = torch.randint(1, 41, (64,), generator=generator)
    largest = int(top_k.max())
    top_p = torch.rand(64, generator=generator)
    top_p[::4] = 1.0
    scores = logits - logits.amax(-1, keepdim=True)
    for nucleus in (None, top_p):
        kept = kept_tokens(scores, top_k, nucleus, largest)
        assert torch.equal(kept, kept_tokens(scores, top_k, nucleus))
        if nucleus is None:
            assert kept.sum(-1).tolist() == top_k.tolist()
        given = (logits, keys(64), torch.ones(64), top_k, nucleus)
        assert torch.equal(ops.sample_rows(*given, largest_top_k=largest), ops.sample_rows(*given))


def test_a_neighbour_with_a_nucleus_does_not_undo_top_k() -> None:
    logits = torch.zeros(300) + torch.arange(300) * 1e-3
    tokens = ops.sample_rows(
        logits.expand(DRAWS, -1), keys(DRAWS), torch.ones(DRAWS), torch.full((DRAWS,), 2), torch.ones(DRAWS)
    )
    assert set(tokens.tolist()) == {298, 299}


def test_a_row_depends_on_nothing_but_itself() -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(3))
    given = (
        keys(6),
        torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 1.0]),
        torch.tensor([500, 5, 500, 20, 500, 500]),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.3]),
    )
    together = ops.sample_rows(logits, *given)
    for row in range(6):
        assert ops.sample_rows(logits[row, None], *(x[row, None] for x in given)) == together[row]
    # a row without limits gives the same token whether other rows have limits or not
    assert ops.sample_rows(logits[4:5], given[0][4:5], given[1][4:5]) == together[4]
    assert together[0] == logits[0].argmax()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_id)
def test_greedy_takes_the_largest_and_marks_rows_that_are_not_finite(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = logits.argmax(-1)
    logits[1, 3] = float("nan")
    logits[2, 4] = float("inf")
    logits[3] = float("-inf")
    expected[1:4] = -1
    assert ops.sample_rows(logits).tolist() == expected.tolist()
    temperature = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    assert ops.sample_rows(logits, keys(5), temperature, top_p=torch.full((5,), 0.5)).tolist() == expected.tolist()


def test_tokens_are_stored_at_their_slots() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, float("nan"), 0.0], [0.0, 1.0, 3.0]])
    last_tokens = torch.full((5,), 9)
    tokens = ops.sample_rows(logits, slots=torch.tensor([4, 0, 2]), last_tokens=last_tokens)
    assert tokens.tolist() == [1, -1, 2]
    assert last_tokens.tolist() == [0, 9, 2, 9, 1]


def test_one_allowed_token_is_always_drawn() -> None:
    logits = torch.full((600,), float("-inf"))
    logits[599] = 0.0
    assert draw(logits)[599] == DRAWS


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_keeps_what_is_likely_enough(min_p: float) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 2
    probabilities = logits.double().softmax(-1)
    kept = probabilities >= min_p * probabilities.max()
    counts = draw(logits, min_p=min_p)
    assert not counts[~kept].any()
    if kept.sum() > 1:
        assert_distribution(counts, logits.masked_fill(~kept, float("-inf")).softmax(-1))
