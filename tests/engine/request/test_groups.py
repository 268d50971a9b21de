"""Several answers to one prompt, and the most likely of them."""

from __future__ import annotations

import asyncio

import pytest

from fa_serve.engine import AsyncEngine, QueueFullError, SamplingParams

PROMPT = [5, 6, 7, 8, 9, 5, 6, 3, 4, 4, 4]


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
    # 33 tokens are 8 full pages of 4, which are shared, and one more page for each answer
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
    with pytest.raises(ValueError, match="n must be at most 4, the capacity of the queue, got 5"):
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
