"""Steps through fixed buffers give the tokens of eager steps.

The fixture `replays` replaces a capture by a plain call. Everything else, buffers, padding and sizes, is what runs on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import greedy, make_model, random_prompts

from fa_serve.engine import EngineConfig, EngineDeadError, SamplingParams
from fa_serve.engine.parallel import leader
from fa_serve.engine.runner import cuda_graphs
from fa_serve.engine.runner.cuda_graphs import batch_sizes
from fa_serve.engine.runner.padded_steps import Shape

PROMPTS = [[3, 4, 5], [6] * 9, [7, 8], [9], [10, 11, 12, 13]]


def decoding(engine) -> list[tuple[int, int]]:
    """(sequences, keys) of the captured decoding steps, in order."""
    return [(x.batch, x.keys) for x in engine._runner._graphs._replays if x.queries == 1]


def prompts(engine) -> list[tuple[int, int, int]]:
    """(tokens, sequences, keys) of the captured steps with prompts, in order."""
    return [(x.tokens, x.batch, x.keys) for x in engine._runner._graphs._replays if x.queries > 1]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_replayed_steps_give_the_same_tokens(make_engine, replays, family) -> None:
    engine = make_engine(family, max_num_seqs=5)
    engine._runner.make_graphs()
    assert decoding(engine) == [(5, 256)], "the largest first"
    params = [SamplingParams(max_tokens=4 * i, temperature=0.0) for i in range(1, 6)]
    completions = engine.generate(PROMPTS, params)
    reference = make_model(family)
    expected = [greedy(reference, p, q.max_tokens) for p, q in zip(PROMPTS, params, strict=True)]
    assert [c.token_ids for c in completions] == expected
    # One eager step computes all prompts. Then 3, 4, 4, 4 and 4 steps have 5 to 1 sequences; the first of sizes 4, 2 and 1
    # is captured.
    assert engine.stats().num_steps - 1 == 19
    assert len(replays) == 19 - 3
    assert sorted(decoding(engine)) == [(1, 256), (2, 256), (4, 256), (5, 256)]
    assert not prompts(engine)
    engine.check_integrity()


def test_sampling_and_logprobs_are_the_same(make_engine, replays) -> None:
    params = [SamplingParams(max_tokens=9, seed=i, top_p=0.9, presence_penalty=0.5, logprobs=2) for i in range(5)]
    eager = make_engine()
    graphs = make_engine()
    graphs._runner.make_graphs()
    for ours, theirs in zip(graphs.generate(PROMPTS, params), eager.generate(PROMPTS, params), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [x.logprob for x in ours.logprobs] == pytest.approx([x.logprob for x in theirs.logprobs], abs=1e-4)
    assert replays


def test_a_chunk_of_one_token_is_not_taken_for_decoding(make_engine, replays) -> None:
    engine = make_engine(max_num_batched_tokens=2)
    engine._runner.make_graphs()
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=5, temperature=0.0))
    assert [c.token_ids for c in completions] == [greedy(make_model(), p, 5) for p in PROMPTS]


def test_a_model_that_cannot_be_replays_stays_eager(make_engine, monkeypatch, caplog) -> None:
    def capture(function, pool, model):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    engine = make_engine()
    engine._runner.make_graphs()
    assert "decoding runs without CUDA graphs, because the first capture failed: operation not permitted" in caplog.text
    assert engine.generate([[3, 4]], SamplingParams(max_tokens=5, temperature=0.0))[0].token_ids == greedy(
        make_model(), [3, 4], 5
    )


def test_recording_without_memory_is_tried_again_with_an_empty_cache(make_engine, replays, monkeypatch) -> None:
    capture = cuda_graphs.capture
    emptied = []

    def scarce(function, pool, model):
        if not emptied:
            raise torch.OutOfMemoryError("the cache holds it all")
        return capture(function, pool, model)

    monkeypatch.setattr(cuda_graphs, "capture", scarce)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    engine = make_engine()
    engine._runner.make_graphs()
    tokens = engine.generate([[3, 4]], SamplingParams(max_tokens=5, temperature=0.0))[0].token_ids
    assert tokens == greedy(make_model(), [3, 4], 5)
    assert (len(emptied), len(replays)) == (1, 3), "the first of 4 decoding steps records"


def test_a_size_that_cannot_be_replays_later_turns_graphs_off(make_engine, replays, monkeypatch, caplog) -> None:
    engine = make_engine()
    engine._runner.make_graphs()
    monkeypatch.setattr(cuda_graphs, "capture", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    tokens = engine.generate([[3, 4]], SamplingParams(max_tokens=5, temperature=0.0))[0].token_ids
    assert tokens == greedy(make_model(), [3, 4], 5)
    assert "steps run without CUDA graphs from now on, because a capture or a replay failed: no memory" in caplog.text


def test_there_are_graphs_for_a_few_lengths(make_engine, replays, monkeypatch) -> None:
    monkeypatch.setattr(cuda_graphs, "KEY_LENGTHS", (8, 20, 256))
    engine = make_engine(max_num_seqs=2)
    graphs = engine._runner
    reference = make_model()
    graphs.make_graphs()
    seen: list[tuple[tuple[int, int], int]] = []
    forward = graphs._graphs._forward

    def watched(inputs):
        seen.append((tuple(inputs.paged.block_table.shape), inputs.paged.max_seqlen_k))
        return forward(inputs)

    graphs._graphs._forward = watched
    asked = [[3, 4, 5], [6, 7]]
    completions = engine.generate(asked, [SamplingParams(max_tokens=n, temperature=0.0) for n in (9, 30)])
    assert [c.token_ids for c in completions] == [greedy(reference, p, n) for p, n in zip(asked, (9, 30), strict=True)]
    assert graphs._graphs.key_lengths == [8, 20, 256], "the longest there can be is one of them"
    assert sorted(decoding(engine)) == [(1, 20), (1, 256), (2, 8), (2, 20), (2, 256)]
    assert set(seen) == {((n, -(-k // 4)), k) for n, k in ((1, 20), (1, 256), (2, 8), (2, 20))}, "as wide as the length"


@pytest.mark.parametrize("room", [448, 1 << 20])
def test_a_step_that_the_block_has_no_room_for_is_eager(make_engine, replays, room) -> None:
    engine = make_engine()
    engine._runner.make_graphs()
    engine._runner._graphs.block = engine._runner._graphs.block[:room]
    params = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={7: 100.0})
    assert [c.token_ids for c in engine.generate(PROMPTS, params)] == [[7] * 9] * 5
    assert bool(replays) == (room > 448)


@pytest.mark.parametrize(
    ("largest", "sizes"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (24, [1, 2, 4, 8, 16, 24])]
)
def test_batch_sizes(largest, sizes) -> None:
    assert batch_sizes(largest) == sizes


@pytest.mark.slow
def test_what_is_missing_is_captured_ahead(make_engine, replays, monkeypatch) -> None:
    monkeypatch.setattr(cuda_graphs, "KEY_LENGTHS", (16,))
    monkeypatch.setattr(cuda_graphs, "PROMPT_BATCHES", (2,))
    engine = make_engine(max_num_seqs=6, max_num_batched_tokens=700)
    engine._runner.make_graphs()
    graphs = engine._runner._graphs
    cached = engine._runner.kv_caches[0][0]
    cached.normal_()
    before = cached.clone()
    steps = 0
    while engine.prepare_one():
        steps += 1
    in_advance = [64, 128, 192, 256, 320, 384, 448, 512, 704]
    assert steps == 7 + 4 * len(in_advance) - 1, "the largest came before another"
    assert graphs.num_captures == 8 + 4 * len(in_advance) == len(graphs._replays)
    shapes = [(6, 256), (1, 16), (2, 16), (4, 16), (6, 16), (1, 256), (2, 256), (4, 256)]
    assert decoding(engine) == shapes, "the largest at the start, then few keys first"
    first, *others = prompts(engine)
    assert first == (704, 6, 256), "so that the memory pool never grows later"
    sizes = [(n, batch, keys) for keys in (16, 256) for batch in (2, 6) for n in in_advance]
    assert others == [size for size in sizes if size != first]
    assert torch.equal(cached, before)
    assert not engine.prepare_one(), "nothing is left"
    assert not replays, "captured, not replayed"
    completions = engine.generate(PROMPTS, SamplingParams(max_tokens=9, temperature=0.0))
    assert [c.token_ids for c in completions] == [greedy(make_model(), p, 9) for p in PROMPTS]
    assert len(replays) == 9, "every step"


@pytest.mark.slow
def test_a_step_that_nobody_prepared_takes_a_graph_with_a_little_padding_or_none(make_engine, replays, monkeypatch) -> None:
    monkeypatch.setattr(cuda_graphs, "KEY_LENGTHS", (16,))
    engine = make_engine(max_num_seqs=40)
    engine._runner.make_graphs()
    graphs = engine._runner._graphs

    def found(batch: int) -> tuple[int, int] | None:
        shape = graphs.shape_for(batch, batch, 10, decoding=True)
        return shape and (shape.batch, shape.keys)

    assert found(33) == (40, 16), "which the step captures, as long as nobody prepares it"
    assert found(30) == (32, 16)
    assert engine.prepare_one()
    assert found(33) == (40, 256)
    assert found(30) == (40, 256), "a quarter more"
    assert found(24) is None, "which would be two thirds more"
    before = graphs.num_captures
    asked = [[3 + i, 4] for i in range(33)]
    lengths = [4] * 32 + [7]
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in lengths]
    completions = engine.generate(asked, params)
    assert [c.token_ids for c in completions] == [greedy(make_model(), p, n) for p, n in zip(asked, lengths, strict=True)]
    assert graphs.num_captures == before, "no step waits for a capture"
    assert len(replays) == 3 + 3, "of one sequence as well, which was captured ahead"


def test_prompts_that_come_again_are_captured_in_the_next_idle_moment(make_engine, replays) -> None:
    engine = make_engine(max_num_batched_tokens=1200, prefix_caching=False, num_pages=1000)
    engine._runner.make_graphs()
    while engine.prepare_one():
        pass
    graphs = engine._runner._graphs
    captured = graphs.num_captures
    for _ in range(3):
        engine.generate([[3] * 200, [4] * 200, [5] * 180], SamplingParams(max_tokens=1, temperature=0.0))
    assert (graphs.num_captures, len(replays)) == (captured, 0), "580 tokens have no graph yet"
    assert engine.prepare_one()
    assert not engine.prepare_one()
    assert prompts(engine)[-1][0] == 640
    engine.generate([[3] * 200, [4] * 200, [5] * 180], SamplingParams(max_tokens=1, temperature=0.0))
    assert (graphs.num_captures, len(replays)) == (captured + 1, 1)


def test_with_a_request_nothing_is_prepared(make_engine, replays) -> None:
    engine = make_engine()
    engine._runner.make_graphs()
    engine.add_request("one", [3, 4], SamplingParams(max_tokens=2))
    assert not engine.prepare_one()
    assert len(engine._runner._graphs._replays) == 1
    assert not make_engine().prepare_one(), "without graphs there is nothing to prepare"


@pytest.mark.parametrize("error", [RuntimeError("no memory"), Exception("no memory")], ids=["torch", "triton"])
def test_a_capture_that_fails_in_an_idle_moment_is_the_last_one(make_engine, replays, monkeypatch, caplog, error) -> None:
    engine = make_engine()
    engine._runner.make_graphs()
    capture = cuda_graphs.capture
    monkeypatch.setattr(cuda_graphs, "capture", lambda *_: (_ for _ in ()).throw(error))
    while engine.prepare_one():
        pass
    assert "no more graphs are captured in advance, because a capture failed: no memory" in caplog.text
    monkeypatch.setattr(cuda_graphs, "capture", capture)
    assert not engine.prepare_one()
    assert engine.generate([[3, 4]], SamplingParams(max_tokens=5, temperature=0.0))[0].token_ids == greedy(
        make_model(), [3, 4], 5
    )
    assert not replays, "steps run eagerly and do not wait for another capture"


def generate_twice(engine) -> None:
    engine.generate(PROMPTS, SamplingParams(max_tokens=1))
    engine.generate(PROMPTS, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("before", "call"),
    [
        ("nothing", lambda engine: engine._runner.make_graphs()),
        ("make_graphs", lambda engine: engine.prepare_one()),
        ("make_graphs", lambda engine: engine.generate([[3, 4]], SamplingParams(max_tokens=5))),
        ("make_graphs", generate_twice),
    ],
    ids=["first", "ahead", "replay", "prompts"],
)
def test_no_rank_goes_on_alone_without_a_graph(make_engine, replays, monkeypatch, caplog, before, call) -> None:
    """The other ranks would have the graph, and wait in sums that this rank does not compute."""
    engine = make_engine(ranks=leader.Leader(EngineConfig(device="cpu", tensor_parallel=2)))
    if before == "make_graphs":
        engine._runner.make_graphs()
    monkeypatch.setattr(leader, "CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(cuda_graphs, "capture", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(EngineDeadError, match="rank 0 of 2 failed: RuntimeError: no memory"):
        call(engine)
    assert "without CUDA graphs" not in caplog.text
    assert "no more graphs" not in caplog.text


def run_mixed(engine) -> None:
    """Prompts in chunks beside decoding sequences, in steps of at most 48 tokens."""
    asked = random_prompts(12, 60)
    params = [SamplingParams(max_tokens=5 + i, temperature=0.0) for i in range(12)]
    completions = engine.generate(asked, params)
    reference = make_model()
    assert [c.token_ids for c in completions] == [
        greedy(reference, p, q.max_tokens) for p, q in zip(asked, params, strict=True)
    ]
    engine.check_integrity()


@pytest.mark.slow
def test_steps_with_prompts_are_captured_when_they_come_again(make_engine, replays, monkeypatch) -> None:
    monkeypatch.setattr(cuda_graphs, "KEY_LENGTHS", (128,))
    monkeypatch.setattr(cuda_graphs, "PROMPT_BATCHES", (2,))
    engine = make_engine(max_num_batched_tokens=48, max_num_seqs=5)
    engine._runner.make_graphs()
    graphs = engine._runner._graphs
    lengths: list[list[int]] = []
    shape_for = graphs.shape_for

    def watched(tokens, batch, longest, *, decoding, **queries):
        shape = shape_for(tokens, batch, longest, decoding=decoding, **queries)
        if not decoding:
            lengths.append([tokens, batch, 0 if shape is None else shape.batch])
        return shape

    graphs.shape_for = watched
    run_mixed(engine)
    taken = [batch for *_, batch in lengths]
    assert taken.count(0) >= cuda_graphs.CAPTURE_AFTER - 1, "not worth a capture before"
    assert 5 in taken
    assert all(tokens <= 48 and batch <= taken for tokens, batch, taken in lengths if taken)
    assert prompts(engine)[0] == (64, 5, 256), "the largest first"
    before = len(replays)
    eager = taken.count(0)
    taken.clear()
    lengths.clear()
    run_mixed(engine)
    assert len(replays) > before
    assert [batch for *_, batch in lengths].count(0) == 0 < eager, "a step whose shape has no graph takes a larger one"


@pytest.mark.slow
def test_prompts_that_cannot_be_replays_leave_decoding_its_graphs(make_engine, replays, monkeypatch, caplog) -> None:
    engine = make_engine(max_num_batched_tokens=48, max_num_seqs=5)
    engine._runner.make_graphs()
    graphs = engine._runner._graphs
    forward = graphs._forward

    def refused(inputs):
        if inputs.paged.max_seqlen_q > 1:
            raise RuntimeError("it looks at its prompts")
        return forward(inputs)

    graphs._forward = refused
    run_mixed(engine)
    assert (
        caplog.text.count("steps with prompts run without CUDA graphs, because a capture failed: it looks at its prompts") == 1
    )
    assert not prompts(engine)
    assert replays
    assert decoding(engine)


def test_there_are_never_more_graphs_of_prompts_than_most(make_engine, replays, monkeypatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_PROMPT_GRAPHS", 3)
    engine = make_engine(max_num_batched_tokens=400, prefix_caching=False)
    engine._runner.make_graphs()
    for length in (350, 50, 100, 150, 200):
        for _ in range(4):
            engine.generate([[3] * min(length, 250), [4] * max(length - 250, 1)], SamplingParams(max_tokens=1, temperature=0.0))
    assert [tokens for tokens, *_ in prompts(engine)] == [448, 384, 64]
    while engine.prepare_one():
        pass
    assert len(prompts(engine)) == 3


@pytest.mark.parametrize(
    ("settings", "records"), [({"deterministic": True}, True), ({"kv_cache_dtype": "fp8"}, False)], ids=["deterministic", "fp8"]
)
def test_what_takes_every_length_for_the_longest_records_no_prompts(make_engine, replays, settings, records) -> None:
    engine = make_engine(**settings)
    engine._runner.make_graphs()
    for _ in range(5):
        engine.generate(PROMPTS, SamplingParams(max_tokens=2, temperature=0.0))
    assert replays
    assert bool(prompts(engine)) == records


def test_logprobs_of_prompts_are_computed_without_a_graph(make_engine, replays) -> None:
    engine = make_engine()
    engine._runner.make_graphs()
    for prompt_logprobs in (0, None):
        for _ in range(4):
            params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=prompt_logprobs)
            (completion,) = engine.generate([[3, 4, 5]], params)
            assert len(completion.prompt_logprobs or []) == (0 if prompt_logprobs is None else 3)
        assert bool(prompts(engine)) == (prompt_logprobs is None)


def verified(engine) -> list[tuple[int, int, int]]:
    """(sequences, tokens, tokens of a sequence) of the captured steps that verify drafts, in order."""
    return [(x.batch, x.tokens, x.queries) for x in engine._runner._graphs._replays if x.kind == "drafts"]


def test_steps_that_verify_drafts_are_replayed(make_engine, replays) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, allowed_token_ids=(5, 6), frequency_penalty=0.01, logprobs=0)
    prompts = [[5, 6] * 6, [5] * 9, [6, 5, 5] * 3]
    expected = make_engine().generate(prompts, params)
    engine = make_engine(max_num_seqs=5, max_num_batched_tokens=64, speculative="ngram", num_speculative_tokens=3)
    engine._steps.depth = 1
    engine._runner.make_graphs()
    launches = []
    run = engine._runner._graphs.run
    engine._runner._graphs.run = lambda shape: launches.append(shape) or run(shape)
    found = engine.generate(prompts, params)
    assert [x.token_ids for x in found] == [x.token_ids for x in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert [x.logprob for x in ours.logprobs] == pytest.approx([x.logprob for x in theirs.logprobs], abs=1e-4)
    assert engine.stats().speculation.num_accepted_tokens > 0
    assert {(batch, tokens, queries) for batch, tokens, queries in verified(engine)} <= {(n, 4 * n, 4) for n in (1, 2, 4)}
    assert sum(shape.kind == "drafts" for shape in launches) >= 4, "and not eager steps"
    engine.check_integrity()


def test_steps_that_verify_drafts_are_captured_ahead(make_engine, replays, monkeypatch) -> None:
    """A step whose shape is not captured, while others are prepared, runs eagerly or in a larger graph of its kind."""
    monkeypatch.setattr(cuda_graphs, "KEY_LENGTHS", (16,))
    params = SamplingParams(max_tokens=24, temperature=0.0, allowed_token_ids=(5, 6))
    prompts = [[5, 6] * 6, [5] * 9, [6, 5, 5] * 3]
    expected = [x.token_ids for x in make_engine().generate(prompts, params)]
    engine = make_engine(max_num_seqs=5, max_num_batched_tokens=64, speculative="ngram", num_speculative_tokens=3)
    engine._runner.make_graphs()
    graphs = engine._runner._graphs
    assert engine.prepare_one()
    captured = graphs.num_captures
    assert graphs.shape_for(8, 2, 100, decoding=True, queries=4) is None, "no graph of this kind holds it"
    assert [x.token_ids for x in engine.generate(prompts, params)] == expected
    assert graphs.num_captures == captured, "no step waits for a capture"
    while engine.prepare_one():
        pass
    assert set(verified(engine)) == {(n, 4 * n, 4) for n in (1, 2, 4, 5)}
    captured = graphs.num_captures
    launches = []
    run = graphs.run
    graphs.run = lambda shape: launches.append(shape) or run(shape)
    assert [x.token_ids for x in engine.generate(prompts, params)] == expected
    assert "drafts" in {shape.kind for shape in launches}
    assert graphs.num_captures == captured
    engine.check_integrity()


def test_the_sizes_of_steps_that_verify_drafts(make_engine, replays) -> None:
    engine = make_engine(max_num_seqs=72, num_pages=600, speculative="ngram")
    engine._runner.make_graphs()
    graphs = engine._runner._graphs
    assert graphs._queries == {1: 8, 2: 8, 4: 8, 8: 8, 16: 8, 24: 7, 32: 5, 40: 3, 48: 3, 56: 2, 64: 2}
    assert graphs._logits.shape[0] == 24 * 7
    # 5 sequences with 17 tokens, at most 6 of one sequence
    assert graphs.shape_for(17, 5, 100, decoding=True, queries=6) == Shape(64, 8, 8, 256)
    assert graphs.shape_for(40, 20, 100, decoding=True, queries=7) == Shape(24 * 7, 24, 7, 256)
    assert graphs.shape_for(40, 20, 100, decoding=True, queries=8) is None, "more than so many sequences may draft"
    assert graphs.shape_for(70, 66, 100, decoding=True, queries=2) is None
    assert graphs.shape_for(100, 73, 100, decoding=False) is None, "a step with prompts that samples for 73 rows"
    assert make_engine(deterministic=True, speculative="ngram")._runner._max_drafts == engine._runner._max_drafts
