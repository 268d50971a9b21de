"""Few layers that stand for all: how many of a model's first layers show every kind of its layers.

    with few_layers(model):
        paged_forward(model, ...)            # launches the kernels of every kind of layer, in a fraction of the time
    small = few_layers_config(model.config)  # of a model with these layers only and a small vocabulary

transformers describes layers that differ by lists in the config with one entry for each layer, such as `layer_types`. Left out:
layers that differ without such a list. Running few of them misses some, which costs time later and no correctness.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

SMALL_VOCAB = 64


def num_distinct_layers(config: PreTrainedConfig) -> int:
    """The number of layers, counted from the first, among which every kind of layer occurs."""
    text: Any = config.get_text_config()
    total = int(text.num_hidden_layers)
    described = list(zip(*_by_layer(text).values(), strict=True)) or [()] * total
    seen: set[str] = set()
    count = 1
    for index, kind in enumerate(described):
        if repr(kind) not in seen:
            seen.add(repr(kind))
            count = index + 1
    return min(max(count, int(getattr(text, "first_k_dense_replace", None) or 0) + 1), total)


def _by_layer(text: Any) -> dict[str, Any]:
    """The attributes of a config that are lists with one entry for each layer."""
    total = int(text.num_hidden_layers)
    return {name: value for name, value in vars(text).items() if isinstance(value, list | tuple) and len(value) == total > 1}


@contextmanager
def few_layers(model: PreTrainedModel) -> Iterator[None]:
    """Forwards within this context compute the first layers only. Models that do not look at their config compute them all."""
    text: Any = model.config.get_text_config()
    total = text.num_hidden_layers
    text.num_hidden_layers = num_distinct_layers(model.config)
    try:
        yield
    finally:
        text.num_hidden_layers = total


def few_layers_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model of the same widths that has the first layers and SMALL_VOCAB tokens."""
    count = num_distinct_layers(config)
    small = copy.deepcopy(config)
    text: Any = small.get_text_config()
    for name, value in _by_layer(text).items():
        setattr(text, name, value[:count])
    text.num_hidden_layers = count
    text.vocab_size = SMALL_VOCAB
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    return small
