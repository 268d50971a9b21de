"""What one call asks for, and the errors that this package raises.

A spec is all that a backend sees when it is asked whether it can serve a call. It holds facts that are known on the host
(shapes, dtypes, options) and never a length that lives on the device, so selecting a backend needs no synchronisation and the
choice can be kept in a plan. `AttentionSpec` describes the calls of `fa_serve.api`, `OpSpec` those of `fa_serve.ops`.

    FaServeError
    ├── ParameterError         a parameter has a bad value; carries the parameter's name, the rule and a code
    ├── UnsupportedError       no backend, or not the requested one, can serve the call; carries the reasons
    └── UnsupportedModelError  a model or a mask that the transformers adapter cannot honour

A bad tensor argument of the functions in `fa_serve.api` is a plain ValueError or TypeError that names the argument, the rule
and the value.
"""

from __future__ import annotations

import reprlib
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

Layout = Literal["dense", "varlen", "paged"]
ParameterCode = Literal["invalid_value", "context_length_exceeded", "no_tokenizer", "duplicate_request_id", "unsupported"]
Op = Literal["attention", "decode", "tree", "store_kv", "backward"]
Precision = Literal["bf16", "qk8", "fp8"]
FLOAT8 = torch.float8_e4m3fn
FEW_QUERIES = 16
"""Up to this many queries per sequence, splitting the keys gains time. More queries fill the tiles of a kernel by
themselves."""
TREE_SPLITS = -1
"""The value of `num_splits` for fixed groups of keys, folded in order: the bits of a query's output depend only on its keys."""
OPTIONS = ("softcap", "sinks", "alibi", "attention_chunk", "block_mask")
"""The fields of `AttentionSpec` that say whether the call uses an option. Each backend names the options that it computes and
refuses the others, so every backend refuses a new option until the backend names it."""


class FaServeError(Exception):
    """Base class of all errors that this package defines."""


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
    """No backend can serve the call. The text lists each backend with its reason."""


class UnsupportedModelError(FaServeError, ValueError):
    """fa_serve cannot serve a transformers model or mask. The text says which one, why, and what to do instead."""


class _Shown(str):
    """A text that stands for a value: its `repr` adds no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _restored_parameter_error(field: str, rule: str, shown: str, code: ParameterCode) -> ParameterError:
    return ParameterError(field, rule, _Shown(shown), code)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention call asks for, as far as it is known without reading the device.

    layout:      "dense" (batch, seqlen, heads, dim), "varlen" (total, heads, dim), "paged" (keys and values behind a block
                 table)
    device:      torch device type
    arch:        10 * major + minor of an NVIDIA device (90 for an H200), else 0
    dtype:       dtype of q
    kv_dtype:    dtype of k and v, which differs from `dtype` only for a quantised cache
    window_size: (left, right), -1 unlimited; a causal call has right == 0
    mask:        dtype of an explicit mask ("bool" keeps where True, "float" is added to the scores), or None
    needs_grad:  autograd will ask for gradients of a tensor of this call
    op:          "attention": any number of queries per sequence
                 "decode": at most FEW_QUERIES queries per sequence, a fixed number of splits, a quantised cache, or prompts
                 whose keys are divided as well (see `backends.chunks`); a mask depends only on the key
                 "tree": paged attention whose bits do not depend on the other queries of the call
                 "store_kv": write keys and values into a paged cache
                 "backward": the gradients of a dense or packed "attention"
    whole_rows:  (paged) tokens and heads are multiples of 16 bytes apart, pages are a whole number of tokens apart, and the
                 numbers of tokens fit into 32 bits
    alibi:       a bias that falls linearly with the distance between query and key
    attention_chunk: queries attend within chunks of a fixed length only
    block_mask:  queries attend to the key blocks of a list (see `block_lists`)
    precision:   precision of the products of "attention", as in `fa_serve.attention`
    values_in_keys: (paged) the values are the first head_dim_v numbers of the keys, in the same memory (latent attention)
    sizes:       (paged, and dense with a mask) the number of sequences, and the most queries and the most keys of a sequence;
                 None if they must not influence which backend serves the call, as where the bits of a row must not depend on
                 the rest of the batch
    deterministic: equal calls must have equal gradients in every bit
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
    op: Op = "attention"
    whole_rows: bool = True
    alibi: bool = False
    attention_chunk: bool = False
    block_mask: bool = False
    values_in_keys: bool = False
    precision: Precision = "bf16"
    sizes: tuple[int, int, int] | None = None
    deterministic: bool = False

    @property
    def cached_bytes(self) -> int:
        """Bytes of the keys and values of one token in a cache."""
        width = self.head_dim if self.values_in_keys else self.head_dim + self.head_dim_v
        return self.num_kv_heads * width * self.kv_dtype.itemsize

    @property
    def options(self) -> list[str]:
        """The members of `OPTIONS` that the call uses."""
        return [name for name in OPTIONS if getattr(self, name)]

    def options_beyond(self, computed: Container[str]) -> str:
        """The options that the call uses and that are not in `computed`, as a message names them; "" if there are none."""
        return " and ".join(name for name in self.options if name not in computed)

    def __str__(self) -> str:
        parts: list[str] = [] if self.op == "attention" else [self.op]
        parts.append(self.layout)
        parts.append(f"{self.device} sm{self.arch}" if self.arch else self.device)
        parts.append(dtype_name(self.dtype))
        parts.append(f"heads {self.num_heads}/{self.num_kv_heads}")
        parts.append(f"head_dim {dims(self.head_dim, self.head_dim_v)}")
        if self.kv_dtype != self.dtype:
            parts.append(f"kv {dtype_name(self.kv_dtype)}")
        if self.window_size == (-1, 0):
            parts.append("causal")
        elif self.window_size != (-1, -1):
            parts.append(f"window {self.window_size}")
        parts += self.options
        parts += [name for name in ("needs_grad", "values_in_keys", "deterministic") if getattr(self, name)]
        if self.precision != "bf16":
            parts.append(f"precision {self.precision}")
        if self.mask:
            parts.append(f"{self.mask} mask")
        if self.page_size:
            parts.append(f"page_size {self.page_size}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """What one call of `fa_serve.ops` asks for: the device type and the architecture, as in `AttentionSpec`."""

    device: str
    arch: int

    def __str__(self) -> str:
        return f"{self.device} sm{self.arch}" if self.arch else self.device


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dims(head_dim: int, head_dim_v: int) -> str:
    """Both head sizes as messages show them: one number where they are equal."""
    return str(head_dim) if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"


@lru_cache(maxsize=64)
def _arch_of_index(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def arch_of(device: torch.device) -> int:
    """10 * major + minor of an NVIDIA device, 0 for any other device. The driver is asked once per device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return _arch_of_index(torch.cuda.current_device() if device.index is None else device.index)


def has_programmatic_launch(arch: int) -> bool:
    """Whether a kernel on such a device may start while the kernel before it drains; see `launch_options`."""
    return arch >= 90
