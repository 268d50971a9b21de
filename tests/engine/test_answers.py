"""Several answers to one prompt, the likeliest of them, and the log-probabilities of the prompt itself."""

from __future__ import annotations

import asyncio

import pytest
import torch
from tiny_models import greedy, make_model

from fa_serve.engine import AsyncEngine, QueueFullError, SamplingParams

PROMPT = [5, 6, 7, 8, 9, 5, 6, 3, 4, 4, 4]


def text_book(prompt: list[int], count: int) -> list[tuple[float, list[int]]]:
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
    monkeypatch.setattr("fa_serve.engine.scheduler.PROMPT_ROWS", 6)
    engine = make_engine(**settings)
    engine._depth = depth
    long = [7, 9] * 20
    engine.generate([PROMPT], SamplingParams(max_tokens=1))  # in the prefix cache, which cannot tell log-probabilities
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
        for entry, (logprob, top) in zip(rest, text_book(prompt, count), strict=True):
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


def test_n_answers_are_those_of_n_requests_with_seeds_in_a_row(make_engine) -> None:
    three = SamplingParams(max_tokens=10, n=3, seed=2**63 - 2)
    both = make_engine().generate([PROMPT, [3]], [three, SamplingParams(max_tokens=4, seed=1)])
    assert [completion.index for completion in both] == [0, 1, 2, 0]
    seeds = [2**63 - 2, 2**63 - 1, -(2**63)]
    single = [make_engine().generate([PROMPT], SamplingParams(max_tokens=10, seed=seed))[0] for seed in seeds]
    assert [c.token_ids for c in both[:3]] == [c.token_ids for c in single]
    assert len({tuple(c.token_ids) for c in both[:3]}) == 3


def test_n_answers_share_the_pages_of_their_prompt(make_engine) -> None:
    engine = make_engine()
    engine.add_request("a", PROMPT * 3, SamplingParams(max_tokens=4, n=5))
    outputs = engine.step()
    assert sorted(output.index for output in outputs) == [0, 1, 2, 3, 4]
    # 33 tokens are 8 full pages of 4 and one of its own for each
    assert engine.stats().num_pages_used == 8 + 5
    assert sorted(output.num_cached_tokens for output in outputs) == [0, 32, 32, 32, 32]
    with pytest.raises(ValueError, match="unique"):
        engine.add_request("a", [1])
    assert {(o.request_id, o.index, o.finish_reason) for o in engine.abort("a")} == {("a", i, "abort") for i in range(5)}
    assert engine.stats().num_pages_used == 0
    assert engine.abort("a") == []
    engine.add_request("a", [1])
    engine.check_integrity()


def test_best_of_gives_the_likeliest_per_token(make_engine) -> None:
    values = {"max_tokens": 6, "seed": 3}
    all_six = make_engine().generate([PROMPT], SamplingParams(n=6, logprobs=0, **values))
    means = [sum(x.logprob for x in c.logprobs) / len(c.logprobs) for c in all_six]
    order = sorted(range(6), key=lambda i: -means[i])
    best = make_engine().generate([PROMPT], SamplingParams(n=2, best_of=6, prompt_logprobs=0, **values))
    assert [c.token_ids for c in best] == [all_six[i].token_ids for i in order[:2]]
    assert [c.index for c in best] == [0, 1]
    assert [c.logprobs for c in best] == [None, None]
    assert len(best[0].prompt_logprobs) == len(PROMPT)
    assert best[1].prompt_logprobs is None
    engine = make_engine()
    engine.add_request("a", PROMPT, SamplingParams(n=2, best_of=6, **values))
    outputs = [engine.step() for _ in range(6)]
    assert [len(x) for x in outputs] == [0] * 5 + [2], "nothing is known before all have ended"


def test_a_full_queue_takes_all_answers_or_none(make_engine) -> None:
    engine = make_engine(max_num_seqs=2, max_waiting=2)
    with pytest.raises(ValueError, match="n and best_of must be at most 4, what the queue holds, got 5"):
        engine.add_request("a", [1], SamplingParams(n=5))
    engine.add_request("a", [1], SamplingParams(n=2, max_tokens=2))
    with pytest.raises(QueueFullError):
        engine.add_request("b", [1], SamplingParams(best_of=3))
    completions = engine.generate([[1], [2], [3]], SamplingParams(n=2, best_of=3, max_tokens=3))
    assert [(c.prompt_token_ids, c.index) for c in completions] == [([p], i) for p in (1, 2, 3) for i in (0, 1)]


def test_streams_of_several_answers(make_engine) -> None:
    params = SamplingParams(max_tokens=8, n=3, seed=5)

    async def main() -> list:
        engine = AsyncEngine(make_engine())
        await engine.start()
        outputs = [output async for output in engine.generate(PROMPT, params, "a")]
        left = engine.generate(PROMPT, SamplingParams(max_tokens=200, n=3), "left")
        await anext(left)
        await engine.abort("left")
        ends = [output async for output in left if output.finished]
        assert {(end.index, end.finish_reason) for end in ends} == {(i, "abort") for i in range(3)}
        early = engine.generate(PROMPT, SamplingParams(max_tokens=200, n=3), "early")
        await anext(early)
        await early.aclose()
        [output async for output in engine.generate([1], SamplingParams(max_tokens=2), "b")]
        assert engine.stats().num_pages_used == 0
        await engine.shutdown()
        return outputs

    outputs = asyncio.run(main())
    for index, whole in enumerate(make_engine().generate([PROMPT], params)):
        mine = [output for output in outputs if output.index == index]
        assert [token for output in mine for token in output.token_ids] == whole.token_ids
        assert [output.finished for output in mine] == [False] * (len(mine) - 1) + [True]
        assert "".join(output.text for output in mine) == whole.text


def test_the_time_in_the_queue(make_engine, monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", lambda: now[0])
    engine = make_engine(max_num_seqs=1)
    for name in "ab":
        engine.add_request(name, [1], SamplingParams(max_tokens=2))
    times = {}
    for _ in range(4):
        now[0] += 1.5
        times |= {output.request_id: output.queue_time for output in engine.step()}
    assert times == {"a": 1.5, "b": 4.5}
    engine.add_request("c", [1])
    assert [output.queue_time for output in engine.abort("c")] == [None]


def test_ended_requests_are_not_kept_for_their_deadlines(make_engine) -> None:
    engine = make_engine()
    for i in range(300):
        engine.add_request(str(i), [1], timeout=1000.0)
        engine.abort(str(i))
        engine.step()
    assert len(engine._deadlines) <= 65
