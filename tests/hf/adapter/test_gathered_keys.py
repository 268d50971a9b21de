"""Models that compute their attention themselves, in the engine's forward. test_every_type.py compares their tokens."""

from __future__ import annotations

import pytest
import torch
from every_type import tiny_config, tiny_model
from tiny_models import make_model

from fa_serve import hf
from fa_serve.engine import Engine, EngineConfig
from fa_serve.hf.adapter.gathered_keys import GatheredKeys, computes_attention
from fa_serve.hf.adapter.paged import OneSequence
from fa_serve.spec import ParameterError, UnsupportedModelError


@pytest.mark.parametrize(("name", "own"), [("git", True), ("blip", True), ("got_ocr2", False), ("llava", False)])
def test_which_models_these_are(name: str, own: bool) -> None:
    """A tower that computes its attention itself (GOT-OCR 2) does not count."""
    config = tiny_config(name)
    with torch.device("meta"):
        model = hf.auto_class(config).from_config(config, attn_implementation="eager")
    assert computes_attention(hf.text_model(model)) is own
    assert not computes_attention(make_model("llama"))


def test_layers_keep_keys_and_values() -> None:
    [layer, other] = hf.model_layers(tiny_model("git")).attention.values()
    assert layer == other
    assert (layer.head_dim, layer.num_kv_heads, layer.window_size) == (16, 4, (-1, 0))


def test_a_model_whose_code_needs_more_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match="XGLMForCausalLM computes its attention itself, and its forward fails"):
        hf.model_layers(tiny_model("xglm"))


def test_what_such_models_do_not_have() -> None:
    model = tiny_model("git")
    for settings, message in (
        ({"deterministic": True}, "deterministic must be False for GitForCausalLM, whose code needs the keys of all tokens"),
        (
            {"kv_cache_dtype": "fp8"},
            'kv_cache_dtype must be "auto" for GitForCausalLM, whose code needs the keys of all tokens',
        ),
    ):
        with pytest.raises(ParameterError, match=message):
            Engine(EngineConfig(num_pages=16, max_model_len=32, **settings), model=model)
    with pytest.raises(UnsupportedModelError, match="OneSequence cannot serve a model whose code needs the keys of all tokens"):
        GatheredKeys(torch.arange(3), OneSequence())
