"""What was made of an object is kept while the object lives."""

from __future__ import annotations

import torch

from fa_serve.kept_values import KeptValues


def test_a_value_is_found_by_its_object_and_its_key() -> None:
    kept: KeptValues[int] = KeptValues(room=4)
    first = torch.ones(2)
    second = torch.ones(2)
    assert kept.keep(first, "a", 1) == 1
    assert (kept.find(first, "a"), kept.find(first, "b"), kept.find(second, "a")) == (1, None, None)
    kept.clear()
    assert kept.find(first, "a") is None


def test_it_is_gone_with_its_object() -> None:
    kept: KeptValues[int] = KeptValues(room=4)
    mask = torch.ones(2)
    kept.keep(mask, "a", 1)
    assert len(kept) == 1
    del mask
    assert not len(kept)


def test_the_oldest_makes_room() -> None:
    kept: KeptValues[int] = KeptValues(room=2)
    masks = [torch.ones(1) for _ in range(3)]
    for number, mask in enumerate(masks[:2]):
        kept.keep(mask, None, number)
    kept.find(masks[0], None)
    kept.keep(masks[2], None, 2)
    assert [kept.find(mask, None) for mask in masks] == [0, None, 2]
