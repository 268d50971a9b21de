"""Values that are derived from an object and kept for as long as the object lives, such as the block lists of a mask.

    found = kept.find(mask, key)
    if found is None:
        found = kept.keep(mask, key, scan(mask))

The key describes the state of the object from which the value was derived, so a changed object has another key. The caller
decides what the key holds. `StreamValues` is for tensors that are computed on a device.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch

Value = TypeVar("Value")


class _Kept(NamedTuple):
    owner: weakref.ref[Any]
    value: Any


class KeptValues(Generic[Value]):
    """At most `room` values. A value is dropped when its object dies, or when `room` other values were kept or found since."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[tuple[int, Hashable], _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, owner: object, key: Hashable) -> Value | None:
        """The value that is kept for this object and key, or None."""
        found = self._kept.get((id(owner), key))
        # another object may have the id of an object that is gone
        if found is None or found.owner() is not owner:
            return None
        with suppress(KeyError):  # another thread may have taken it out since
            self._kept.move_to_end((id(owner), key))
        value: Value = found.value
        return value

    def keep(self, owner: object, key: Hashable, value: Value) -> Value:
        """Keep a value, and return it."""
        place = (id(owner), key)
        self._kept.pop(place, None)  # a new entry is the last one
        self._kept[place] = _Kept(weakref.ref(owner, lambda _: self._kept.pop(place, None)), value)
        if len(self._kept) > self._room:
            self._kept.popitem(last=False)
        return value

    def clear(self) -> None:
        self._kept.clear()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph records what is launched, so that the host cannot wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int | None:
    """The stream on which the next launch runs; None on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


class StreamValues(Generic[Value]):
    """`KeptValues` of tensors: a stream finds only values that were made on it, and the capture of a CUDA graph finds the value
    that was made last, on any stream.

    Capturing begins when the device is idle, so a graph may read what another stream has made. Values that a capture finds are
    never freed, because replays read them. The number of captures in a process bounds the number of such values.
    """

    def __init__(self, room: int) -> None:
        self._of_streams: KeptValues[Value] = KeptValues(room)
        self._last: KeptValues[Value] = KeptValues(room)
        self._captured: dict[int, Value] = {}

    def find(self, owner: object, key: Hashable, device: torch.device) -> Value | None:
        """The value that is kept for this object and key, for the current stream of the device, or None."""
        if not is_capturing(device):
            return self._of_streams.find(owner, (key, stream_of(device)))
        found = self._last.find(owner, key)
        if found is not None:
            self._captured[id(found)] = found
        return found

    def keep(self, owner: object, key: Hashable, device: torch.device, value: Value) -> Value:
        """Keep a value that was made on the current stream of the device, and return it."""
        self._last.keep(owner, key, value)
        return self._of_streams.keep(owner, (key, stream_of(device)), value)

    def clear(self) -> None:
        """Forget all but what graphs read."""
        self._of_streams.clear()
        self._last.clear()
