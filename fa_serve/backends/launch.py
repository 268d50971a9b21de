"""Launching a compiled kernel without asking the JIT again: the host's part of a call's cost.

`kernel[grid](...)` derives a key from every argument at each call, tens of microseconds with thirty of them or with tensor
descriptors. Here the caller states what may change the machine code. A plan keeps a `Launch`, which knows all but addresses
and goes to the driver at once; `launch` keeps one for callers without a plan, and looks it up each time. Addresses are
passed as numbers, which Triton's launcher does not ask the driver about, and a descriptor that was encoded for an address is
not encoded for it again. The first launch of its kind goes through the JIT, which compiles, specialises and checks as ever; a
launch that somebody watches through Triton's hooks goes by Triton's own way, which makes a description of it and calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from math import gcd
from typing import Any, cast

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

# what Triton's launcher takes is its own affair, and read in 3.6; other releases are launched as they document
_KNOWN = triton.__version__.startswith("3.6.")
_RUNTIME = triton.knobs.runtime
_KEPT: dict[tuple[Any, ...], Launch] = {}
_MOST_KEPT = 4096
_ENCODED = 256  # addresses that a plan remembers for one of its tensors


@cache
def multiprocessors(device: torch.device, otherwise: int) -> int:
    """Of a GPU (compute units on ROCm); `otherwise` on a CPU, where a kernel is interpreted or compiled for another machine."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else otherwise


class View(dict[int, tuple[Any, ...]]):
    """How a kernel sees a tensor: what Gluon's TensorDescriptor has besides `base`; and by address what a launch passes for it:
    the descriptor, which is encoded when an address comes first, shape and strides."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any) -> None:
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape
        self.layout = layout
        self.metadata: dict[str, Any] = {}  # how it is encoded, which every kernel that takes it says alike

    def __missing__(self, address: int) -> tuple[Any, ...]:
        """As Triton's own `make_tensordesc_arg`, with its argument order: rows outside of the bounds read as zero."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        if len(self) >= _ENCODED:
            self.clear()
        kind, size, swizzle = (self.metadata[name] for name in ("elem_type", "elem_size", "swizzle"))
        encoded = driver.active.utils.fill_tma_descriptor(
            address, swizzle, size, TMA_DTYPE_DEVICE_TO_HOST[kind], self.metadata["block_size"], self.shape, self.strides, 0
        )
        return self.setdefault(address, (encoded, *self.shape, *self.strides))


# Triton's launcher below its checks, which takes the grid, a stream, the second of these and the kernel's arguments as the
# driver does; how each descriptor is encoded; what tells the current stream of a device; the device
_Sender = tuple[Callable[..., None], tuple[Any, ...], Sequence[dict[str, Any]], Callable[[int], int], int]
_COMPILED: dict[tuple[Any, ...], tuple[Any, _Sender | None]] = {}


