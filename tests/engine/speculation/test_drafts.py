"""Speculation changes no answer: not its tokens, text, log-probabilities or end. And it stops where it is of no help."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import examples
from speculation_cases import CASES, SAMPLED, TIGHT, shown
from tiny_models import VOCAB, make_model, random_prompts

from fa_serve.engine import Engine, RequestOutput, SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation import drafts as speculation
from fa_serve.engine.speculation.drafts import (
    MAX_PAUSE,
    MIN_MATCH,
    NgramDrafter,
    NgramIndex,
    Speculation,
    draft_limit,
    num_accepted,
)


class Oracle:
    """Drafts the tokens that an engine without speculation has generated, a fifth of them replaced by others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._random = random.Random(3)
        monkeypatch.setattr(NgramDrafter, "propose", lambda _, sequence, count: self.propose(sequence, count))
        monkeypatch.setattr(speculation, "MAX_PAUSE", 1)

    def watch(self, engine: Engine) -> None:
        """Remember what this engine generates."""
        finish = engine._scheduler.finish

        def remember(sequence: SequenceState, *rest: object) -> None:
            request = sequence.request
            self.answers[tuple(request.prompt), request.seed] = list(sequence.tokens)
            finish(sequence, *rest)

        engine._scheduler.finish = remember

    def propose(self, sequence: SequenceState, count: int) -> list[int]:
        request = sequence.request
        answer = self.answers.get((tuple(request.prompt), request.seed), [])
        assert answer[: len(sequence.tokens)] == sequence.tokens[: len(answer)], "the answer has changed"
        drafts = answer[len(sequence.tokens) :][:count]
        return [(token + 1) % VOCAB if self._random.random() < 0.2 else token for token in drafts]


@pytest.fixture
def check(make_engine, monkeypatch) -> Callable[..., Engine]:
    """Answers with speculation are those without it."""

    def check(
        params: SamplingParams,
        *,
        longer: SamplingParams | None = None,
        depth: int = 1,
        graphs: bool = False,
        **given: object,
    ) -> Engine:
        """longer: parameters under which answers continue, so that drafts reach beyond the end of the answer
        graphs: steps with drafts go through the fixed buffers of CUDA graphs, which the fixture `replays` replaces
        """
        oracle = Oracle(monkeypatch)
        prompts = random_prompts(4)
        plain = make_engine(**given)
        oracle.watch(plain)
        expected = plain.generate(prompts, longer or params)
        if longer is not None:
            expected = make_engine(**given).generate(prompts, params)
        engine = make_engine(speculative="ngram", num_speculative_tokens=5, **given)
        engine._steps.depth = depth
        if graphs:
            engine._runner.make_graphs()
        assert list(map(shown, engine.generate(prompts, params))) == list(map(shown, expected))
        engine.check_integrity()
        stats = engine.stats()
        assert stats.num_pages_used == 0
        assert stats.num_output_tokens == plain.stats().num_output_tokens or longer is not None
        return engine

    return check


@pytest.mark.parametrize("case", CASES)
def test_no_parameter_changes_what_is_generated(check, case) -> None:
    engine = check(CASES[case])
    accepted = engine.stats().speculation.num_accepted_tokens
    assert accepted > 0 or case in ("one", "two"), "a last token needs no draft"


@pytest.mark.parametrize("given", [{}, TIGHT], ids=["room", "preempted"])
@pytest.mark.parametrize("case", ["greedy", "sampled", "penalties", "logprobs", "schema", "ids", "answers"])
def test_no_parameter_changes_what_is_generated_by_graphs(check, replays, case, given) -> None:
    """A step with drafts fills padding that was made before, and its sampling is prepared behind its launch."""
    engine = check(CASES[case], graphs=True, **given)
    assert engine.stats().speculation.num_accepted_tokens > 0
    assert any(shape.kind == "drafts" for shape in engine._runner._graphs._replays)
    assert replays


