"""A launch by its key: what may change the machine code must be part of it, and what is not aligned must not use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.amd.driver import HIPLauncher
from triton.backends.nvidia.driver import CudaLauncher

from fa_serve.backends import launch as module
from fa_serve.backends.launch import launch


class Pointer:
    """As much of a CUDA tensor as a launch looks at."""

    is_cuda = True

    def __init__(self, address: int = 4096, dtype: torch.dtype = torch.float16) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return 0


class Kernel:
    """Counts what goes through the JIT, and what a compiled kernel is launched with."""

    def __init__(self) -> None:
        self.compiled = 0
        self.launched: list[tuple[Any, ...]] = []
        self.watched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def jit(*args: object, **options: object) -> Compiled:
            self.compiled += 1
            return Compiled(self)

        return jit


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.kernel.watched.append((grid, args))

    def run(self, x: int, y: int, z: int, *args: Any) -> None:
        assert args[:6] == (77, "function", "metadata", None, None, None), "stream, code, no hooks"
        self.kernel.launched.append(((x, y, z), args[6:]))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    active = SimpleNamespace(get_current_stream=lambda device: 77 + device)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    return Kernel()


BASE: dict[str, Any] = {
    "grid": 3,
    "pointers": (Pointer(), None),
    "varying": (1, 0.5),
    "fixed": (16, True),
    "options": {"num_warps": 4},
    "strides": (32, 64),
}


def test_the_second_launch_skips_the_jit(kernel: Kernel) -> None:
    q = Pointer()
    launch(kernel, **BASE)
    launch(kernel, **(BASE | {"pointers": (q, None), "varying": (7, 0.25), "grid": 5}))
    assert kernel.compiled == 1
    assert kernel.launched == [((5, 1, 1), (q, None, 7, 0.25, 32, 64, 16, True))]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_watched_launch_takes_tritons_own_way(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    launch(kernel, **BASE)
    chain = triton.knobs.HookChain()
    chain.add(lambda metadata: None)
    monkeypatch.setattr(triton.knobs.runtime, hook, chain)
    launch(kernel, **BASE)
    assert kernel.compiled == 1
    assert [grid for grid, _ in kernel.watched] == [(3, 1, 1)]
    assert not kernel.launched


def test_another_release_of_triton_is_launched_as_it_documents(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KNOWN", False)
    launch(kernel, **BASE)
    launch(kernel, **BASE)
    assert kernel.compiled == 1
    assert [grid for grid, _ in kernel.watched] == [(3, 1, 1)]
    assert not kernel.launched


@pytest.mark.parametrize("launcher", [CudaLauncher, HIPLauncher])
def test_what_runs_a_compiled_kernel_is_tritons_own(launcher: type) -> None:
    """Behind these come the packed metadata, that of the launch, two hooks and the kernel's arguments."""
    assert list(signature(launcher.__call__).parameters) == ["self", "gridX", "gridY", "gridZ", "stream", "function", "args"]
    used = triton.compiler.CompiledKernel.__getitem__.__code__
    (runner,) = [code for code in used.co_consts if hasattr(code, "co_names")]
    assert {"run", "function", "packed_metadata", "launch_enter_hook"} <= set(runner.co_names)


def test_a_stride_that_grows_with_a_cache_is_of_one_kind(kernel: Kernel) -> None:
    for length in range(1, 9):
        launch(kernel, **(BASE | {"strides": (64, 64 * length)}))
    assert kernel.compiled == 1
    assert [args[5] for _, args in kernel.launched] == [64 * length for length in range(2, 9)]


@pytest.mark.parametrize(
    "change",
    [
        {"pointers": (Pointer(), Pointer())},
        {"pointers": (Pointer(dtype=torch.bfloat16), None)},
        {"pointers": (Pointer(4104), None)},
        {"fixed": (32, True)},
        {"fixed": (16, False)},
        {"options": {"num_warps": 8}},
        {"strides": (8, 64)},
        {"strides": (1, 64)},
        {"strides": (32, 1 << 35)},
    ],
    ids=["presence", "dtype", "alignment", "stride", "constexpr", "option", "multiple of 16", "one", "width"],
)
def test_what_changes_the_code_goes_through_the_jit(kernel: Kernel, change: dict[str, Any]) -> None:
    launch(kernel, **BASE)
    launch(kernel, **(BASE | change))
    assert kernel.compiled == 2
    assert not kernel.launched


def test_each_device_has_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch goes to where the tensors are, whichever device is the current one."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])

    @contextmanager
    def switch(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", switch)
    went_to: list[int] = []
    original = Kernel.__getitem__
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: went_to.append(current[0]) or original(self, grid))
    launch(kernel, **BASE)
    monkeypatch.setattr(Pointer, "get_device", lambda self: 1)
    launch(kernel, **BASE)
    assert went_to == [0, 1]
    assert current == [0]


def test_an_unaligned_launch_is_never_remembered(kernel: Kernel) -> None:
    for _ in range(3):
        launch(kernel, **(BASE | {"pointers": (Pointer(), Pointer(4100))}))
    assert kernel.compiled == 3
    assert not module._COMPILED
