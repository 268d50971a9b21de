"""Places where transformers asks whether flash attention is used, and fa_serve has to answer yes.

    read_in_one_call(type(model))    # the towers of this model attend to all images and windows in one call

The vision towers of Qwen2-VL and similar models read images end to end as one row. With flash attention, each layer makes one
attention call, with `cu_seqlens` for the borders of images or windows. With any other implementation, each layer copies the
borders to the host and makes one call for each window: 25 for an image of 560 x 560 pixels. transformers tells the two cases
apart by the word "flash" in the name of the implementation. `continuous.py` needs the same answer in other places. The length
of the longest image is read from the device once in a forward, as with flash attention. A layer that is not given this length
reads it from the device itself.

Left out: `Qwen2_5OmniToken2WavModel`, which asks too, in order to compute in float32, and then uses PyTorch's attention.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from fa_serve.hf.adapter.models import NAME

PAGED_NAME = f"paged|{NAME}"
_ASKS = "is_flash_attention_requested"
_LONGEST = "get_max_seqlen"
_OF_FORWARD = "get_vision_attention_seqlens"
"""The function that asks for the longest image before the layers run. It is defined in another module than the towers."""


def passes_for_flash(original: Any) -> Any:
    """A wrapper of transformers' `is_flash_attention_requested` that also says yes for fa_serve."""

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, **kwargs: Any
    ) -> Any:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name in (NAME, PAGED_NAME) or original(config, requested_attention_implementation, **kwargs)

    return is_flash_attention_requested


def read_in_one_call(model_class: type) -> None:
    """Let the towers in the modules of this class, and of its base classes, take the branch of flash attention.

    Harmless when repeated. Modules without such a tower stay as they are. A module has one if it uses `get_max_seqlen`, the
    length of the longest of several packed sequences.
    """
    for name in dict.fromkeys(base.__module__ for base in model_class.__mro__):
        module = sys.modules.get(name)
        longest: Any = getattr(module, _LONGEST, None)
        if longest is None or not hasattr(module, _ASKS) or hasattr(longest, "asks_fa_serve"):
            continue
        setattr(module, _ASKS, passes_for_flash(getattr(module, _ASKS)))
        setattr(module, _LONGEST, _longest_sequence(longest))
        names: dict[str, Any] = getattr(getattr(module, _OF_FORWARD, None), "__globals__", {})
        if _LONGEST in names and not hasattr(names[_LONGEST], "asks_fa_serve"):
            names[_LONGEST] = _longest_sequence(names[_LONGEST])


def _longest_sequence(original: Any) -> Any:
    """A wrapper of transformers' `get_max_seqlen` that also returns a length for fa_serve."""

    @functools.wraps(original)
    def get_max_seqlen(cu_seqlens: Tensor, config: Any, *args: Any, **kwargs: Any) -> int | None:
        found: int | None = original(cu_seqlens, config, *args, **kwargs)
        if found is None and config._attn_implementation == NAME:
            return int(cu_seqlens.diff().max())
        return found

    get_max_seqlen.__dict__["asks_fa_serve"] = True
    return get_max_seqlen
