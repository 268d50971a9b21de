"""Triton's hooks for compilations, with kernels whose constants JSON cannot represent.

    show_constants_as_text(kernel)           # a function with @triton.jit or @gluon.jit

A program may set `triton.knobs.runtime.jit_cache_hook` and `jit_post_compile_hook`; vLLM does, to report compilations that
requests wait for. Triton then describes the kernel in JSON, and a constant that is a dataclass ends the launch with a
TypeError. With this module, hooks get the text of such a constant instead. Left out: Triton's listener of compilations, which
gets no constants (launching/compilations.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

HOOK_CALL = "_call_hook"
"""Triton's method that calls a hook. Triton 3.6 to 3.9 have it; without it, nothing is changed."""


def show_constants_as_text(kernel: Any) -> None:
    """Let hooks get constants that JSON cannot represent as text. A second call for the same kernel changes nothing."""
    call = getattr(kernel, HOOK_CALL, None)
    if call is not None and HOOK_CALL not in vars(kernel):
        setattr(kernel, HOOK_CALL, _Readable(call))


class _Readable:
    """In place of Triton's method. call: that method, which takes a hook and a description of the compilation, partly dicts"""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, hook: Callable[..., Any] | None, *described: Any, **named: Any) -> Any:
        if hook is None:
            return None
        return self._call(hook, *map(_shown, described), **{name: _shown(value) for name, value in named.items()})


def _shown(described: Any) -> Any:
    return {key: _text(value) for key, value in described.items()} if isinstance(described, dict) else described


def _text(value: Any) -> Any:
    """The value, if Triton can describe it, or its text. Triton knows its own types by their names as well."""
    kind = type(value).__name__
    if kind == "dtype":
        return value
    inner = value.value if kind == "constexpr" else value
    try:
        json.dumps(inner)
    except TypeError:
        return str(inner)
    return value
