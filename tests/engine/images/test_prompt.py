"""Places of images in prompts, where chunks may end, and what pages are hashed by."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.images.prompt import (
    ImageInput,
    PlacedImage,
    PromptImages,
    content_of,
    content_of_prefix,
    find_places,
    runs_of,
)
from fa_serve.spec import ParameterError

IMAGE = 9


def image(seed: int, count: int = 2) -> ImageInput:
    return ImageInput.of({"input_ids": torch.full((1, count), IMAGE), "pixel_values": torch.full((1, 3), float(seed))})


def test_the_key_follows_from_the_content() -> None:
    assert image(1).key == image(1).key
    assert image(1).key != image(2).key
    assert image(1).key != image(1, count=3).key
    assert ImageInput.of({"a": torch.zeros(2, 3)}).key != ImageInput.of({"a": torch.zeros(3, 2)}).key
    assert ImageInput.of({"a": torch.zeros(2)}).key != ImageInput.of({"a": torch.zeros(2, dtype=torch.int32)}).key


@pytest.mark.parametrize("x", [torch.ones(3, dtype=torch.bfloat16), torch.tensor(True), torch.ones(2, 3).T, torch.empty(0, 4)])
def test_the_key_of_tensors_of_every_kind(x: torch.Tensor) -> None:
    """Llama 4's processor returns bfloat16, which numpy has not."""
    assert ImageInput.of({"a": x}).key == ImageInput.of({"a": x.clone()}).key
    if x.numel():
        assert ImageInput.of({"a": x}).key != ImageInput.of({"a": torch.zeros_like(x)}).key


def test_places_in_the_order_of_the_images() -> None:
    tokens = [1, IMAGE, IMAGE, 2, IMAGE, 3, IMAGE, IMAGE]
    first, second = find_places(tokens, [image(1), image(2, count=3)], IMAGE)
    assert (first.places.tolist(), second.places.tolist()) == ([1, 2], [4, 6, 7])
    assert runs_of((first, second)) == ((1, 3), (4, 5), (6, 8))
    with pytest.raises(ParameterError, match=r"image token \(9\) for each of the 2 embeddings of its 1 images, got '5 image"):
        find_places(tokens, [image(1)], IMAGE)


def by_pickle(given: PlacedImage) -> PlacedImage:
    return pickle.loads(pickle.dumps(given))


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_of_a_placed_image_has_its_pixels(copied: Callable[[PlacedImage], PlacedImage]) -> None:
    """Every copy lost them, because the other ranks need none."""
    given = PlacedImage(ImageInput.of({"input_ids": torch.full((1, 2), IMAGE), "pixel_values": torch.ones(3)}), np.arange(2))
    found = copied(given)
    assert (found.image.key, found.places.tolist()) == (given.image.key, [0, 1])
    assert found.image.inputs["pixel_values"].tolist() == [1.0, 1.0, 1.0]


def hashes(content: list[int], page_size: int = 2) -> list[bytes]:
    known: list[bytes] = []
    PageTable(8, page_size, salt=b"salt").hash_pages(content, known)
    return known


def test_pages_are_hashed_by_the_content_of_images() -> None:
    tokens = [1, 2, IMAGE, IMAGE, 3, 4]
    own, same, other = (hashes(content_of(tokens, find_places(tokens, [image(n)], IMAGE))) for n in (1, 1, 2))
    assert own == same
    assert own[0] == other[0]
    assert own[1] != other[1]
    assert own[1] not in hashes(tokens)
    assert all(number < 0 for number in content_of(tokens, find_places(tokens, [image(1)], IMAGE))[2:4])


def test_a_prefix_that_attends_both_ways_is_shared_whole_or_not_at_all() -> None:
    tokens = [1, 2, IMAGE, IMAGE, 3, 4]
    placed = find_places(tokens, [image(1)], IMAGE)
    longer = [*tokens, 5]
    assert hashes(content_of_prefix(tokens, placed)) == hashes(content_of_prefix(tokens, placed))
    assert not set(hashes(content_of_prefix(tokens, placed))) & set(hashes(content_of_prefix(longer, placed)))


def test_chunks_end_outside_of_blocks() -> None:
    placed = (PlacedImage(image(1), np.array([2, 3])),)
    images = PromptImages(placed, [], blocks=((2, 6), (6, 9), (12, 14)))
    for end, last, following in ((1, 1, 1), (2, 2, 2), (3, 2, 6), (5, 2, 6), (6, 6, 6), (7, 6, 9), (11, 11, 11), (13, 12, 14)):
        assert (images.last_cut(end), images.next_cut(end)) == (last, following), end
