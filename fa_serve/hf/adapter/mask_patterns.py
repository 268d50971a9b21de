"""Recognises the pattern of a mask function of transformers: a window of keys, chunks of keys, or packed sequences.

    classify(causal_mask_function)                                # Pattern(window_size=(-1, 0), sequences=None)
    classify(sliding_window_causal_mask_function(128))            # Pattern(window_size=(127, 0), sequences=None)
    classify(chunked_causal_mask_function(8192, padding))         # Pattern(window_size=(-1, 0), chunks=Chunks(8192, padding))

transformers describes a mask by a function of (batch, head, query, key) indices, which it composes of closures. All closures
that one function makes share a code object, so the code objects and the closed-over values show how a mask function was
composed.

A mask that Gemma 3 makes for embeddings is the union of a causal mask and a mask function that Gemma 3's module defines. Such
functions are recognised by their bytecode, because importing that module to get the code object would take a second.

Left out: calling a mask function. A composition that is not listed here has no pattern (None), whatever it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_overlay,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)

from fa_serve.hf.adapter.releases import REMAPPING

MaskFunction = Callable[..., Any]


class Chunks(NamedTuple):
    """A query sees only keys in its own chunk (Llama 4). The first chunk begins after the padding on the left.

    length:       keys in a chunk
    left_padding: (batch,) int64: keys of padding before the first token
    """

    length: int
    left_padding: Tensor


class Pattern(NamedTuple):
    """The keys that queries see, in a form that a kernel can apply without a mask tensor.

    window_size: (left, right) as in `fa_serve.api`; right is 0 if causal
    sequences:   (batch, seqlen) int64, the number of the packed sequence that each token belongs to, or None
    chunks:      only in a causal pattern without a window; else None
    """

    window_size: tuple[int, int]
    sequences: Tensor | None = None
    chunks: Chunks | None = None

    @property
    def is_causal(self) -> bool:
        return self.window_size[1] == 0


def _everything() -> MaskFunction:
    """The mask function in Gemma 3's forward for layers without a window that attend in both directions."""
    return lambda *args: torch.tensor(True, dtype=torch.bool)


def _window_both_ways(sliding_window: int) -> MaskFunction:
    """`_bidirectional_window_overlay` of Gemma 3: `sliding_window` keys on each side, the query included."""

    def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
        return abs(q_idx - kv_idx) < sliding_window

    return inner_mask


_AND = and_masks(causal_mask_function).__code__
_OR = or_masks(causal_mask_function).__code__
_EVERYTHING = _everything().__code__
_WINDOW_WITH_QUERY = _window_both_ways(1).__code__
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__
_BLOCKS = blockwise_overlay(torch.empty(0)).__code__
_CHUNKS = chunked_overlay(1, torch.empty(0)).__code__
_WINDOW = sliding_window_overlay(1).__code__
_WINDOW_BOTH_WAYS = sliding_window_bidirectional_overlay(1).__code__


def classify(mask_function: MaskFunction) -> Pattern | None:
    """The pattern that a mask function of transformers stands for, or None if it is any other function."""
    if mask_function is causal_mask_function:
        return Pattern((-1, 0))
    if mask_function is bidirectional_mask_function:
        return Pattern((-1, -1))
    if _code(mask_function) is _OR:
        return _classify_union(_closed_over(mask_function, "mask_functions"))
    if _code(mask_function) is not _AND:
        return None
    parts = _closed_over(mask_function, "mask_functions")
    if len(parts) != 2:
        return None
    first, second = parts
    if _code(first) is _WINDOW and second is causal_mask_function:
        left = _closed_over(first, "sliding_window") - 1
        return Pattern((left, 0)) if left >= 0 else None
    if _code(first) is _WINDOW_BOTH_WAYS and second is bidirectional_mask_function:
        side = _closed_over(first, "sliding_window")
        return Pattern((side, side)) if side >= 0 else None
    if _code(first) is _CHUNKS and second is causal_mask_function:
        return Pattern((-1, 0), chunks=Chunks(_closed_over(first, "chunk_size"), _closed_over(first, "left_padding")))
    return _classify_packed(first, second)


def tells_packs(mask_function: MaskFunction) -> bool:
    """Whether a mask function, or a function that it is composed of, keeps packed sequences apart."""
    code = _code(mask_function)
    if code is _PACKED:
        return True
    if code is _AND or code is _OR:
        return any(tells_packs(part) for part in _closed_over(mask_function, "mask_functions"))
    return False


def without_packs(mask_function: MaskFunction) -> MaskFunction:
    """The mask function without its part that keeps packed sequences apart, if it has such a part."""
    if _code(mask_function) is not _AND:
        return mask_function
    rest = [part for part in _closed_over(mask_function, "mask_functions") if _code(part) is not _PACKED]
    return rest[0] if len(rest) == 1 else and_masks(*rest)


def split_blocks(mask_function: MaskFunction) -> tuple[MaskFunction, Tensor] | None:
    """Split off the blocks of tokens that attend to each other both ways.

    Returns the mask function without these blocks, and (batch, seqlen) int64: the block of each token, or -1. Returns None if
    the mask function has no such blocks.
    """
    if _code(mask_function) is not _OR:
        return None
    parts = _closed_over(mask_function, "mask_functions")
    if len(parts) != 2 or _code(parts[1]) is not _BLOCKS:
        return None
    return parts[0], _closed_over(parts[1], "block_sequence_ids")


def _classify_union(parts: Any) -> Pattern | None:
    """The pattern of `or_masks(first, second)`, if the second function sees in both directions all that the first one sees."""
    if len(parts) != 2:
        return None
    first = classify(parts[0])
    if first is None or first.sequences is not None or first.chunks is not None:
        return None
    if _same_bytecode(parts[1], _EVERYTHING):
        return Pattern((-1, -1))
    if _same_bytecode(parts[1], _WINDOW_WITH_QUERY):
        side = _closed_over(parts[1], "sliding_window") - 1
        return Pattern((side, side)) if first.window_size == (side, 0) else None
    return None


def _same_bytecode(function: Any, code: CodeType) -> bool:
    """Whether a function has the same instructions, names and constants as `code`. Its docstring does not count."""
    own = _code(function)
    facts = ("co_code", "co_names", "co_freevars", "co_varnames", "co_argcount")
    return (
        own is not None and all(getattr(own, fact) == getattr(code, fact) for fact in facts) and _consts(own) == _consts(code)
    )


def _consts(code: CodeType) -> list[Any]:
    """The constants of a function without its docstring, or without the None that stands for a missing docstring."""
    return [each for each in code.co_consts if each is not None and not isinstance(each, str)]


def _classify_packed(first: MaskFunction, second: MaskFunction) -> Pattern | None:
    """The pattern of `and_masks(first, second)`, if one of the two says which tokens belong to the same packed sequence."""
    packed, other = (first, second) if _code(first) is _PACKED else (second, first)
    if _code(packed) is not _PACKED:
        return None
    if REMAPPING is not None and _code(other) is REMAPPING:
        # positions rise by one within a sequence, so a window of positions is a window of tokens
        other = _closed_over(other, "mask_function")
    within = classify(other)
    sequences = _closed_over(packed, "packed_sequence_mask")
    if within is None or within.sequences is not None or within.chunks is not None:
        return None  # transformers counts chunks from the start of the row, across packed sequences
    return Pattern(within.window_size, sequences)


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _closed_over(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
