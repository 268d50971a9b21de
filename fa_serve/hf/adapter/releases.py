"""What the supported releases of transformers, 5.17 and later, name differently, found by what is there and not by a number.

    if kinds_of_layers <= CHOOSING_LAYERS: ...       # each layer's queries choose keys by an indexer
    model(ids, **{cache_argument(model.forward): cache})

A name that a release lacks stands for nothing here, so callers ask no release for its number and have no branches. Left out:
what a cache is asked by the modules of a model, all of which `StepCache` answers, whichever release asks it (step_cache.py),
and transformers' own continuous batching (continuous.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from transformers import cache_utils, masking_utils
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

CACHE_NAMES = ("cache_params", "past_key_values", "cache")
"""What a forward calls its cache: up to 5.23 "past_key_values", or "cache_params" in state space models, and then "cache"."""


@lru_cache(maxsize=256)
def cache_argument(forward: Callable[..., Any]) -> str:
    """What a forward calls its cache; "past_key_values" if it names none, which every release understands."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


CHOOSING_LAYERS = frozenset(name for name, kind in DYNAMIC_LAYER_TYPE_MAPPING.items() if kind is DynamicIndexedLayer)
"""What configs call a layer whose queries choose keys by an indexer: "deepseek_sparse_attention" and "qwen_sparse_attention",
later "indexed_attention"."""

PAGED_LAYERS = frozenset(
    (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
)
"""The classes of layers of a cache that keep no more than the engine's pages: keys and values, the keys of an indexer, or
nothing. Later than 5.17, a layer that shares the keys of another one, or has no attention, keeps a `DummyLayer`."""


def _code_of_remapping() -> CodeType | None:
    make = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    return None if make is None else make(masking_utils.causal_mask_function, torch.empty(0)).__code__


REMAPPING = _code_of_remapping()
"""The code of a mask function over positions within packed sequences; None in 5.17, whose masks count from the row's start."""
