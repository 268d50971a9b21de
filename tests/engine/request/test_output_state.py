"""What a client gets from one sequence: text, log-probabilities of the prompt, the time in the queue."""

from __future__ import annotations

import pytest
import torch
from tiny_models import greedy, make_model

from fa_serve.engine import RequestOutput, SamplingParams, StructuredOutput
from fa_serve.engine.request.detokenizer import TextStream
from fa_serve.engine.request.output_state import OutputState
from fa_serve.engine.request.request import Request
from fa_serve.engine.request.stop_strings import StopStrings
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.structured.grammars import Grammars

PROMPT = [5, 6, 7, 8, 9, 5, 6, 3, 4, 4, 4]


def make_state(tokenizer, **params) -> OutputState:
    request = Request("a", PROMPT, SamplingParams(**params), max_tokens=20)
    stream = TextStream(tokenizer.backend_tokenizer, PROMPT, stop=StopStrings(request.params.stop))
    return OutputState(SequenceState(request), stream)


def test_a_stop_string_completes_an_answer_after_min_tokens(tokenizer) -> None:
    state = make_state(tokenizer, stop=("q",), min_tokens=1)
    letter = tokenizer.backend_tokenizer.token_to_id("q")
    state.sequence.tokens.append(letter)
    assert (state.push([letter]), state.complete) == (("q", [letter]), False), "min_tokens is not exceeded"
    state.sequence.tokens.append(letter)
    state.sequence.tokens.append(letter)
    assert (state.push([letter] * 2), state.complete) == (("", [letter]), True), "the second one is too much"
    assert state.flush() == ""
    assert state.output("", [letter], None).stop_string is None, "the sequence has not ended yet"
    state.sequence.finish("stop")
    assert state.output("", [letter], None).stop_string == "q"


def test_a_grammar_completes_an_answer_before_the_tokens_end(tokenizer) -> None:
    ends = tokenizer.eos_token_id
    grammars = Grammars(tokenizer, len(tokenizer), [ends])
    state = make_state(tokenizer)
    state.matcher = grammars.matcher(StructuredOutput(regex="qq?z"))
    q, z = (tokenizer.backend_tokenizer.token_to_id(letter) for letter in "qz")
    assert state.follow([q]) == 0, "it goes on"
    assert state.follow([q, z, q]) == 2, "the third token comes after the end"


def plain_loop(prompt: list[int], count: int) -> list[tuple[float, list[int]]]:
    with torch.no_grad():
        logprobs = make_model()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return [(row[token].item(), row.topk(count).indices.tolist()) for row, token in zip(logprobs, prompt[1:], strict=False)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 9}, {"num_pages": 15, "max_model_len": 56, "max_num_batched_tokens": 17}],
    ids=["plain", "chunked", "preempted"],
)
def test_prompt_logprobs_are_those_of_the_model(make_engine, monkeypatch, depth, settings) -> None:
    monkeypatch.setattr("fa_serve.engine.scheduler.chunk_lengths.MAX_PROMPT_LOGITS", 6)
    engine = make_engine(**settings)
    engine._steps.depth = depth
    long = [7, 9] * 20
    engine.generate([PROMPT], SamplingParams(max_tokens=1))  # fills the prefix cache, which keeps no log-probabilities
    prompts = [PROMPT, [3, 4], long, [11], PROMPT, long]
    counts = [2, None, 0, 1, 5, 3]
    asked = [SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=count) for count in counts]
    completions = engine.generate(prompts, asked)
    for prompt, count, completion in zip(prompts, counts, completions, strict=True):
        assert completion.token_ids == greedy(make_model(), prompt, 9)
        if count is None:
            assert completion.prompt_logprobs is None
            continue
        first, *rest = completion.prompt_logprobs
        assert first is None
        assert [entry.token_id for entry in rest] == prompt[1:]
        for entry, (logprob, top) in zip(rest, plain_loop(prompt, count), strict=True):
            assert entry.logprob == pytest.approx(logprob, abs=1e-3)
            assert [token for token, _ in entry.top] == top
    if "num_pages" in settings:
        assert engine.stats().num_preemptions > 0
    engine.check_integrity()