@pytest.mark.parametrize(
    ("depth", "given"),
    [(0, TIGHT), (1, TIGHT), (1, {"prefix_caching": False}), (1, {"family": "mistral", **TIGHT}), (0, {"max_num_seqs": 2})],
    ids=["at-once", "preempted", "no-cache", "window", "queue"],
)
def test_no_setting_changes_what_is_generated(check, depth, given) -> None:
    params = replace(CASES["penalties"], max_tokens=20, logprobs=0)
    assert check(params, depth=depth, **given).stats().speculation.num_accepted_tokens > 0


@pytest.mark.slow
def test_answers_end_inside_a_draft(make_engine, check) -> None:
    """At a stop string, a stop token, the model's end token, the end of a grammar, or the last token that is allowed."""
    text = make_engine().generate(random_prompts(4), SAMPLED)
    stop = next(each.text[5:8] for each in text if len(each.text) > 8)
    ends = tuple({each.token_ids[7] for each in text})
    for params in (
        replace(SAMPLED, stop=(stop,), min_tokens=3),
        replace(SAMPLED, stop=(stop,), max_tokens=9, logprobs=1),
        replace(SAMPLED, stop_token_ids=ends, logprobs=0),
        replace(SAMPLED, max_tokens=6),
    ):
        engine = check(params, longer=replace(SAMPLED, max_tokens=30))
        assert engine.stats().speculation.num_accepted_tokens > 0
    model = make_model()
    model.generation_config.eos_token_id = list(ends)
    check(SAMPLED, longer=replace(SAMPLED, ignore_eos=True), model=model)


@pytest.mark.slow
def test_deterministic_mode_is_bitwise_the_same(make_engine, monkeypatch) -> None:
    params = replace(CASES["penalties"], logprobs=2, max_tokens=12)
    prompts = random_prompts(3)
    oracle = Oracle(monkeypatch)
    plain = make_engine(deterministic=True)
    oracle.watch(plain)
    expected = plain.generate(prompts, params)
    engine = make_engine(deterministic=True, speculative="ngram")
    assert engine.generate(prompts, params) == expected
    assert engine.stats().speculation.num_accepted_tokens > 0


def drafting(make_engine, monkeypatch, count: int) -> tuple[list[list[int]], list[list[int]], Engine]:
    """Prompts, their answers, and an engine that works a step ahead and whose drafts come from these answers."""
    prompts = random_prompts(count)
    oracle = Oracle(monkeypatch)
    plain = make_engine()
    oracle.watch(plain)
    expected = [each.token_ids for each in plain.generate(prompts, SAMPLED)]
    engine = make_engine(speculative="ngram")
    engine._steps.depth = 1
    return prompts, expected, engine


def test_requests_come_and_are_aborted_while_drafts_are_in_flight(make_engine, monkeypatch) -> None:
    prompts, expected, engine = drafting(make_engine, monkeypatch, 4)
    got: dict[str, list[int]] = {str(number): [] for number in range(4)}
    ends: dict[str, RequestOutput] = {}
    for number in range(40):
        if number < 4:
            engine.add_request(str(number), prompts[number], SAMPLED)
        outputs = engine.abort("1") if number == 6 else engine.step()
        for output in outputs:
            got[output.request_id] += output.token_ids
            if output.finished:
                ends[output.request_id] = output
        engine.check_integrity()
    assert not engine.has_unfinished()
    assert [ends[name].finish_reason for name in sorted(ends)] == ["length", "abort", "length", "length"]
    assert got["1"] == expected[1][: len(got["1"])]
    assert 0 < len(got["1"]) < 20
    assert [got[name] for name in "023"] == [expected[number] for number in (0, 2, 3)]
    assert engine._scheduler.speculation._histories == {}, "nothing is remembered of sequences that have ended"


def test_tokens_become_outputs_while_the_next_drafts_are_verified(make_engine, monkeypatch) -> None:
    """The device is idle from the end of a step until the next launch, so the host makes no text between the two."""
    prompts, expected, engine = drafting(make_engine, monkeypatch, 2)
    order: list[str] = []

    def watch(owner: object, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **named: (order.append(name), call(*a, **named))[1])

    watch(engine._runner, "launch")
    watch(engine._scheduler, "commit")
    watch(engine._answers, "output")
    assert [each.token_ids for each in engine.generate(prompts, SAMPLED)] == expected
    assert engine.stats().speculation.num_accepted_tokens
    assert " ".join(order).count("commit launch output output") > 2, order


