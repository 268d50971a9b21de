"""Launching a compiled kernel without asking the JIT again: the host's part of a call's cost.

`kernel[grid](...)` derives a key from every argument at each call, some 20 microseconds with thirty of them. Here the caller
states what may change the machine code, so a launch is one dictionary lookup and the driver's own call. The first launch of a
key goes through the JIT, which compiles, specialises and checks as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_COMPILED: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: int, pointers: Sequence[torch.Tensor | None], varying: Sequence[float], fixed: Sequence[Any],
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Run `kernel(*pointers, *varying, *fixed)` on the current device and stream, in a grid of one dimension.

    pointers: tensors or None. The JIT knows them by dtype, presence and whether they are 16-byte aligned, which allocations
              are; a call with any that is not goes through the JIT each time.
    varying:  numbers that the kernel declares `do_not_specialize`, and floats: always of the same type, below 2^31
    fixed:    whatever else the machine code may depend on: strides by value, then constexprs
    """
    address = 0
    kinds: list[torch.dtype | None] = []
    for tensor in pointers:
        if tensor is None:
            kinds.append(None)
        else:
            address |= tensor.data_ptr()
            kinds.append(tensor.dtype)
    if pointers[0] is None or not pointers[0].is_cuda or address % 16:
        kernel[grid,](*pointers, *varying, *fixed, **options)
        return
    key = (id(kernel), torch.cuda.current_device(), tuple(kinds), tuple(fixed), tuple(options.values()))
    compiled = _COMPILED.get(key)
    if compiled is None:
        _COMPILED[key] = kernel[grid,](*pointers, *varying, *fixed, **options)
    else:
        compiled[grid, 1, 1](*pointers, *varying, *fixed)
