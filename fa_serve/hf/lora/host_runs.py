"""Finds matrices on the host that follow each other in memory, so that they are copied at once.

    for run in runs_of(matrices):
        copy = run.data.clone()
        copies = [viewed(copy, offset, matrices[index]) for index, offset in run.members]

An adapter has hundreds of matrices, and those that were read from a file are views of it without gaps. A call of PyTorch or
NumPy for each of them would need the interpreter each time, for which the engine's steps wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class MatrixRun(NamedTuple):
    """Matrices of one dtype that follow each other in memory.

    data:    (bytes,) uint8, a view of their memory
    members: the index of each matrix, and the byte at which it begins
    """

    data: Tensor
    members: list[tuple[int, int]]


def is_dense(x: Tensor) -> bool:
    """Whether a matrix has no gaps in memory, where it may lie row by row or column by column."""
    return x.is_contiguous() or x.stride() == (1, len(x))


def runs_of(matrices: Sequence[Tensor]) -> list[MatrixRun]:
    """The memory of dense matrices. Each of them is in one run."""
    places = [(x.untyped_storage().data_ptr(), x.storage_offset() * x.itemsize, index) for index, x in enumerate(matrices)]
    runs: list[list[int]] = []
    following = None
    for storage, begin, index in sorted(places):
        x = matrices[index]
        if following != (storage, begin, x.dtype):
            runs.append([])
        runs[-1].append(index)
        following = (storage, begin + x.nbytes, x.dtype)
    return [_run(matrices, indices) for indices in runs]


def viewed(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """A matrix with the dtype, shape and strides of `like`, which is dense, whose bytes begin at `offset` of this memory."""
    begin = (memory.storage_offset() + offset) // like.itemsize
    return memory.view(like.dtype).as_strided(like.shape, like.stride(), begin)


def cloned(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Copies that share no memory with the matrices."""
    dense = [x if is_dense(x) else x.contiguous() for x in matrices]
    found = list(dense)
    for run in runs_of(dense):
        copy = run.data.clone()
        for index, offset in run.members:
            found[index] = viewed(copy, offset, dense[index])
    return found


def _run(matrices: Sequence[Tensor], indices: Sequence[int]) -> MatrixRun:
    first = matrices[indices[0]]
    members = []
    length = 0
    for index in indices:
        members.append((index, length))
        length += matrices[index].nbytes
    data = torch.empty(0, dtype=torch.uint8)
    begin = first.storage_offset() * first.itemsize
    return MatrixRun(data.set_(first.untyped_storage(), begin, (length,), (1,)), members)