@pytest.mark.parametrize("where", ["_scheduler.schedule", "_runner.launch"])
def test_what_was_read_before_a_failure_is_not_lost(make_engine, monkeypatch, where) -> None:
    """Tokens of step n are known, and not outputs yet, when step n + 1 cannot be scheduled or launched."""
    prompts, expected, engine = drafting(make_engine, monkeypatch, 2)
    for name, prompt in zip("01", prompts, strict=True):
        engine.add_request(name, prompt, SAMPLED)
    outputs = [output for _ in range(3) for output in engine.step()]
    part, method = where.split(".")
    monkeypatch.setattr(getattr(engine, part), method, lambda *_: {}["lost"])
    last = engine.step()
    assert [(each.request_id, each.finish_reason) for each in last] == [
        ("0", None),
        ("1", None),
        ("0", "error"),
        ("1", "error"),
    ]
    for output in outputs + last:
        tokens = expected[int(output.request_id)]
        assert tokens[: len(output.token_ids)] == output.token_ids
        del tokens[: len(output.token_ids)]
    assert [len(tokens) for tokens in expected] == [SAMPLED.max_tokens - each.num_output_tokens for each in last[2:]]
    engine.check_integrity()


def test_pages_of_wrong_drafts_are_not_shared(make_engine, monkeypatch) -> None:
    """The prefix cache holds what was accepted, and nothing else."""
    prompt = random_prompts(1)[0]
    oracle = Oracle(monkeypatch)
    plain = make_engine()
    oracle.watch(plain)
    answer = plain.generate([prompt], SAMPLED)[0].token_ids
    engine = make_engine(speculative="ngram")
    engine.generate([prompt], SAMPLED)
    longer = [*prompt, *answer]
    expected = plain.generate([longer], SAMPLED)[0]
    found = engine.generate([longer], SAMPLED)[0]
    assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, expected.num_cached_tokens)


@pytest.mark.slow
def test_repetitions_are_found_in_prompt_and_answer(make_engine) -> None:
    """Without an oracle: an answer of two tokens repeats itself."""
    params = SamplingParams(max_tokens=40, temperature=0.0, allowed_token_ids=(5, 6))
    plain = make_engine()
    expected = plain.generate([[5, 6] * 6], params)[0].token_ids
    engine = make_engine(speculative="ngram")
    off = replace(params, speculative=False)
    assert engine.generate([[5, 6] * 6], off)[0].token_ids == expected
    assert engine.stats().speculation.num_drafts == 0
    before = engine.stats().num_steps
    assert engine.generate([[5, 6] * 6], params)[0].token_ids == expected
    stats = engine.stats()
    assert stats.num_steps - before <= 20
    found = stats.speculation
    assert found.num_accepted_tokens >= 20
    assert list(found.accepted_at) == sorted(found.accepted_at, reverse=True)
    assert found.num_drafts <= found.num_draft_tokens <= 7 * found.num_drafts


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_are_those_without_speculation_when_nothing_matches(make_engine, depth) -> None:
    prompts = [list(range(start, start + 9)) for start in (10, 40, 70)]
    params = replace(SAMPLED, max_tokens=10, temperature=2.0)
    plain = make_engine()
    engine = make_engine(speculative="ngram")
    plain._steps.depth = engine._steps.depth = depth
    assert [x.token_ids for x in engine.generate(prompts, params)] == [x.token_ids for x in plain.generate(prompts, params)]
    assert engine.stats().num_steps == plain.stats().num_steps
    assert engine.stats().speculation.num_drafts == 0


def make_sequence(tokens: list[int], max_tokens: int = 100, **params: object) -> SequenceState:
    """A decoding sequence: two tokens of prompt, and a last token that has not been computed."""
    sequence = SequenceState(Request("a", tokens[:2], SamplingParams(**params), max_tokens))
    for token in tokens[2:]:
        sequence.tokens.append(token)
    sequence.start(0, [], num_shared=0, page_size=4)
    sequence.advance(len(tokens) - 1, samples=False)
    return sequence


