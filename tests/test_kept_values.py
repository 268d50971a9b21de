"""What was made of an object is kept while the object lives."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

from fa_serve import kept_values
from fa_serve.kept_values import KeptValues, StreamValues


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


def test_another_thread_may_take_a_value_out_while_it_is_found() -> None:
    class Raced(OrderedDict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return self.pop(key, default)

    kept: KeptValues[int] = KeptValues(room=2)
    mask = torch.ones(1)
    kept.keep(mask, None, 1)
    kept._kept = Raced(kept._kept)
    assert kept.find(mask, None) == 1


def test_a_stream_finds_what_was_made_on_it_and_a_graph_what_was_made_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph has found stays when its object is gone."""
    kept: StreamValues[tuple[Tensor, int]] = StreamValues(room=2)
    owner = torch.ones(1)
    cpu = torch.device("cpu")
    values = {stream: (torch.ones(1), stream) for stream in (1, 2)}
    for stream, value in values.items():
        monkeypatch.setattr(kept_values, "stream_of", lambda device, stream=stream: stream)
        assert kept.find(owner, "a", cpu) is None
        assert kept.keep(owner, "a", cpu, value) is value
        assert kept.find(owner, "a", cpu) is value
    monkeypatch.setattr(kept_values, "stream_of", lambda device: 1)
    assert kept.find(owner, "a", cpu) is values[1]
    monkeypatch.setattr(kept_values, "is_capturing", lambda device: True)
    monkeypatch.setattr(kept_values, "stream_of", lambda device: 3)
    assert kept.find(owner, "b", cpu) is None
    assert kept.find(owner, "a", cpu) is values[2]
    gone = [weakref.ref(value[0]) for value in values.values()]
    del owner, values, value
    kept.clear()
    assert [reference() is None for reference in gone] == [True, False]
