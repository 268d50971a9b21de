"""What the active dispatch modes of PyTorch ask of ops. Only the mode in `deterministic.py` asks for anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_repeats: ContextVar[bool] = ContextVar("fa_serve_repeated_forward", default=False)


def rows_are_independent() -> bool:
    """Whether a mode asks that the bits of a row do not depend on the other rows."""
    return torch._C._len_torch_dispatch_stack() > 0 and _is_asked("rows_are_independent")


def has_gradients() -> bool:
    """Whether ops have gradients here: only if a mode asks for independent rows while autograd records, as in the forward of
    `fa_serve.exact`. Elsewhere, code that needs gradients calls a model's own layers.
    """
    return torch.is_grad_enabled() and rows_are_independent()


def records_gradients(*tensors: object) -> bool:
    """Whether autograd records an op with these arguments: ops have gradients here, and one of the tensors needs one."""
    if not torch.is_grad_enabled():
        return False  # the usual case, at each op
    return has_gradients() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def modes_of_backward() -> AbstractContextManager[object]:
    """A context for a backward pass: `without_row_order`, unless the operators of backward passes are replaced as well."""
    return nullcontext() if _is_asked("replaces_backward") else without_row_order()


def without_row_order() -> AbstractContextManager[object]:
    """A context in which no mode replaces operators, so that they cost the host no more than usual."""
    if not rows_are_independent():
        return nullcontext()
    without_modes: AbstractContextManager[object] = _disable_current_modes()
    return without_modes


@contextmanager
def repeated_forward() -> Iterator[None]:
    """A context for the forward of an autograd function that a checkpoint repeats within a backward pass. Autograd does not
    record there, just as in the backward pass; so this context makes `in_backward` False."""
    token = _repeats.set(True)
    try:
        yield
    finally:
        _repeats.reset(token)


def in_backward() -> bool:
    """Whether a backward pass is computed, and not a forward that a checkpoint repeats within it."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and not _repeats.get()


def _is_asked(name: str) -> bool:
    count = torch._C._len_torch_dispatch_stack()
    return any(getattr(torch._C._get_dispatch_stack_at(i), name, False) for i in range(count))
