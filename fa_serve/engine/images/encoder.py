"""Embeddings of images by content, within a budget of bytes, and those that one step needs.

    encoder = ImageEncoder(reader, max_bytes=2 << 30)
    images = encoder.step(pieces)            # encodes what is not in the cache -> StepImages, or None

What is evicted is encoded again when a later chunk needs it, because requests keep what their processor has made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
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
from fa_serve.hf.images import ImageFeatures, ImageReader, StepImages, TwoWay
from fa_serve.spec import ParameterError, UnsupportedModelError


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

    def features(self, image: ImageInput) -> ImageFeatures:
        """What an image comes to, from the cache if it is there."""
        found = self._features.get(image.key)
        if found is not None:
            self._features.move_to_end(image.key)
            return found
        found = self.reader.encode(image.inputs)
        self.num_encoded += 1
        if found.num_bytes <= self.max_bytes:
            self._features[image.key] = found
            self.num_bytes += found.num_bytes
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
        parts = [(self.features(piece.image), slice(piece.first, piece.first + len(piece.rows))) for piece in pieces]
        rows = torch.tensor([row for piece in pieces for row in piece.rows])
        depth = max(len(found.deep) for found, _ in parts)
        return StepImages(
            rows.to(parts[0][0].embeds.device),
            torch.cat([found.embeds[part] for found, part in parts]),
            tuple(torch.cat([found.deep[layer][part] for found, part in parts]) for layer in range(depth)),
        )

    def place(self, tokens: Sequence[int], images: Sequence[ImageInput], max_block: int) -> PromptImages:
        """What the images of a prompt come to. The first image that comes tells which tokens attend both ways.

        tokens: with an image token for each embedding, in the order of the images
        max_block: tokens that a step can compute together

        Raises ParameterError for images that do not fit the prompt, and for a block of tokens that no step can compute.
        """
        placed = find_places(tokens, images, self.reader.image_token)
        if self._two_way is None:
            self._two_way = self.features(images[0]).two_way
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

    def check_integrity(self) -> None:
        """Assert that the bytes are those of the entries, within the budget."""
        assert self.num_bytes == sum(each.num_bytes for each in self._features.values()) <= self.max_bytes


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
        reader = ImageReader(model)
    except UnsupportedModelError as error:
        return str(error)
    refuses = ""
    if config.kv_cache_dtype == "fp8":
        refuses = "tokens that attend both ways with a float8 cache are not built yet"
    if config.deterministic:
        refuses = "tokens that attend both ways in deterministic mode are not built yet"
    return ImageEncoder(reader, config.image_cache_bytes, refuses)
