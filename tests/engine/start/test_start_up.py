"""The start of an engine: its phases, and a warm-up of which every step could be a step of requests."""

from __future__ import annotations

import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_models import VOCAB, greedy, make_model

from fa_serve.engine import SamplingParams
from fa_serve.engine.events import Phase
from fa_serve.engine.parallel.ranks import Alone
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.engine.start import start_up
from fa_serve.engine.start.loading import Loaded
from fa_serve.engine.start.warm_up import EmptyStep, empty_steps, plan_warm_up
from fa_serve.hf import patch
from fa_serve.launching.compilations import Compilers
from fa_serve.launching.launch import NotCompiledError
from fa_serve.ops.collectives.all_reduce import AllReduce

PROMPT = [3, 4, 5, 6, 7]


def check_inputs(engine: Any, inputs: Any) -> None:
    """Every number of a step that kernels take as an index, a length or a bound is one that a request could lead to."""
    paged = inputs.paged
    total = inputs.input_ids.numel()
    batch = paged.seqused_k.numel()
    lengths = paged.cu_seqlens_q.diff()
    assert paged.cu_seqlens_q.dtype == paged.seqused_k.dtype == paged.block_table.dtype == torch.int32
    assert paged.cu_seqlens_q.numel() == batch + 1
    assert (int(paged.cu_seqlens_q[0]), int(paged.cu_seqlens_q[-1])) == (0, total)
    assert (lengths > 0).all()
    assert int(lengths.max()) == paged.max_seqlen_q
    assert (paged.seqused_k >= lengths).all()
    assert (paged.seqused_k <= paged.max_seqlen_k).all()
    assert paged.max_seqlen_k <= engine.config.max_model_len
    # in deterministic mode each token is a sequence
    assert batch <= (total if engine.config.deterministic else engine.config.max_num_seqs)
    assert total <= engine.config.max_num_batched_tokens
    assert inputs.input_ids.shape == inputs.position_ids.shape == paged.slot_mapping.shape == (total,)
    assert ((inputs.input_ids >= 0) & (inputs.input_ids < VOCAB)).all()
    assert (inputs.position_ids < engine.config.max_model_len).all()
    assert ((inputs.logits_indices >= 0) & (inputs.logits_indices < total)).all()
    assert (paged.slot_mapping == -1).all(), "nothing is written"
    assert paged.block_table.shape == (batch, -(-paged.max_seqlen_k // engine.config.page_size))
    assert ((paged.block_table >= 0) & (paged.block_table < engine.config.num_pages)).all()
    if paged.fresh:
        assert (paged.seqused_k == lengths).all()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("gemma2", {}, id="usual"),
        pytest.param("llama", {"deterministic": True}, id="deterministic"),
        pytest.param("llama", {"num_pages": 1, "page_size": 24}, id="one page"),
    ],
)
def test_each_step_of_the_warm_up_is_valid(make_engine, monkeypatch, family, settings) -> None:
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 20, "max_model_len": 24}
    # decoding steps with groups are repetitions of planned steps (tests/engine/test_cascade.py)
    engine = make_engine(family, **({"num_pages": 40, "cascade_attention": False} | limits | settings))
    runner = engine._runner
    seen = []
    forward = runner._forward

    def check(inputs: Any) -> torch.Tensor:
        check_inputs(engine, inputs)
        seen.append((inputs.input_ids.numel(), inputs.paged.seqused_k.numel(), inputs.paged.max_seqlen_k))
        return forward(inputs)

    before = runner.kv_caches[0][0].normal_().clone()
    with monkeypatch.context() as watched:
        watched.setattr(runner, "_forward", check)
        start_up.warm_up(runner, engine.config, engine.config.max_model_len, Compilers())
    plan = plan_warm_up(engine.config, 20, engine.config.max_model_len, drafting=False)
    planned = [step for step in plan if isinstance(step, EmptyStep)]
    assert len(seen) == len(planned) > 30
    assert torch.equal(runner.kv_caches[0][0], before)
    if not settings:
        assert {(s.num_tokens, s.batch, s.keys) for s in planned} == set(seen)
        params = SamplingParams(max_tokens=12, temperature=0.0, frequency_penalty=1e-6)
        answer = engine.generate([PROMPT], params)[0].token_ids
        assert answer == greedy(make_model(family), PROMPT, 12), "the warm-up leaves nothing behind, penalties included"


