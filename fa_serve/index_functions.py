"""Functions of indices, FlexAttention's mask_mod(b, h, q_idx, kv_idx): how they are evaluated, and what they read.

    batch, heads = dims_read(mask_mod, device)              # whether sequences and heads differ
    keep = over_grid(mask_mod)(b, h, queries, keys)         # bool (b, h, queries, keys)

Such a function is written for one query and one key, so it is evaluated by `torch.vmap`, as FlexAttention does without a
compiler. A value that was made of a function may be kept for as long as `what_is_read` stays the same. Left out: what the
results mean, which `block_lists` knows of a mask_mod and `score_mods` of a score_mod.
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
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, type)
_BUILT_IN = (types.BuiltinFunctionType, types.MethodWrapperType, type(torch.Tensor.add))

_level_of = torch._C._functorch.maybe_get_level
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_inside_of = torch._C._functorch.get_unwrapped


def name_of(function: object) -> str:
    """How messages call a function."""
    return str(getattr(function, "__qualname__", None) or repr(function))


def over_grid(function: IndexFunction) -> IndexFunction:
    """The function over all combinations of (b,), (h,), (queries,), (keys,) int64 -> (b, h, queries, keys)."""
    mapped = function
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims)
    return _explaining(mapped, function)


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
                f"{name_of(function)} must be a function that torch.vmap can evaluate, got a {type(error).__name__}: choose by "
                "torch.where and operators of tensors in the place of Python's if, and, or, not"
            ) from error

    return evaluate


def dims_read(function: IndexFunction, device: torch.device) -> tuple[bool, bool]:
    """Whether the result depends on b, and whether on h. The function is evaluated for the first query and key."""
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
    """The dimensions of vmap that a result depends on; each has wrapped it once."""
    levels = set()
    while _is_wrapped(x):
        levels.add(_level_of(x))
        x = _inside_of(x)
    return levels


def what_is_read(function: object) -> tuple[Hashable, list[Tensor]] | None:
    """What a function's result depends on beside its arguments: its code, and the values of its closure and of its globals.

    Returns a key, which changes if a name is bound to another value or a tensor is changed in place, and the tensors that are
    read, whose numbers in the key hold as long as the tensors live. None if that is not known, as of objects with attributes.
    """
    tensors: list[Tensor] = []
    try:
        return _facts_of(function, tensors, ()), tensors
    except (LookupError, ValueError):  # a name that is not bound yet is a ValueError
        return None


def _facts_of(value: Any, tensors: list[Tensor], parents: tuple[int, ...]) -> Hashable:
    """Raises LookupError for a value that may change without a trace."""
    if isinstance(value, Tensor):
        if value.is_inference():
            raise LookupError(value)
        tensors.append(value)
        return (id(value), value._version, value.requires_grad)
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, tuple):
        return tuple(_facts_of(each, tensors, parents) for each in value)
    if isinstance(value, _BUILT_IN) or _is_constant(value):
        return id(value)
    # names that a function inside of it reads are not found, and objects and modules may have other attributes by the next call
    if not isinstance(value, types.FunctionType) or any(isinstance(each, types.CodeType) for each in value.__code__.co_consts):
        raise LookupError(value)
    if id(value) in parents:  # it calls itself
        return id(value)
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    closure = (cell.cell_contents for cell in value.__closure__ or ())
    # names of attributes are among them; one that is also a global name is read in vain
    read = (value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__)
    parts = (*defaults, *closure, *read)
    return (value.__code__, *(_facts_of(each, tensors, (*parents, id(value))) for each in parts))


def _is_constant(value: Any) -> bool:
    """Whether a module, or a function of a module, is always the same."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] in ("torch", "math")
