"""How few layers stand for all of a model's layers."""

from __future__ import annotations

import pytest
from tiny_models import CONFIGS, SIZES, make_model
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig

from fa_serve.hf.layer_kinds import few_layers, num_distinct_layers


@pytest.mark.parametrize(("family", "count"), [("llama", 1), ("qwen3", 1), ("mistral", 1), ("gemma2", 2)])
def test_the_first_layers_show_every_kind(family, count) -> None:
    assert num_distinct_layers(CONFIGS[family]()) == count


def test_lists_with_an_entry_for_each_layer_tell_kinds_apart() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    gemma = Gemma3TextConfig(**sizes, num_hidden_layers=12)
    assert gemma.layer_types.index("full_attention") == 5
    assert num_distinct_layers(gemma) == 6
    assert num_distinct_layers(LlamaConfig(**sizes, num_hidden_layers=1)) == 1
    dense_first = LlamaConfig(**sizes, num_hidden_layers=4, first_k_dense_replace=2)
    assert num_distinct_layers(dense_first) == 3


def test_forwards_compute_few_layers_within_the_context() -> None:
    model = make_model()
    calls = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    with few_layers(model):
        model(model.dummy_inputs["input_ids"])
    assert calls == [0]
    calls.clear()
    model(model.dummy_inputs["input_ids"])
    assert calls == [0, 1]


def test_weights_tell_layers_apart() -> None:
    """As dense layers among experts, and layers that are not quantised, do."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(4, 4, bias=False), nn.Linear(4, 4).half()]
    sizes = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    for count, kinds in ((2, 1), (3, 3), (4, 4), (5, 5)):
        config = LlamaConfig(**sizes, num_hidden_layers=count)
        assert num_distinct_layers(config, layers[:count]) == kinds
