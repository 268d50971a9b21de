"""The engine for asyncio: streams, aborts, slow consumers, and what happens when the worker dies."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from peft_adapters import save_adapter
from streams import GREEDY, collect, until
from tiny_models import greedy, make_model

from fa_serve.engine import AsyncEngine, Engine, EngineConfig, EngineDeadError, RequestError, SamplingParams
from fa_serve.engine.process import mailbox
from fa_serve.spec import ParameterError


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[AsyncEngine]:
    running = AsyncEngine(engine)
    await running.start()
    try:
        yield running
    finally:
        await running.shutdown()


def hold_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Let the engine compute one step for each release of the semaphore."""
    gate = threading.Semaphore(0)
    step = engine.step

    def gated():
        if engine.has_unfinished():
            assert gate.acquire(timeout=20)
        return step()

    monkeypatch.setattr(engine, "step", gated)
    return gate


@pytest.mark.slow
def test_many_streams_at_once_are_exact(make_engine) -> None:
    async def main():
        async with started(make_engine()) as engine:
            return await asyncio.gather(*(collect(engine, [i, 5], name=f"r{i}") for i in range(16)))

    reference = make_model()
    for i, outputs in enumerate(asyncio.run(main())):
        assert [t for output in outputs for t in output.token_ids] == greedy(reference, [i, 5], 12)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (outputs[-1].finish_reason, outputs[-1].num_output_tokens, outputs[-1].num_prompt_tokens) == ("length", 12, 2)


def test_an_id_used_again_gets_nothing_of_its_predecessor(make_engine, monkeypatch) -> None:
    inner = make_engine()
    gate = hold_steps(inner, monkeypatch)

    async def main():
        async with started(inner) as engine:
            gate.release()
            first = engine.generate([3, 5], GREEDY, "same")
            await anext(first)
            # the next token of the first request is being computed now
            await first.aclose()
            second = asyncio.create_task(collect(engine, [4, 5], name="same"))
            await asyncio.sleep(0)
            for _ in range(20):
                gate.release()
            return await second

    outputs = asyncio.run(main())
    assert [t for output in outputs for t in output.token_ids] == greedy(make_model(), [4, 5], 12)
    assert {output.request_id for output in outputs} == {"same"}
    assert outputs[-1].finish_reason == "length"


def test_a_slow_consumer_gets_everything_in_one_output(make_engine, tokenizer) -> None:
    async def main():
        async with started(make_engine()) as engine:
            stream = engine.generate("the quick", GREEDY, "slow")
            first = await anext(stream)
            await until(lambda: engine.stats().num_output_tokens == 12)
            return [first] + [output async for output in stream]

    outputs = asyncio.run(main())
    assert len(outputs) == 2
    expected = greedy(make_model(), tokenizer.encode("the quick"), 12)
    assert outputs[0].token_ids + outputs[1].token_ids == expected
    assert outputs[1].finished


