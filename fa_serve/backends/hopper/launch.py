"""Launching a compiled kernel without asking the JIT again: the host's part of a call's cost.

`kernel[grid](...)` derives a key from every argument at each call, tens of microseconds with tensor descriptors. Here the
caller states the key, so a launch is one dictionary lookup and the driver's own call. The first launch of a key goes through
the JIT, which compiles, specialises and checks as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_COMPILED: dict[tuple[Any, ...], Any] = {}


class Descriptor(NamedTuple):
    """The fields of Gluon's TensorDescriptor, without its validation: `forward` has checked them once for all four."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any
    padding: str = "zero"


def launch(kernel: Any, key: tuple[Any, ...], grid: tuple[int, int, int], args: Sequence[Any], device: torch.device,
           **options: Any) -> None:  # fmt: skip
    """Run `kernel` on the current stream of `device`.

    key: everything that changes the machine code: constexprs, dtypes, which arguments are None. Integers and pointers must be
         declared unspecialised by the kernel, or be alike for equal keys.
    """
    key = (id(kernel), device.index, key)
    compiled = _COMPILED.get(key)
    if compiled is not None:
        compiled[grid](*args)
        return
    args = [TensorDescriptor(*arg) if isinstance(arg, Descriptor) else arg for arg in args]
    compiled = kernel[grid](*args, **options)
    if device.type == "cuda":
        _COMPILED[key] = compiled
