"""Images that go through the towers in parts, beside requests that decode."""

from __future__ import annotations

import concurrent.futures.thread
import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import pytest
import torch
from every_type import tiny_model
from image_inputs import CHANGES, IMAGE, Inputs, one_image, whole_prompt
from transformers import PreTrainedModel

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.runner.results import LaunchedStep, StepQueue
from fa_serve.engine.scheduler import prompt_share
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.engine.scheduler.step_cost import ImageSeconds
from fa_serve.hf.images import ImageReader

DEPTH = 8
NAME = "qwen2_5_vl"
PART_SECONDS = 0.003
STEP_SECONDS = 0.005


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(NAME, {**CHANGES[NAME], "vision_config": {"depth": DEPTH}})


@pytest.fixture(scope="module")
def inputs(model: PreTrainedModel) -> list[Inputs]:
    return [one_image(NAME, model, seed) for seed in range(5)]


def test_encodings_pause_behind_their_inputs_layers_and_what_is_beside_layers(
    model: PreTrainedModel, inputs: list[Inputs]
) -> None:
    reader = ImageReader(copy.deepcopy(model))
    tower = reader._model.get_submodule("model.visual")
    run: list[str] = []
    for name, module in tower.named_modules():
        module.register_forward_hook(lambda *_, name=name: run.append(name))
    found = []
    with reader.pausing(lambda: found.append([name for name in run if name.count(".") == name.startswith("blocks.")])):
        reader.encode(inputs[0])
    added = [after[len(before) :] for before, after in pairwise([[], *found])]
    blocks = [f"blocks.{number}" for number in range(DEPTH)]
    assert added == [[], ["patch_embed"], ["rotary_pos_emb", blocks[0]], *([name] for name in blocks[1:]), ["merger"]]


