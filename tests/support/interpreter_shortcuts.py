"""Shortcuts through the interpreter of Triton 3.6: the same results in less than half of the time.

It does a few things again and again whose results it has, or drops:

- Each call of a device function replaces all functions of `triton.language`, as its launch has done before.
- Each product, sum and difference of integers is computed a second time in int64, to find overflows for an assertion that is
  not made without the option `debug`.
- Each result makes a table of all dtypes, to look one of them up, and the tuples of constants that describe its shape.
- A reduction or a scan with a function of ours calls it for each element. It is called for whole slices; what a reduction
  combines are neighbours, then neighbours of those, so that the function has to be associative, as it has to for a GPU.

With another release nothing is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Kernels that the interpreter runs inside the context take the shortcuts."""
    with pytest.MonkeyPatch.context() as patch:
        if triton.__version__.startswith("3.6."):
            _replace_the_language_once(patch)
            _check_no_overflow(patch)
            _look_dtypes_up_once(patch)
            _describe_shapes_once(patch)
            _combine_slices(patch)
        yield


@functools.cache
def _languages(function: Callable[..., Any]) -> frozenset[str]:
    """The modules with functions of the language that a kernel or a device function sees."""
    seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    return frozenset(module.__name__ for module in seen)


def _replace_the_language_once(patch: pytest.MonkeyPatch) -> None:
    replace = interpreter._patch_lang
    replaced: set[str] = set()

    class Scope:
        """What a launch has replaced. Triton restores it at the end of the launch; device functions drop theirs."""

        def __init__(self, scope: Any) -> None:
            self.scope = scope

        def restore(self) -> None:
            replaced.clear()
            self.scope.restore()

    def replace_once(function: Callable[..., Any]) -> Scope | None:
        languages = _languages(function)
        if languages and languages <= replaced:
            return None
        replaced.update(languages)
        return Scope(replace(function))

    patch.setattr(interpreter, "_patch_lang", replace_once)


def _check_no_overflow(patch: pytest.MonkeyPatch) -> None:
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    assert not options.debug, "with `debug`, overflows raise"
    patch.setattr(interpreter, "InterpreterOptions", lambda: options)
    patch.setattr(interpreter.interpreter_builder, "options", options)


def _look_dtypes_up_once(patch: pytest.MonkeyPatch) -> None:
    look_up = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def look_up_once(dtype: Any) -> Any:
        if type(dtype) is tl.block_type:
            dtype = dtype.element_ty
        if type(dtype) is not tl.dtype:  # a pointer
            return look_up(dtype)
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    patch.setattr(interpreter, "_get_np_dtype", look_up_once)


def _describe_shapes_once(patch: pytest.MonkeyPatch) -> None:
    of_types: dict[tuple[int, ...], tuple[Any, Any, str]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    make_type = tl.block_type.__init__
    make_tensor = tl.tensor.__init__

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(getattr(size, "value", size) for size in shape)
        if key not in of_types:
            make_type(self, element_ty, shape)
            of_types[key] = (self.shape, self.numel, str(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, name = of_types[key]
        self.name = f"<{name}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = (self.shape, self.numel)
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = of_tensors[key]

    patch.setattr(tl.block_type, "__init__", init_type)
    patch.setattr(tl.tensor, "__init__", init_tensor)


def _combine_slices(patch: pytest.MonkeyPatch) -> None:
    def combined(op: Any, types: list[Any], first: list[Any], second: list[Any]) -> list[Any]:
        """`op` of slices of arrays, whose elements are what it combines."""
        found = op.combine_fn.fn(*(op.to_tensor(x, t) for x, t in zip([*first, *second], [*types, *types], strict=True)))
        found = found if isinstance(found, tuple) else (found,)
        values = [x.handle.data if isinstance(x, tl.core.tensor) else x for x in found]
        return [numpy.broadcast_to(x, like.shape).astype(like.dtype) for x, like in zip(values, first, strict=True)]

    def reduce_slices(self: Any, inputs: Any) -> list[Any]:
        types = [x.dtype for x in inputs]
        every = self.axis is None
        parts = [x.handle.data.ravel() if every else numpy.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        while len(parts[0]) > 1:
            parts = combined(self, types, [x[0::2] for x in parts], [x[1::2] for x in parts])
        ends = [x[0] for x in parts]
        if self.keep_dims:
            ends = [x.reshape([1] * inputs[0].handle.data.ndim) if every else numpy.expand_dims(x, self.axis) for x in ends]
        return [self.to_tensor(x, t) for x, t in zip(ends, types, strict=True)]

    def scan_slices(self: Any, inputs: Any) -> list[Any]:
        types = [x.dtype for x in inputs]
        parts = [numpy.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        rows = [[x[:1] for x in parts]]
        for i in range(1, len(parts[0])):
            rows.append(combined(self, types, rows[-1], [x[i : i + 1] for x in parts]))
        whole = [numpy.moveaxis(numpy.concatenate(of_one), 0, self.axis) for of_one in zip(*rows, strict=True)]
        return [self.to_tensor(x, t) for x, t in zip(whole, types, strict=True)]

    patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_slices)
    patch.setattr(interpreter.ScanOps, "generic_scan", scan_slices)
