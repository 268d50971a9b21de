"""Compilations are counted by Triton's listener, and processes divide kernels by files."""

from __future__ import annotations

import threading
import time

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fa_serve.backends import launch
from fa_serve.ops import compilations
from fa_serve.ops.compilations import Compilations, KernelClaims, claim_kernels, num_compilations, watch


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


def test_the_first_of_several_processes_compiles_a_kernel(tmp_path) -> None:
    first, second = KernelClaims(tmp_path), KernelClaims(tmp_path)
    second.launches = False
    assert first.begin("a kernel")
    assert not first.begin("a kernel"), "once is enough"
    assert not second.begin("a kernel"), "a process that launches nothing does not wait"
    assert second.begin("another kernel")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_launch_waits_for_the_process_that_compiles_its_kernel(tmp_path, monkeypatch) -> None:
    first, second = KernelClaims(tmp_path), KernelClaims(tmp_path)
    assert first.begin("a kernel")
    compiled = []
    threading.Timer(0.2, lambda: (compiled.append(1), first.end("a kernel"))).start()
    assert not second.begin("a kernel")
    assert compiled, "it has waited"
    monkeypatch.setattr(compilations, "WAIT_SECONDS", 0.01)
    assert first.begin("lost")
    begin = time.monotonic()
    assert not second.begin("lost"), "a process that died does not hold up others for long"
    assert time.monotonic() - begin < 5


def test_with_claims_kernels_are_compiled_and_not_launched(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launch, "CLAIMS", None)
    claims = claim_kernels(tmp_path)
    assert launch.CLAIMS is claims

    class Kernel:
        __name__ = "kernel"
        warmed: list[tuple[tuple[object, ...], dict[str, object]]] = []  # noqa: RUF012

        def warmup(self, *arguments, **options):
            self.warmed.append((arguments, options))

    kernel = Kernel()
    each = launch.Launch(kernel, 3, varying=(0.5,), fixed=(64,), options={"num_warps": 4})
    for _ in range(2):
        each._compile_claimed(claims, (id(kernel), 0, (), (), (64,), (4,)), (), ())
    assert kernel.warmed == [((0.5, 64), {"grid": (3, 1, 1), "num_warps": 4})]
    assert len(list(tmp_path.glob("*.done"))) == 1
