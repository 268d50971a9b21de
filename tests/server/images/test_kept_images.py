"""Images are kept within a budget of bytes, and found by those alone who may share them."""

from __future__ import annotations

import pytest
import torch
from fa_serve.server.images import kept_images
from fa_serve.server.images.kept_images import KeptImages, key_of_file

from fa_serve.engine.images.processed import ProcessedImage


def image(key: bytes, count: int = 10) -> ProcessedImage:
    return ProcessedImage({"x": torch.zeros(count, dtype=torch.uint8)}, "", key)


def test_keys() -> None:
    keys = {key_of_file(data, salt) for data in (b"one", b"two") for salt in (None, "", "one", "x" * 1000)}
    assert len(keys) == 8
    assert {len(key) for key in keys} == {16}
    assert key_of_file(memoryview(b"one"), "salt") == key_of_file(b"one", "salt")


def test_the_one_that_was_found_least_recently_goes_first() -> None:
    kept = KeptImages(30)
    for name in (b"a", b"b", b"c"):
        kept.keep(image(name))
    first = kept.find(b"a")
    kept.keep(image(b"d"))
    assert kept.find(b"a") is first is not None
    assert kept.find(b"b") is None
    assert (len(kept), kept.num_bytes) == (3, 30)


def test_the_budget() -> None:
    kept = KeptImages(30)
    kept.keep(image(b"a", 31))
    assert len(kept) == 0
    kept.keep(image(b"a", 10))
    kept.keep(image(b"a", 20))  # two requests have brought it at the same time
    assert (len(kept), kept.num_bytes) == (1, 20)
    kept.keep(image(b"b", 30))
    assert (len(kept), kept.num_bytes) == (1, 30)
    nothing = KeptImages(0)
    nothing.keep(image(b"a"))
    assert nothing.find(b"a") is None


def test_the_number_of_descriptors_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_images, "MAX_IMAGES", 2)
    kept = KeptImages(100)
    for name in (b"a", b"b", b"c"):
        kept.keep(image(name, 0))
    assert [kept.find(name) is not None for name in (b"a", b"b", b"c")] == [False, True, True]
