"""Sends arrays of several types to the device in one copy.

    tensors = send({"ids": ids, "lengths": lengths}, device)             # in new memory
    tensors = send({"ids": ids, "lengths": lengths}, device, block)      # at fixed addresses

Arrays lie one after another in the order of the dict, so the place of each depends only on the sizes of those before it. The
host does not wait for the copy; work that is queued later on the current stream runs after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 16
"""Bytes that the address of each array is a multiple of."""


def send(arrays: Mapping[str, NDArray[Any]], device: torch.device, block: Tensor | None = None) -> dict[str, Tensor]:
    """The arrays as tensors on the device, by the same names.

    block: (at least packed_size(arrays),) uint8, on the device; None allocates new memory
    """
    if device.type == "cpu" and block is None:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    size = packed_size(arrays)
    # torch's cache takes the pinned memory back and waits for the copy before it gives the memory out again.
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, place in unpack(host, arrays).items():
        place.numpy()[...] = arrays[name]
    if block is None:
        return unpack(host.to(device, non_blocking=True), arrays)
    block[:size].copy_(host, non_blocking=True)
    return unpack(block, arrays)


def packed_size(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Bytes that a block needs for such arrays."""
    return sum(_padded(array) for array in arrays.values())


def unpack(block: Tensor, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Views of a block, one for each array. Only the types and shapes of `arrays` matter, not their contents."""
    views = {}
    start = 0
    for name, array in arrays.items():
        views[name] = block[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        start += _padded(array)
    return views


def _padded(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGN) * ALIGN
