"""What one attention call needs, and the errors this package raises.

`AttentionSpec` is the only thing a backend sees when it is asked whether it can serve a call. It holds facts known on the
host (shapes, dtypes, options) and never a length that lives on the device, so that choosing a backend costs no sync and the
choice can be cached.

    FaServeError
    ├── ParameterError         a parameter has a bad value; carries the parameter's name, the rule and a code
    ├── UnsupportedError       no backend, or not the one asked for, can do this call; carries the reasons
    └── UnsupportedModelError  a model or a mask that the transformers adapter cannot honour

A bad tensor argument of the functions in `fa_serve.api` is a plain ValueError or TypeError that names the argument, the rule
and the value.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any, Literal

import torch

Layout = Literal["dense", "varlen", "paged"]
ParameterCode = Literal["invalid_value", "context_length_exceeded", "no_tokenizer", "duplicate_request_id", "unsupported"]
FEW_QUERIES = 16
"""Per sequence: beyond that rows fill a tile by themselves, and splitting keys gains nothing."""


class FaServeError(Exception):
    """Base of every error of this package's own."""


class ParameterError(FaServeError, ValueError):
    """A parameter has a value that its rule does not allow.

    field: name of the parameter, for programs; rule: completes the sentence "<field> must ..."; value: what was given
    code:  what kind of rule was broken, for programs

    The text is for people only. Code that needs to know which parameter is wrong reads `field`, and never the text.
    """

    def __init__(self, field: str, rule: str, value: object, code: ParameterCode = "invalid_value") -> None:
        super().__init__(f"{field} must {rule}, got {reprlib.repr(value)}")
        self.field = field
        self.rule = rule
        self.value = value
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross the pipe of the engine's process. `value` may not be picklable, so its short text crosses instead."""
        return _restored_parameter_error, (self.field, self.rule, reprlib.repr(self.value), self.code)


class UnsupportedError(FaServeError, NotImplementedError):
    """No backend can do what was asked; the text lists each backend with its reason."""


class UnsupportedModelError(FaServeError, ValueError):
    """A transformers model or mask that fa_serve cannot honour; the text says which and why."""


class _Shown(str):
    """A text that stands for a value: its `repr` adds no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _restored_parameter_error(field: str, rule: str, shown: str, code: ParameterCode) -> ParameterError:
    return ParameterError(field, rule, _Shown(shown), code)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One call, as far as it is known without reading the device.

    layout:       "dense" (batch, seqlen, heads, dim), "varlen" (total, heads, dim), "paged" (K/V behind a block table)
    device:       torch device type; arch is 10 * major + minor of a CUDA device (90 for H200), else 0
    dtype:        of q; kv_dtype of k and v (they differ only for a quantised cache)
    window_size:  (left, right), -1 unlimited; causal calls arrive with right == 0
    mask:         dtype of an explicit mask ("bool" keeps where True, "float" is added to the scores), or None
    needs_grad:   autograd will ask for gradients of q, k or v
    few_queries:  up to FEW_QUERIES per sequence, behind which no mask of their own stands; or, paged, keys in a fixed number of
                  splits: what decoding kernels are for. Packed sequences have it never
    whole_rows:   (paged) tokens and heads are multiples of 16 bytes apart, and pages a whole number of tokens
    """

    layout: Layout
    device: str
    arch: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    num_heads: int
    num_kv_heads: int
    window_size: tuple[int, int] = (-1, -1)
    softcap: bool = False
    sinks: bool = False
    mask: Literal["bool", "float"] | None = None
    page_size: int = 0
    needs_grad: bool = False
    few_queries: bool = False
    whole_rows: bool = True

    def __str__(self) -> str:
        parts = [self.layout, self.device if not self.arch else f"{self.device} sm{self.arch}", str(self.dtype)[6:]]
        parts.append(f"heads {self.num_heads}/{self.num_kv_heads}")
        parts.append(f"head_dim {self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""))
        parts += [f"kv {str(self.kv_dtype)[6:]}"] if self.kv_dtype != self.dtype else []
        seen = "causal" if self.window_size == (-1, 0) else f"window {self.window_size}"
        parts += [seen] if self.window_size != (-1, -1) else []
        parts += [name for name in ("softcap", "sinks", "needs_grad") if getattr(self, name)]
        parts += [f"{self.mask} mask"] if self.mask else []
        parts += [f"page_size {self.page_size}"] if self.page_size else []
        parts += ["few queries"] if self.few_queries else []
        return ", ".join(parts)


_ARCH: dict[int, int] = {}


def arch_of(device: torch.device) -> int:
    """10 * major + minor of an NVIDIA device, 0 for anything else; asked of the driver once per device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _ARCH:
        major, minor = torch.cuda.get_device_capability(index)
        _ARCH[index] = 10 * major + minor
    return _ARCH[index]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One op of `fa_serve.ops`, as far as it is known without reading the device.

    op:     name of the function in `fa_serve.ops`
    device: torch device type; arch is 10 * major + minor of a CUDA device, else 0
    dtype:  of the input
    """

    op: str
    device: str
    arch: int
    dtype: torch.dtype

    def __str__(self) -> str:
        device = self.device if not self.arch else f"{self.device} sm{self.arch}"
        return f"op {self.op}, {device}, {self.dtype}"
