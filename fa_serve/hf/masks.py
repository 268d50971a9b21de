"""The mask function: what transformers asks for is kept implicit where a kernel knows the pattern, else spelled out.

transformers describes a mask by a function of (batch, head, query, key) indices, composed of closures. Reading the closures
tells the plain patterns (causal or not, a window, packed sequences) from everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    packed_sequence_mask_function,
    prepare_padding_mask,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)
from transformers.utils.import_utils import is_tracing

from fa_serve.hf.models import Habits, habits_of

MaskFunction = Callable[..., Any]

# closures of one function share its code
_AND = and_masks(causal_mask_function).__code__
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__
_WINDOWS = {
    sliding_window_overlay(1).__code__: causal_mask_function,
    sliding_window_bidirectional_overlay(1).__code__: bidirectional_mask_function,
}


@dataclass(frozen=True, eq=False)
class Pattern:
    """A mask that a kernel knows by itself.

    window:    transformers' count: keys seen on the left with the query's own if causal, on either side without it if not
    sequences: (batch, seqlen) int64: which packed sequence each token belongs to, or None
    """

    causal: bool
    window: int | None = None
    sequences: Tensor | None = None


def classify(mask_function: MaskFunction) -> Pattern | None:
    """The pattern that a mask function of transformers stands for; None if it is any other."""
    if mask_function is causal_mask_function:
        return Pattern(causal=True)
    if mask_function is bidirectional_mask_function:
        return Pattern(causal=False)
    if _code(mask_function) is not _AND:
        return None
    parts = _closed_over(mask_function, "mask_functions")
    if len(parts) != 2:
        return None
    first, second = parts
    if _WINDOWS.get(_code(first)) is second:
        return Pattern(second is causal_mask_function, _closed_over(first, "sliding_window"))
    base = classify(first)
    if base is not None and base.sequences is None and _code(second) is _PACKED:
        return Pattern(base.causal, base.window, _closed_over(second, "packed_sequence_mask"))
    return None


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _closed_over(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def mask_forward(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function, attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = True, config: Any = None, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The mask function of `attn_implementation="fa_serve"`: called by transformers once per forward and kind of layer.

    attention_mask: bool (batch, any length) padding or None; q_offset is a tensor when a static cache is being filled
    Returns a mask in one of the forms that `fa_serve.hf` lists.
    """
    # a traced forward gets its mask in full: closures cannot be read there, nor the padding looked at
    pattern = None if is_tracing(attention_mask) else classify(mask_function)
    if pattern is not None:
        habits = habits_of(config)
        device = kwargs.get("device", "cpu")
        keys = _countable_keys(pattern, habits, q_length, kv_length, q_offset, kv_offset)
        if keys is not None and pattern.sequences is not None:
            # transformers does not let a packed mask be skipped, whoever asks
            if batch_size == 1 and keys == kv_length and not habits.wants_masks:
                return _starts(pattern.sequences)
        elif keys is not None and (allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip):
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            if padding is not None and not (padding := padding[:, kv_offset : kv_offset + keys]).all():
                return padding
            return None if keys == kv_length else torch.empty((0, keys), dtype=torch.bool, device=device)
    mask: Tensor = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False, **kwargs,
    )  # fmt: skip
    return mask


def _countable_keys(
    pattern: Pattern, habits: Habits, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int
) -> int | None:
    """How many of the first keys are there to be seen, or None when the pattern has to be spelled out."""
    if not pattern.causal:
        # a module's window is all we would have, and modules disagree on whether its edge is inside
        return kv_length if pattern.window is None or kv_length <= pattern.window else None
    if isinstance(q_offset, Tensor):
        return None
    # bottom-right alignment: the last query sees up to the last key
    keys = q_offset - kv_offset + q_length
    if not q_length <= keys <= kv_length:
        return None
    if pattern.window is not None and keys > pattern.window and not habits.passes_window:
        return None
    return keys


def _starts(sequences: Tensor) -> Tensor:
    """(1, seqlen) numbers of sequences that rise along the row -> int32 (n + 1,): where each starts, and the end."""
    edges = (sequences[0].diff() != 0).nonzero()[:, 0] + 1
    return torch.nn.functional.pad(torch.nn.functional.pad(edges, (1, 0)), (0, 1), value=sequences.shape[1]).to(torch.int32)
