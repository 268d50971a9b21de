"""All unfinished answers: under which ids clients know them, what ends them, and what is taken in once."""

from __future__ import annotations

from typing import Any

import pytest

from fa_serve.engine import SamplingParams, TokenLogprob
from fa_serve.engine.request.answers import Answers
from fa_serve.engine.request.groups import members
from fa_serve.engine.request.request import Request
from fa_serve.engine.runner.results import StepResult
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.stats import Counters

PROMPT = [5, 6, 7, 8, 9, 5, 6, 3, 4, 4, 4]


class Scheduled:
    """Answers without an engine: its sequences run as soon as they are added."""

    def __init__(self, tokenizer: Any) -> None:
        self.counters = Counters()
        self.stopped: list[tuple[SequenceState, int]] = []
        self.answers = Answers(tokenizer, self.counters, self.stop)

    def stop(self, sequence: SequenceState, num_later: int) -> None:
        self.stopped.append((sequence, num_later))
        sequence.drop_last(num_later)
        sequence.finish("stop")

    def add(self, name: str, **params: Any) -> list[SequenceState]:
        asked = SamplingParams(**params)
        sequences = [SequenceState(Request(each, PROMPT, own, max_tokens=20)) for each, own in members(name, asked)]
        self.answers.add(name, asked, sequences, None)
        return sequences


@pytest.fixture
def scheduled(tokenizer: Any) -> Scheduled:
    return Scheduled(tokenizer)


def test_an_id_is_in_use_until_all_answers_have_ended(scheduled: Scheduled) -> None:
    one, two = scheduled.add("a", n=2)
    names = [one.request.request_id, two.request.request_id]
    assert scheduled.answers.request_ids("a") == names
    assert list(scheduled.answers.states) == names
    assert all(name in scheduled.answers for name in ["a", *names])
    for index, sequence in enumerate((one, two)):
        assert "a" in scheduled.answers
        sequence.finish("abort")
        [output] = scheduled.answers.merge([scheduled.answers.output(sequence)])
        assert (output.request_id, output.index, output.finish_reason) == ("a", index, "abort")
    assert not any(name in scheduled.answers for name in ["a", *names])
    assert scheduled.answers.sequences() == []


def test_a_stop_string_ends_the_sequence_at_its_token(scheduled: Scheduled, tokenizer: Any) -> None:
    [sequence] = scheduled.add("a", stop=("q",))
    q, z = (tokenizer.backend_tokenizer.token_to_id(letter) for letter in "qz")
    sequence.tokens += [z, q, z, z]
    output = scheduled.answers.output(sequence, [z, q, z, z])
    assert scheduled.stopped == [(sequence, 2)]
    assert (output.text, output.token_ids, output.finish_reason, output.stop_string) == ("z", [z, q], "stop", "q")
    assert (scheduled.counters.num_prompt_tokens, scheduled.counters.num_output_tokens) == (len(PROMPT), 2)
    assert "a" not in scheduled.answers


def test_prompt_logprobs_that_come_twice_are_taken_once(scheduled: Scheduled) -> None:
    [sequence] = scheduled.add("a", prompt_logprobs=0)
    entries = [TokenLogprob(token, -1.0, []) for token in PROMPT[1:]]
    for start, end in (1, 5), (1, 7), (7, 11):  # the second time computed again after a preemption
        scheduled.answers.add_prompt_logprobs(StepResult([], prompt_logprobs=[(sequence, start, entries[start - 1 : end - 1])]))
    ended = SequenceState(sequence.request)  # an earlier one of this name
    scheduled.answers.add_prompt_logprobs(StepResult([], prompt_logprobs=[(ended, 11, entries)]))
    assert scheduled.answers.states["a"].prompt_logprobs == [None, *entries]
