"""A launch by its key: what may change the machine code must be part of it, and what is not aligned must not use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fa_serve.backends import launch as module
from fa_serve.backends.launch import launch


class Pointer:
    """As much of a CUDA tensor as a launch looks at."""

    is_cuda = True

    def __init__(self, address: int = 4096, dtype: torch.dtype = torch.float16) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


class Kernel:
    """Counts what goes through the JIT, and what a compiled kernel is launched with."""

    def __init__(self) -> None:
        self.compiled = 0
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def jit(*args: object, **options: object) -> Compiled:
            self.compiled += 1
            return Compiled(self)

        return jit


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


BASE: dict[str, Any] = {
    "grid": 3,
    "pointers": (Pointer(), None),
    "varying": (1, 0.5),
    "fixed": (16, True),
    "options": {"num_warps": 4},
}


def test_the_second_launch_skips_the_jit(kernel: Kernel) -> None:
    q = Pointer()
    launch(kernel, **BASE)
    launch(kernel, **(BASE | {"pointers": (q, None), "varying": (7, 0.25), "grid": 5}))
    assert kernel.compiled == 1
    assert kernel.launched == [((5, 1, 1), (q, None, 7, 0.25, 16, True))]


@pytest.mark.parametrize(
    "change",
    [
        {"pointers": (Pointer(), Pointer())},
        {"pointers": (Pointer(dtype=torch.bfloat16), None)},
        {"pointers": (Pointer(4104), None)},
        {"fixed": (32, True)},
        {"fixed": (16, False)},
        {"options": {"num_warps": 8}},
    ],
    ids=["presence", "dtype", "alignment", "stride", "constexpr", "option"],
)
def test_what_changes_the_code_goes_through_the_jit(kernel: Kernel, change: dict[str, Any]) -> None:
    launch(kernel, **BASE)
    launch(kernel, **(BASE | change))
    assert kernel.compiled == 2
    assert not kernel.launched


def test_each_device_has_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(kernel, **BASE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(kernel, **BASE)
    assert kernel.compiled == 2


def test_an_unaligned_launch_is_never_remembered(kernel: Kernel) -> None:
    for _ in range(3):
        launch(kernel, **(BASE | {"pointers": (Pointer(), Pointer(4100))}))
    assert kernel.compiled == 3
    assert not module._COMPILED