class Launch:
    """`kernel(*tensors, *varying, *strides, *fixed)` in a grid of one dimension, for calls that differ in addresses alone.

    varying: numbers that the kernel declares `do_not_specialize`, and floats: always of the same type, below 2^31
    strides: integers that the JIT knows by whether they are 1 or multiples of 16, and by their width; a cache's grow
    fixed:   whatever else the machine code may depend on: strides by value, then constexprs
    views:   of the first tensors, which the kernel takes as descriptors; None where it has none. They are aligned
    """

    __slots__ = ("_fixed", "_grid", "_kernel", "_numbers", "_options", "_sender", "_strides", "_views")

    def __init__(
        self,
        kernel: Any,
        grid: int,
        varying: Sequence[float],
        fixed: Sequence[Any],
        options: dict[str, Any],
        strides: Sequence[int] = (),
        views: Sequence[View | None] = (),
    ) -> None:
        self._kernel = kernel
        self._grid = (grid, 1, 1)
        self._options = options
        self._views = views
        self._numbers = (*varying, *strides, *fixed)
        self._strides = strides
        self._fixed = fixed
        self._sender: _Sender | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Run on the tensors' device and its current stream. The first tensor is never None.

        The JIT knows tensors by dtype, presence and whether they are 16-byte aligned, which allocations are; a call with any
        that is not goes through the JIT each time. Presence and dtypes are those of this launch's first call.
        """
        sender = self._sender
        first: Any = tensors[0]
        if sender is None or not first.get_device() == sender[4] == torch.cuda.current_device() or is_watched():
            self._first(tensors)
            return
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if gcd(16, *addresses) == 16:
            self._send(sender, addresses)
        else:
            self._jit(tensors)

    def _first(self, tensors: Sequence[Tensor | None]) -> None:
        """Whatever is not known yet, or not to be short."""
        first: Any = tensors[0]
        if not first.is_cuda:
            self._jit(tensors)
            return
        device = first.get_device()
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._first(tensors)
            return
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if gcd(16, *addresses) < 16:
            self._jit(tensors)
            return
        kinds = tuple([None if x is None else x.dtype for x in tensors])
        widths = tuple([1 if stride == 1 else (stride % 16 == 0, stride >= 1 << 31) for stride in self._strides])
        key = (id(self._kernel), device, kinds, widths, tuple(self._fixed), tuple(self._options.values()))
        compiled, sender = _COMPILED.get(key, (None, None))
        if compiled is None:
            compiled = self._jit(tensors)
            _COMPILED[key] = compiled, _sender(compiled, device)
        elif sender is None or is_watched():
            compiled[self._grid](*self._arguments(tensors))
        else:
            for view, metadata in zip((view for view in self._views if view is not None), sender[2], strict=True):
                view.metadata = metadata
            self._sender = sender  # another thread may go by it from here on
            self._send(sender, addresses)

    def _jit(self, tensors: Sequence[Tensor | None]) -> Any:
        return self._kernel[self._grid](*self._arguments(tensors), **self._options)

    def _arguments(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        arguments = [*tensors, *self._numbers]
        if self._views:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            for i, view in enumerate(self._views):
                arguments[i] = None
                if view is not None:
                    arguments[i] = TensorDescriptor(tensors[i], view.shape, view.strides, view.block_shape, view.layout)
        return arguments

    def _send(self, sender: _Sender, addresses: list[Any]) -> None:
        native, fixed, _, stream_of, device = sender
        if self._views:
            flat: list[Any] = []
            for view, address in zip(self._views, addresses, strict=False):
                flat += (None,) if view is None else view[address]
            addresses = flat + addresses[len(self._views) :]
        native(*self._grid, stream_of(device), *fixed, *addresses, *self._numbers)


def launch(
    kernel: Any,
    grid: int,
    pointers: Sequence[Tensor | None],
    varying: Sequence[float],
    fixed: Sequence[Any],
    options: dict[str, Any],
    strides: Sequence[int] = (),
) -> None:
    """One call of a `Launch`, for those that keep none: it is kept here."""
    kinds = [None if x is None else x.dtype for x in pointers]
    key = (id(kernel), grid, *kinds, *varying, *fixed, *options.values(), *strides, cast(Tensor, pointers[0]).get_device())
    kept = _KEPT.get(key)
    if kept is None:
        if len(_KEPT) >= _MOST_KEPT:
            _KEPT.clear()
        kept = _KEPT[key] = Launch(kernel, grid, varying, fixed, options, strides)
    kept(pointers)


def _sender(compiled: Any, device: int) -> _Sender | None:
    """What Triton 3.6 does after its checks, less the encoding and the hooks; None if its launcher is not the one known."""
    run = compiled.run
    if not _KNOWN or not hasattr(run, "launch_pdl") or run.global_scratch_size or run.profile_scratch_size:
        return None
    native = run.launch
    metadata = ()
    if getattr(native, "__closure__", None):
        inner = dict(zip(native.__code__.co_freevars, (cell.cell_contents for cell in native.__closure__), strict=True))
        if not {"launcher", "tensordesc_meta"} <= inner.keys() or None in inner["tensordesc_meta"]:
            return None
        native = inner["launcher"]
        metadata = inner["tensordesc_meta"]
    scratch = hooks = (None, None)
    fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, *scratch, compiled.packed_metadata, None, *hooks)
    return native, fixed, metadata, driver.active.get_current_stream, device


def is_watched() -> bool:
    """Whether a profiler asked Triton to be told of launches."""
    enter = _RUNTIME.launch_enter_hook
    leave = _RUNTIME.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, wherever the tensors are: layers may be spread over several."""
    return torch.cuda.device(x.device) if x.is_cuda and x.get_device() != torch.cuda.current_device() else nullcontext()
