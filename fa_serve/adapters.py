"""Helpers of the adapters to other engines: a check of interfaces, which change between releases, and rounding of lengths.

    missing(installed(MODULES, REQUIRED), REQUIRED)      # [] or what the installed release lacks

A signature is the name of a class, method or function, and the names of its parameters, fields or members. `installed` reads
them from imported modules; tests read them from the sources of other releases. Left out: what each adapter requires
(fa_serve/vllm/signatures.py, fa_serve/sglang/sglang_interface.py).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from enum import EnumMeta
from importlib import import_module
from typing import Any

Signatures = Mapping[str, frozenset[str]]


def missing(signatures: Signatures, required: Signatures) -> list[str]:
    """The names in `required` that `signatures` lack, such as "AttentionImpl.forward(output)"."""
    absent = []
    for name, needed in required.items():
        lacks = sorted(needed - signatures.get(name, frozenset()))
        if lacks or name not in signatures:
            absent.append(f"{name}({', '.join(lacks)})")
    return absent


def installed(modules: Sequence[str], required: Signatures) -> dict[str, frozenset[str]]:
    """The signatures that `required` names, in these modules."""
    found = {}
    for module in map(import_module, modules):
        for name in required:
            value: Any = module
            for part in name.split("."):
                value = None if value is None else getattr(value, part, None)
            if value is not None:
                found[name] = _names(value)
    return found


def _names(value: Any) -> frozenset[str]:
    if isinstance(value, EnumMeta):
        return frozenset(value.__members__)
    if dataclasses.is_dataclass(value):
        return frozenset(field.name for field in dataclasses.fields(value))
    if isinstance(value, type):
        return frozenset({*dir(value), *inspect.signature(value).parameters})
    return frozenset(inspect.signature(value).parameters)


def rounded_up(length: int) -> int:
    """The least power of two that is not below a length. Steps whose lengths are rounded up share a plan."""
    return 1 << max(length - 1, 0).bit_length()
