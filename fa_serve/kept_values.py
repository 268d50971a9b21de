"""Values that were made of an object, and that are kept for as long as the object lives: the lists of a mask, for one.

    found = kept.find(mask, key)
    if found is None:
        found = kept.keep(mask, key, scan(mask))

The key says what of the object the value was made of, so a change of the object is a change of the key. What the key holds is
left to the caller.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class _Kept(NamedTuple):
    owner: weakref.ref[Any]
    value: Any


class KeptValues(Generic[Value]):
    """At most `room` values. One is gone as soon as its object is, or when `room` others were kept or found after it."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._kept: OrderedDict[tuple[int, Hashable], _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, owner: object, key: Hashable) -> Value | None:
        """What was kept of this object under this key, or None."""
        found = self._kept.get((id(owner), key))
        # the number of an object that is gone may be another's by now
        if found is None or found.owner() is not owner:
            return None
        self._kept.move_to_end((id(owner), key))
        value: Value = found.value
        return value

    def keep(self, owner: object, key: Hashable, value: Value) -> Value:
        """Keep a value, and return it."""
        place = (id(owner), key)
        self._kept[place] = _Kept(weakref.ref(owner, lambda _: self._kept.pop(place, None)), value)
        self._kept.move_to_end(place)
        if len(self._kept) > self._room:
            self._kept.popitem(last=False)
        return value

    def clear(self) -> None:
        self._kept.clear()
