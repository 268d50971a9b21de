"""A replica's methods over an engine that says set words, without a cluster."""

import asyncio
import time
from contextlib import aclosing

import numpy as np
import pytest

pytest.importorskip("ray", reason="the ray extra is not installed")
from fa_serve.server.ray import engine_replica
from fa_serve.server.ray.engine_replica import FRONT_SECONDS, EngineReplica, Front, Listen
from fa_serve.server.ray.output_channel import Gains

from fa_serve.engine import EngineConfig, EngineDeadError, QueueFullError, RequestError, RequestOutput, SamplingParams
from fa_serve.engine.pooling.inputs import EncoderInput, EncoderInputs
from fa_serve.engine.pooling.params import PooledRows
from fa_serve.engine.process.engine_loop import Add, Encode
from fa_serve.engine.process.parent import Pulse
from fa_serve.spec import ParameterError

DIES = 9
"""The first token of a prompt whose second one says how many words the engine says before it dies."""


class Words:
    """Says "a" and "b" once `gate` is open. `left` has the requests that ended before the last word."""

    is_alive = True
    is_restarting = False
    beats = Pulse()

    def __init__(self):
        self.gate = asyncio.Event()
        self.left = []

    async def generate(self, prompt, params, request_id, **_):
        if prompt == [0]:
            raise ParameterError("prompt", "be another one", 0)
        said = 0
        if prompt[0] == DIES:
            for word in "a"[: prompt[1]]:
                yield RequestOutput(request_id, prompt, word, [1], finished=False, num_output_tokens=1)
            error = RequestError("engine_dead", "the engine has ended: rank 1")
            yield RequestOutput(request_id, prompt, finished=True, finish_reason="error", error=error)
            return
        try:
            for word in "ab":
                await self.gate.wait()
                said += 1
                yield RequestOutput(request_id, prompt, word, [said], finished=said == 2, num_output_tokens=said)
        finally:
            if said < 2:
                self.left.append(request_id)

    async def encode(self, inputs, params, request_id, **_):
        error = None
        if inputs[0].ids[0] == DIES:
            error = RequestError("engine_dead", "the engine has ended: rank 1")
        elif len(inputs) == 1:
            raise QueueFullError("the queue is full")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left.append(request_id)
            raise
        rows = PooledRows(np.zeros((len(inputs) - 1, 2), dtype=np.float32))
        found = [RequestOutput(f"{request_id}-0", [], finished=True, pooled=rows)] if len(inputs) > 1 else []
        last = PooledRows(np.ones((1, 2), dtype=np.float32)) if error is None else None
        return [*found, RequestOutput(f"{request_id}-0", [], finished=True, index=len(inputs) - 1, pooled=last, error=error)]

    def pulse(self):
        return self.beats

    async def ended(self):
        return EngineDeadError("the engine has ended")

    def stats(self):
        return "stats"

    def kill(self): ...


def replica(engine: Words) -> EngineReplica:
    made = EngineReplica.__new__(EngineReplica)  # its constructor loads a model, and asks Ray for its name
    made._config = EngineConfig(device="cpu")
    made._step_timeout = 10.0
    made._name = "r1"
    made._channels = {}
    made._engine = engine
    return made


async def _two_requests() -> None:
    engine = Words()
    ours = replica(engine)
    tasks = [asyncio.create_task(ours.add(Front("front"), Add(name, [1, 2], SamplingParams()))) for name in ("one", "two")]
    gains = ours.listen(Listen("front", "r1"))
    assert (await anext(gains)).accepted == ["one", "two"]
    engine.gate.set()
    assert await asyncio.gather(*tasks) == [None, None]
    said = (await anext(gains)).outputs
    assert [(output.request_id, output.text, output.token_ids, output.finished) for output in said] == [
        ("one", "ab", [1, 2], True),
        ("two", "ab", [1, 2], True),
    ], "what nobody has read is one output"
    assert all(output.prompt_token_ids == [] for output in said), "the front knows the prompt"
    refusal = await ours.add(Front("front"), Add("bad", [0], SamplingParams()))
    assert isinstance(refusal, ParameterError)
    await gains.aclose()


def test_a_step_of_all_requests_is_one_message():
    asyncio.run(_two_requests())


async def _cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Words()
    ours = replica(engine)
    tasks = [asyncio.create_task(ours.add(Front(front), Add(front, [1], None))) for front in ("gone", "there")]
    listener = asyncio.create_task(anext(aiter(ours.listen(Listen("gone", "r1")))))
    await listener
    listener = asyncio.create_task(anext(aiter(ours.listen(Listen("gone", "r1")))))
    await asyncio.sleep(0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + FRONT_SECONDS + 1)
    assert await ours.snapshot("there") == ("r1", "stats")
    await asyncio.wait(tasks[:1])
    await asyncio.wait([listener])
    assert tasks[0].cancelled()
    assert listener.cancelled()
    assert engine.left == ["gone"], "nobody would read its outputs"
    engine.gate.set()
    assert await tasks[1] is None


