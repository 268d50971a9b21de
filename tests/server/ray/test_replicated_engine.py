"""Requests that are aborted, and those whose replica dies or is silent. Clusters are in tests/server/test_ray.py."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("ray", reason="the ray extra is not installed")
from types import SimpleNamespace

from fa_serve.server.ray import replicated_engine
from fa_serve.server.ray.output_channel import Gains
from fa_serve.server.ray.replicated_engine import SILENT_LOOKS, ReplicaWorker
from ray.exceptions import RayActorError

from fa_serve.engine import EngineConfig, EngineDeadError, RequestError, RequestOutput, SamplingParams
from fa_serve.engine.pooling.inputs import EncoderInput, EncoderInputs
from fa_serve.engine.pooling.params import PooledRows
from fa_serve.engine.process.engine_loop import Abort, Add, Encode


async def _aborted(iterations: int) -> None:
    steps = []
    sent = []
    worker = ReplicaWorker(SimpleNamespace(), EngineConfig(device="cpu"), steps.append, None)

    def remote(front, add):
        sent.append(asyncio.get_running_loop().create_future())
        return sent[-1]

    worker._add = SimpleNamespace(remote=remote)
    worker.send(Add("one", [1], SamplingParams(n=2)))
    for _ in range(iterations):
        await asyncio.sleep(0)
    worker.send(Abort("one", 2))
    for _ in range(3):
        await asyncio.sleep(0)
    ends = [(output.request_id, output.index, output.finish_reason) for step in steps for output in step.outputs]
    assert ends == [("one", 0, "abort"), ("one", 1, "abort")]
    assert [future.cancelled() for future in sent] == [True] * (iterations > 0)
    assert worker._requests == {}, "nothing of it keeps a listener alive"


@pytest.mark.parametrize("iterations", [0, 2], ids=["before it is sent", "afterwards"])
def test_an_aborted_request_ends_and_is_forgotten(iterations: int) -> None:
    asyncio.run(_aborted(iterations))


def _worker(steps: list, answers: list) -> ReplicaWorker:
    """A worker whose requests get these answers, and which hears the replica r1. `gains` feeds that one."""
    worker = ReplicaWorker(SimpleNamespace(), EngineConfig(device="cpu"), steps.append, None)
    worker.gains = asyncio.Queue()

    async def add():
        return await answers.pop(0) if answers else await asyncio.Future()

    class Listening:
        def __aiter__(self):
            return self

        async def __anext__(self):
            return await worker.gains.get()

        def cancel(self): ...

    worker._add = SimpleNamespace(remote=lambda front, add_: asyncio.ensure_future(add()))
    worker._listen_to = SimpleNamespace(remote=lambda listen: Listening())
    worker._listen_to_all(frozenset({"r1"}))
    return worker


async def _turn(worker: ReplicaWorker) -> None:
    while not worker.gains.empty():
        await asyncio.sleep(0)
    await asyncio.sleep(0)


def _ends(steps: list) -> list:
    return [(output.request_id, output.error.code) for step in steps for output in step.outputs if output.error is not None]


async def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_engine, "LOOK_SECONDS", 0.0)
    steps = []
    worker = _worker(steps, [])
    worker.send(Add("one", [1], None))
    worker.gains.put_nowait(Gains(["one"], []))
    await _turn(worker)
    for _ in range(SILENT_LOOKS - 1):
        worker._count_silence()
    worker.gains.put_nowait(Gains())  # a beat
    await _turn(worker)
    for _ in range(SILENT_LOOKS - 1):
        worker._count_silence()
    assert (_ends(steps), worker._front.heard) == ([], {"r1"})
    worker._count_silence()
    await _turn(worker)
    await _turn(worker)
    assert (_ends(steps), worker._front.heard, worker._listeners) == ([("one", "replica_lost")], set(), {})
    worker._listen_to_all(frozenset({"r1"}))
    assert worker._front.heard == {"r1"}, "it answers again"
    monkeypatch.setattr(replicated_engine, "LOOK_SECONDS", 60.0)
    for _ in range(SILENT_LOOKS):
        worker._count_silence()
    assert worker._listeners["r1"].silent_looks == 0, "looks that come at once say nothing about replicas"
    await worker._stop_listening()


def test_a_silent_replica_is_given_up_until_it_is_heard_again(monkeypatch):
    asyncio.run(_silent(monkeypatch))


async def _dying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_engine, "AGAIN_SECONDS", 0.0)
    steps = []
    answers = [asyncio.Future() for _ in range(3)]
    worker = _worker(steps, list(answers))
    worker.send(Add("one", [1], None))
    worker.gains.put_nowait(Gains(["one"], []))
    await _turn(worker)
    assert worker._requests["one"].replica == "r1"
    for answer in answers[:2]:
        answer.set_result(EngineDeadError("the engine has ended"))
    for _ in range(20):
        await asyncio.sleep(0)
    worker._lose("r1")
    assert steps == [], "the third replica computes it"
    error = RequestError("engine_dead", "the engine has ended: rank 1")
    worker.gains.put_nowait(Gains([], [RequestOutput("one", [], finished=True, finish_reason="error", error=error)]))
    await _turn(worker)
    assert _ends(steps) == [("one", "replica_lost")], "only this replica is dead"
    assert worker._front.heard == set(), "and gets no other request"
    answers[2].set_result(None)
    await worker._stop_listening()


def test_a_request_that_a_dying_replica_has_not_begun_is_sent_again(monkeypatch):
    asyncio.run(_dying(monkeypatch))


@pytest.mark.parametrize("accepts", ["neither", "the second", "the first, as one hears late"])
def test_a_request_survives_one_replica_that_may_not_have_taken_it(monkeypatch, accepts: str):
    """A replica ends while a request is on its way there. Nobody knows whether it has ended because of it, so one may end."""

    async def lost() -> None:
        steps = []
        answers = [asyncio.Future() for _ in range(3)]
        worker = _worker(steps, list(answers))
        worker.send(Add("one", [1], None))
        await _turn(worker)
        answers[0].set_exception(RayActorError())
        if accepts == "the first, as one hears late":
            worker.gains.put_nowait(Gains(["one"], []))
        for _ in range(20):
            await asyncio.sleep(0)
        if accepts == "the second":
            answers[1].set_result(None)
            worker.gains.put_nowait(Gains(["one"], [RequestOutput("one", [], "a", [1], finished=True, finish_reason="stop")]))
        elif accepts == "neither":
            assert steps == []
            answers[1].set_exception(RayActorError())
        for _ in range(20):
            await asyncio.sleep(0)
        assert _ends(steps) == ([] if accepts == "the second" else [("one", "replica_lost")])
        assert [output.text for step in steps for output in step.outputs if output.error is None] == ["a"] * (
            accepts == "the second"
        )
        assert worker._requests == {}
        await worker._stop_listening()

    monkeypatch.setattr(replicated_engine, "AGAIN_SECONDS", 0.0)
    asyncio.run(lost())


async def _encoding() -> None:
    steps = []
    answers = [asyncio.Future(), asyncio.Future()]
    worker = _worker(steps, list(answers))
    inputs = EncoderInputs.of([EncoderInput(np.ones(2, dtype=np.int32)) for _ in range(3)])
    worker.send(Encode("texts", inputs, None))
    worker.send(Encode("lost", inputs, None))
    worker.gains.put_nowait(Gains(["texts", "lost"], []))
    await _turn(worker)

    def output(index: int, count: int) -> RequestOutput:
        rows = PooledRows(np.zeros((count, 2), dtype=np.float32))
        return RequestOutput("texts", [], finished=True, index=index, pooled=rows)

    worker.gains.put_nowait(Gains([], [output(0, 2)]))
    await _turn(worker)
    assert worker._requests["texts"].unfinished == {2}
    worker.gains.put_nowait(Gains([], [output(2, 1)]))
    await _turn(worker)
    assert worker._requests["texts"].ended.is_set()
    answers[0].set_result(None)
    await asyncio.sleep(0)
    worker._lose("r1")
    assert _ends(steps) == [("lost", "replica_lost")] * 3, "for each of its inputs, and none of the request that has ended"
    await worker._stop_listening()


def test_an_answer_of_an_encoder_ends_all_of_its_inputs():
    asyncio.run(_encoding())
