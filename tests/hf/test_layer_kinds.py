"""How few layers stand for all of a model's layers."""

from __future__ import annotations

import pytest
from tiny_models import CONFIGS, SIZES, make_model
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from fa_serve.hf.layer_kinds import SMALL_VOCAB, few_layers, few_layers_config, num_distinct_layers


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


@pytest.mark.parametrize("family", CONFIGS)
def test_a_small_model_has_the_same_widths_and_few_layers(family) -> None:
    config = CONFIGS[family]()
    small = few_layers_config(config)
    assert (config.num_hidden_layers, config.vocab_size) == (SIZES["num_hidden_layers"], SIZES["vocab_size"]), "unchanged"
    model = AutoModelForCausalLM.from_config(small)
    assert model.get_output_embeddings().weight.shape == (SMALL_VOCAB, SIZES["hidden_size"])
    assert len(model.model.layers) == num_distinct_layers(config)
    for name, weight in model.model.layers[0].named_parameters():
        assert weight.shape == dict(make_model(family).model.layers[0].named_parameters())[name].shape


def test_a_small_mixture_of_experts_can_be_made() -> None:
    config = Qwen3MoeConfig(**SIZES | {"num_hidden_layers": 3}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    assert len(AutoModelForCausalLM.from_config(few_layers_config(config)).model.layers) == 1


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