@pytest.mark.parametrize("how", ["aclose", "cancel", "abort"])
def test_leaving_a_stream_frees_its_pages_within_a_step(make_engine, monkeypatch, how) -> None:
    async def main():
        inner = make_engine()
        gate = hold_steps(inner, monkeypatch)
        async with started(inner) as engine:
            gate.release()
            if how == "cancel":
                task = asyncio.create_task(collect(engine, [1, 2], SamplingParams(max_tokens=200), "left"))
                await until(lambda: engine.stats().num_output_tokens == 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                stream = engine.generate([1, 2], SamplingParams(max_tokens=200), "left")
                await anext(stream)
                if how == "aclose":
                    await stream.aclose()
                else:
                    await engine.abort("left")
                    gate.release()
                    rest = [output async for output in stream]
                    assert rest[-1].finish_reason == "abort"
            gate.release()
            await until(lambda: engine.stats().num_pages_used == 0)
            assert engine.stats().num_output_tokens <= 2
            gate.release(20)
            assert (await collect(engine, [3], name="next"))[-1].finish_reason == "length"
            inner.check_integrity()

    asyncio.run(main())


def test_a_bad_request_raises_before_the_first_output(make_engine) -> None:
    async def main():
        async with started(make_engine(max_model_len=20)) as engine:
            with pytest.raises(ParameterError) as long:
                await collect(engine, [1] * 20)
            assert (long.value.field, long.value.code) == ("prompt", "context_length_exceeded")
            stream = engine.generate([1], GREEDY, "twice")
            await anext(stream)
            with pytest.raises(ParameterError) as twice:
                await collect(engine, [1], name="twice")
            assert (twice.value.field, twice.value.code) == ("request_id", "duplicate_request_id")
            await stream.aclose()
            assert (await collect(engine, [1]))[-1].finished

        without = Engine(EngineConfig(device="cpu", num_pages=32), model=make_model())
        async with started(without) as engine:
            with pytest.raises(ParameterError) as stop:
                await collect(engine, [1], SamplingParams(stop=("x",)))
            assert (stop.value.field, stop.value.code) == ("stop", "no_tokenizer")

    asyncio.run(main())


def test_a_dead_engine_fails_its_requests_and_refuses_new_ones(make_engine, monkeypatch, caplog) -> None:
    async def main():
        inner = make_engine()
        gate = hold_steps(inner, monkeypatch)
        async with started(inner) as engine:
            streams = [asyncio.create_task(collect(engine, [i], name=str(i))) for i in range(3)]
            await until(lambda: inner.has_unfinished())
            monkeypatch.setattr(inner, "_expire", lambda: 1 / 0)
            gate.release()
            for outputs in await asyncio.gather(*streams):
                assert outputs[-1].finish_reason == "error"
                assert outputs[-1].error.code == "engine_dead"
                assert "the engine has ended: ZeroDivisionError" in outputs[-1].error.message
            assert not engine.is_alive
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                    await collect(engine, [1])
            kept = (await engine.ended()).__traceback__
            assert kept is None, "what an error comes through, such as prompts, is kept with it"

    asyncio.run(main())
    assert "the engine has ended" in caplog.text


def test_shutdown_ends_unfinished_requests(make_engine) -> None:
    async def main():
        engine = AsyncEngine(make_engine())
        with pytest.raises(EngineDeadError, match="not been started"):
            await collect(engine, [1])
        await engine.start()
        with pytest.raises(RuntimeError, match="has been started already"):
            await engine.start()
        task = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=200)))
        await until(lambda: engine.stats().num_output_tokens > 0)
        await engine.shutdown()
        outputs = await task
        assert outputs[-1].finish_reason == "error"
        assert outputs[-1].error == RequestError("engine_dead", "the engine was shut down")
        assert str(await asyncio.wait_for(engine.ended(), 5)) == "the engine was shut down"
        assert not engine.is_alive

    asyncio.run(main())


def test_start_loads_the_model(model_folder) -> None:
    async def main():
        engine = AsyncEngine(EngineConfig(model=model_folder, device="cpu", num_pages=32))
        await engine.start()
        assert (engine.model_name, engine.max_model_len, engine.is_alive) == (model_folder.name, 256, True)
        outputs = await collect(engine, "the fox")
        await engine.shutdown()
        return engine.tokenizer.encode("the fox"), [t for output in outputs for t in output.token_ids]

    prompt, tokens = asyncio.run(main())
    assert tokens == greedy(make_model(), prompt, 12)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_engine_processes")
