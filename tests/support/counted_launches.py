"""What an engine on a CPU would launch on a GPU: each kernel is named and counted, and neither compiled nor run.

    with counted_launches() as counted:
        warm_up(engine._runner, ...)
        before = engine.preparations()
        engine.generate(...)
    assert engine.preparations() == before, counted.kernels

The engine chooses backends, plans and launches as on a GPU, and Triton's JIT classes the arguments of each launch by itself: by
their types, by which integers are 1 or multiples of 16, and by constants. Where it would compile, it tells its listener, which
is how fa_serve counts compilations. So the count is the one of `late_compilations_total`.

A forward gives random logits, because no kernel has computed any. Tokens are drawn from them by PyTorch. What PyTorch computes
itself is not compiled, but a GPU loads a kernel for each operation and dtype when it is first launched: those of sampling are
listed as well.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from cross_compile import TARGETS, NamingDriver
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import fa_serve.dispatch
import fa_serve.spec
from fa_serve.backends.hopper import HopperBackend
from fa_serve.backends.triton import TritonBackend
from fa_serve.engine.runner import model_runner
from fa_serve.engine.runner.model_runner import ModelRunner
from fa_serve.launching.compilations import watch
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention import run as recurrences
from fa_serve.ops.sampling.fallback import torch_sample_rows
from fa_serve.ops.sampling.kernel import launch_sample_rows
from fa_serve.ops.select import select_ops
from fa_serve.ops.triton_ops import TritonOps

_NUMBERS = itertools.count()


class _Gpu(NamingDriver):
    """A GPU with a number that no other has, so that Triton knows no kernel of it."""

    def __init__(self, target: str) -> None:
        super().__init__(TARGETS[target])
        self._number = f"counted-{next(_NUMBERS)}"

    def get_current_device(self) -> str:
        return self._number


@dataclass
class CountedLaunches:
    """kernels: each kernel that a GPU would have compiled, in their order, with what its arguments were classed as
    sampling: each operation of PyTorch that sampling has computed, with its dtypes
    """

    kernels: list[str] = field(default_factory=list)
    sampling: set[str] = field(default_factory=set)


class _Listing(TorchDispatchMode):
    def __init__(self, operations: set[str]) -> None:
        super().__init__()
        self._operations = operations

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if function._schema.is_mutable or result is not args[0]:  # else nothing was to be converted, and no kernel is launched
            dtypes = [str(x.dtype).removeprefix("torch.") for x in _tensors((*args, *(kwargs or {}).values()))]
            self._operations.add(" ".join([str(function), *dict.fromkeys(dtypes)]))
        return result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments of an operation, some of which are lists. PyTorch's own search took a third of a test."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@contextlib.contextmanager
def counted_launches(target: str = "sm90") -> Iterator[CountedLaunches]:
    """Within the block launches are counted as on `target`. Engines are made before it, because they prove what they fuse."""
    counted = CountedLaunches()
    run = JITFunction.run
    arch = TARGETS[target].arch

    def count(jit: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(jit, *args, grid=grid, warmup=True, **options)

    def compile_nothing(jit: JITFunction, key: str, signature: Any, device: str, *described: Any) -> str:
        counted.kernels.append(f"{jit.fn.__name__} {key}")
        jit.device_caches[device][0][key] = jit.fn.__name__
        assert knobs.compilation.listener is not None
        knobs.compilation.listener(cache_hit=False)
        return jit.fn.__name__

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", _Gpu(target))
        patch.setattr(JITFunction, "run", count)
        patch.setattr(JITFunction, "_do_compile", compile_nothing)
        patch.setattr(knobs.compilation, "listener", None)
        watch()
        for module in (fa_serve.spec, fa_serve.dispatch):
            patch.setattr(module, "arch_of", lambda device: arch)
        for backend in (HopperBackend, TritonBackend, TritonOps):
            patch.setattr(backend, "supports", _as_on_a_gpu(backend.supports))
        patch.setattr(fa_serve.dispatch, "_multiprocessors", lambda q: 132)
        patch.setattr(recurrences, "runs_triton", lambda device: True)
        patch.setattr(TritonOps, "sample_rows", staticmethod(_sample_rows))
        patch.setattr(model_runner, "paged_forward", _with_random_logits(model_runner.paged_forward))
        patch.setattr(ModelRunner, "sample", _listed(ModelRunner.sample, counted.sampling))
        for forget in (PLANS.clear, select_ops.cache_clear):
            forget()
        try:
            yield counted
        finally:
            for forget in (PLANS.clear, select_ops.cache_clear):
                forget()


def _as_on_a_gpu(supports: Any) -> Any:
    return lambda self, spec: supports(self, replace(spec, device="cuda"))


def _listed(sample: Any, operations: set[str]) -> Any:
    def listed(*arguments: Any) -> Any:
        with _Listing(operations):
            return sample(*arguments)

    return listed


def _sample_rows(*arguments: Any) -> Tensor:
    launch_sample_rows(*arguments)
    with _disable_current_modes():
        return torch_sample_rows(*arguments)


def _with_random_logits(forward: Any) -> Any:
    draw = torch.Generator().manual_seed(0)

    def compute(*arguments: Any) -> Tensor:
        logits = forward(*arguments)
        return torch.randn(logits.shape, generator=draw).to(logits.dtype)

    return compute
