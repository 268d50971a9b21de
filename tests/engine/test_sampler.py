"""The sampler draws from the right distribution, from exactly the right tokens, and by seed alone.

Counts of many draws are compared with the expected ones by a chi-square statistic. Seeds are fixed, so a test either always
passes or never does; bounds are those that a right sampler exceeds once in a million seeds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fa_serve.engine import SamplingParams
from fa_serve.engine.sampler import BLOCK, SampleParams, _threshold, log_probabilities, random_keys, sample
from fa_serve.engine.scheduler import INVALID_TOKEN

DRAWS = 20_000


def keys(count: int, seed: int = 0) -> torch.Tensor:
    """The keys of one request's first tokens."""
    return torch.from_numpy(random_keys(np.full(count, seed, dtype=np.int64), np.arange(count, dtype=np.int64)))


def draw(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0
):
    """DRAWS tokens for one row of logits -> how often each came."""
    params = SampleParams(
        keys=keys(DRAWS, seed),
        temperature=torch.full((DRAWS,), temperature),
        top_k=None if top_k is None else torch.full((DRAWS,), top_k),
        top_p=None if top_p is None else torch.full((DRAWS,), top_p),
    )
    tokens = sample(logits.expand(DRAWS, -1), params)
    return torch.bincount(tokens, minlength=logits.shape[-1])


