"""Processes compile real kernels of this package into Triton's cache, and threads do what no process can."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cross_compile import TARGETS, NamingDriver, compiling_for
from torch_processes import after_torch
from triton import knobs
from triton.runtime.driver import driver

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.launching import compilers
from fa_serve.launching.compilers import CompilerProcesses, CompilerThreads, compiled_by_process
from fa_serve.launching.launch import FUSED
from fa_serve.ops.elementwise.activation import _act_and_mul

START_SECONDS = 60


@triton.jit
def _fill(x_ptr, SIZE: tl.constexpr):
    """A kernel of a module that the processes do not find."""
    tl.store(x_ptr + tl.arange(0, SIZE), 1.0)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, bool]]:
    """What this process has compiled or loaded: the kernel, whether the cache had it, and whether a process had compiled it."""
    seen: list[tuple[str, bool, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        seen.append((src.name, cache_hit, compiled_by_process()))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", listen)
    monkeypatch.setattr(driver, "_active", NamingDriver(TARGETS["sm90"]))
    return seen


@contextmanager
def started() -> Iterator[CompilerProcesses]:
    """Two processes that are ready, and that end as they should."""
    processes = CompilerProcesses(2)
    deadline = time.monotonic() + START_SECONDS
    while not all(each.poll() for each in processes._importing):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        yield processes
    finally:
        processes.close()
    assert processes._process.wait(START_SECONDS) == 0, "each of them ends when its pipe is closed"


@pytest.fixture(scope="module")
def processes() -> Iterator[CompilerProcesses]:
    with started() as two:
        yield two


def children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def threads_of(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/task"))


def compile_all(processes: CompilerProcesses | None, warm_up: Callable[[], None]) -> list[Any]:
    """The kernels that are launched in a warm-up, each with the thread's finish."""
    finished: list[Any] = []
    threads = CompilerThreads(2, processes, finished.append)
    with threads, triton.AsyncCompileMode(threads):
        warm_up()
    return finished


def activate(width: int, kind: int, block: int = 1024) -> Any:
    bf16 = torch.bfloat16
    return _act_and_mul.warmup(bf16, bf16, 14, 2 * width, width, width, kind, block, False, grid=(1,), num_warps=4, **FUSED)


def warm_up_activations(width: int) -> None:
    for kind in (0, 1):
        activate(width, kind)


@pytest.mark.slow
def test_processes_compile_what_threads_then_load(compiled, processes) -> None:
    parent = processes._process.pid
    assert len(children(parent)) == 2
    assert {threads_of(each) for each in (parent, *children(parent))} == {1}, "a fork copies no other thread"
    finished = compile_all(processes, lambda: warm_up_activations(14336))
    assert compiled == [("_act_and_mul", True, True)] * 2
    assert len(finished) == 2
    assert all(kernel.asm["cubin"] for kernel in finished)
    assert len(processes._free) == 2, "both are free again"


@pytest.mark.slow
def test_a_kernel_with_layouts_and_descriptors_goes_to_a_process(compiled, processes) -> None:
    """Some of its constants are functions, and objects of Gluon or of this package."""
    q, k = (torch.zeros(1, 256, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    tensors = AttentionTensors(q=q, k=k, v=k)

    def warm_up() -> None:
        with compiling_for("sm90"):
            plan_hopper_forward(tensors, AttentionOptions(0.1, (-1, 0), 0.0, 256, 256, return_lse=True))(tensors)

    compile_all(processes, warm_up)
    assert compiled == [("attn_fwd_hopper", True, True)]


def test_a_kernel_in_the_cache_is_not_said_to_be_compiled(compiled, processes) -> None:
    compile_all(None, lambda: warm_up_activations(8192))
    assert compiled == [("_act_and_mul", False, False)] * 2
    compiled.clear()
    _act_and_mul.device_caches.clear()
    compile_all(processes, lambda: warm_up_activations(8192))
    assert compiled == [("_act_and_mul", True, False)] * 2


def test_threads_compile_what_no_process_can(compiled, processes) -> None:
    """The kernel of a module that the processes do not find."""
    compile_all(processes, lambda: _fill.warmup(torch.float32, 64, grid=(1,), **FUSED))
    assert compiled == [("_fill", False, False)]
    assert len(processes._free) + len(processes._importing) == 2, "the process takes the next kernel"


class _Endless:
    """What does not come to its end in a process."""

    def __reduce__(self) -> Any:
        return time.sleep, (600,)


def endless() -> Callable[[], Any]:
    """As Triton's function that compiles, whose variables are read."""
    src = _Endless()
    target = TARGETS["sm90"]
    options = SimpleNamespace()
    env_vars: dict[str, str] = {}
    return lambda: (src, target, options, env_vars)


@pytest.mark.slow
def test_processes_that_do_not_answer_end_and_threads_go_on(compiled, monkeypatch, caplog) -> None:
    """One compiles what nobody waits for any more, and one takes too long."""
    monkeypatch.setattr(compilers, "COMPILE_SECONDS", 4)
    with started() as processes:
        threads = CompilerThreads(1, processes, finish=lambda kernel: None)
        begin = time.monotonic()
        with threads:
            future = threads.submit(endless())
            time.sleep(0.1)
            threads.cancel()
        assert time.monotonic() - begin < 3.5, "it does not wait for COMPILE_SECONDS"
        assert isinstance(future.exception(), CancelledError)
        assert processes.compile(endless(), threading.Event()) is None
        assert "a compiler process has exited" in caplog.text
        assert processes._free == processes._importing == []
        deadline = time.monotonic() + 10
        while left := children(processes._process.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        compile_all(processes, lambda: warm_up_activations(4096))
        assert compiled == [("_act_and_mul", False, False)] * 2


def test_a_hook_of_this_process_keeps_compilations_here(compiled, processes, monkeypatch) -> None:
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    compile_all(processes, lambda: warm_up_activations(1024))
    assert compiled == [("_act_and_mul", False, False)] * 2


def test_an_error_is_that_of_the_thread(compiled, processes) -> None:
    threads = CompilerThreads(1, processes, finish=lambda kernel: None)
    with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        future = activate(4096, 0, block=1000).future  # Triton 3.9 forgets it afterwards
    with pytest.raises(triton.CompilationError, match="power of 2"):
        future.result()


KERNELS_IMPORTED = """
import sys
from fa_serve.launching.compilers import _import_kernels
_import_kernels()
print(sorted(name for name in {names!r} if name not in sys.modules))
"""


@pytest.mark.slow
def test_all_modules_with_kernels_are_imported_before_the_first_fork() -> None:
    """Also those in the rooms of the packages: a process that has to import one first keeps its kernel waiting."""
    root = Path(compilers.__file__).parents[1]
    names = [
        ".".join(("fa_serve", *path.relative_to(root).with_suffix("").parts))
        for folder in ("ops", "backends/triton", "backends/hopper")
        for path in (root / folder).rglob("*.py")
        if "@triton.jit" in path.read_text() or "@gluon.jit" in path.read_text()
    ]
    assert len(names) > 30
    done = after_torch(KERNELS_IMPORTED.format(names=names))
    assert (done.stdout, done.stderr) == ("[]\n", "")
