"""The names of weights in files: those of image-text models, of experts, and of models that have no others."""

from __future__ import annotations

import pytest
import torch
import transformers
from every_type import tiny_config
from packaging.version import Version
from torch import nn

from fa_serve.hf.adapter.composites import auto_class
from fa_serve.hf.weights.file_names import names_in_files, names_in_model


def meta_model(model_type: str) -> nn.Module:
    config = tiny_config(model_type)
    with torch.device("meta"):
        model: nn.Module = auto_class(config).from_config(config)
    return model


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        (
            "qwen2_5_vl",
            {
                "model.visual.blocks.0.attn.qkv": "visual.blocks.0.attn.qkv",
                "model.language_model.layers.1.mlp.up_proj": "model.layers.1.mlp.up_proj",
                "lm_head": None,
            },
        ),
        (
            "mixtral",
            {
                "model.layers.0.mlp.experts.gate_up_proj": "model.layers.0.block_sparse_moe.experts.0.w1",
                "model.layers.0.mlp.experts.down_proj": "model.layers.0.block_sparse_moe.experts.0.w2",
                "model.layers.0.self_attn.q_proj": None,
            },
        ),
        ("gpt_neox", {"lm_head": "embed_out"}),
    ],
)
def test_names_that_differ_are_given(model_type: str, expected: dict[str, str | None]) -> None:
    names = names_in_files(meta_model(model_type))
    assert {name: names.get(name) for name in expected} == expected


def test_a_model_whose_files_have_its_own_names_gives_none() -> None:
    assert names_in_files(meta_model("llama")) == {}


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        (
            "qwen2_5_vl",
            {
                "visual.blocks.0.attn.qkv.weight": "model.visual.blocks.0.attn.qkv.weight",
                "model.layers.1.mlp.up_proj.weight": "model.language_model.layers.1.mlp.up_proj.weight",
                "model.language_model.layers.0.mlp.up_proj.weight": "model.language_model.layers.0.mlp.up_proj.weight",
                "lm_head.weight": "lm_head.weight",
            },
        ),
        (
            "mixtral",
            {
                f"model.layers.0.block_sparse_moe.experts.5.{name}.weight": f"model.layers.0.mlp.experts.{stacked}"
                for name, stacked in {"w1": "gate_up_proj", "w2": "down_proj", "w3": "gate_up_proj"}.items()
            },
        ),
        ("gpt_neox", {"embed_out.weight": "lm_head.weight", "layers.0.mlp.dense_h_to_4h.bias": None}),
        ("llama", {"layers.1.mlp.up_proj.weight": "model.layers.1.mlp.up_proj.weight", "unknown": "unknown"}),
    ],
)
def test_names_in_files_become_those_of_the_model(model_type: str, names: dict[str, str | None]) -> None:
    """None: the same name behind the prefix of the model."""
    model = meta_model(model_type)
    expected = {key: f"{model.base_model_prefix}.{key}" if name is None else name for key, name in names.items()}
    assert names_in_model(model, names) == expected


def test_names_of_older_releases_become_those_of_the_model() -> None:
    """transformers up to 5.23 saved some models with the text model's name twice, which later releases load."""
    model = meta_model("qwen2_5_vl")
    name = "model.language_model.model.layers.1.mlp.up_proj.weight"
    is_known = Version(transformers.__version__) >= Version("5.24")
    expected = "model.language_model.layers.1.mlp.up_proj.weight" if is_known else name
    assert names_in_model(model, [name]) == {name: expected}
    bert = transformers.AutoModel.from_config(transformers.BertConfig(num_hidden_layers=1))
    old = "bert.encoder.layer.0.output.LayerNorm.gamma"
    assert names_in_model(bert, [old]) == {old: "encoder.layer.0.output.LayerNorm.weight"}
