"""A memory checker for Triton's interpreter: an access outside the launch's tensors raises instead of corrupting the process.

The interpreter reads and writes raw addresses, so a kernel that leaves its tensors damages the heap and the test that fails is
some later one, if any. Under `checked_accesses()` every address of a load, store or atomic whose mask is set must lie in the
storage of a tensor that the launch was given, or that is `reachable`. An access that leaves a view but stays in its storage is
not seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


class OutOfBoundsError(Exception):
    """A kernel accesses an address that lies in none of its tensors."""


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """First address and length in bytes of each tensor's storage in an argument of a launch."""
    if isinstance(value, tuple):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, TensorDescriptor):
        yield from _storages(value.base)
    elif isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        yield storage.data_ptr(), storage.nbytes()


_REACHABLE: list[tuple[int, int]] = []
"""Storages that no launch is given: kernels find their addresses in memory."""


@contextlib.contextmanager
def reachable(*tensors: torch.Tensor) -> Iterator[None]:
    """Inside, kernels may access these tensors too, as they do with addresses from a table."""
    _REACHABLE.extend(_storages(tensors))
    try:
        yield
    finally:
        _REACHABLE.clear()


class _Bounds:
    """The storages of the launch that runs now. Launches do not nest."""

    def __init__(self) -> None:
        self.starts = numpy.zeros(0, numpy.uint64)
        self.ends = numpy.zeros(0, numpy.uint64)

    def set(self, arguments: list[Any]) -> None:
        ranges = sorted({r for argument in arguments for r in _storages(argument)} | set(_REACHABLE))
        self.starts = numpy.array([start for start, _ in ranges], numpy.uint64)
        self.ends = numpy.array([start + length for start, length in ranges], numpy.uint64)

    def check(self, what: str, ptrs: Any, mask: Any) -> None:
        addresses = ptrs.data.ravel()
        if mask is not None:
            addresses = addresses[numpy.asarray(mask.data, bool).ravel()]  # descriptors give an array, which has `data` too
        if addresses.size == 0:
            return
        size = numpy.uint64(max(ptrs.get_element_ty().primitive_bitwidth // 8, 1))
        owner = numpy.searchsorted(self.starts, addresses, side="right") - 1
        outside = (owner < 0) | (addresses + size > self.ends[owner])
        if outside.any():
            count = f"{int(outside.sum())} of {ptrs.data.size}"
            raise OutOfBoundsError(f"{count} elements of the {what} lie outside the kernel's tensors")


@contextlib.contextmanager
def checked_accesses() -> Iterator[None]:
    """Check each memory access of the kernels that the interpreter runs inside the context."""
    bounds = _Bounds()
    # which positional arguments of each method are the addresses and the mask
    methods = {
        "create_masked_load": (0, 1),
        "create_masked_store": (0, 2),
        "create_atomic_rmw": (1, 3),
        "create_atomic_cas": (0, None),
    }
    builder = interpreter.InterpreterBuilder
    executor = interpreter.GridExecutor
    originals = {name: getattr(builder, name) for name in methods}
    init = executor._init_args_hst

    def checked(name: str) -> Callable[..., Any]:
        original = originals[name]
        ptrs, mask = methods[name]

        @functools.wraps(original)
        def access(self: Any, *args: Any, **options: Any) -> Any:
            bounds.check(name.removeprefix("create_").replace("_", " "), args[ptrs], None if mask is None else args[mask])
            return original(self, *args, **options)

        return access

    def remembered(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, keywords = init(self, args_dev, kwargs)
        bounds.set([*args, *keywords.values()])
        return args, keywords

    executor._init_args_hst = remembered
    for name in methods:
        setattr(builder, name, checked(name))
    try:
        yield
    finally:
        executor._init_args_hst = init
        for name, original in originals.items():
            setattr(builder, name, original)