def test_drafts_are_fewer_the_more_sequences_run() -> None:
    guesses = Speculation(7)
    assert [draft_limit(7, running) for running in (0, 1, 16, 17, 32, 64, 65, 256)] == [7, 7, 7, 6, 3, 1, 0, 0]
    sequence = make_sequence([1, 2, 3, 4, 9, 1, 2, 3])
    assert guesses.draft(sequence, 1, 9) == [4, 9, 1, 2, 3, 4, 9]
    assert guesses.draft(sequence, 32, 9) == [4, 9, 1]
    assert guesses.draft(sequence, 1, 2) == [4, 9], "pages or tokens of the step are short"
    assert guesses.draft(sequence, 65, 9) == []
    assert guesses.draft(make_sequence([1, 2, 3, 4, 9, 1, 2, 3], max_tokens=8), 1, 9) == [4], "two tokens are left"
    assert guesses.draft(make_sequence([1, 2, 3, 4, 9, 1, 2, 3], speculative=False), 1, 9) == []
    assert Speculation(0).draft(sequence, 1, 9) == []


class OneByOne(NgramDrafter):
    """A drafter whose guesses take time, each of them."""

    prepares = True


def drafts_after(right: Callable[[], int], steps: int = 60, num_tokens: int = 7) -> list[int]:
    """How many tokens a sequence may draft in each step, if so many of them are right as `right` says, or all."""
    guesses = Speculation(num_tokens, OneByOne())
    sequence = make_sequence([1, 2, 3, 4], max_tokens=1000)
    counts = []
    for _ in range(steps):
        counts.append(guesses.num_wanted(sequence, 1, 99))
        guesses.record(sequence, counts[-1], min(right(), counts[-1]))
        guesses._histories[sequence].resume_at = 0  # no pause
    return counts


def test_a_drafter_that_takes_time_draws_a_few_more_than_are_right() -> None:
    assert drafts_after(lambda: 3)[-1] == 5
    assert drafts_after(lambda: 0)[-1] == 1
    assert drafts_after(lambda: 99) == [7] * 60
    changed = iter([0] * 30 + [99] * 30)
    assert drafts_after(lambda: next(changed))[-1] == 7, "they may become right again"


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.85, 0.9])
def test_the_number_of_drafts_is_nearly_the_best_one(share: float) -> None:
    """Each draft takes 1/12 of a step, as with a head of an 8B, and is right with the same probability."""
    draw = random.Random(0)
    right = [next(n for n in itertools.count() if draw.random() > share) for _ in range(4000)]
    counts = drafts_after(iter(right).__next__, len(right))
    tokens = sum(1 + min(pair) for pair in zip(right, counts, strict=True))
    rate = tokens / sum(1 + count / 12 for count in counts)
    best = max(sum(share**n for n in range(count + 1)) / (1 + count / 12) for count in range(1, 8))
    assert rate > 0.96 * best


def test_a_new_sequence_begins_with_the_average_of_others() -> None:
    guesses = Speculation(7, OneByOne())
    first = make_sequence([1, 2, 3, 4], max_tokens=1000)
    for _ in range(60):
        guesses.record(first, guesses.num_wanted(first, 1, 99), 2)
    assert guesses.num_wanted(make_sequence([1, 2, 3, 4], max_tokens=1000), 1, 99) == 4
    lookups = Speculation(7)
    for _ in range(60):
        lookups.record(first, 7, 2)
    assert lookups.num_wanted(first, 1, 99) == 7, "a look-up costs the same for any number"


def test_a_sequence_waits_for_its_newest_token_only_if_more_may_follow() -> None:
    guesses = Speculation(7)
    sequence = make_sequence([1, 2, 3, 4, 9, 1, 2, 3])
    assert not guesses.waits(sequence, 1), "its newest token is known"
    sequence.advance(1, samples=True)
    assert guesses.waits(sequence, 1)
    assert not guesses.waits(sequence, 65)
    assert guesses.draft(sequence, 1, 9) == []
    other = make_sequence([1, 2, 3, 4, 9, 1, 2, 4])
    other.advance(1, samples=True)
    assert not guesses.waits(other, 1)


