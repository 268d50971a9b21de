"""How much of a multiprocessor's memory the driver sets aside as shared memory for a kernel (CUDA calls it the carve-out).

On NVIDIA GPUs the L1 cache and shared memory are one memory, which the driver divides for each kernel. What it chooses may hold
fewer programs than registers and the whole memory allow: on one H200 with graphs of decoding steps, it was two programs of 36
KiB instead of three, and reading 64 x 8192 keys of 16/8 heads took 559 us instead of 496. Triton asks for all of it only where
a program has more than 48 KiB. A kernel that reads most of its numbers through the L1 cache loses by that: with all kernels of
an 8B model a step of one sequence took 4.5 ms instead of 4.2.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

_PREFERRED_CARVEOUT = 9
"""CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the driver's interface."""
_ALL = 100  # percent of the most shared memory that a multiprocessor can have


def prefer_shared_memory(function: int) -> None:
    """Ask the driver to set aside as much shared memory as it can while this kernel runs.

    function: the handle of a loaded kernel (CUfunction). It is a hint, so it does not matter if the driver refuses it, and on
              ROCm nothing is asked
    """
    driver = _load_driver()
    if driver is not None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, _ALL)


@lru_cache(maxsize=1)
def _load_driver() -> Any:
    """The library of CUDA's driver, or None where there is none."""
    if torch.version.hip is not None:
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
