"""How many operations of the interpreter a call takes, which unlike time is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_opcodes(call: Callable[[], object]) -> int:
    """The bytecode instructions of the call and of all Python functions that it calls. What a builtin does counts as one."""
    count = 0

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
