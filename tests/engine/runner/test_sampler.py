"""The engine's part of sampling: keys of random numbers, log-probabilities, and what it passes to `ops.sample_rows`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chi_square import assert_distribution

from fa_serve import ops
from fa_serve.engine import SamplingParams
from fa_serve.engine.runner.log_probabilities import log_probabilities
from fa_serve.engine.runner.sampler import SampleParams, TokenCounts, draft_arrays, random_keys, sample
from fa_serve.engine.scheduler.scheduled_batch import INVALID_TOKEN, NO_TOKEN

DRAWS = 20_000


def keys(count: int, seed: int = 0) -> torch.Tensor:
    """The keys of one request's first tokens."""
    return torch.from_numpy(random_keys(np.full(count, seed, dtype=np.int64), np.arange(count, dtype=np.int64)))


def test_every_parameter_of_a_draw_reaches_the_op() -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(512, 200, generator=generator)
    limits = {
        "keys": keys(512),
        "temperature": torch.rand(512, generator=generator) + 0.5,
        "top_k": torch.randint(1, 60, (512,), generator=generator),
        "top_p": torch.rand(512, generator=generator),
        "min_p": torch.rand(512, generator=generator) / 10,
    }
    slots = torch.arange(512).flip(0)
    last_tokens = torch.zeros(512, dtype=torch.int64)
    expected = ops.sample_rows(logits, **limits)
    tokens = sample(logits, SampleParams(**limits, largest_top_k=59), None, slots, last_tokens)
    assert torch.equal(tokens, expected)
    assert torch.equal(last_tokens[slots], expected)
    assert torch.equal(sample(logits, SampleParams()), logits.argmax(-1))


def test_a_row_that_is_not_finite_gets_the_token_that_the_scheduler_knows() -> None:
    logits = torch.tensor([[0.0, float("nan")], [float("inf"), 0.0]])
    assert sample(logits, SampleParams()).tolist() == [INVALID_TOKEN] * 2


@pytest.mark.parametrize("drawn", [False, True])
def test_the_logits_decide_whether_they_are_finite_and_not_the_parameters(drawn) -> None:
    """A mask may hide what is not finite, and may leave nothing of what is finite."""
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [0.0, 1.0], [float("inf"), 0.0], [float("-inf"), 0.0]])
    rows = torch.arange(5)
    draw = {"keys": keys(5), "temperature": torch.ones(5)} if drawn else {}
    first_only = SampleParams(allowed_index=2 * rows, allowed_rows=rows, **draw)
    assert sample(logits, first_only).tolist() == [INVALID_TOKEN, 0, 0, INVALID_TOKEN, NO_TOKEN]
    none_of_second = SampleParams(bias_index=torch.tensor([2, 3]), bias=torch.tensor([float("-inf")] * 2), **draw)
    tokens = sample(logits, none_of_second).tolist()
    assert tokens[:2] == [INVALID_TOKEN, NO_TOKEN]
    assert tokens[3:] == [INVALID_TOKEN, 1]
    assert tokens[2] >= 0


def test_a_top_k_for_every_row_sorts_nothing(make_engine, monkeypatch) -> None:
    monkeypatch.setattr(torch.Tensor, "sort", lambda *_, **__: pytest.fail("the whole vocabulary was sorted"))
    completions = make_engine().generate([[1, 2], [3]], SamplingParams(max_tokens=5, top_k=20, top_p=0.9, seed=1))
    assert [len(c.token_ids) for c in completions] == [5, 5]


def test_keys_differ_by_seed_and_by_position() -> None:
    seeds = np.repeat(np.array([-(2**63), -1, 0, 1, 2**63 - 1], dtype=np.int64), 1000)
    positions = np.tile(np.arange(1000, dtype=np.int64), 5)
    both = random_keys(seeds, positions)
    assert len(np.unique(both)) == 5000
    assert abs((both > 0).mean() - 0.5) < 0.03


@pytest.mark.slow
def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    logits = torch.zeros(16)
    for first, second in ((keys(DRAWS, 0), keys(DRAWS, 1)), (keys(DRAWS + 1, 0)[:-1], keys(DRAWS + 1, 0)[1:])):
        pairs = [sample(logits.expand(DRAWS, -1), SampleParams(k, torch.ones(DRAWS))) for k in (first, second)]
        assert_distribution(torch.bincount(pairs[0] * 16 + pairs[1], minlength=256), torch.full((256,), 1 / 256))


def test_log_probabilities_are_those_of_the_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6)).bfloat16()
    tokens = torch.tensor([3, 49, 0, INVALID_TOKEN])
    exact = logits.double().log_softmax(-1)
    chosen, values, ids = log_probabilities(logits, tokens, 5)
    assert torch.allclose(chosen[:3].double(), exact[range(3), tokens[:3]], atol=1e-6)
    assert torch.allclose(values.double(), exact.topk(5).values, atol=1e-6)
    assert torch.equal(exact.gather(1, ids), exact.topk(5).values)


def penalties(count: int, **drafts: torch.Tensor) -> SampleParams:
    values = {"presence": 0.5, "frequency": 0.25, "repetition": 1.5}
    return SampleParams(**{name: torch.full((count,), value) for name, value in values.items()}, **drafts)


def test_penalties_count_the_drafts_before_a_row() -> None:
    """Three rows of one sequence with the drafts 4, 4 have the scores of three steps that draw 4, 4."""
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    fields = {name: torch.from_numpy(array) for name, array in draft_arrays([[4, 4]], 8).items()}
    at_once, in_turn = (TokenCounts(2, 8, torch.device("cpu")) for _ in range(2))
    for counts in (at_once, in_turn):
        counts.start(1, [2, 3], 1)
    slots = torch.tensor([1])
    expected = []
    for row in scores:
        expected.append(in_turn.penalise(row[None], slots, penalties(1)))
        in_turn.record(slots, torch.tensor([4]), penalties(1))
    assert torch.equal(at_once.penalise(scores, slots.repeat(3), penalties(3, **fields)), torch.cat(expected))
    assert at_once.generated[1].tolist() == [0, 0, 0, 1, 0, 0, 0, 0], "drafts are not recorded before they are accepted"


def test_a_row_without_a_token_counts_for_nothing() -> None:
    """Its sequence may go on: a late mask leaves it without a token for one step."""
    counts = TokenCounts(4, 8, torch.device("cpu"))
    counts.start(2, [7, 6], 2)
    counts.record(torch.tensor([0, 1, 2]), torch.tensor([3, INVALID_TOKEN, NO_TOKEN]), penalties(3))
    fields = {name: torch.from_numpy(array) for name, array in draft_arrays([[4]], 8).items()}
    counts.record(torch.tensor([3, 3]), torch.tensor([NO_TOKEN, NO_TOKEN]), penalties(2, **fields))
    assert counts.generated.nonzero().tolist() == [[0, 3]]
    assert counts.present.nonzero().tolist() == [[0, 3], [2, 6], [2, 7]]


def test_tokens_are_recorded_up_to_the_first_that_differs_from_its_draft() -> None:
    fields = {name: torch.from_numpy(array) for name, array in draft_arrays([[4, 5], [], [1, 1]], 8).items()}
    counts = TokenCounts(3, 8, torch.device("cpu"))
    slots = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    counts.record(slots, torch.tensor([4, 6, 7, 3, 1, 1, 1]), penalties(7, **fields))
    assert counts.generated.tolist() == [[0, 0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0, 0, 0]]
    assert counts.present.tolist() == (counts.generated > 0).tolist()
