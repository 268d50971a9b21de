"""Sends arrays of several types to the device in one copy.

    tensors = send({"ids": ids, "lengths": lengths}, device)             # in new memory
    tensors = send({"ids": ids, "lengths": lengths}, device, block)      # at fixed addresses

    staged = StagedArrays({"ids": ids, "lengths": lengths}, device)      # ahead of time, where the device copies from
    staged["ids"][:3] = tokens
    tensors = send(staged, device, block)

Arrays lie one after another in the order of the dict, so the place of each depends only on the sizes of those before it. The
host does not wait for the copy; work that is queued later on the current stream runs after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 16
"""Bytes that the address of each array is a multiple of."""


class StagedArrays(Mapping[str, NDArray[Any]]):
    """Arrays in the host memory from which they are sent. They are copies of the given ones, and may be changed until then.

    room: bytes that are kept free for the arrays of `extend`
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]], device: torch.device, room: int = 0) -> None:
        # torch's cache takes pinned memory back, and waits for its copy to the device before it gives the memory out again
        self._pinned = device.type == "cuda"
        self._allocate(packed_size(arrays) + room)
        self._append(arrays)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def extend(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add arrays behind the others."""
        size = self.size + packed_size(arrays)
        if size > len(self._bytes):
            views = self._views
            self._allocate(size)
            self._append(views)
        self._append(arrays)

    @property
    def host(self) -> Tensor:
        """(size,) uint8, in pinned memory for a GPU."""
        return self._host[: self.size]

    def _allocate(self, size: int) -> None:
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self._bytes: NDArray[np.uint8] = self._host.numpy()
        self._views: dict[str, NDArray[Any]] = {}
        self.size = 0  # bytes of the arrays

    def _append(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        start = self.size
        for name, array in arrays.items():
            view = self._bytes[start : start + array.nbytes].view(array.dtype)
            if array.ndim != 1:
                view = view.reshape(array.shape)
            view[...] = array
            self._views[name] = view
            start += _padded(array)
        self.size = start


class PackedTensors(Mapping[str, Tensor]):
    """The tensors of a block, by name. A view is made at each access, because a step with a CUDA graph uses only two of ten.

    block:  (at least packed_size(arrays),) uint8
    arrays: only their names, types and shapes matter, not their contents
    """

    def __init__(self, block: Tensor, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._block = block
        self._arrays = arrays
        self._starts: dict[str, int] = {}  # found at the first access, because a step with drafts may use none of them

    def __getitem__(self, name: str) -> Tensor:
        array = self._arrays[name]
        if not self._starts:
            self._starts = _starts(self._arrays)
        start = self._starts[name]
        view = self._block[start : start + array.nbytes].view(_torch_type(array.dtype))
        return view if array.ndim == 1 else view.view(array.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def send(arrays: Mapping[str, NDArray[Any]], device: torch.device, block: Tensor | None = None) -> Mapping[str, Tensor]:
    """The arrays as tensors on the device, by the same names.

    block: (at least packed_size(arrays),) uint8, on the device; None allocates new memory
    """
    if device.type == "cpu" and block is None:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    host = (arrays if isinstance(arrays, StagedArrays) else StagedArrays(arrays, device)).host
    if block is None:
        block = host.to(device, non_blocking=True)
    else:
        block[: host.numel()].copy_(host, non_blocking=True)
    return PackedTensors(block, arrays)


def packed_size(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Bytes that a block needs for such arrays."""
    return sum(_padded(array) for array in arrays.values())


def _starts(arrays: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """The first byte of each array in a block."""
    starts = {}
    start = 0
    for name, array in arrays.items():
        starts[name] = start
        start += _padded(array)
    return starts


def _padded(array: NDArray[Any]) -> int:
    return -(-array.nbytes // ALIGN) * ALIGN


@lru_cache(maxsize=16)
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same name, cached because NumPy takes longer to spell a name than torch takes to make a view."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found