def test_a_dead_process_is_replaced_as_often_as_allowed(model_folder, caplog) -> None:
    async def main() -> None:
        own = {"device": "cpu", "num_pages": 64, "kv_host_memory": 1 << 20}
        config = EngineConfig(model=model_folder, process=True, max_restarts=1, **own)
        engine = AsyncEngine(config)
        await engine.start()
        ended = asyncio.create_task(engine.ended())
        for death in range(2):
            task = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=250), f"r{death}"))
            await until(lambda: engine.stats().num_running > 0)
            (process,) = multiprocessing.active_children()
            os.kill(process.pid, signal.SIGKILL)
            end = (await task)[-1]
            assert (end.finish_reason, engine.is_alive) == ("error", False)
            assert end.error.message.endswith("; it is being restarted") == (death == 0)
            with pytest.raises(EngineDeadError, match="exit code -9"):
                await collect(engine, [1])
            assert engine.death_cause == "its process ended with exit code -9"
            await until(lambda: "fa_serve-engine-write" not in [thread.name for thread in threading.enumerate()])
            if death == 0:
                await until(lambda: engine.is_alive, 120)
                assert engine.death_cause == ""
                tokens = [t for output in await collect(engine, [7, 5]) for t in output.token_ids]
                assert tokens == greedy(make_model(), [7, 5], 12)
                tier = engine.stats().host_tier
                assert 0 < tier.num_bytes <= 1 << 20, "the host tier has ended with its process, and the next one has its own"
                assert not ended.done()
        assert "exit code -9" in str(await asyncio.wait_for(ended, 5))
        assert engine.num_restarts == 1
        await engine.shutdown()

    with caplog.at_level(logging.INFO, "fa_serve.engine"):
        asyncio.run(main())
    assert "kv cache: 64 pages" in caplog.text, "without a callback the phases are logged"
    assert "has been restarted (restart 1 of 1); weight updates that are lost: 0" in caplog.text
    assert not multiprocessing.active_children()


def test_a_restart_that_fails_is_the_end(monkeypatch) -> None:
    """Its error is the cause then, without its text, which is in the message."""

    async def main() -> None:
        async def fail() -> None:
            raise ValueError("a secret")

        engine = AsyncEngine(EngineConfig(device="cpu", max_restarts=2))
        monkeypatch.setattr(engine, "_start", fail)
        engine._handle_death(EngineDeadError("its process ended with exit code -9", "its process ended with exit code -9"))
        assert (engine.is_restarting, engine.num_restarts) == (True, 1)
        assert engine.death_cause == "its process ended with exit code -9"
        error = await asyncio.wait_for(engine.ended(), 5)
        assert str(error) == "the engine has ended and could not be restarted: a secret"
        assert (engine.death_cause, engine.is_alive, engine.num_restarts) == ("it raised ValueError", False, 1)

    asyncio.run(main())


def test_a_death_while_adapters_are_restored_is_the_cause(monkeypatch) -> None:
    """A call that waited for the new engine gets its death as an error. It is not that of another rank, which there is not."""

    async def main() -> None:
        async def start() -> None: ...

        async def restore(adapters) -> None:
            engine._replies[0] = asyncio.get_running_loop().create_future()
            await engine._replies[0]

        engine = AsyncEngine(EngineConfig(device="cpu", max_restarts=2))
        monkeypatch.setattr(engine, "_start", start)
        monkeypatch.setattr(engine, "_restore", restore)
        for code in (-9, 1):
            reason = f"its process ended with exit code {code}"
            engine._handle_death(EngineDeadError(reason, reason))
            await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.ended(), 5)
        assert engine.death_cause == "its process ended with exit code 1"

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.usefixtures("warm_engine_processes")
def test_an_engine_that_is_started_again_has_the_adapters_of_the_dead_one(model_folder, tmp_path) -> None:
    """What its settings name may have been replaced or unloaded since, and would answer in the place of what was asked for."""
    folders = {name: str(save_adapter(tmp_path / name, seed=seed)) for seed, name in enumerate("abc")}
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)

    async def main() -> None:
        given = [f"kept={folders['a']}", f"replaced={folders['a']}", f"unloaded={folders['a']}"]
        own = {"device": "cpu", "num_pages": 64, "lora_bytes": 1 << 24, "lora": given}
        engine = AsyncEngine(EngineConfig(model=model_folder, process=True, max_restarts=1, **own))
        await engine.start()
        await engine.load_adapter("replaced", folders["b"])
        await engine.load_adapter("added", folders["c"])
        await engine.unload_adapter("unloaded")

        async def answers() -> list[list[int]]:
            found = []
            for name in sorted(engine.adapters):
                outputs = [
                    output async for output in engine.generate([5, 6, 7], params, f"{name} {os.urandom(4)}", adapter=name)
                ]
                found.append([token for output in outputs for token in output.token_ids])
            return found

        before = await answers()
        (process,) = multiprocessing.active_children()
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not engine.is_alive)
        await until(lambda: engine.is_alive, 120)
        assert sorted(engine.adapters) == ["added", "kept", "replaced"]
        assert await answers() == before
        assert before[1] != before[2]
        await engine.shutdown()

    asyncio.run(main())


