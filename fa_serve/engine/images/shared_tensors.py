"""Tensors of an image in shared memory, on their way from the process that decodes to the process that runs the towers.

    inputs = share_tensors(told, file)       # a mapping of names to tensors; told: what `ProcessedImage.write` returned
    connection.send(inputs)                  # of multiprocessing: sends the file descriptor, and no pixels

The process that decodes writes the tensors into an anonymous file (memfd). The server seals the file, so that nobody can change
it any more, and passes it on: pixels are written once, and the server does not even map them. The memory is freed with the last
descriptor and the last mapping of the file. It belongs to a file system inside the kernel, not to /dev/shm, because /dev/shm of
a container may have as little as 64 MB.

Other pickles, such as those of Ray, contain the tensors themselves. On a system without seals the tensors are copied.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch import Tensor


class SharedTensors(Mapping[str, Tensor]):
    """Owner of the descriptor of a sealed file. Writing to one of the tensors changes it only in this process.

    described: name, dtype, shape and place (bytes from the beginning) of each tensor
    length:    bytes of the file that hold the tensors, from the beginning
    num_bytes: memory of the whole file, including what was written outside of the tensors
    """

    def __init__(self, file: int, described: Sequence[Mapping[str, Any]], length: int) -> None:
        self._file = file
        self._described = {each["name"]: each for each in described}
        self._length = length
        self.num_bytes = os.fstat(file).st_blocks * 512
        weakref.finalize(self, os.close, file)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def __contains__(self, name: object) -> bool:
        return name in self._described

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        # a private mapping, because torch wants writable memory and the file is sealed
        return _map_tensors(self._file, self._described, self._length, mmap.MAP_PRIVATE)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def reduce_to_descriptor(self) -> tuple[Any, ...]:
        return _open_shared, (DupFd(self._file), list(self._described.values()), self._length)


ForkingPickler.register(SharedTensors, SharedTensors.reduce_to_descriptor)


def _open_shared(file: Any, described: Sequence[Mapping[str, Any]], length: int) -> SharedTensors:
    return SharedTensors(file.detach(), described, length)


def share_tensors(told: Mapping[str, Any], file: int) -> Mapping[str, Tensor]:
    """The tensors of a file whose writer has ended, as they are now. The caller may close the descriptor afterwards.

    told: what `ProcessedImage.write` returned: `inputs`, which is `described` of SharedTensors, and `bytes`, its `length`

    Raises ValueError if they lie outside of the file: a process that a malicious picture has taken over may claim anything.
    """
    described = {each["name"]: each for each in told["inputs"]}
    length = max(int(told["bytes"]), 1)
    ends = [each["place"] + prod(each["shape"]) * getattr(torch, each["dtype"]).itemsize for each in described.values()]
    places = [each["place"] for each in described.values()]
    sizes = [size for each in described.values() for size in each["shape"]]
    if min([*places, *sizes], default=0) < 0 or max(ends, default=0) > length or length > os.fstat(file).st_size:
        raise ValueError("inputs must lie in the file of the image")
    if _has_sealed(file):
        return SharedTensors(os.dup(file), told["inputs"], length)
    shared = _map_tensors(file, described, length, mmap.MAP_SHARED)
    return {name: x.clone() for name, x in shared.items()}


def _has_sealed(file: int) -> bool:
    """Seal the file against writes. Returns False if the system has no seals, or while a process has it mapped for writing."""
    if not hasattr(fcntl, "F_SEAL_WRITE"):
        return False
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    except OSError:
        return False
    return True


def _map_tensors(file: int, described: Mapping[str, Mapping[str, Any]], length: int, kind: int) -> dict[str, Tensor]:
    memory = mmap.mmap(file, length, flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    tensors = {}
    for name, each in described.items():
        dtype = getattr(torch, each["dtype"])
        count = prod(each["shape"])
        flat = (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=each["place"]) if count else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(each["shape"])
    return tensors
