"""Launching a compiled kernel without asking the JIT again: the host's part of a call's cost.

`kernel[grid](...)` derives a key from every argument at each call, tens of microseconds with tensor descriptors. Here the
caller states the key, so a launch is one dictionary lookup and the driver's own call; and a descriptor that was encoded for an
address once is not encoded for it again. The first launch of a key goes through the JIT, which compiles, specialises and checks
as ever; so does every launch that somebody watches through Triton's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from fa_serve.backends.launch import is_watched

_COMPILED: dict[tuple[Any, ...], tuple[Any, Callable[..., None] | None]] = {}
_ENCODED = 256  # addresses that a plan remembers for one of its tensors


class View(NamedTuple):
    """How a kernel sees a tensor, whatever its address: what Gluon's TensorDescriptor has besides `base`; the shape and the
    strides in one, as a launch passes them; and what was encoded so far, by address."""

    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any
    numbers: tuple[int, ...]
    encoded: dict[int, Any]


class Descriptor(NamedTuple):
    """A TensorDescriptor without its validation: `forward` has checked the fields once for all calls of a plan."""

    base: Tensor
    view: View


def launch(
    kernel: Any, key: tuple[Any, ...], grid: tuple[int, int, int], descriptors: Sequence[Descriptor | None],
    others: Sequence[Any], device: torch.device, **options: Any,
) -> None:  # fmt: skip
    """Run `kernel(*descriptors, *others)` on the current stream of `device`.

    key: everything that changes the machine code: constexprs, dtypes, which arguments are None. Integers and pointers must be
         declared unspecialised by the kernel, or be alike for equal keys.
    """
    key = (id(kernel), device.index, key)
    compiled, send = _COMPILED.get(key, (None, None))
    if send is not None and not is_watched():
        send(grid, descriptors, others)
        return
    args = [d and TensorDescriptor(d.base, *d.view[:4]) for d in descriptors]
    if compiled is not None:
        compiled[grid](*args, *others)
        return
    compiled = kernel[grid](*args, *others, **options)
    if device.type == "cuda":
        _COMPILED[key] = compiled, _sender(compiled, device.index)


def _sender(compiled: Any, device: int) -> Callable[..., None] | None:
    """What Triton 3.6 does after its checks, less the encoding and the hooks; None if its launcher is not the one known."""
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    native, metadata = run.launch, ()
    if getattr(native, "__closure__", None):
        inner = dict(zip(native.__code__.co_freevars, (cell.cell_contents for cell in native.__closure__), strict=True))
        if not {"launcher", "tensordesc_meta"} <= inner.keys() or None in inner["tensordesc_meta"]:
            return None
        native, metadata = inner["launcher"], inner["tensordesc_meta"]
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    fixed = (compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None)
    stream_of = driver.active.get_current_stream

    def send(grid: tuple[int, int, int], descriptors: Sequence[Descriptor | None], others: Sequence[Any]) -> None:
        flat: list[Any] = []
        number = 0
        for descriptor in descriptors:
            if descriptor is None:
                flat.append(None)
                continue
            base, view = descriptor
            address = base.data_ptr()
            encoded = view.encoded.get(address)
            if encoded is None:
                if len(view.encoded) >= _ENCODED:
                    view.encoded.clear()
                encoded = view.encoded[address] = _encode(address, view, metadata[number])
            number += 1
            flat.append(encoded)
            flat += view.numbers
        native(*grid, stream_of(device), *fixed, *flat, *others)

    return send


def _encode(address: int, view: View, metadata: dict[str, Any]) -> Any:
    """As Triton's own `make_tensordesc_arg`, with its argument order: rows outside of the bounds read as zero."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    return driver.active.utils.fill_tma_descriptor(
        address, metadata["swizzle"], metadata["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[metadata["elem_type"]],
        metadata["block_size"], view.shape, view.strides, 0,
    )  # fmt: skip
