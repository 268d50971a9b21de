"""Embeddings of images by content, within a budget of bytes, and those that one step needs.

    encoder = ImageEncoder(reader, max_bytes=2 << 30)
    images = encoder.step(pieces)            # encodes what is not in the cache -> StepImages, or None

What is evicted is encoded again when a later chunk needs it, because requests keep what their processor has made. The images of
a step, of whichever requests, are encoded together, as far as their inputs can be joined.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.prompt import (
    ImageInput,
    ImagePiece,
    PromptImages,
    content_of,
    content_of_prefix,
    find_places,
    runs_of,
)
from fa_serve.engine.scheduler.chunk_lengths import MAX_IMAGE_TOKENS
from fa_serve.hf.images import ImageFeatures, ImageReader, StepImages, TwoWay
from fa_serve.spec import ParameterError, UnsupportedModelError

log = logging.getLogger("fa_serve.engine")


class ImageEncoder:
    """Owner of the embeddings.

    max_bytes:      budget of the cache. An image that is larger than that is encoded for each chunk that needs it
    refuses_blocks: why tokens that attend both ways are refused; empty if they are not
    """

    def __init__(self, reader: ImageReader, max_bytes: int, refuses_blocks: str = "") -> None:
        self.reader = reader
        self.refuses_blocks = refuses_blocks
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_encoded = 0
        self._two_way: TwoWay | None = None
        self._features: OrderedDict[bytes, ImageFeatures] = OrderedDict()  # the least recently used first

    def features(self, images: Sequence[ImageInput]) -> dict[bytes, ImageFeatures]:
        """What images come to, by key: from the cache if they are there, and otherwise encoded together.

        An image that the towers refuse comes to numbers that are not finite, which end its own request, and the log says why.
        """
        found: dict[bytes, ImageFeatures] = {}
        missing: dict[bytes, ImageInput] = {}
        for image in images:
            kept = self._features.get(image.key)
            if kept is None:
                missing[image.key] = image
            else:
                self._features.move_to_end(image.key)
                found[image.key] = kept
        for batch in _batches(missing.values(), self.reader.image_token):
            found |= self._encode(batch)
        return found

    def _encode(self, images: Sequence[ImageInput]) -> dict[bytes, ImageFeatures]:
        """Encode images and keep what they come to."""
        try:
            made = self.reader.encode_all([image.inputs for image in images])
        except torch.AcceleratorError:
            raise  # the device is lost
        except Exception as error:  # whatever the code of a model raises for an image that it does not take
            if len(images) > 1:
                return {key: x for image in images for key, x in self._encode([image]).items()}
            log.warning("an image could not be encoded, which ends its request: %s: %s", type(error).__name__, error)
            return {images[0].key: self.reader.failed(images[0].inputs)}
        self.num_encoded += len(made)
        found = {image.key: each for image, each in zip(images, made, strict=True)}
        for key, each in found.items():
            if each.num_bytes <= self.max_bytes:
                self._features[key] = each
                self.num_bytes += each.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._features.popitem(last=False)[1].num_bytes
        return found

    def forget(self) -> None:
        """Empty the cache, because other weights encode images from now on."""
        self._features.clear()
        self.num_bytes = 0

    def step(self, pieces: Sequence[ImagePiece]) -> StepImages | None:
        """The embeddings of one step; None without images."""
        if not pieces:
            return None
        found = self.features([piece.image for piece in pieces])
        parts = [(found[piece.image.key], slice(piece.first, piece.first + len(piece.rows))) for piece in pieces]
        rows = torch.tensor([row for piece in pieces for row in piece.rows])
        depth = max(len(each.deep) for each, _ in parts)
        return StepImages(
            rows.to(parts[0][0].embeds.device),
            torch.cat([each.embeds[part] for each, part in parts]),
            # an image that could not be encoded has nothing for inner layers
            tuple(
                torch.cat([(each.deep or (each.embeds,) * depth)[layer][part] for each, part in parts])
                for layer in range(depth)
            ),
        )

    def place(self, tokens: Sequence[int], images: Sequence[ImageInput], max_block: int) -> PromptImages:
        """What the images of a prompt come to. The first image that comes tells which tokens attend both ways.

        tokens: with an image token for each embedding, in the order of the images
        max_block: tokens that a step can compute together

        Raises ParameterError for images that do not fit the prompt, and for a block of tokens that no step can compute.
        """
        placed = find_places(tokens, images, self.reader.image_token)
        if self._two_way is None:
            self._two_way = self._find_two_way(images[0])
        two_way = self._two_way
        blocks: tuple[tuple[int, int], ...] = ()
        if two_way != "none":
            blocks = ((0, len(tokens)),) if two_way == "prompt" else runs_of(placed)
            longest = max(end - begin for begin, end in blocks)
            if self.refuses_blocks:
                raise ParameterError("images", f"be empty, because {self.refuses_blocks}", len(placed))
            if longest > max_block:
                rule = f"have at most {max_block} tokens that attend to each other both ways (max_num_batched_tokens)"
                raise ParameterError("images", rule, longest)
        found = self.reader.positions(torch.tensor(tokens), [image.inputs for image in images])
        positions, delta = (None, 0) if found is None else (found[0].numpy(), found[1])
        content = (content_of_prefix if two_way == "prompt" else content_of)(tokens, placed)
        return PromptImages(placed, content, blocks, positions, delta)

    def _find_two_way(self, image: ImageInput) -> TwoWay:
        """Which tokens attend both ways. Raises ParameterError for an image that the towers refuse."""
        found = self.features([image])[image.key]
        if image.key not in self._features and found.embeds.isnan().any():
            raise ParameterError("images", "be such that the model's towers take them (the log says why not)", "another one")
        return found.two_way

    def check_integrity(self) -> None:
        """Assert that the bytes are those of the entries, within the budget."""
        assert self.num_bytes == sum(each.num_bytes for each in self._features.values()) <= self.max_bytes


def _batches(images: Iterable[ImageInput], image_token: int) -> Iterator[list[ImageInput]]:
    """Images whose embeddings are few enough for one forward of the towers, or a single one."""
    batch: list[ImageInput] = []
    room = MAX_IMAGE_TOKENS
    for image in images:
        count = int((image.inputs["input_ids"] == image_token).sum())
        if batch and count > room:
            yield batch
            batch = []
            room = MAX_IMAGE_TOKENS
        batch.append(image)
        room -= count
    if batch:
        yield batch


def require_encoder(images: ImageEncoder | str) -> ImageEncoder:
    """What `find_images` has found. Raises ParameterError, with the reason, if there is none."""
    if isinstance(images, str):
        raise ParameterError("images", f"be empty, because {images}", "images")
    return images


def find_images(model: Any, config: EngineConfig) -> ImageEncoder | str:
    """The towers of a model, or why an engine with these settings takes no images."""
    if not config.max_images:
        return "the engine is set to take none (max_images)"
    if config.tensor_parallel > 1:
        return "images with several ranks are not built yet"
    if config.draft_model is not None or config.draft_head is not None:
        return "images with a draft model or head are not built yet"
    try:
        reader = ImageReader(model, quickens=config.fusion and not config.eager)
    except UnsupportedModelError as error:
        return str(error)
    refuses = ""
    if config.kv_cache_dtype == "fp8":
        refuses = "tokens that attend both ways with a float8 cache are not built yet"
    if config.deterministic:
        refuses = "tokens that attend both ways in deterministic mode are not built yet"
    return ImageEncoder(reader, config.image_cache_bytes, refuses)