def test_an_adapter_that_cannot_be_read_again_does_not_end_the_engine(make_engine, monkeypatch) -> None:
    async def main() -> None:
        async with started(make_engine()) as engine:

            async def start() -> None:
                engine._adapters = {}

            async def change(name: str, folder: str | None, starting: bool = False) -> None:
                raise ValueError("of a library that reads it")

            engine._adapters = {"a": "a folder"}
            monkeypatch.setattr(engine, "_start", start)
            monkeypatch.setattr(engine, "_change_adapter", change)
            await engine._restart(0)
            assert engine.is_alive

    asyncio.run(main())


def test_a_shutdown_while_adapters_are_restored_ends(make_engine, monkeypatch) -> None:
    """The engine that is stopped does not answer any more, and nobody says that it has died."""

    async def main() -> None:
        engine = AsyncEngine(make_engine())
        await engine.start()

        async def start() -> None:
            engine._adapters = {}

        engine._adapters = {"a": "a folder"}
        monkeypatch.setattr(engine, "_start", start)
        monkeypatch.setattr(engine._worker, "send", lambda command: None)
        engine._restarting = asyncio.create_task(engine._restart(0))
        await until(lambda: engine._replies)
        await asyncio.wait_for(engine.shutdown(), 20)
        assert not engine.is_alive

    asyncio.run(main())


def test_an_abort_while_the_prompt_is_tokenized(make_engine, monkeypatch) -> None:
    async def main() -> None:
        async with started(make_engine()) as engine:
            gate = threading.Event()
            read = engine.reader.read
            monkeypatch.setattr(engine.reader, "read", lambda prompt: gate.wait(20) and read(prompt))
            task = asyncio.create_task(collect(engine, "the fox", SamplingParams(max_tokens=200), "slow"))
            await until(lambda: "slow" in engine._names)
            await engine.abort("slow")
            gate.set()
            assert [(output.finish_reason, output.token_ids) for output in await task] == [("abort", [])]
            assert engine.stats().num_steps == 0

    asyncio.run(main())


def test_the_consumer_with_the_most_unread_log_probabilities_is_cut_off(make_engine, monkeypatch) -> None:
    """Its answers end with an error, nothing of it is kept, and another slow consumer loses nothing."""
    monkeypatch.setattr(mailbox, "MAX_UNREAD", 100)

    async def main():
        async with started(make_engine()) as engine:
            slow = engine.generate([3, 5], replace(GREEDY, n=3, logprobs=4), "slow")
            other = engine.generate([4, 5], replace(GREEDY, logprobs=1), "other")
            first = [await anext(slow), await anext(other)]
            await until(lambda: all(not box.unfinished for box in engine._mailboxes.values()))
            assert max(box.unread for box in engine._mailboxes.values()) <= 24
            rest = [[output async for output in stream] for stream in (slow, other)]
            return first, rest

    first, (slow, other) = asyncio.run(main())
    assert {output.index for output in slow} == {0, 1, 2}
    assert {(output.finish_reason, output.error.code) for output in slow} == {("error", "unread")}
    assert [t for output in [first[1], *other] for t in output.token_ids] == greedy(make_model(), [4, 5], 12)
