"""Names that differ between the supported releases of transformers, 5.17 and later, found without reading a version number.

    if kinds_of_layers <= CHOOSING_LAYERS: ...       # each layer's queries choose keys by an indexer
    model(ids, **{cache_argument(model.forward): cache})

If a release lacks a name, its value here is neutral, so callers need neither version numbers nor branches. Left out: the
methods that a model's modules call on a cache, because `StepCache` has those of all releases (step_cache.py), and transformers'
own continuous batching (continuous.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers import cache_utils, masking_utils
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.modeling_layers import GradientCheckpointingLayer

CACHE_NAMES = ("cache_params", "past_key_values", "cache")
"""Names of a forward's argument for its cache: up to 5.23 "past_key_values", or "cache_params" in state space models; later
"cache"."""


@lru_cache(maxsize=256)
def cache_argument(forward: Callable[..., Any]) -> str:
    """The name of a forward's argument for its cache; if it has none, "past_key_values", which every release understands."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


def plain_function(value: Any) -> FunctionType | None:
    """The function behind a value of a modeling module, without its decorators; None for all other values.

    Where the package `kernels` is installed, which transformers needs from 5.25 on, its decorator makes a module of a function.
    The function is in the closure of that module's forward.
    """
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, nn.Module):
        cells = getattr(type(value).forward, "__closure__", None) or ()
        functions = (cell.cell_contents for cell in cells)
        value = inspect.unwrap(next((each for each in functions if isinstance(each, FunctionType)), value))
    return value if isinstance(value, FunctionType) else None


CHECKPOINTING = "_gradient_checkpointing_func"
"""The attribute of a module of transformers that holds the function by which it checkpoints its layers, or itself."""


def _checkpoints_in_forward(layer: nn.Module) -> bool:
    """Whether the `forward` of a layer's class checkpoints the layer. In 5.17 its `__call__` does, which includes its hooks."""
    return isinstance(layer, GradientCheckpointingLayer) and "__call__" not in vars(GradientCheckpointingLayer)


def missing_checkpoint(layer: nn.Module) -> Callable[..., Any] | None:
    """The function by which a replaced `forward` of a layer must checkpoint the layer now, because the forward of the layer's
    class would do so. None if nothing is checkpointed, or if the layer's `__call__` does it."""
    if not _checkpoints_in_forward(layer):
        return None
    checkpoints = layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()
    return getattr(layer, CHECKPOINTING) if checkpoints else None


def forward_within_checkpoint(layer: nn.Module) -> Callable[..., Any]:
    """The forward of a layer's class without what checkpoints it: what a checkpoint calls."""
    forward: Any = type(layer).forward
    return partial(forward.__wrapped__ if _checkpoints_in_forward(layer) else forward, layer)


CHOOSING_LAYERS = frozenset(name for name, kind in DYNAMIC_LAYER_TYPE_MAPPING.items() if kind is DynamicIndexedLayer)
"""The layer types of configs whose queries choose keys by an indexer: "deepseek_sparse_attention" and "qwen_sparse_attention",
in later releases "indexed_attention"."""

PAGED_LAYERS = frozenset(
    (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
)
"""The classes of cache layers that keep nothing but what the engine's pages can hold: keys and values, an indexer's keys, or
nothing at all. In releases after 5.17, a layer that shares another layer's keys or has no attention has a `DummyLayer`."""


def _code_of_remapping() -> CodeType | None:
    make = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    return None if make is None else make(masking_utils.causal_mask_function, torch.empty(0)).__code__


REMAPPING = _code_of_remapping()
"""The code object of the mask function that counts positions within packed sequences; None in 5.17, where masks count positions
from the start of the row."""
