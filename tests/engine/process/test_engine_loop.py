"""The engine's loop: commands between steps, preparation when there is no request, grammars in other threads."""

from __future__ import annotations

import asyncio
import queue
import threading
import time

import pytest
from tiny_models import greedy, make_model

from fa_serve.engine import AsyncEngine, EngineDeadError, QueueFullError, SamplingParams, StructuredOutput
from fa_serve.engine.process import engine_loop
from fa_serve.engine.process.engine_loop import Abort, Add, Commands, EngineLoop
from fa_serve.engine.process.parent import ThreadWorker
from fa_serve.engine.stats import STEP_SECONDS
from fa_serve.engine.structured import grammars as structured
from fa_serve.spec import ParameterError

REGEX = SamplingParams(max_tokens=50, structured=StructuredOutput(regex="[a-f]{3}"))


def run(engine, *commands):
    """All outputs and rejections of these commands and what follows from them."""
    waiting = queue.SimpleQueue()
    steps = []

    def deliver(step):
        steps.append(step)
        if not engine.has_unfinished():
            waiting.put(None)

    for command in commands:
        waiting.put(command)
    EngineLoop(engine, waiting, deliver).run()
    return [output for step in steps for output in step.outputs], [x for step in steps for x in step.rejected]


def test_commands_are_carried_out_and_errors_are_delivered(make_engine) -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=1)
    greedy_params = SamplingParams(max_tokens=4, temperature=0.0)
    adds = [Add(name, [3, 4], greedy_params) for name in "abc"]
    outputs, rejected = run(engine, *adds, Add("bad", [], greedy_params), Abort("b"), Abort("never"))
    assert [token for output in outputs if output.request_id == "a" for token in output.token_ids] == greedy(
        make_model(), [3, 4], 4
    )
    assert [output.finish_reason for output in outputs if output.request_id == "b"] == ["abort"]
    errors = dict(rejected)
    assert isinstance(errors["c"], QueueFullError)
    assert isinstance(errors["bad"], ParameterError)
    assert errors["bad"].field == "prompt"


def test_steps_are_timed_with_their_outputs(make_engine, monkeypatch) -> None:
    """What the outputs of step n carry are the steps before it."""
    engine = make_engine()
    now = [100.0]
    monkeypatch.setattr("fa_serve.engine.process.engine_loop.time.monotonic", lambda: now[0])
    step = engine.step

    def slow():
        now[0] += 0.003
        return step()

    monkeypatch.setattr(engine, "step", slow)
    delivered = []
    waiting = queue.SimpleQueue()

    def deliver(outputs):
        now[0] += 0.25
        delivered.append(outputs.stats.steps)
        if not engine.has_unfinished():
            waiting.put(None)

    waiting.put(Add("a", [3], SamplingParams(max_tokens=3)))
    EngineLoop(engine, waiting, deliver).run()
    assert [sum(each.counts) for each in delivered] == [0, 1, 2]
    assert delivered[-1].total == pytest.approx(2 * 0.253)
    assert delivered[-1].counts[STEP_SECONDS.index(0.256)] == 2


@pytest.mark.parametrize(("seconds", "expected"), [(60.0, [0]), (-1.0, [2, 1, 0])])
def test_a_step_without_outputs_delivers_statistics_alone_and_seldom(make_engine, monkeypatch, seconds, expected) -> None:
    """Each delivery wakes two threads and the event loop. The last one tells that nothing runs."""
    monkeypatch.setattr(engine_loop, "STATS_SECONDS", seconds)
    engine = make_engine()
    monkeypatch.setattr(engine, "has_unfinished", lambda: bool(left))
    left = [1, 2, 3]
    monkeypatch.setattr(engine, "step", lambda: left.pop() and [])
    waiting = queue.SimpleQueue()
    delivered = []

    def deliver(outputs):
        delivered.append(len(left))
        if not left:
            waiting.put(None)

    waiting.put(Add("a", [3], SamplingParams(max_tokens=3)))
    EngineLoop(engine, waiting, deliver).run()
    assert delivered == expected


def test_an_error_of_an_unknown_class_arrives_as_a_runtime_error(make_engine, monkeypatch) -> None:
    """Its class may not survive the pipe between two processes."""
    engine = make_engine()
    monkeypatch.setattr(engine, "add_request", lambda *_, **__: {}["lost"])
    _, ((name, error),) = run(engine, Add("a", [3], None))
    assert (name, type(error), str(error)) == ("a", RuntimeError, "KeyError: 'lost'")


def test_an_abort_while_the_grammar_is_compiled_ends_every_answer(make_engine, monkeypatch) -> None:
    engine = make_engine()
    gate = threading.Event()
    matcher = engine.grammars.matcher
    monkeypatch.setattr(engine.grammars, "matcher", lambda *given: gate.wait(20) and matcher(*given))
    outputs, rejected = run(engine, Add("a", [3], REGEX), Abort("a", num_answers=2))
    gate.set()
    assert [(output.index, output.finish_reason) for output in outputs] == [(0, "abort"), (1, "abort")]
    assert not rejected