def test_wrong_drafts_pause_a_sequence_longer_and_longer() -> None:
    guesses = Speculation(7)
    sequence = make_sequence([1, 1, 1, 1, 1], max_tokens=1000)
    pauses = []
    for _ in range(8):
        drafts = guesses.draft(sequence, 1, 9)
        assert drafts == [1] * 7
        guesses.record(sequence, 7, 0)
        before = len(sequence.tokens)
        while not guesses.draft(sequence, 1, 9):
            sequence.tokens.append(1)
            sequence.advance(1, samples=False)
        pauses.append(len(sequence.tokens) - before)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, MAX_PAUSE]
    guesses.record(sequence, 7, 2)
    guesses.record(sequence, 7, 0)
    assert guesses._histories[sequence].resume_at == len(sequence.tokens) + 2, "a right draft ends the series"
    assert guesses.snapshot().accepted_at == (1, 1, 0, 0, 0, 0, 0)
    guesses.forget(sequence)
    assert guesses._histories == {}


def test_waiting_in_vain_counts_as_a_wrong_draft() -> None:
    guesses = Speculation(7)
    sequence = make_sequence([1, 2, 3, 4, 9, 1, 2, 3])
    sequence.advance(1, samples=True)
    assert guesses.waits(sequence, 1)
    sequence.receive([8])
    assert guesses.draft(sequence, 1, 9) == []
    assert guesses._histories[sequence].failures == 1


@pytest.mark.parametrize(
    ("drafts", "draws", "accepted"), [([], [4], 0), ([4], [4, 5], 1), ([4, 5], [4, 6, 7], 1), ([4, 5], [3, 5, 7], 0)]
)
def test_drafts_are_accepted_up_to_the_first_wrong_one(drafts, draws, accepted) -> None:
    assert num_accepted(drafts, draws) == accepted


@settings(max_examples=examples(200), deadline=None)
@given(tokens=st.lists(st.integers(0, 2), max_size=60), cut=st.integers(0, 60))
def test_the_longest_of_the_newest_matches_continues(tokens, cut) -> None:
    index = NgramIndex()
    index.extend(tokens[:cut])
    assert index.extend(tokens)
    length = len(tokens)
    ends = [end for end in range(MIN_MATCH, length) if tokens[end - MIN_MATCH : end] == tokens[-MIN_MATCH:]]

    def match(end: int) -> int:
        size = MIN_MATCH
        while size < min(speculation.MAX_MATCH, end) and tokens[end - 1 - size] == tokens[length - 1 - size]:
            size += 1
        return size

    candidates = ends[-speculation.MAX_CANDIDATES :]
    if not candidates:
        assert index.continuation(tokens, 4) == []
        return
    best = max(candidates, key=lambda end: (match(end), end))
    repeated = (tokens[best:] * 4)[:4]
    assert index.continuation(tokens, 4) == repeated


def test_candidates_are_compared_as_slices() -> None:
    """The device waits for look-ups. A text that repeats itself has as many candidates as are compared, all of them long."""

    class Counting(list):
        reads = 0

        def __getitem__(self, place):
            self.reads += 1
            return super().__getitem__(place)

    tokens = Counting([*range(20)] * 10)
    index = NgramIndex()
    index.extend(tokens)
    tokens.reads = 0
    assert index.continuation(tokens, 7) == [*range(7)]
    assert tokens.reads < 5
    other = Counting([1, 2, 3, 4, 0, 9, 2, 3, 4, 7, 1, 2, 3, 4])
    index = NgramIndex()
    index.extend(other)
    other.reads = 0
    assert index.continuation(other, 2) == [0, 9], "the longer match, which is not the newest"
    assert other.reads < 12


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch) -> None:
    monkeypatch.setattr(speculation, "CATCH_UP", 10)
    index = NgramIndex()
    tokens = [*range(12), 0, 1, 2, *range(40, 50), 0, 1, 2]
    assert [index.extend(tokens) for _ in range(3)] == [False, False, True]
    assert index.continuation(tokens, 2) == [40, 41]


def test_an_index_has_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(speculation, "MAX_NGRAMS", 20)
    index = NgramIndex()
    for length in range(1, 100):
        index.extend(list(range(length)))
        assert len(index._newest) <= 20
    assert index.continuation([*range(99), 0, 1, 2], 2) == []
