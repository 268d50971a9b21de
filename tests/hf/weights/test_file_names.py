"""The names of weights in files: those of image-text models, of experts, and of models that have no others."""

from __future__ import annotations

import pytest
import torch
from every_type import tiny_config

from fa_serve.hf.adapter.composites import auto_class
from fa_serve.hf.weights.file_names import names_in_files


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
    config = tiny_config(model_type)
    with torch.device("meta"):
        names = names_in_files(auto_class(config).from_config(config))
    assert {name: names.get(name) for name in expected} == expected


def test_a_model_whose_files_have_its_own_names_gives_none() -> None:
    config = tiny_config("llama")
    with torch.device("meta"):
        assert names_in_files(auto_class(config).from_config(config)) == {}