def test_a_step_that_ends_at_a_kernel_is_repeated_when_the_kernel_exists(make_engine, monkeypatch) -> None:
    engine = make_engine()
    ended = []
    missing = Future()
    run = engine._runner.run_warm_up

    def run_with_kernels(work: Any) -> None:
        if len(ended) == 5 and not missing.done():
            missing.set_result("compiled")
            raise NotCompiledError(missing)
        run(work)
        ended.append(work)

    monkeypatch.setattr(engine._runner, "run_warm_up", run_with_kernels)
    start_up.warm_up(engine._runner, engine.config, 64, Compilers())
    plan = plan_warm_up(engine.config, engine.config.max_num_batched_tokens, 64, drafting=False)
    assert ended == [*plan[:5], *plan[6:], plan[5]]


def test_a_warm_up_that_fails_is_logged_and_a_lost_device_ends_the_start(make_engine, monkeypatch, caplog) -> None:
    engine = make_engine()

    def fail(work: Any) -> None:
        raise error

    monkeypatch.setattr(engine._runner, "run_warm_up", fail)
    error: Exception = ValueError("no such tile")
    start_up.warm_up(engine._runner, engine.config, 64, Compilers())
    planned = len(plan_warm_up(engine.config, engine.config.max_num_batched_tokens, 64, drafting=False))
    assert f"because {planned} of {planned} warm-up steps failed: no such tile" in caplog.text
    assert engine._runner.model.config.num_hidden_layers == make_model().config.num_hidden_layers, "all layers again"
    error = torch.AcceleratorError("unspecified launch failure")
    with pytest.raises(torch.AcceleratorError):
        start_up.warm_up(engine._runner, engine.config, 64, Compilers())


def test_graphs_are_captured_for_a_limited_time(make_engine, replays) -> None:
    engine = make_engine(max_num_seqs=4)
    engine._runner.make_graphs()
    assert start_up.capture_ahead(engine._runner, engine._ranks, seconds=0.0) == "1 graphs, the rest when the engine is idle"
    told: list[str] = []
    clock = SimpleNamespace(progress=lambda name, done, total, unit: told.append(name))
    captured = start_up.capture_ahead(engine._runner, engine._ranks, clock)
    assert captured == f"{engine._runner.num_captures} graphs"
    assert set(told) == {"captures"}
    assert not engine.prepare_one()


def test_graphs_are_freed_before_the_ranks_part(make_engine, replays, monkeypatch) -> None:
    """NCCL would wait for them."""
    engine = make_engine(max_num_seqs=4)
    engine._runner.make_graphs()
    at_the_end: list[int] = []
    monkeypatch.setattr(engine._ranks, "close", lambda: at_the_end.append(len(engine._runner._graphs._replays)))
    engine.close()
    assert at_the_end == [0]


