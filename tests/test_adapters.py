"""What adapters share: signatures of imported modules, what is missing of them, and lengths that are rounded up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import ModuleType

import pytest

from fa_serve.adapters import installed, missing, rounded_up

REQUIRED = {
    "Backend": frozenset({"name"}),
    "Backend.forward": frozenset({"q", "k"}),
    "Kind": frozenset({"DECODER"}),
    "Step": frozenset({"length"}),
    "register": frozenset({"name"}),
}


class Backend:
    name = "a"

    def forward(self, q, k): ...


class Kind(Enum):
    DECODER = 1


@dataclass
class Step:
    length: int


def register(name): ...


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("host_package")
    for value in (Backend, Kind, Step, register):
        setattr(module, value.__name__, value)
    monkeypatch.setitem(__import__("sys").modules, "host_package", module)
    return module


def test_everything_that_is_required_is_found(host: ModuleType) -> None:
    found = installed(["host_package"], REQUIRED)
    assert found.keys() == REQUIRED.keys()
    assert missing(found, REQUIRED) == []


def test_what_is_missing_is_named(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(host, "register")
    monkeypatch.setattr(host.Backend, "forward", lambda self, q: q)
    found = installed(["host_package"], REQUIRED)
    assert missing(found, REQUIRED) == ["Backend.forward(k)", "register(name)"]
    assert missing({}, {"Pool.free": frozenset()}) == ["Pool.free()"]


def test_lengths_are_rounded_up_to_powers_of_two() -> None:
    assert [rounded_up(n) for n in (0, 1, 2, 3, 4, 5, 1025)] == [1, 1, 2, 4, 4, 8, 2048]
