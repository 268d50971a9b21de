"""Launching a compiled kernel without asking the JIT again: the host's part of a call's cost.

`kernel[grid](...)` derives a key from every argument at each call, some 20 microseconds with thirty of them. Here the caller
states what may change the machine code, so a launch is one dictionary lookup and the driver's own call. The first launch of a
key goes through the JIT, which compiles, specialises and checks as ever; a launch that somebody watches through Triton's hooks
goes by Triton's own way, which makes a description of it and calls them, though they are none as a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

_COMPILED: dict[tuple[Any, ...], Any] = {}
# what `compiled.run` takes is Triton's own affair, and read in 3.6; other releases are launched as they document
_KNOWN = triton.__version__.startswith("3.6.")


def launch(
    kernel: Any, grid: int, pointers: Sequence[torch.Tensor | None], varying: Sequence[float], fixed: Sequence[Any],
    options: dict[str, Any], strides: Sequence[int] = (),
) -> None:  # fmt: skip
    """Run `kernel(*pointers, *varying, *strides, *fixed)` on the tensors' device and its current stream, in a grid of one
    dimension.

    pointers: tensors, the first one never None. The JIT knows them by dtype, presence and whether they are 16-byte aligned,
              which allocations are; a call with any that is not goes through the JIT each time.
    varying:  numbers that the kernel declares `do_not_specialize`, and floats: always of the same type, below 2^31
    strides:  integers that the JIT knows by whether they are 1 or multiples of 16, and by their width; a cache's grow
    fixed:    whatever else the machine code may depend on: strides by value, then constexprs
    """
    first = pointers[0]
    assert first is not None
    if not first.is_cuda:
        kernel[grid,](*pointers, *varying, *strides, *fixed, **options)
        return
    current, device = torch.cuda.current_device(), first.get_device()
    if device != current:
        with torch.cuda.device(device):
            launch(kernel, grid, pointers, varying, fixed, options, strides)
        return
    address = 0
    kinds: list[torch.dtype | None] = []
    for tensor in pointers:
        if tensor is None:
            kinds.append(None)
        else:
            address |= tensor.data_ptr()
            kinds.append(tensor.dtype)
    if address % 16:
        kernel[grid,](*pointers, *varying, *strides, *fixed, **options)
        return
    widths = tuple([1 if stride == 1 else (stride % 16 == 0, stride >= 1 << 31) for stride in strides])
    key = (id(kernel), device, tuple(kinds), widths, tuple(fixed), tuple(options.values()))
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[grid,](*pointers, *varying, *strides, *fixed, **options)
    elif not _KNOWN or is_watched():
        compiled[grid, 1, 1](*pointers, *varying, *strides, *fixed)
    else:
        stream = driver.active.get_current_stream(device)
        compiled.run(
            grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *pointers, *varying, *strides,
            *fixed,
        )  # fmt: skip


def is_watched() -> bool:
    """Whether a profiler asked Triton to be told of launches."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, wherever the tensors are: layers may be spread over several."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()
