"""Decoding through fixed buffers gives the tokens of eager steps. What records kernels is replaced by a plain call: the rest,
buffers, padding and sizes, is what runs on a GPU."""

from __future__ import annotations

import pytest
from tiny_models import greedy, make_model

from fa_serve.engine import SamplingParams, cuda_graphs
from fa_serve.engine.cuda_graphs import batch_sizes

PROMPTS = [[3, 4, 5], [6] * 9, [7, 8], [9], [10, 11, 12, 13]]


@pytest.fixture
def recorded(monkeypatch) -> list[int]:
    """The number of kernels' worth of calls so far, by replay."""
    calls: list[int] = []

    def record(function, pool):
        def replay():
            calls.append(1)
            function()

        return replay, pool or (0, 1)

    monkeypatch.setattr(cuda_graphs, "record", record)
    return calls


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_replayed_steps_give_the_same_tokens(make_engine, recorded, family) -> None:
    engine = make_engine(family, max_num_seqs=5)
    engine._runner.make_graphs()
    assert list(engine._runner._graphs._replays) == [5], "the largest first"
    params = [SamplingParams(max_tokens=4 * i, temperature=0.0) for i in range(1, 6)]
    completions = engine.generate(PROMPTS, params)
    reference = make_model(family)
    expected = [greedy(reference, p, q.max_tokens) for p, q in zip(PROMPTS, params, strict=True)]
    assert [c.token_ids for c in completions] == expected
    # all prompts in one eager step, then 3, 4, 4, 4 and 4 steps with 5 to 1 sequences
    assert len(recorded) == engine.stats().num_steps - 1 == 19
    assert sorted(engine._runner._graphs._replays) == [1, 2, 4, 5]
    engine.check_integrity()


def test_sampling_and_logprobs_are_the_same(make_engine, recorded) -> None:
    params = [SamplingParams(max_tokens=9, seed=i, top_p=0.9, presence_penalty=0.5, logprobs=2) for i in range(5)]
    eager, graphs = make_engine(), make_engine()
    graphs._runner.make_graphs()
    for ours, theirs in zip(graphs.generate(PROMPTS, params), eager.generate(PROMPTS, params), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [x.logprob for x in ours.logprobs] == pytest.approx([x.logprob for x in theirs.logprobs], abs=1e-4)
    assert recorded


def test_a_chunk_of_one_token_is_not_taken_for_decoding(make_engine, recorded) -> None:
    engine = make_engine(max_num_batched_tokens=2)
    engine._runner.make_graphs()
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=5, temperature=0.0))
    assert [c.token_ids for c in completions] == [greedy(make_model(), p, 5) for p in PROMPTS]


def test_a_model_that_cannot_be_recorded_stays_eager(make_engine, monkeypatch, caplog) -> None:
    def record(function, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "record", record)
    engine = make_engine()
    engine._runner.make_graphs()
    assert "decoding without CUDA graphs: operation not permitted" in caplog.text
    assert engine.generate([[3, 4]], SamplingParams(max_tokens=5, temperature=0.0))[0].token_ids == greedy(
        make_model(), [3, 4], 5
    )


def test_a_size_that_cannot_be_recorded_later_turns_graphs_off(make_engine, recorded, monkeypatch, caplog) -> None:
    engine = make_engine()
    engine._runner.make_graphs()
    monkeypatch.setattr(cuda_graphs, "record", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    tokens = engine.generate([[3, 4]], SamplingParams(max_tokens=5, temperature=0.0))[0].token_ids
    assert tokens == greedy(make_model(), [3, 4], 5)
    assert "decoding without CUDA graphs from now on: no memory" in caplog.text


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (24, [1, 2, 4, 8, 16, 24])]
)
def test_batch_sizes(largest, sizes) -> None:
    assert batch_sizes(largest) == sizes