async def _alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_replica, "BEAT_SECONDS", 0.0)
    ours = replica(Words())
    beats = asyncio.create_task(ours._beat())
    async with aclosing(ours.listen(Listen("front", "r1"))) as gains:
        heard = [await asyncio.wait_for(anext(gains), 5) for _ in range(2)]
    assert heard == [Gains(), Gains()]
    beats.cancel()


def test_a_replica_that_has_nothing_to_say_gives_signs_of_life(monkeypatch):
    asyncio.run(_alive(monkeypatch))


async def _dead(monkeypatch: pytest.MonkeyPatch) -> None:
    exits = []
    monkeypatch.setattr(engine_replica, "FAREWELL_SECONDS", 0.0)
    monkeypatch.setattr(engine_replica.os, "_exit", exits.append)
    engine = Words()
    engine.is_alive = False
    ours = replica(engine)
    refusal = await ours.add(Front("front"), Add("one", [1], None))
    assert isinstance(refusal, EngineDeadError)
    assert ours._channels == {}, "the front does not hear that this replica has accepted the request"
    await ours._end_with_engine()
    assert exits == [1]


def test_a_replica_ends_with_its_engine(monkeypatch):
    asyncio.run(_dead(monkeypatch))


def test_requests_of_a_front_that_is_gone_are_aborted(monkeypatch):
    asyncio.run(_cancelled(monkeypatch))


def test_ray_replaces_a_replica_that_is_dead_or_hangs():
    engine = Words()
    ours = replica(engine)
    asyncio.run(ours.check_health())
    engine.beats = Pulse(busy_seconds=11.0)
    with pytest.raises(RuntimeError, match="above --step-timeout 10"):
        asyncio.run(ours.check_health())
    engine.is_alive = False
    with pytest.raises(RuntimeError, match="has died"):
        asyncio.run(ours.check_health())
    engine.is_restarting = True
    asyncio.run(ours.check_health())


async def _dying() -> None:
    ours = replica(Words())
    refusal = await ours.add(Front("front"), Add("early", [DIES, 0], None))
    assert isinstance(refusal, EngineDeadError)
    assert str(refusal) == "the engine has ended: rank 1"
    assert await ours.add(Front("front"), Add("late", [DIES, 1], None)) is None
    async with aclosing(ours.listen(Listen("front", "r1"))) as gains:
        said = (await anext(gains)).outputs
    assert [(output.request_id, output.text) for output in said] == [("late", "a")], "the client has the word already"
    assert said[0].error is not None
    assert said[0].error.code == "engine_dead"


def test_a_request_without_a_word_is_left_to_another_replica_when_the_engine_dies():
    asyncio.run(_dying())


def _inputs(*firsts: int) -> EncoderInputs:
    return EncoderInputs.of([EncoderInput(np.array([first, 1], dtype=np.int32)) for first in firsts])


async def _encoding() -> None:
    engine = Words()
    ours = replica(engine)
    left = asyncio.create_task(ours.add(Front("front"), Encode("left", _inputs(1, 1), None)))
    task = asyncio.create_task(ours.add(Front("front"), Encode("texts", _inputs(1, 2, 3), None)))
    async with aclosing(ours.listen(Listen("front", "r1"))) as gains:
        assert (await anext(gains)).accepted == ["left", "texts"]
        left.cancel()
        await asyncio.wait([left])
        assert (left.cancelled(), engine.left) == (True, ["left"])
        engine.gate.set()
        assert await task is None
        said = (await anext(gains)).outputs
        assert [(output.request_id, list(output.answers)) for output in said] == [("texts", [0, 1]), ("texts", [2])]
        refusal = await ours.add(Front("front"), Encode("full", _inputs(1), None))
        assert isinstance(refusal, QueueFullError)
        refusal = await ours.add(Front("front"), Encode("early", _inputs(DIES), None))
        assert isinstance(refusal, EngineDeadError), "another replica may compute it"
        assert await ours.add(Front("front"), Encode("late", _inputs(DIES, 1), None)) is None
        [first, last] = (await anext(gains)).outputs
    assert (list(first.answers), last.error.code) == ([0], "engine_dead"), "some of it has been computed"


def test_inputs_of_an_encoder_come_back_together():
    asyncio.run(_encoding())
