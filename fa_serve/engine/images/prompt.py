"""A prompt with images, as the engine takes it: its tokens, the towers' inputs, and what images mean for pages and positions.

    image = ImageInput.of(inputs)                # what the model's processor makes of one image
    prompt = ImagePrompt(tokens, (image,))       # tokens: with one image token for each embedding

An image occupies a list of places in the prompt. `PromptImages` holds what the scheduler and the runner need to know about the
images: which places attend both ways and must be computed in one step, the numbers by which pages are hashed, and positions on
several axes.

Left out: pixels (processor.py) and embeddings (encoder.py). Nothing here needs torch: tensors are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, shake_128
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa_serve.spec import ParameterError


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image for the towers.

    key:    hash of its content and of how it was processed, 16 bytes
    inputs: arguments of the model's forward for a prompt that holds only this image, as tensors with a batch of 1
    """

    key: bytes
    inputs: Mapping[str, Any]

    @classmethod
    def of(cls, inputs: Mapping[str, Any]) -> ImageInput:
        """Compute the key from the inputs. inputs: on the CPU"""
        content = blake2b(digest_size=16)
        for name in sorted(inputs):
            x = inputs[name]
            # numpy has no bfloat16 (Llama 4)
            values = np.ascontiguousarray((x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x).numpy())
            content.update(f"{name} {x.dtype} {values.shape}\0".encode())
            content.update(values.data if values.size else b"")
        return cls(content.digest(), dict(inputs))


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """Token ids and images, in the order of their places. An image takes as many image tokens as its own input_ids have."""

    tokens: Sequence[int]
    images: tuple[ImageInput, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """places: (n,) int64, ascending: the tokens of the prompt that its n embeddings replace"""

    image: ImageInput
    places: NDArray[np.int64]

    def reduce_without_pixels(self) -> tuple[Any, ...]:
        """For pickles whose reader does not run the towers: of the inputs, only `input_ids` are kept."""
        return PlacedImage, (ImageInput(self.image.key, {"input_ids": self.image.inputs["input_ids"]}), self.places)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """What the engine knows about the images of a prompt. It never changes.

    placed:    the images in order
    content:   the prompt's tokens as the hashes of pages take them: instead of an image token, a number that depends on the
               image and on the place within it
    blocks:    (begin, end) of tokens that attend to each other both ways, ascending
    positions: (axes, total) int64, for the rotary embedding; None if the position of each token is its place
    delta:     added to the place of a token after the prompt to get its position
    """

    placed: tuple[PlacedImage, ...]
    content: list[int]
    blocks: tuple[tuple[int, int], ...] = ()
    positions: NDArray[np.int64] | None = None
    delta: int = 0
    _begins: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begins", np.array([begin for begin, _ in self.blocks], dtype=np.int64))

    def last_cut(self, end: int) -> int:
        """The last place up to `end` where a chunk may end: `end` itself unless it lies inside a block."""
        block = self._block_around(end)
        return end if block is None else block[0]

    def next_cut(self, end: int) -> int:
        """The first place from `end` on where a chunk may end."""
        block = self._block_around(end)
        return end if block is None else block[1]

    def _block_around(self, place: int) -> tuple[int, int] | None:
        number = int(np.searchsorted(self._begins, place)) - 1
        if number >= 0 and self.blocks[number][0] < place < self.blocks[number][1]:
            return self.blocks[number]
        return None


@dataclass(frozen=True, slots=True)
class ImagePiece:
    """Some embeddings of an image in a step. first: index of the first one; rows: tokens of the step they replace, ascending"""

    image: ImageInput
    first: int
    rows: Sequence[int]


def rows_of(pieces: Sequence[ImagePiece], num_tokens: int) -> NDArray[np.int64]:
    """For each token of a step, the index of the embedding that replaces its own, counting through all pieces; or -1."""
    rows = np.full(num_tokens, -1, dtype=np.int64)
    places = [row for piece in pieces for row in piece.rows]
    rows[places] = np.arange(len(places))
    return rows


def find_places(tokens: Sequence[int], images: Sequence[ImageInput], image_token: int) -> tuple[PlacedImage, ...]:
    """Which image tokens of a prompt belong to which image.

    Raises ParameterError if the number of image tokens differs from the number of embeddings of the images.
    """
    places = np.flatnonzero(np.asarray(tokens, dtype=np.int64) == image_token)
    counts = [int((image.inputs["input_ids"] == image_token).sum()) for image in images]
    if len(places) != sum(counts):
        rule = f"have an image token ({image_token}) for each of the {sum(counts)} embeddings of its {len(images)} images"
        raise ParameterError("prompt", rule, f"{len(places)} image tokens")
    ends = np.cumsum(counts)
    return tuple(PlacedImage(image, places[end - n : end]) for image, n, end in zip(images, counts, ends, strict=True))


def content_of(tokens: Sequence[int], placed: Sequence[PlacedImage]) -> list[int]:
    """The numbers by which pages of a prompt are hashed. No two images share a number, and none of them is a token id."""
    content = list(tokens)
    for each in placed:
        for place, number in zip(each.places.tolist(), _numbers_of(each.image.key, len(each.places)), strict=True):
            content[place] = number
    return content


def content_of_prefix(tokens: Sequence[int], placed: Sequence[PlacedImage]) -> list[int]:
    """The same for a prompt whose tokens all attend to each other: every number depends on the whole prompt, so that no longer
    or other prompt finds its pages."""
    whole = blake2b(repr(content_of(tokens, placed)).encode(), digest_size=16).digest()
    return _numbers_of(whole, len(tokens))


def _numbers_of(key: bytes, count: int) -> list[int]:
    """`count` negative numbers that depend on the key. No other key gets the same ones."""
    digest = shake_128(key).digest(8 * count)
    numbers: list[int] = (-1 - (np.frombuffer(digest, "<u8") >> np.uint64(1)).astype(np.int64)).tolist()
    return numbers


def runs_of(placed: Sequence[PlacedImage]) -> tuple[tuple[int, int], ...]:
    """The runs of neighbouring image tokens, as (begin, end)."""
    places = np.sort(np.concatenate([each.places for each in placed]))
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks))