def test_graphs_are_prepared_between_requests_and_a_command_interrupts(make_engine, replays, monkeypatch) -> None:
    monkeypatch.setattr(engine_loop, "QUIET_SECONDS", 0.01)
    engine = make_engine(max_num_seqs=4)
    engine._runner.make_graphs()
    prepare_one = engine.prepare_one
    prepared = []
    messages = []

    def shapes():
        return [(x.batch, x.keys) for x in engine._runner._graphs._replays if x.queries == 1]

    worker = ThreadWorker(engine, messages.append, lambda reason: None)

    def watched():
        prepared.append(len(engine._runner._graphs._replays))
        if len(prepared) == 2:
            worker.send(Add("one", [3, 4], SamplingParams(max_tokens=3, temperature=0.0)))
        if len(prepared) == 3:
            assert [token for m in messages for o in m.outputs for token in o.token_ids] == greedy(make_model(), [3, 4], 3)
        return prepare_one()

    monkeypatch.setattr(engine, "prepare_one", watched)
    worker.start()
    for _ in range(2000):
        if len(shapes()) == 3 and messages:
            break
        time.sleep(0.01)
    captured = shapes()
    worker.stop()
    assert captured[0] == (4, 256)
    assert sorted(captured) == [(1, 256), (2, 256), (4, 256)]
    late = [message.stats.num_late_captures for message in messages]
    assert set(late) == {1}, "the request came while a graph was captured; its steps captured nothing"


def test_a_loop_that_is_never_quiet_captures_nothing(make_engine, replays, monkeypatch) -> None:
    monkeypatch.setattr(engine_loop, "QUIET_SECONDS", 60.0)
    engine = make_engine(max_num_seqs=4)
    engine._runner.make_graphs()
    engine.prepare_one()
    before = engine._runner.num_captures
    run(engine, *[Add(name, [3, 4], SamplingParams(max_tokens=4, temperature=0.0)) for name in "abc"])
    assert engine._runner.num_captures == before


def test_what_a_step_compiles_and_captures_is_counted_as_late(make_engine, monkeypatch) -> None:
    engine = make_engine()
    prepared = iter([(5, 2), (9, 3), *[(9, 3)] * 100])
    monkeypatch.setattr(engine, "preparations", lambda: next(prepared))
    steps = []
    waiting = queue.SimpleQueue()
    waiting.put(Add("a", [3, 4], SamplingParams(max_tokens=2, temperature=0.0)))

    def deliver(step):
        steps.append(step.stats)
        if not engine.has_unfinished():
            waiting.put(None)

    EngineLoop(engine, waiting, deliver).run()
    assert [(stats.num_late_compilations, stats.num_late_captures) for stats in steps] == [(4, 1)] * len(steps)
    assert engine.stats().num_late_captures == 0, "the engine itself does not know who waits"


def test_a_deadline_counts_while_the_grammar_is_compiled(make_engine, monkeypatch) -> None:
    async def main() -> list:
        engine = make_engine()
        matcher = engine.grammars.matcher
        monkeypatch.setattr(engine.grammars, "matcher", lambda *given: time.sleep(0.5) or matcher(*given))
        running = AsyncEngine(engine)
        await running.start()
        try:
            return [output async for output in running.generate([5], REGEX, "late", timeout=0.3)]
        finally:
            await running.shutdown()

    end = asyncio.run(main())[-1]
    assert (end.finish_reason, end.error.code) == ("error", "timeout")


def test_grammars_are_compiled_in_other_threads(make_engine, monkeypatch) -> None:
    """Also when more grammars are being compiled than are kept."""
    real = structured._compile
    names = []

    def slow(*given):
        names.append(threading.current_thread().name)
        time.sleep(0.05)
        return real(*given)

    async def main() -> list:
        running = AsyncEngine(make_engine())
        await running.start()

        async def ask(index: int) -> str:
            held = SamplingParams(max_tokens=9, structured=StructuredOutput(choice=(f"{index:08d}",)))
            return "".join([output.text async for output in running.generate([5], held, str(index))])

        try:
            return await asyncio.gather(*map(ask, range(8)))
        finally:
            await running.shutdown()

    monkeypatch.setattr(structured, "_compile", slow)
    monkeypatch.setattr(structured, "MIN_BYTES", 100 << 20)
    assert [text[:1] for text in asyncio.run(main())] == ["0"] * 8
    assert len(names) == 8
    assert {name.rpartition("_")[0] for name in names} == {"fa_serve-grammar"}


def test_a_lost_rank_ends_the_loop(make_engine) -> None:
    """Also one that waits for commands."""
    commands: Commands = queue.SimpleQueue()
    commands.put(EngineDeadError("rank 1 of 2 ended"))
    with pytest.raises(EngineDeadError, match="rank 1 of 2 ended"):
        EngineLoop(make_engine(), commands, lambda step: None).run()