def test_prompt_logprobs_come_once_with_the_first_token(make_engine) -> None:
    engine = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=3, prompt_logprobs=0))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]


def test_the_time_in_the_queue(make_engine, monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", lambda: now[0])
    engine = make_engine(max_num_seqs=1)
    for name in "ab":
        engine.add_request(name, [1], SamplingParams(max_tokens=2))
    times = {}
    for _ in range(4):
        now[0] += 1.5
        times |= {output.request_id: output.times for output in engine.step() if output.finished}
    assert {name: each.queue for name, each in times.items()} == {"a": 1.5, "b": 4.5}
    engine.add_request("c", [1])
    now[0] += 0.5
    [aborted] = engine.abort("c")
    assert (aborted.times.queue, aborted.times.begun, aborted.times.until) == (0.5, False, now[0])


def test_the_parts_of_the_time_add_up(make_engine, monkeypatch) -> None:
    """With a clock that moves at every look, and a structured output whose masks take time."""
    now = [10.0]

    def tick() -> float:
        now[0] += 0.25
        return now[0]

    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", tick)
    engine = make_engine(max_num_batched_tokens=8)
    structured = StructuredOutput(regex="[ab]{4}")
    engine.add_request("a", PROMPT, SamplingParams(structured=structured))
    engine.add_request("b", PROMPT * 2, SamplingParams(max_tokens=5))
    outputs: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    while engine.has_unfinished():
        for output in engine.step():
            outputs[output.request_id].append(output)
    for name in "ab":
        first, *rest, last = outputs[name]
        assert all(output.times is None for output in rest), "only the first and the last output carry times"
        assert (first.times.num_steps, first.times.decode) == (1, 0.0)
        times = last.times
        parts = (times.queue, times.prompt, times.decode, times.masks, times.detokenise)
        assert sum(parts) == times.until - times.arrival
        assert min(parts) > 0
        assert times.num_steps == len(outputs[name])
        assert times.decode + times.masks >= times.longest_step > 0


@pytest.mark.parametrize("keep_pages", [False, True])
@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_prompt_logprobs_are_those_of_one_version_of_the_weights(make_engine, num_steps, keep_pages, preempted) -> None:
    """The weights change when a part of the prompt is computed, by one step or by several."""
    prompt = [7, 9, 11] * 8
    model = make_model()
    changed = {name: parameter * 1.5 for name, parameter in make_model().named_parameters()}
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0)
    engine = make_engine(model=model, max_num_batched_tokens=9)
    before = engine.generate([prompt], params)[0]
    engine.add_request("a", prompt, params)
    for _ in range(num_steps):
        assert not engine.step()
    sequence = engine._scheduler.sequences["a"]
    assert 0 < sequence.num_computed < len(prompt)
    if preempted:
        engine.drain()
        engine._scheduler._requeue(sequence)
    engine.update_weights(changed.items(), keep_pages=keep_pages)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    after = engine.generate([prompt], params)[0]
    found = [entry.logprob for entry in outputs[0].prompt_logprobs[1:]]
    assert found == pytest.approx([entry.logprob for entry in after.prompt_logprobs[1:]], abs=1e-4)
    assert found != pytest.approx([entry.logprob for entry in before.prompt_logprobs[1:]], abs=1e-2)
    assert [token for output in outputs for token in output.token_ids] == after.token_ids
    engine.check_integrity()


def test_pages_are_kept_once_the_prompt_has_its_log_probabilities(make_engine) -> None:
    engine = make_engine(model=make_model())
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=4, prompt_logprobs=0))
    while not engine.step():
        pass
    sequence = engine._scheduler.sequences["a"]
    engine.update_weights(keep_pages=True)
    assert sequence.num_computed >= len(PROMPT)
    while engine.has_unfinished():
        engine.step()
