"""The engine in a separate process: start, commands, outputs, errors and every way to die."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time

import pytest
from streams import collect, until
from tiny_models import VOCAB, greedy, make_model

from fa_serve.engine import (
    AsyncEngine,
    EngineConfig,
    EngineDeadError,
    QueueFullError,
    RequestError,
    SamplingParams,
    StructuredOutput,
)
from fa_serve.engine.events import Phase
from fa_serve.engine.process.parent import ProcessWorker, Pulse
from fa_serve.engine.process.pipe import receive_items
from fa_serve.spec import ParameterError

pytestmark = pytest.mark.usefixtures("warm_engine_processes")


@pytest.mark.slow
def test_a_separate_process(model_folder, caplog) -> None:
    """Its phases, beats, streams, refusals and an abort; in the end the process is killed from outside."""
    phases: list[Phase] = []

    async def main():
        config = EngineConfig(model=model_folder, device="cpu", num_pages=64, process=True, max_num_seqs=4, max_waiting=4)
        engine = AsyncEngine(config, on_phase=phases.append)
        assert engine.pulse() == Pulse()
        await engine.start()
        assert (engine.config.num_pages, engine.max_model_len, engine.is_alive) == (64, 256, True)
        streams = await asyncio.gather(*(collect(engine, [i, 5], name=f"r{i}") for i in range(6)))
        await until(lambda: engine.pulse().silent_seconds > 0.5)
        await until(lambda: engine.pulse().silent_seconds < 0.5)  # it beats each second
        assert engine.pulse().busy_seconds == 0, "it waits for a command"
        for params, match, field in (
            (SamplingParams(stop_token_ids=(VOCAB,)), "below", "stop_token_ids"),
            (SamplingParams(structured=StructuredOutput(regex="(")), "must be valid and satisfiable", "regex"),
        ):  # the errors keep their fields on their way through the pipe
            with pytest.raises(ParameterError, match=match) as error:
                await collect(engine, [1], params, field)
            assert (error.value.field, error.value.code) == (field, "invalid_value")
        (end,) = await collect(engine, [1], SamplingParams(max_tokens=4, bad_token_ids=tuple(range(VOCAB))), "none")
        assert end.error == RequestError("no_token_left", end.error.message)
        long = SamplingParams(max_tokens=250, logprobs=1)
        crowd = [asyncio.create_task(collect(engine, [3, 4, 5], long, name=f"c{i}")) for i in range(9)]
        rejected = await asyncio.wait(crowd, return_when=asyncio.FIRST_EXCEPTION)
        with pytest.raises(QueueFullError, match="room for 0 of 1 sequences"):
            await rejected[0].pop()
        await engine.abort("c0")
        assert (await crowd[0])[-1].finish_reason == "abort"
        await until(lambda: engine.stats().num_running > 0)
        (process,) = multiprocessing.active_children()
        os.kill(process.pid, signal.SIGKILL)
        ends = [(await task)[-1] for task in crowd[1:8]]
        with pytest.raises(EngineDeadError, match="exit code -9"):
            await collect(engine, [1])
        await engine.shutdown()
        return streams, ends

    with caplog.at_level(logging.INFO, "fa_serve.engine"):
        streams, ends = asyncio.run(main())
    reference = make_model()
    for i, outputs in enumerate(streams):
        assert outputs[0].prompt_token_ids == [i, 5]
        assert [t for output in outputs for t in output.token_ids] == greedy(reference, [i, 5], 12)
    dead = RequestError("engine_dead", "the engine has ended: its process ended with exit code -9")
    assert {(end.finish_reason, end.error) for end in ends} == {("error", dead)}
    assert [phase.name for phase in phases] == ["engine", "weights", "fusion", "kv cache"]
    assert "kv cache" not in caplog.text, "they are not logged as well"


def test_a_process_that_cannot_start_says_why(model_folder) -> None:
    config = EngineConfig(model=model_folder, device="cpu", num_pages=4, max_model_len=100, process=True)
    with pytest.raises(ParameterError, match=r"at most 64, which is what 4 pages of 16 tokens hold, got 100") as error:
        asyncio.run(AsyncEngine(config).start())
    assert error.value.field == "max_model_len"
    assert not multiprocessing.active_children()


def test_a_process_is_not_waited_for_while_it_loads(model_folder) -> None:
    async def main() -> float:
        engine = AsyncEngine(EngineConfig(model=model_folder, device="cpu", num_pages=64, process=True))
        loading = asyncio.create_task(engine.start())
        await until(lambda: bool(multiprocessing.active_children()))
        start = time.perf_counter()
        await engine.shutdown()
        took = time.perf_counter() - start
        with pytest.raises(RuntimeError, match="was stopped while it was loading"):
            await loading
        return took

    assert asyncio.run(main()) < 15, "it would take the half minute that a step may take"
    assert not multiprocessing.active_children()


class TwoArgumentsError(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, a, b):
        super().__init__(a + b)


def test_an_item_that_cannot_be_read_is_a_death(monkeypatch) -> None:
    deaths: queue.SimpleQueue[EngineDeadError] = queue.SimpleQueue()
    process = ProcessWorker(EngineConfig(), lambda _: None, deaths.put)
    ours, theirs = multiprocessing.Pipe()
    process._process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process._process.start()
    theirs.send([TwoArgumentsError("lost ", "device")])
    reader = threading.Thread(target=process._read, args=(receive_items(ours),))
    monkeypatch.setattr(process._process, "join", lambda wait=None, join=process._process.join: join(wait and 0.1))
    reader.start()
    assert str(deaths.get(timeout=20)) == "its process ended with exit code -9"
    reader.join()
