"""What a model's towers encode before the first request: pictures of noise, in sizes that need different kernels.

    process = find_process(config, vocab_size, max_model_len)        # None if the model's processor cannot be loaded
    for images in tower_calls(reader, process, max_tokens=4096):
        encoder.warm_up(images)              # encodes these images together

The model's own processor makes the inputs, because it decides which sizes the towers are given. Attention chooses its tiles by
the longest picture, and the choice nearly always changes at a power of two, so each picture has about twice as many pixels as
the one before. Strips, alternately wide and tall, have other windows and other tiles than squares. Then pictures are encoded
together: two small ones, two small ones with a large one, and many. The pictures are noise so that they differ: from different
pictures the encoder finds out how inputs are joined.

Left out: prompts with images (warm_up.py), and pictures that the towers cannot compute together with others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.processor import PromptMaker, load_processor_of
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.engine.scheduler.prompt_share import MAX_IMAGE_TOKENS
from fa_serve.hf.images import ImageReader
from fa_serve.spec import ParameterError

log = logging.getLogger("fa_serve.engine")

SIDES = (16, 1024)
"""Sides of the smallest and the largest square, in pixels; the processor resizes them to sizes that it allows. Attention uses
no other tiles for more patches than the largest one has, and a processor takes seconds for pictures of 12 million pixels."""
STRIP = 8
"""How much longer than wide a strip is. Processors refuse pictures that are much longer."""

Inputs = Mapping[str, Tensor]
Process = Callable[[Any], Inputs]
"""Makes the towers' inputs from a picture: (height, width, 3) uint8."""


def find_process(config: EngineConfig, vocab_size: int, max_model_len: int) -> Process | None:
    """A function that makes inputs from a picture with the model's processor. None if it cannot be loaded; the log says why."""
    try:
        if config.model is None:
            raise ParameterError("model", "be given, so that its processor can be loaded", None)
        processor, token = load_processor_of(config)
        maker = PromptMaker(processor, PromptReader(processor.tokenizer, vocab_size, max_model_len), token)
    except (ParameterError, AttributeError) as error:
        log.info("the first images may wait for kernels to compile, because no warm-up image could be made: %s", error)
        return None
    return lambda image: maker.input_of(image).inputs


def tower_calls(reader: ImageReader, process: Process, max_tokens: int) -> Iterator[list[Inputs]]:
    """The inputs of each call to the towers: single images, the smallest first, then several images together.

    max_tokens: maximum number of embeddings of one image
    """
    most = min(max_tokens, MAX_IMAGE_TOKENS)
    images = [x for x in _images(process, reader) if reader.num_tokens(x) <= most]
    if not images:
        return
    yield from ([image] for image in images)
    smallest = images[0]
    largest = max(images, key=reader.num_tokens)
    # two images that differ; below, they are repeated up to the number that is encoded together
    many = [smallest, *_images_of(process, (SIDES[0], SIDES[0]), seed=1)]
    yield many
    yield [largest, *many]
    count = max(MAX_IMAGE_TOKENS // max(reader.num_tokens(smallest), 1), 1)
    yield (many * count)[:count]


def _images(process: Process, reader: ImageReader) -> list[Inputs]:
    """Images whose inputs have different shapes, from the smallest to the largest that the processor allows."""
    largest = [_form(x) for x in _images_of(process, (SIDES[1], SIDES[1]))]
    found: dict[Any, Inputs] = {}
    power = 0
    while (side := round(SIDES[0] * 2 ** (power / 2))) <= SIDES[1]:
        power += 1
        strip = (round(side * STRIP**0.5), max(round(side / STRIP**0.5), 1))
        squares = [*_images_of(process, (side, side))]
        for image in (*squares, *_images_of(process, strip if power % 2 else strip[::-1])):
            found.setdefault(_form(image), image)
        if any(_form(x) in largest or reader.num_tokens(x) > MAX_IMAGE_TOKENS for x in squares):
            break
    return sorted(found.values(), key=reader.num_tokens)


def _images_of(process: Process, size: tuple[int, int], seed: int = 0) -> Iterator[Inputs]:
    """The inputs of one picture of noise, if the processor accepts it. size: width and height"""
    width, height = size
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    try:
        yield process(values)
    except ParameterError as error:
        log.debug("no picture of %d x %d pixels: %s", width, height, error)


def _form(inputs: Inputs) -> tuple[Any, ...]:
    """What pictures of one size have in common: the shapes of the inputs, and the values of inputs with few elements."""
    return tuple((name, x.shape, tuple(x.flatten().tolist()) if x.numel() < 16 else ()) for name, x in sorted(inputs.items()))
