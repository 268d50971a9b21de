"""What a trainer gets, and when it gets an exception instead."""

from __future__ import annotations

import pickle

import pytest

from fa_serve.engine import RequestError, RequestOutput, Rollout, RolloutError, RolloutGroup, TokenLogprob
from fa_serve.spec import FaServeError


def test_a_rollout_has_what_each_step_gave_with_the_version_of_its_weights() -> None:
    rollout = Rollout(top_logprobs=[])
    first = [TokenLogprob(7, -0.5, [(7, -0.5)]), TokenLogprob(8, -1.5, [(9, -0.25)])]
    rollout.absorb(RequestOutput("0", [1], text="ab", token_ids=[7, 8], logprobs=first), version=2)
    assert rollout.finish_reason is None
    last = [TokenLogprob(9, -2.0, [(9, -2.0)])]
    rollout.absorb(
        RequestOutput("0", [1], text="c", token_ids=[9], logprobs=last, finished=True, finish_reason="length"), version=3
    )
    assert rollout == Rollout(
        token_ids=[7, 8, 9],
        logprobs=[-0.5, -1.5, -2.0],
        top_logprobs=[[(7, -0.5)], [(9, -0.25)], [(9, -2.0)]],
        weight_versions=[2, 2, 3],
        text="abc",
        finish_reason="length",
    )


def test_a_group_with_a_failed_answer_is_not_whole() -> None:
    good = Rollout(token_ids=[5], finish_reason="stop")
    error = RequestError("step_failed", "the step failed: RuntimeError: no memory")
    bad = Rollout(token_ids=[5, 6], finish_reason="error", error=error)
    RolloutGroup(3, [1], [good, Rollout(finish_reason="abort")]).require_whole()
    group = RolloutGroup(4, [1], [good, bad])
    assert group.finished
    with pytest.raises(RolloutError) as caught:
        group.require_whole()
    told = "answer 1 to prompt 4 has ended after 2 tokens with an error: the step failed: RuntimeError: no memory"
    assert str(caught.value) == told
    assert (caught.value.group, caught.value.error) == (group, error)
    assert isinstance(caught.value, FaServeError)


def test_the_error_comes_out_of_another_process() -> None:
    """Such as an actor of Ray. For an error that cannot be read, its caller gets a TypeError."""
    error = RequestError("step_failed", "no memory")
    group = RolloutGroup(4, [1], [Rollout(finish_reason="error", error=error)])
    with pytest.raises(RolloutError) as caught:
        group.require_whole()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.group, again.error) == (str(caught.value), group, error)
