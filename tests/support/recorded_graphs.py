"""What takes the place of `capture` of CUDA graphs on a CPU.

    replay, pool = run_again(step, pool, model)     # replays run the function again: the code of a model is not put to the test
    replay, pool = record(step, pool, model)        # replays run the operations that were recorded, with the same memory

As a graph does, a recorded replay knows nothing of Python: of tensors that were made elsewhere in the meantime, and of numbers
that came to the host. Reading one of these in a recording raises where PyTorch can be told: for `item`, but not for `tolist`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POOL = 7
"""The pool that both give back."""


def run_again(step: Callable[[], None], pool: Any, model: nn.Module) -> tuple[Callable[[], None], Any]:
    step()
    return step, POOL


def record(step: Callable[[], None], pool: Any, model: nn.Module) -> tuple[Callable[[], None], Any]:
    recorder = _Recorder()
    with recorder:
        step()
    return recorder.replay, POOL


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs))}
        # what lies in the memory of an argument is a view, or was written in place
        made = [None if x.untyped_storage().data_ptr() in given else x for x in _tensors(out)]
        self.calls.append((func, args, kwargs or {}, made))
        return out

    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            for target, x in zip(before, _tensors(func(*args, **kwargs)), strict=True):
                if target is not None:
                    target.copy_(x)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
