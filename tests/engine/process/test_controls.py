"""An engine that serves is told to pause, to sleep and to take other weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_folders import save_encoder
from tiny_models import greedy, make_model

from fa_serve.engine import (
    AsyncEngine,
    Encoder,
    Engine,
    EngineAsleepError,
    EngineConfig,
    EngineDeadError,
    RequestOutput,
    SamplingParams,
    WeightTransferError,
)
from fa_serve.engine.process.controls import Control, Controls, Reply
from fa_serve.engine.process.engine_loop import StepOutputs
from fa_serve.engine.rollout.weight_group import WeightGroup
from fa_serve.engine.start import new_weights
from fa_serve.ops.collectives.all_reduce import listen
from fa_serve.spec import ParameterError

PROMPT = [*range(5, 25)]
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def running(engine: Engine | Encoder) -> AsyncIterator[AsyncEngine]:
    running = AsyncEngine(engine)
    await running.start()
    try:
        yield running
    finally:
        await running.shutdown()


class Answer:
    """A request in flight: its tokens so far, and how it has ended."""

    def __init__(self, engine: AsyncEngine, name: str, max_tokens: int = 40, prompt: list[int] = PROMPT) -> None:
        self.tokens: list[int] = []
        self.last: RequestOutput | None = None
        self.begun = asyncio.Event()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._outputs = engine.generate(prompt, params, name)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self._outputs:
            self.tokens += output.token_ids
            self.last = output
            if self.tokens:
                self.begun.set()

    async def end(self) -> list[int]:
        await asyncio.wait_for(self.task, 30)
        return self.tokens


async def test_a_pause_that_keeps_requests_stops_them_with_their_pages(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    async with running(engine) as served:
        answer = Answer(served, "a")
        await answer.begun.wait()
        await served.pause("keep")
        seen = len(answer.tokens)
        assert 0 < seen < 40
        later = Answer(served, "b", max_tokens=3)
        steps = served.stats().num_steps
        await asyncio.sleep(0.1)
        assert (len(answer.tokens), later.tokens, served.is_paused, served.is_asleep) == (seen, [], True, False)
        assert served.stats().num_pages_used > 0
        await served.resume()
        assert await answer.end() == greedy(make_model(), PROMPT, 40)
        assert len(await later.end()) == 3
        assert served.stats().num_preemptions == 0
        assert served.stats().num_steps > steps


async def test_a_pause_aborts_or_awaits_requests(make_engine: Callable[..., Engine]) -> None:
    async with running(make_engine()) as served:
        answer = Answer(served, "a")
        await answer.begun.wait()
        await served.pause("wait")
        assert len(answer.tokens) == 40, "it was awaited"
        late = Answer(served, "late", max_tokens=2)
        await asyncio.sleep(0.05)
        assert late.tokens == []
        await served.resume()
        await late.end()
        answer = Answer(served, "b")
        await answer.begun.wait()
        await served.pause("abort")
        await answer.end()
        assert answer.last is not None
        assert answer.last.finish_reason == "abort"
        await served.resume()
        with pytest.raises(ParameterError, match="mode must be abort, wait, keep"):
            await served.pause("stop")  # type: ignore[arg-type]


async def test_a_pause_that_waits_is_refused_while_requests_sleep(make_engine: Callable[..., Engine]) -> None:
    async with running(make_engine()) as served:
        await served.sleep()
        await asyncio.wait_for(served.pause("wait"), 30)  # no request is in flight
        await served.wake_up()
        await served.resume()
        answer = Answer(served, "a")
        await answer.begun.wait()
        await served.sleep()
        with pytest.raises(EngineAsleepError, match="cannot end while the engine is asleep"):
            await asyncio.wait_for(served.pause("wait"), 30)
        assert served.is_paused, "it sleeps"
        await served.wake_up()
        assert not served.is_paused, "a refused pause changes nothing"
        assert await answer.end() == greedy(make_model(), PROMPT, 40)


async def test_a_pause_that_waits_ends_one_that_keeps_requests(make_engine: Callable[..., Engine]) -> None:
    async with running(make_engine()) as served:
        answer = Answer(served, "a")
        await answer.begun.wait()
        await served.pause("keep")
        await asyncio.wait_for(served.pause("wait"), 30)
        assert await answer.end() == greedy(make_model(), PROMPT, 40)
        assert served.is_paused


async def test_weights_change_under_a_request(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    other = make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    other.save_pretrained(tmp_path)
    async with running(make_engine()) as served:
        answer = Answer(served, "a")
        await answer.begun.wait()
        await served.pause("keep")
        begun = list(answer.tokens)
        assert served.weight_version == 0
        assert await served.update_weights(folder=str(tmp_path)) == 1
        assert served.weight_version == 1
        await served.resume()
        assert await answer.end() == begun + greedy(other, PROMPT + begun, 40 - len(begun))
        with pytest.raises(ParameterError, match="weight_dir must be a folder"):
            await served.update_weights(folder=str(tmp_path / "nowhere"))
        with pytest.raises(ParameterError, match="weight_dir must be given, or shared_memory, or update_info"):
            await served.update_weights()
        with pytest.raises(ParameterError, match="dry_run must be False unless update_info is given"):
            await served.update_weights(folder=str(tmp_path), dry_run=True)
        with pytest.raises(ParameterError, match="update_info must come after init_weight_transfer_engine"):
            await served.update_weights(announced=[])
        assert served.weight_version == 1


async def test_weights_come_through_shared_memory(make_engine: Callable[..., Engine]) -> None:
    head = torch.randn(320, 32, generator=torch.Generator().manual_seed(2))
    memory = SharedMemory(create=True, size=head.nbytes)
    try:
        memory.buf[: head.nbytes] = head.numpy().tobytes()
        place = {"name": "lm_head.weight", "dtype": "float32", "shape": [320, 32], "offset": 0}
        engine = make_engine()
        async with running(engine) as served:
            await served.update_weights(segment=memory.name, tensors=[place])
            assert torch.equal(engine.model.lm_head.weight, head)
    finally:
        memory.close()
        memory.unlink()


async def test_requests_wait_while_the_engine_sleeps(make_engine: Callable[..., Engine]) -> None:
    async with running(make_engine()) as served:
        answer = Answer(served, "a")
        await answer.begun.wait()
        await served.sleep(1)
        later = Answer(served, "b", max_tokens=2, prompt=PROMPT[:5])
        await asyncio.sleep(0.05)
        assert (later.tokens, served.is_paused, served.is_asleep) == ([], True, True)
        await served.wake_up(["weights"])
        assert served.is_paused
        await served.wake_up(["kv_cache"])
        assert await answer.end() == greedy(make_model(), PROMPT, 40)
        assert len(await later.end()) == 2


async def test_requests_run_again_as_soon_as_the_engine_is_awake(model_folder: Path) -> None:
    """Whatever was given away, and in whatever order it comes back: what counts is what the engine lacks."""
    sizes = {"num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_model_len": 64}
    async with running(Engine(EngineConfig(model=model_folder, device="cpu", **sizes))) as served:
        await served.sleep(0)  # the weights stay
        await served.wake_up(["kv_cache"])
        assert not served.is_paused
        await served.sleep(1)
        await served.wake_up(["weights"])
        await served.sleep(1)  # which changes nothing, because the cache sleeps
        await served.wake_up(["kv_cache"])
        assert not served.is_paused
        assert len(await Answer(served, "a", max_tokens=2).end()) == 2
        await served.sleep(2)
        await served.wake_up()
        assert served.is_paused, "the weights have no values yet"
        later = Answer(served, "b", max_tokens=2)
        await served.update_weights(folder=str(model_folder))
        assert await later.end() == greedy(make_model(), PROMPT, 2)


async def test_weights_that_are_refused_change_nothing(make_engine: Callable[..., Engine]) -> None:
    """Neither a weight before the refused one, nor the version, nor what is cached."""
    engine = make_engine()
    embeddings = engine.model.get_input_embeddings().weight
    before = embeddings.detach().clone()
    memory = SharedMemory(create=True, size=1 << 16)
    first = {"name": "model.embed_tokens.weight", "dtype": "float32", "shape": [*before.shape], "offset": 0}
    try:
        async with running(engine) as served:
            await Answer(served, "a", max_tokens=2).end()
            for wrong in ({"name": "model.norm.weight", "shape": [3]}, {"name": "nothing", "shape": [32]}):
                with pytest.raises(ParameterError, match="weights must have the"):
                    await served.update_weights(segment=memory.name, tensors=[first, first | wrong])
            assert torch.equal(embeddings, before)
            assert served.weight_version == 0
            again = Answer(served, "b", max_tokens=2)
            await again.end()
            assert again.last is not None
            assert again.last.num_cached_tokens
    finally:
        memory.close()
        memory.unlink()


async def test_requests_wait_for_the_rest_of_weights_that_came_in_part(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    def cut_off(model: object, folder: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from [*read(model, folder)][:3]
        raise OSError("it is cut off")

    read: Any = new_weights.from_folder
    async with running(make_engine()) as served:
        answer = Answer(served, "a")
        await answer.begun.wait()
        with monkeypatch.context() as patch:
            patch.setattr(new_weights, "from_folder", cut_off)
            with pytest.raises(RuntimeError, match="OSError: it is cut off"):
                await served.update_weights(folder=str(model_folder))
        assert served.is_paused
        later = Answer(served, "b", max_tokens=2)
        await asyncio.sleep(0.05)
        assert (answer.task.done(), later.tokens) == (False, [])
        await served.update_weights(folder=str(model_folder))
        assert await later.end() == greedy(make_model(), PROMPT, 2)
        assert await answer.end() == greedy(make_model(), PROMPT, 40)


async def test_a_group_is_replaced_and_left(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    async with running(engine) as served:
        with pytest.raises(WeightTransferError, match=r"did not connect to each other at 127\.0\.0\.1, port 9"):
            await served.join_weight_group(host="127.0.0.1", port=9, timeout=1.0)
        trainers = []
        for _ in range(2):
            store, port = listen(2)
            place = {"rank": 0, "world_size": 2, "backend": "gloo", "device": torch.device("cpu"), "timeout": 20.0}
            meeting = asyncio.create_task(asyncio.to_thread(WeightGroup, "127.0.0.1", port, **place))
            await served.join_weight_group(host="127.0.0.1", port=port)
            trainers.append(await meeting)
            del store
        with pytest.raises(WeightTransferError, match="has left the group"):
            await asyncio.to_thread(trainers[0].broadcast, torch.zeros(1 << 20))
        announced = [{"name": "model.norm.weight", "dtype": "float32", "shape": (32,)}]
        update = asyncio.create_task(served.update_weights(announced=announced))
        await asyncio.to_thread(trainers[1].broadcast, torch.full((32,), 0.5))
        assert await update == 1
        assert engine.model.model.norm.weight.tolist() == [0.5] * 32
        await served.join_weight_group()
        with pytest.raises(ParameterError, match="update_info must come after"):
            await served.update_weights(announced=announced)
        for trainer in trainers:
            trainer.close()


def test_several_ranks_join_no_group(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.config = replace(engine.config, tensor_parallel=2)
    with pytest.raises(ParameterError, match="tensor_parallel must be 1 to receive weights from a group"):
        Controls(engine).carry_out(Control(1, "join_weight_group", {"host": "127.0.0.1", "port": 9}))


async def test_an_encoder_refuses_a_pause_and_goes_on(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert")
    encoder = Encoder(EngineConfig(model=folder, device="cpu", dtype="float32", max_num_batched_tokens=64))
    async with running(encoder) as served:
        for mode in ("abort", "keep"):
            with pytest.raises(ParameterError, match="task must be generate: encoders do not support pause"):
                await served.pause(mode)  # type: ignore[arg-type]
        assert not served.is_paused


async def test_the_end_of_the_engine_ends_those_who_wait_for_an_answer(
    make_engine: Callable[..., Engine], model_folder: Path
) -> None:
    engine = make_engine()
    async with running(engine) as served:
        engine._residence.settle = None  # type: ignore[method-assign, assignment] - its failure is no error of a parameter
        with pytest.raises(RuntimeError, match="TypeError"):
            await served.update_weights(folder=str(model_folder))


def test_an_engine_is_called_between_two_steps(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    controls = Controls(engine)
    controls.carry_out(Control(1, "sleep", {"level": 0}))
    with pytest.raises(EngineAsleepError):
        engine.generate([PROMPT])
    controls.carry_out(Control(2, "wake_up", {"tags": None}))
    assert not engine.is_asleep


@pytest.mark.usefixtures("warm_engine_processes")
async def test_controls_and_their_answers_cross_the_pipe(model_folder: Path) -> None:
    sizes = {"num_pages": 64, "page_size": 4, "max_num_seqs": 4, "max_model_len": 64}
    served = AsyncEngine(EngineConfig(model=model_folder, device="cpu", process=True, **sizes))
    await served.start()
    try:
        assert await served.update_weights(folder=str(model_folder)) == 1
        assert served.weight_version == 1
        await served.sleep(2)
        await served.wake_up()
        assert served.is_paused
        with pytest.raises(ParameterError, match="weight_dir must be a folder"):
            await served.update_weights(folder="/nowhere")
        with pytest.raises(ParameterError, match="weight_dir must be given"):
            await served.update_weights(folder=None, keep_pages=True)
        await served.update_weights(folder=str(model_folder))
        answer = Answer(served, "a", max_tokens=6)
        assert await answer.end() == greedy(make_model(), PROMPT, 6)
    finally:
        await served.shutdown()


async def test_an_engine_that_dies_when_it_has_fallen_asleep_lets_the_next_one_wake(make_engine, monkeypatch) -> None:
    """Its answer and its death may come before the caller runs again. Requests to the next engine would wait for ever."""
    async with running(make_engine()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._worker, "send", lambda command: None)
            call = asyncio.create_task(engine.sleep())
            while not engine._replies:
                await asyncio.sleep(0)
            engine._deliver(StepOutputs(None, replies=[Reply(serial, is_asleep=True) for serial in engine._replies]))
            engine._handle_death(EngineDeadError("it was killed"))
            await call
        assert not engine.is_paused
