"""Results on their way to the host: which row belongs to which sequence."""

from __future__ import annotations

from typing import Any, cast

import torch

from fa_serve.engine import SamplingParams, TokenLogprob
from fa_serve.engine.request.request import Request
from fa_serve.engine.runner.results import LaunchedStep, PendingResult, PromptSpan, StepQueue
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.scheduler.step_cost import ImageSeconds


def make_sequence(**params: object) -> SequenceState:
    return SequenceState(Request("a", [5, 6, 7], SamplingParams(**params), 8))


def test_log_probabilities_find_their_sequences() -> None:
    few = make_sequence(logprobs=1)
    many = make_sequence(logprobs=2)
    prompt = make_sequence(prompt_logprobs=1)
    logprobs = (torch.tensor([-1.0, -2.0]), torch.tensor([[-0.5, -1.0], [-2.0, -3.0]]), torch.tensor([[8, 9], [7, 6]]))
    prompt_logprobs = (torch.tensor([-4.0, -5.0]), torch.tensor([[-1.5], [-2.5]]), torch.tensor([[3], [4]]))
    pending = PendingResult(
        torch.tensor([9, 4, 7]), [(0, few), (2, many)], logprobs, [PromptSpan(prompt, 1, 3)], prompt_logprobs
    )
    result = pending.read()
    assert result.tokens == [9, 4, 7]
    assert result.logprobs == {
        few: [TokenLogprob(9, -1.0, [(8, -0.5)])],
        many: [TokenLogprob(7, -2.0, [(7, -2.0), (6, -3.0)])],
    }
    entries = [TokenLogprob(6, -4.0, [(3, -1.5)]), TokenLogprob(7, -5.0, [(4, -2.5)])]
    assert result.prompt_logprobs == [(prompt, 1, entries)]


def test_a_step_without_log_probabilities_has_only_tokens() -> None:
    result = PendingResult(torch.tensor([9, 4])).read()
    assert (result.tokens, result.logprobs, result.prompt_logprobs) == ([9, 4], {}, [])


def test_a_sequence_with_drafts_has_several_rows() -> None:
    sequence = make_sequence(logprobs=0)
    logprobs = (torch.tensor([-1.0, -2.0]), torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.int64))
    result = PendingResult(torch.tensor([3, 9, 4]), [(1, sequence), (2, sequence)], logprobs).read()
    assert result.logprobs == {sequence: [TokenLogprob(9, -1.0, []), TokenLogprob(4, -2.0, [])]}


class Watch:
    """Images that have taken so long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self) -> float:
        return self._seconds


def test_images_count_for_the_step_beside_which_they_are_encoded() -> None:
    """With a step ahead, the device begins with those of the second step while it computes the first one."""
    steps = StepQueue(depth=1)

    def launch(seconds: float | None) -> LaunchedStep:
        watch: Any = None if seconds is None else Watch(seconds)
        steps.add(LaunchedStep(cast(Any, None), cast(Any, None), 0.0, False, 0.0, watch, []))
        return steps.launched[-1]

    first = launch(None)
    launch(0.25)
    launch(0.5)
    assert steps.seconds(first)[1] == ImageSeconds(own=0.0, beside=0.75)
    steps.launched.popleft()
    alone = steps.launched.popleft()
    assert steps.seconds(alone)[1] == ImageSeconds(own=0.25, beside=0.0)
    steps.launched.clear()
    assert steps.seconds(launch(0.125))[1] == ImageSeconds(own=0.125, beside=0.125), "nothing else is in flight"