def assert_distribution(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square over the tokens that are expected 5 times or more, the others together as one."""
    expected = probabilities.double() * DRAWS
    common = expected >= 5
    observed = torch.cat([counts[common].double(), counts[~common].sum()[None].double()])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed = observed[expected > 0]
    expected = expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    # Wilson and Hilferty: the cube root of chi-square over its mean is nearly normal; 4.75 sigma is one in a million
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4.75 * spread**0.5) ** 3, f"chi-square {statistic:.1f}, {freedom} degrees"


@pytest.mark.parametrize("vocab", [2, 17, BLOCK, BLOCK + 1, 1000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_distribution_is_the_softmax(vocab, temperature) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    assert_distribution(draw(logits, temperature=temperature), (logits / temperature).softmax(-1))


def test_the_bound_tells_a_wrong_distribution() -> None:
    logits = torch.randn(17, generator=torch.Generator().manual_seed(17)) * 2
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distribution(draw(logits, temperature=1.1), logits.softmax(-1))


@pytest.mark.parametrize("top_k", [1, 2, 10, 300, 10_000])
def test_top_k_keeps_exactly_the_k_most_likely(top_k) -> None:
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
def test_top_p_keeps_exactly_the_nucleus(top_p) -> None:
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
    # of 0.4, 0.3, 0.2, 0.1 the first two are 4/7 and 3/7 of what is left: 0.5 is reached by the first alone
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert draw(logits, top_k=2, top_p=0.5).tolist() == [DRAWS, 0, 0, 0]
    assert draw(logits, top_p=0.5)[:2].all()


def test_tokens_that_tie_with_the_last_one_are_kept() -> None:
    logits = torch.tensor([1.0, 0.0, 0.0, -1.0])
    assert (draw(logits, top_k=2) > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("ties", [False, True])
def test_few_candidates_give_what_sorting_all_gives(ties) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(64, 500, generator=generator) * 2
    if ties:
        logits = logits.round()
    top_k = torch.randint(1, 41, (64,), generator=generator)
    top_p = torch.rand(64, generator=generator)
    top_p[::4] = 1.0
    for nucleus in (None, top_p):
        params = SampleParams(keys(64), torch.ones(64), top_k=top_k, top_p=nucleus)
        few = replace(params, largest_top_k=int(top_k.max()))
        scores = logits - logits.amax(-1, keepdim=True)
        assert torch.equal(_threshold(scores, few), _threshold(scores, params))
        assert torch.equal(sample(logits, few), sample(logits, params))


def test_a_neighbour_with_a_nucleus_does_not_undo_top_k() -> None:
    logits = torch.zeros(300) + torch.arange(300) * 1e-3
    params = SampleParams(keys(DRAWS), torch.ones(DRAWS), torch.full((DRAWS,), 2), torch.ones(DRAWS))
    assert set(sample(logits.expand(DRAWS, -1), params).tolist()) == {298, 299}


def test_a_top_k_for_every_row_sorts_nothing(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("the whole vocabulary was sorted"))
    completions = make_engine().generate([[1, 2], [3]], SamplingParams(max_tokens=5, top_k=20, top_p=0.9, seed=1))
    assert [len(c.token_ids) for c in completions] == [5, 5]


def test_a_row_depends_on_nothing_but_itself() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 500, generator=generator)
    params = SampleParams(
        keys=keys(6),
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 1.0]),
        top_k=torch.tensor([500, 5, 500, 20, 500, 500]),
        top_p=torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.3]),
    )
    together = sample(logits, params)
    for row in range(6):
        one = SampleParams(
            params.keys[row, None], params.temperature[row, None], params.top_k[row, None], params.top_p[row, None]
        )
        assert sample(logits[row, None], one) == together[row]
    # a row that needs no threshold is the same whether or not its neighbours do
    plain = sample(logits[4:5], SampleParams(params.keys[4:5], params.temperature[4:5]))
    assert plain == together[4]
    assert together[0] == logits[0].argmax()


def test_keys_differ_by_seed_and_by_position() -> None:
    seeds = np.repeat(np.array([-(2**63), -1, 0, 1, 2**63 - 1], dtype=np.int64), 1000)
    positions = np.tile(np.arange(1000, dtype=np.int64), 5)
    both = random_keys(seeds, positions)
    assert len(np.unique(both)) == 5000
    assert abs((both > 0).mean() - 0.5) < 0.03


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    logits = torch.zeros(16)
    for first, second in ((keys(DRAWS, 0), keys(DRAWS, 1)), (keys(DRAWS + 1, 0)[:-1], keys(DRAWS + 1, 0)[1:])):
        pairs = [sample(logits.expand(DRAWS, -1), SampleParams(k, torch.ones(DRAWS))) for k in (first, second)]
        assert_distribution(torch.bincount(pairs[0] * 16 + pairs[1], minlength=256), torch.full((256,), 1 / 256))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_greedy_takes_the_largest_and_marks_what_is_not_finite(dtype) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = logits.argmax(-1)
    logits[1, 3], logits[2, 4], logits[3] = float("nan"), float("inf"), float("-inf")
    expected[1:4] = INVALID_TOKEN
    assert sample(logits, SampleParams()).tolist() == expected.tolist()
    sampled = sample(logits, SampleParams(keys(5), torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), top_p=torch.full((5,), 0.5)))
    assert sampled.tolist() == expected.tolist()


def test_one_allowed_token_is_always_drawn() -> None:
    logits = torch.full((600,), float("-inf"))
    logits[599] = 0.0
    assert draw(logits)[599] == DRAWS


@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_keeps_what_is_likely_enough(min_p) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5)) * 2
    probabilities = logits.double().softmax(-1)
    kept = probabilities >= min_p * probabilities.max()
    params = SampleParams(keys(DRAWS), torch.ones(DRAWS), min_p=torch.full((DRAWS,), min_p))
    counts = torch.bincount(sample(logits.expand(DRAWS, -1), params), minlength=300)
    assert not counts[~kept].any()
    if kept.sum() > 1:
        assert_distribution(counts, logits.masked_fill(~kept, float("-inf")).softmax(-1))


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6)).bfloat16()
    tokens = torch.tensor([3, 49, 0, INVALID_TOKEN])
    exact = logits.double().log_softmax(-1)
    chosen, values, ids = log_probabilities(logits, tokens, 5)
    assert torch.allclose(chosen[:3].double(), exact[range(3), tokens[:3]], atol=1e-6)
    assert torch.allclose(values.double(), exact.topk(5).values, atol=1e-6)
    assert torch.equal(exact.gather(1, ids), exact.topk(5).values)
