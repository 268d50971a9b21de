"""Arrays of several types to the device in one copy.

    tensors = send({"ids": ids, "lengths": lengths}, device)             # in memory of their own
    tensors = send({"ids": ids, "lengths": lengths}, device, block)      # at fixed addresses

Arrays lie one after another in the order of the dict, so where each lies depends on the sizes of those before it alone. The
host does not wait; work on the current stream comes after the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 16  # bytes, of each array in the block


def send(arrays: Mapping[str, NDArray[Any]], device: torch.device, block: Tensor | None = None) -> dict[str, Tensor]:
    """block: (at least packed_size(arrays),) uint8, on the device"""
    if device.type == "cpu" and block is None:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    size = packed_size(arrays)
    # the pinned memory goes back to torch's cache, which waits for the copy before it hands it out again
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, place in unpack(host, arrays).items():
        place.numpy()[...] = arrays[name]
    if block is None:
        return unpack(host.to(device, non_blocking=True), arrays)
    block[:size].copy_(host, non_blocking=True)
    return unpack(block, arrays)


def packed_size(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Bytes of the block."""
    return sum(_padded(array) for array in arrays.values())


def unpack(block: Tensor, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """Views of the places of such arrays, whose contents do not matter."""
    views = {}
    start = 0
    for name, array in arrays.items():
        views[name] = block[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        start += _padded(array)
    return views


def _padded(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGN) * ALIGN
