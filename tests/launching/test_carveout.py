"""The request for shared memory reaches CUDA's driver, and is left out where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fa_serve.launching import carveout


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What CUDA's driver is asked for; it refuses everything."""
    calls: list[tuple[Any, ...]] = []

    def refuse(function: Any, *given: int) -> int:
        calls.append((function.value, *given))
        return 1

    monkeypatch.setattr(carveout.ctypes, "CDLL", lambda name: SimpleNamespace(cuFuncSetAttribute=refuse))
    carveout._load_driver.cache_clear()
    yield calls
    carveout._load_driver.cache_clear()


def test_all_of_the_memory_is_asked_for(asked: list[tuple[Any, ...]]) -> None:
    handle = 1 << 40
    carveout.prefer_shared_memory(handle)
    assert asked == [(handle, 9, 100)]


def test_rocm_is_not_asked(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carveout.torch.version, "hip", "6.4")
    carveout.prefer_shared_memory(1 << 40)
    assert asked == []


def test_without_a_driver_nothing_is_asked(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(carveout.ctypes, "CDLL", fail)
    carveout.prefer_shared_memory(1 << 40)
    assert asked == []
