"""Towers that fail or are interrupted: what is lost, what the log says of it, and what memory is left."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from image_cases import GREEDY, Case, answer
from image_inputs import one_image

from fa_serve.engine.images.encoder import ImageEncoder
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import TowerWork
from fa_serve.hf.images import ImageReader


@pytest.fixture(scope="module")
def llava() -> Case:
    return Case("llava")


def test_failures_are_counted_by_the_images_that_are_lost(
    llava: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that came through the towers before, and the same image in two requests, end no further request."""
    encoder = ImageEncoder(ImageReader(llava.model), max_bytes=1 << 20)
    third = ImageInput.of(one_image("llava", llava.model, 3))
    images = [*llava.images, third]
    for image in images:
        encoder.hold(image.key)
    own = encoder._encode
    batches: list[int] = []

    def encode(given: Any) -> Any:
        batches.append(len(given))
        if len(batches) == 2:
            raise KeyError("broken")
        return own(given)

    monkeypatch.setattr(encoder, "_encode", encode)
    monkeypatch.setattr("fa_serve.engine.images.encoder.MAX_IMAGE_TOKENS", 2 * llava.count)
    encoder.advance(TowerWork([*images, third], limit=None, count=1))
    assert batches == [2, 1]
    assert "1 images could not be encoded; their requests end with an error" in caplog.text
    assert [encoder.has_failed(image.key) for image in images] == [False, False, True]
    encoder.check_integrity()


@pytest.mark.parametrize("limit", [None, 1], ids=["at-once", "in-parts"])
def test_an_interrupt_in_the_towers_leaves_no_thread_and_loses_nothing(
    llava: Case, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C in a notebook, which then steps on."""
    monkeypatch.setattr(PromptShare, "image_limit", lambda *_, **__: limit)
    engine = llava.engine(target_itl=15.0)
    ids = llava.prompt(0)
    answer(engine, ids, llava.images[0])
    encoder = engine._runner.images
    encoder.forget()
    text = [5, 6, 7]
    expected = {"text": answer(engine, text), "image": llava.generate(llava.prompt(1), 1)}
    engine.add_request("text", text, GREEDY)
    tokens: dict[str, list[int]] = {"text": [], "image": []}
    tokens["text"] += [token for output in engine.step() for token in output.token_ids]
    engine.add_request("image", llava.prompt(1), GREEDY, images=[llava.images[1]])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(encoder.reader, "encode_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not encoder.is_busy
    assert [thread for thread in threading.enumerate() if thread.name == "fa_serve-towers"] == []
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert tokens == expected
    engine.check_integrity()
    encoder.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 1], ids=["at-once", "in-parts"])
@pytest.mark.parametrize("fails", [False, True], ids=["encoded", "failed"])
def test_a_forward_of_the_towers_leaves_no_memory(
    llava: Case, limit: int | None, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a garbage collection, which may come late: a few objects of Python can hold gigabytes of a device."""
    reader = ImageReader(copy.deepcopy(llava.model))
    encoder = ImageEncoder(reader, max_bytes=1 << 20)
    seen: list[weakref.ref[torch.Tensor]] = []

    def look(module: Any, args: tuple[Any, ...], output: Any) -> None:
        seen.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
        if fails:
            raise KeyError("broken")

    monkeypatch.setattr("fa_serve.engine.images.encoder.log", logging.Logger("unheard", logging.CRITICAL))
    image = llava.images[0]
    hook = reader.blocks[0].register_forward_hook(look)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            encoder.hold(image.key)
            while not encoder.is_encoded(image.key):
                encoder.advance(TowerWork([image], limit=limit, count=1))
            assert encoder.has_failed(image.key) == fails
            assert seen
            assert [each for each in seen if each() is not None] == []
            encoder.forget()
    finally:
        gc.enable()
        hook.remove()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_image_that_fails_ends_every_answer_that_shares_its_pages(
    llava: Case, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They join the same step as the answer that computes the pages. One has another image, and shares the text before it."""
    engine = llava.engine(page_size=4)
    engine._steps.depth = depth
    answer(engine, llava.prompt(0), llava.images[0])
    engine._runner.images.forget()
    engine._scheduler.forget_cache()
    wrong = ImageInput.of({**llava.inputs[1], "pixel_values": torch.zeros(1, 3, 30, 28)})
    begin = [5, 6, 7, 8, 9, 10, 11, 12]
    ids = begin + llava.prompt(1) + [*range(30, 50)]
    fine = begin + llava.prompt(0)
    engine.add_request("fails", ids, dataclasses.replace(GREEDY, n=3), images=[wrong])
    engine.add_request("also", [*ids, 60, 61], GREEDY, images=[wrong])
    engine.add_request("fine", fine, GREEDY, images=[llava.images[0]])
    errors: list[tuple[str, str, str]] = []
    tokens: list[int] = []
    while engine.has_unfinished():
        for output in engine.step():
            if output.error is not None:
                errors.append((output.request_id, output.error.code, output.error.message[:50]))
            tokens += output.token_ids if output.request_id == "fine" else ()
        engine.check_integrity()
        engine._runner.images.check_integrity()
    message = "the vision tower could not encode image 1 of 1 (see"[:50]
    assert sorted(errors) == sorted((name, "image_failed", message) for name in ["fails", "fails", "fails", "also"])
    assert tokens == llava.generate(fine, 0)