def test_a_start_that_fails_frees_its_graphs(make_engine, replays, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=4)
    runner = engine._runner
    runner.make_graphs()
    loaded = Loaded(runner, cast(Any, None), None, engine.config, 64, frozenset(), SamplingParams(), cast(Any, None))
    monkeypatch.setattr(start_up, "load", lambda *_: loaded)
    monkeypatch.setattr(runner, "device", torch.device("cuda"))
    monkeypatch.setattr(start_up, "warm_up", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        start_up.start_up(engine.config, engine._ranks, ahead=True)
    assert not runner._graphs._replays


def test_a_lost_device_does_not_keep_graphs(make_engine, replays, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=4)
    engine._runner.make_graphs()
    graphs = engine._runner._graphs

    def lost(_: Any) -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(graphs, "_device", torch.device("cuda"))
    graphs.close()
    assert not graphs._replays


def test_the_phases_of_a_start(make_engine) -> None:
    phases: list[Phase] = []
    engine = make_engine()
    ranks = Alone(torch.device("cpu"))
    started = start_up.start_up(engine.config, ranks, phases.append, make_model(), None, ahead=True)
    assert [phase.name for phase in phases] == ["fusion", "kv cache"], "without a GPU there is nothing to compile or capture"
    assert started.config.max_model_len == engine.config.max_model_len
    assert started.runner.kv_caches


def test_the_draft_model_is_warmed_up_with_its_own_steps(make_engine, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=4)
    draft = make_model("gemma2")
    patch(draft)
    draft_runner = ModelRunner(draft, engine.config, drafting=True)
    runner = ModelRunner(engine._runner.model, engine.config, draft=draft_runner)
    runner.allocate(engine.config.num_pages, engine.config.max_model_len)
    seen = {runner: [], runner.draft: []}
    for each, works in seen.items():
        run = each.run_warm_up
        monkeypatch.setattr(each, "run_warm_up", lambda work, run=run, works=works: (works.append(work), run(work)))
    monkeypatch.setattr(start_up, "CATCH_UP", 8)
    start_up.warm_up(runner, engine.config, 64, Compilers())
    tokens = engine.config.max_num_batched_tokens
    assert seen[runner] == plan_warm_up(engine.config, tokens, 64, drafting=False)
    assert seen[runner.draft] == plan_warm_up(engine.config, 8, 64, drafting=True)
    assert runner.draft.model.config.num_hidden_layers == make_model("gemma2").config.num_hidden_layers


def test_ranks_compile_alone_and_add_together(make_engine, monkeypatch) -> None:
    """The order in which threads compile differs between ranks, so a sum that waited for the others might never end."""
    engine = make_engine()
    ranks = Alone(torch.device("cpu"))
    ranks.size = 2
    ranks.all_reduce = all_reduce = object.__new__(AllReduce)
    all_reduce._paused = False
    done: list[tuple[str, bool]] = []

    class Runner:
        device = torch.device("cuda")
        images = "the engine takes none"

    loaded = Loaded(
        cast(Any, Runner()), cast(Any, None), None, engine.config, 64, frozenset(), SamplingParams(), cast(Any, None)
    )
    monkeypatch.setattr(start_up, "load", lambda *_: loaded)
    for name in ("warm_up", "warm_up_sums", "capture_ahead"):
        monkeypatch.setattr(start_up, name, lambda *_, name=name: done.append((name, all_reduce._paused)) or "")
    assert start_up.start_up(engine.config, ranks, ahead=True) is loaded
    assert done == [("warm_up", True), ("warm_up_sums", False), ("capture_ahead", False)]


def test_sums_are_warmed_up_with_each_number_of_tokens_once(make_engine, monkeypatch) -> None:
    engine = make_engine()
    works: list[Any] = []
    run = engine._runner.run_warm_up
    monkeypatch.setattr(engine._runner, "run_warm_up", lambda work: (works.append(work), run(work)))
    start_up.warm_up_sums(engine._runner, engine.config, 64)
    planned = empty_steps(max_num_seqs=8, max_tokens=engine.config.max_num_batched_tokens, max_keys=64)
    assert sorted(work.num_tokens for work in works) == sorted({step.num_tokens for step in planned})


def test_graphs_of_the_draft_model_are_captured_by_turns(make_engine, replays) -> None:
    """From the first capture ahead on, steps of neither model capture."""
    engine = make_engine(max_num_seqs=4)
    draft = make_model()
    patch(draft)
    draft_runner = ModelRunner(draft, engine.config, drafting=True)
    runner = engine._runner = ModelRunner(engine._runner.model, engine.config, draft=draft_runner)
    runner.allocate(engine.config.num_pages, engine.config.max_model_len)
    runner.make_graphs()
    assert engine.prepare_one()
    assert runner.draft._graphs._missing is not None
    assert engine.prepare_one()
    assert (runner.num_captures, runner.draft.num_captures) == (runner.draft.num_captures * 2, runner.draft.num_captures)


def test_a_container_has_the_cores_of_its_limit(tmp_path) -> None:
    everywhere = len(os.sched_getaffinity(0))
    for text, cores in (("max 100000", everywhere), ("100000 100000", 1), ("50000 100000", 1), ("", everywhere)):
        (tmp_path / "cpu.max").write_text(text)
        assert start_up.num_cores(tmp_path / "cpu.max") == cores
    assert start_up.num_cores(tmp_path / "no such file") == everywhere
