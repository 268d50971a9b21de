"""Functions of indices, such as FlexAttention's mask_mod(b, h, q_idx, kv_idx): how to evaluate them, and what they read.

    batch, heads = dims_read(mask_mod, device)              # whether sequences and heads differ
    keep = over_grid(mask_mod)(b, h, queries, keys)         # bool (b, h, queries, keys)

Such a function is written for one query and one key, so `torch.vmap` evaluates it, as in FlexAttention without a compiler. A
value that was computed from a function may be kept for as long as `what_is_read` returns the same. Left out: what the results
mean (see `block_lists` for a mask_mod, and `score_mods` for a score_mod).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fa_serve.spec import UnsupportedError

IndexFunction = Callable[..., Tensor]
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_BUILT_IN = (types.BuiltinFunctionType, type(torch.Tensor.add))
_TENSORS = (Tensor, torch.nn.Parameter)
_FIXED = ("builtins", "math", "torch")
"""Packages whose modules, classes and functions are assumed not to change."""

_level_of = torch._C._functorch.maybe_get_level
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_inside_of = torch._C._functorch.get_unwrapped


def name_of(function: object) -> str:
    """The name of a function in messages."""
    return str(getattr(function, "__qualname__", None) or repr(function))


def over_grid(function: IndexFunction) -> IndexFunction:
    """The function over all combinations of (b,), (h,), (queries,), (keys,) int64 -> (b, h, queries, keys)."""
    mapped = function
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims)
    evaluate = _explaining(mapped, function)

    def evaluate_all(*indices: Tensor) -> Tensor:
        sizes = [len(index) for index in indices]
        # vmap cannot map over an empty dimension
        return evaluate(*indices) if all(sizes) else torch.zeros(sizes, dtype=torch.bool, device=indices[0].device)

    return evaluate_all


def over_blocks(function: IndexFunction) -> IndexFunction:
    """The function over blocks: (blocks,), (blocks,), (blocks, queries), (blocks, keys) int64 -> (blocks, queries, keys)."""
    mapped = function
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        mapped = torch.vmap(mapped, in_dims=dims)
    return _explaining(mapped, function)


def _explaining(mapped: IndexFunction, function: IndexFunction) -> IndexFunction:
    def evaluate(*indices: Tensor) -> Tensor:
        try:
            return mapped(*indices)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{name_of(function)} must be a function that torch.vmap can evaluate, got a {type(error).__name__}: choose "
                "with torch.where and tensor operators instead of Python's if, and, or, not"
            ) from error

    return evaluate


def dims_read(function: IndexFunction, device: torch.device) -> tuple[bool, bool]:
    """Whether the result depends on b, and whether it depends on h. The function is evaluated for the first query and key."""
    found: list[bool] = []

    @wraps(function)
    def watch(*indices: Tensor) -> Tensor:
        result = function(*indices)
        levels = _levels_of(result)
        found[:] = [_level_of(index) in levels for index in indices[:2]]
        return result

    over_grid(watch)(*(torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)))
    batch, heads = found
    return batch, heads


def _levels_of(x: Tensor) -> set[int]:
    """The levels of vmap on which a result depends; each of them has wrapped the result once."""
    levels = set()
    while _is_wrapped(x):
        levels.add(_level_of(x))
        x = _inside_of(x)
    return levels


def what_is_read(function: object) -> tuple[Hashable, list[Tensor]] | None:
    """What a function's result depends on in addition to its arguments: its code, and the values of its closure and globals.

    Returns a key, which changes if a name is bound to another value or a tensor is changed in place, and the tensors that are
    read. The key has the ids of these tensors, so it is valid while they live. Returns None if the dependencies are not known:
    for objects, for classes and functions with attributes, for bound methods, and for tensors of `torch.inference_mode`, which
    have no version.
    """
    tensors: list[Tensor] = []
    try:
        return _facts_of(function, tensors, ()), tensors
    except (LookupError, ValueError):  # a name that is not bound yet is a ValueError
        return None


def _facts_of(value: Any, tensors: list[Tensor], parents: tuple[int, ...]) -> Hashable:
    """A key of a value. Raises LookupError for a value that may change without leaving a trace."""
    # exact types, because an object of a derived class may have attributes
    kind = type(value)
    if kind in _TENSORS:
        # names with an underscore are notes of libraries, such as transformers' _is_hf_initialized
        if value.is_inference() or any(not name.startswith("_") for name in vars(value)):
            raise LookupError(value)
        tensors.append(value)
        return (id(value), value._version, value.requires_grad)
    if kind in _PLAIN:
        return (kind, value)
    if kind in (tuple, torch.Size):
        return (kind, *(_facts_of(each, tensors, parents) for each in value))
    if _is_constant(value):
        return id(value)
    # objects, classes and modules may have other attributes by the next call
    if not isinstance(value, types.FunctionType) or vars(value).keys() - {"__wrapped__"}:
        raise LookupError(value)
    # the names that a nested function reads would not be found
    if any(isinstance(each, types.CodeType) for each in value.__code__.co_consts):
        raise LookupError(value)
    if id(value) in parents:  # it calls itself
        return id(value)
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    closure = (cell.cell_contents for cell in value.__closure__ or ())
    # co_names has names of attributes, too; if a global has the same name, it is read needlessly
    read = (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    parts = (*defaults, *closure, *read)
    return (value.__code__, *(_facts_of(each, tensors, (*parents, id(value))) for each in parts))


def _is_constant(value: Any) -> bool:
    """Whether a module, a class or a function is always the same, and stays in memory."""
    home: object
    if isinstance(value, _BUILT_IN):
        owner = getattr(value, "__self__", None)
        return owner is None or isinstance(owner, types.ModuleType)
    if isinstance(value, types.ModuleType):
        home = value.__name__
    elif isinstance(value, type):
        home = value.__module__
    elif isinstance(value, types.FunctionType) and not value.__closure__:
        # `functools.wraps` copies __module__, but not the globals
        home = value.__globals__.get("__name__")
    else:
        return False
    return str(home).partition(".")[0] in _FIXED
