"""A few layers that stand for all layers: how many of a model's first layers contain every kind of its layers.

    with few_layers(model):
        paged_forward(model, ...)            # launches the kernels of every kind of layer, in a fraction of the time

Layers differ in their modules and settings and in the shapes and dtypes of their weights (dense layers before experts, layers
that are not quantised), which `kind_of` compares, and in lists of the config with one entry for each layer, such as
`layer_types`. Left out: layers that differ in another way. A few layers may not contain all of these kinds. This costs time
later, but not correctness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.surgery.proof import kind_of


def num_distinct_layers(config: PreTrainedConfig, layers: Iterable[nn.Module] = ()) -> int:
    """The smallest number of layers, counted from the first, that contains every kind of layer.

    layers: the layers that `config` describes, if they must also be told apart by their modules and weights
    """
    text: Any = config.get_text_config()
    total = int(text.num_hidden_layers)
    described: list[Any] = list(zip(*_by_layer(text).values(), strict=True)) or [()] * total
    if kinds := [kind_of(layer) for layer in layers]:
        described = list(zip(described, kinds, strict=True))
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


def decoder_layers(model: PreTrainedModel, total: int) -> list[nn.Module]:
    """The decoder layers of a model, `total` of them; an empty list if they are not in one list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == total]
    return list(lists[0]) if lists else []


@contextmanager
def few_layers(model: PreTrainedModel) -> Iterator[None]:
    """Inside, forwards compute only the first layers. Models that do not read the config in their forward compute all."""
    text: Any = model.config.get_text_config()
    total = text.num_hidden_layers
    text.num_hidden_layers = num_distinct_layers(model.config, decoder_layers(model, total))
    try:
        yield
    finally:
        text.num_hidden_layers = total
