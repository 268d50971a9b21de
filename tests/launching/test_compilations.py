"""Compilations are counted by Triton's listener, and threads compile what calls need."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from fa_serve.launching import launch
from fa_serve.launching.compilations import Compilations, Compilers, num_compilations, run_compiled, use_kernel_cache, watch
from fa_serve.launching.compilers import CompilerThreads
from fa_serve.launching.launch import NotCompiledError


@triton.jit
def _fill(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 1.0)


@pytest.fixture
def listener(monkeypatch):
    """The listeners of this process as they were, without one at first."""
    monkeypatch.setattr(knobs.compilation, "listener", None)


def test_kernels_are_counted_when_they_are_compiled_and_when_they_are_loaded(listener, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert num_compilations() == (0, 0), "nobody watches yet"
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **described: heard.append(described["cache_hit"]))
    watch()
    watch()
    for _ in range(2):
        source = ASTSource(_fill, {"x_ptr": "*fp32", "SIZE": "constexpr"}, {"SIZE": 64})
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert num_compilations() == Compilations(loaded=1, compiled=1)
    assert heard == [False, True], "an earlier listener hears of it too"


class _Driver:
    """As much of a Triton driver as compiling needs."""

    def __init__(self) -> None:
        self.launchers: list[object] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> str:
        return "for tests of threads"

    def get_current_stream(self, device: object) -> int:
        return 0

    def launcher_cls(self, source: object, metadata: object) -> None:
        self.launchers.append(source)


def compile_or_raise(size: int) -> object:
    """What a launch does in its first call."""
    kernel = _fill.warmup(torch.float32, size, grid=(1,))
    if isinstance(kernel, triton.FutureKernel):
        if not kernel.future.done():
            raise NotCompiledError(kernel.future)
        kernel = kernel.result()
    return kernel


def test_threads_compile_what_several_calls_need(listener, tmp_path, monkeypatch) -> None:
    """Each kernel is compiled once, with its launcher, and a call runs to its end when all its kernels exist."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fake = _Driver()
    monkeypatch.setattr(driver, "_active", fake)
    watch()
    ended = []

    def call(name: str, *sizes: int) -> None:
        found = [compile_or_raise(size) for size in sizes]
        ended.append((name, [kernel.metadata.name for kernel in found]))

    calls = [partial(call, "a", 32, 64), partial(call, "b", 64, 128), partial(call, "c", 32)]
    run_compiled(calls, Compilers(2))
    assert sorted(ended) == [("a", ["_fill"] * 2), ("b", ["_fill"] * 2), ("c", ["_fill"])]
    assert num_compilations() == Compilations(loaded=0, compiled=3)
    assert len(fake.launchers) == 3
    assert launch._COMPILING is None
    run_compiled(calls, Compilers(2))
    assert len(ended) == 6
    assert num_compilations() == Compilations(loaded=0, compiled=3)


def test_a_call_is_repeated_only_when_its_kernel_exists() -> None:
    kernels = {name: Future() for name in "xy"}
    tries = []

    def call(name: str, *needed: str) -> None:
        tries.append(name)
        for each in needed:
            if not kernels[each].done():
                raise NotCompiledError(kernels[each])

    def compile_both() -> None:
        for name in "xy":
            time.sleep(0.2)
            kernels[name].set_result(name)

    thread = threading.Thread(target=compile_both)
    thread.start()
    calls = [partial(call, "1", "x"), partial(call, "2", "x", "y"), partial(call, "3"), partial(call, "4", "y")]
    told: list[tuple[int, int]] = []
    run_compiled(calls, Compilers(), on_progress=lambda done, total: told.append((done, total)))
    thread.join()
    assert told == [(1, 4), (2, 4), (4, 4)], "without those that wait for x and y, for y, and for none"
    assert tries == ["1", "2", "3", "4", "1", "2", *tries[6:]]
    assert sorted(tries[6:]) == ["2", "4"]


def test_what_a_call_or_a_compilation_raises_is_returned_and_the_others_run() -> None:
    broken: Future[object] = Future()

    def fail() -> None:
        if not broken.done():
            raise NotCompiledError(broken)
        broken.result()

    threading.Timer(0.1, broken.set_exception, [ValueError("no such instruction")]).start()
    ended = []

    def lose() -> None:
        raise torch.AcceleratorError("unspecified launch failure")

    errors = run_compiled([fail, partial(ended.append, "other"), fail], Compilers())
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "no such instruction")] * 2
    assert ended == ["other"]
    assert launch._COMPILING is None
    with pytest.raises(torch.AcceleratorError):
        run_compiled([lose, partial(ended.append, "not called")], Compilers())
    assert launch._COMPILING is None
    assert ended == ["other"]
    assert run_compiled([], Compilers()) == []


def test_kernels_are_kept_by_release_and_card(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 NVL/8")
    use_kernel_cache("cpu", "1.2")
    assert "TRITON_CACHE_DIR" not in os.environ
    use_kernel_cache("cuda:0", "1.2")
    folder = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder == tmp_path / "fa_serve" / f"1.2-triton-{triton.__version__}-NVIDIA-H200-NVL-8"
    assert folder.is_dir()
    monkeypatch.setenv("TRITON_CACHE_DIR", "own")
    use_kernel_cache("cuda:0", "1.2")
    assert os.environ["TRITON_CACHE_DIR"] == "own"


@pytest.mark.slow
def test_kernels_that_take_too_long_are_left_out(monkeypatch, tmp_path) -> None:
    """Compilations that have not begun are cancelled. What has been compiled runs, and the start goes on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", _Driver())
    compile_both = CompilerThreads.submit

    def slowly(self, compile_kernel):
        return compile_both(self, lambda: (time.sleep(1.5), compile_kernel())[1])

    monkeypatch.setattr(CompilerThreads, "submit", slowly)
    ended = []

    def call(size: int) -> None:
        compile_or_raise(size)
        ended.append(size)

    begin = time.monotonic()
    errors = run_compiled(
        [partial(call, size) for size in (512, 1024, 2048, 4096)] + [partial(ended.append, 0)], Compilers(), 0.5
    )
    assert ended == [0]
    assert [type(error) for error in errors] == [TimeoutError] * 4
    assert time.monotonic() - begin < 30, "one compilation had begun, and three had not"
    assert launch._COMPILING is None