def test_an_encoding_pauses_beside_other_forwards(model: PreTrainedModel, inputs: list[Inputs]) -> None:
    reader = ImageReader(copy.deepcopy(model))
    assert len(reader.blocks) == DEPTH
    alone = reader.encode(inputs[0])
    encoder = ImageEncoder(reader, max_bytes=1 << 20)
    images = [ImageInput.of(inputs[0])]
    for number in range(DEPTH + 3):
        assert not encoder.is_encoded(images[0].key)
        count = reader.num_tokens(inputs[0])
        encoder.advance(TowerWork(images, limit=count // DEPTH, count=1))
        assert encoder.is_busy, number
        # forwards of others meet neither the pauses nor the end of the encoding
        torch.testing.assert_close(reader.encode(inputs[0]).embeds, alone.embeds)
        assert reader._model(torch.tensor([[5, 6, 7]])).logits.shape[1] == 3, number
    encoder.advance(TowerWork(images, limit=None, count=1))
    assert not encoder.is_busy
    torch.testing.assert_close(encoder.features(images)[images[0].key].embeds, alone.embeds)
    assert encoder.num_encoded == 1
    assert encoder._num_pauses == DEPTH + 2, "the copy is no part of the towers"


def test_steps_do_not_wait_for_the_copy_of_an_image(
    model: PreTrainedModel, inputs: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ImageReader(copy.deepcopy(model))
    alone = reader.encode(inputs[0])
    may_copy = threading.Event()
    moved = reader._moved
    monkeypatch.setattr(reader, "_moved", lambda x: may_copy.wait(20) and moved(x))
    encoder = ImageEncoder(reader, max_bytes=1 << 20)
    work = TowerWork([ImageInput.of(inputs[0])], limit=1, count=1)
    encoder.advance(work)  # would take 20 s for each of them
    assert encoder.is_busy
    may_copy.set()
    while encoder.is_busy:
        encoder.advance(work)
    torch.testing.assert_close(encoder.features(work.images)[work.images[0].key].embeds, alone.embeds)


def test_a_copy_that_fails_ends_its_image_alone(
    model: PreTrainedModel, inputs: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ImageReader(copy.deepcopy(model))
    encoder = ImageEncoder(reader, max_bytes=1 << 20)
    images = [ImageInput.of(x) for x in inputs[:2]]
    for image in images:
        encoder.hold(image.key)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_moved", lambda x: {}["no memory"])
        for _ in range(2):
            encoder.advance(TowerWork(images[:1], limit=1, count=1))
    assert encoder.has_failed(images[0].key)
    while not encoder.is_encoded(images[1].key):
        encoder.advance(TowerWork(images[1:], limit=1, count=1))
    assert not encoder.has_failed(images[1].key)


def test_an_engine_whose_main_thread_has_ended_copies_images(
    model: PreTrainedModel, inputs: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter waits for other threads then, and for pools before these: a pool refuses work from there on."""
    encoder = ImageEncoder(ImageReader(copy.deepcopy(model)), max_bytes=1 << 20)
    work = TowerWork([ImageInput.of(inputs[0])], limit=1, count=1)
    encoder.hold(work.images[0].key)
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    while not encoder.is_encoded(work.images[0].key):
        encoder.advance(work)
    assert not encoder.has_failed(work.images[0].key)


@pytest.mark.slow
def test_a_copy_that_fails_keeps_nothing(model: PreTrainedModel, inputs: list[Inputs], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the collection of garbage, which may come late: the pixels may be hundreds of MB."""
    reader = ImageReader(copy.deepcopy(model))
    encoder = ImageEncoder(reader, max_bytes=1 << 20)
    copies: list[weakref.ref[torch.Tensor]] = []

    def move(x: torch.Tensor) -> torch.Tensor:
        mine = x.clone()
        copies.append(weakref.ref(mine))
        raise ValueError("no memory")

    monkeypatch.setattr(reader, "_moved", move)
    image = ImageInput.of(inputs[0])
    encoder.hold(image.key)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            encoder.advance(TowerWork([image], limit=1, count=1))
        assert encoder.has_failed(image.key)
        assert [ref() for ref in copies] == [None]
    finally:
        gc.enable()


@pytest.fixture
def layers(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many layers of the tower, and modules beside them, have run up to each step. Steps take what a formula says, so that
    no machine is too slow."""
    run = [0]
    before = [0]

    def seconds(queue: StepQueue, step: LaunchedStep) -> tuple[float, ImageSeconds]:
        took = PART_SECONDS * (run[-1] - before[0])
        before[0] = run[-1]
        images = 0.0 if step.watch is None else took  # the first image is also encoded when it comes
        return STEP_SECONDS + took, ImageSeconds(images, images)

    def count(*_: object) -> None:
        run[-1] += 1

    monkeypatch.setattr(StepQueue, "seconds", seconds)
    reader = ImageReader(model)
    hooks = [each.register_forward_hook(count) for each in (*reader.blocks, *reader._beside_blocks())]
    yield run
    for hook in hooks:
        hook.remove()


def engine_of(model: PreTrainedModel, **settings: object) -> Engine:
    given = {"device": "cpu", "num_pages": 256, "max_model_len": 256, "page_size": 4, "target_itl": 15.0} | settings
    return Engine(EngineConfig(**given), model=model)  # type: ignore[arg-type]


def prompt(inputs: Inputs, seed: int = 0) -> list[int]:
    return [10 + seed, 11, *[IMAGE] * inputs["input_ids"].shape[1], 12]


def generated(model: PreTrainedModel, ids: list[int], given: Inputs) -> list[int]:
    whole = whole_prompt(NAME, model, ids, [given])
    with torch.no_grad():
        output = model.generate(**whole, max_new_tokens=4, min_new_tokens=4, do_sample=False, eos_token_id=None)  # type: ignore[operator]
    return output[0, len(ids) :].tolist()


def layers_beside_text(model: PreTrainedModel, inputs: list[Inputs], layers: list[int]) -> list[int]:
    """The layers of the tower that ran in each step in which texts decode, after the first image that was cut, by
    whose parts their cost is known."""
    engine = engine_of(model)
    text = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    engine.add_request("text", [5, 6, 7], text)
    answers: dict[str, list[int]] = {}
    found = []
    for step in range(400):
        if not engine.has_unfinished():
            break
        if step and not step % 14 and step // 14 <= len(inputs):
            number = step // 14 - 1
            engine.add_request(str(number), prompt(inputs[number]), short, images=[ImageInput.of(inputs[number])])
        layers.append(layers[-1])
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        found.append(layers[-1] - layers[-2])
    for number, each in enumerate(inputs):
        assert answers[str(number)] == generated(model, prompt(each), each)
    engine.check_integrity()
    return found[42:80]


@pytest.mark.slow
def test_texts_keep_their_gaps_beside_a_slow_tower(
    model: PreTrainedModel, inputs: list[Inputs], layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has 15 ms: beside 5 of decoding there is time for three parts of 3 ms, which are one of four embeddings."""
    monkeypatch.setattr(prompt_share, "MIN_IMAGE_TOKENS", 1)
    found = layers_beside_text(model, inputs, layers)
    assert max(found) == 3
    assert sum(found) >= (DEPTH + 2) * 3


def test_without_slices_texts_wait_for_whole_images(
    model: PreTrainedModel, inputs: list[Inputs], layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptShare, "image_limit", lambda *_, **__: 4096)
    assert max(layers_beside_text(model, inputs, layers)) >= DEPTH


@pytest.mark.parametrize("event", ["abort", "weights", "sleep", "reset"])
def test_what_happens_while_an_image_is_on_its_way(
    model: PreTrainedModel, inputs: list[Inputs], event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = copy.deepcopy(model)
    monkeypatch.setattr(PromptShare, "image_limit", lambda *_, **__: 1)
    engine = engine_of(own)
    text = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    engine.add_request("warm", prompt(inputs[0]), text, images=[ImageInput.of(inputs[0])])
    engine.add_request("text", [5, 6, 7], text)
    for _ in range(3):
        engine.step()
    short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    ids = prompt(inputs[1], seed=1)
    engine.add_request("image", ids, short, images=[ImageInput.of(inputs[1])])
    engine.step()
    encoder = engine._runner.images
    assert isinstance(encoder, ImageEncoder)
    assert encoder.is_busy
    tokens: list[int] = []
    if event == "abort":
        engine.abort("image")
    elif event == "weights":
        changed = {name: x * 1.5 for name, x in own.named_parameters() if "visual" in name}
        engine.update_weights(changed.items())
        assert not encoder.is_busy
    elif event == "reset":
        monkeypatch.setattr(engine._scheduler, "schedule", lambda: {}["lost"])
        assert {output.finish_reason for output in engine.step()} == {"error"}
        assert not encoder.is_busy
        assert not encoder._held
        ids = prompt(inputs[2], seed=1)
        inputs = [inputs[0], inputs[2]]
        engine.add_request("image", ids, short, images=[ImageInput.of(inputs[1])])
    else:
        engine.sleep(0)
        assert not encoder.is_busy
        engine.wake_up()
    while engine.has_unfinished():
        for output in engine.step():
            if output.request_id == "image":
                tokens += output.token_ids
    engine.check_integrity()
    assert tokens == ([] if event == "abort" else generated(own, ids, inputs[1]))
    assert not encoder._held


def test_a_forward_that_does_not_read_the_images_is_launched_before_they_are_encoded(
    model: PreTrainedModel, inputs: list[Inputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host prepares the towers' inputs while the device computes the forward. A forward that reads the images waits."""
    monkeypatch.setattr(PromptShare, "image_limit", lambda *_, **__: 1)
    engine = engine_of(model)
    runner = engine._runner
    order: list[str] = []
    for name in ("encode", "_run"):
        plain = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda given, name=name, plain=plain: order.append(name) or plain(given))
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    cast(ImageEncoder, runner.images).place(prompt(inputs[0]), [ImageInput.of(inputs[0])], 64)  # an engine's first image
    for number, calls in ((1, ["encode", "_run"]), (2, ["_run", "encode"] * 3)):
        order.clear()
        engine.add_request(str(number), prompt(inputs[number]), params, images=[ImageInput.of(inputs[number])])
        for _ in range(len(calls) // 2):
            engine.step()
        assert order == calls
