"""Increments of answers: joining them, sending them to another process, and completions."""

from __future__ import annotations

import pickle
from dataclasses import fields

from tiny_models import greedy, make_model

from fa_serve.engine import Completion, RequestError, RequestOutput, SamplingParams, SequenceTimes, TokenLogprob

PROMPT = [5, 6, 7, 8, 9, 5, 6]
PLAIN = greedy(make_model(), PROMPT, 16)
TIMES = SequenceTimes(arrival=3.0, until=4.5, queue=0.25, prompt=1.25)
FIRST = RequestOutput("a", [1, 2], "he", [7], [TokenLogprob(7, -0.5, [(7, -0.5)])], num_prompt_tokens=2, num_output_tokens=1)
LAST = RequestOutput(
    "a", [1, 2], "llo", [8, 9], None, True, "error", RequestError("timeout", "too late"), 2, 3, 1, 0, None, TIMES, "END"
)


def test_an_output_survives_pickling_with_every_field() -> None:
    for output in (FIRST, LAST):
        again = pickle.loads(pickle.dumps(output))
        assert {f.name: getattr(again, f.name) for f in fields(output)} == {
            f.name: getattr(output, f.name) for f in fields(output)
        }


def test_a_completion_is_the_sum_of_its_outputs() -> None:
    whole = pickle.loads(pickle.dumps(FIRST))
    whole.absorb(LAST)
    assert (whole.text, whole.token_ids, whole.times, whole.num_output_tokens) == ("hello", [7, 8, 9], TIMES, 3)
    assert whole.stop_string == "END"
    completion = Completion.of(whole)
    assert (completion.text, completion.finish_reason, completion.error.code) == ("hello", "error", "timeout")


def test_logprobs_keep_step_with_joined_outputs(make_engine) -> None:
    engine = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=6, temperature=0.0, logprobs=1))
    outputs = [output for _ in range(6) for output in engine.step()]
    whole = outputs[0]
    for output in outputs[1:]:
        whole.absorb(output)
    assert [x.token_id for x in whole.logprobs] == whole.token_ids == PLAIN[:6]
