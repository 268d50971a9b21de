"""Layers of encoders are fused by their structure, compute what their own code computes, and are refused where they do not."""

import numpy as np
import pytest
import torch
from encoder_folders import TEXTS, make_encoder, word_pieces

from fa_serve import api
from fa_serve.hf.encoders.packed import PackedInputs, PackedModel
from fa_serve.hf.surgery.fuse.encoder import FusedEncoderLayer, fuse_encoder

FUSED = ["bert", "roberta", "xlm-roberta", "modernbert", "nomic"]


def load(family: str, **settings) -> PackedModel:
    model = make_encoder(family, **settings)
    model.set_attn_implementation("fa_serve")
    return PackedModel(model.eval())


def inputs() -> PackedInputs:
    ids = word_pieces()(list(TEXTS))["input_ids"]
    return PackedInputs.of(np.concatenate(ids), None, [0, *np.cumsum([len(each) for each in ids])], torch.device("cpu"))


def hidden(model: PackedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.hidden(inputs())


@pytest.mark.parametrize("family", FUSED)
def test_fused_layers_compute_what_their_own_code_computes(family: str, monkeypatch) -> None:
    model = load(family)
    own = hidden(model)
    windows = []
    attend = api.attention_varlen
    assert model.fuse() == 2

    def watch(*qkv, **words):
        windows.append(words["window_size"])
        return attend(*qkv, **words)

    monkeypatch.setattr(api, "attention_varlen", watch)
    torch.testing.assert_close(hidden(model), own, rtol=1e-5, atol=1e-5)
    longest = max(inputs().lengths)
    assert windows == ([(4, 4), (-1, -1)] if family == "modernbert" else [(-1, -1)] * 2)
    assert longest > 5


@pytest.mark.parametrize("family", ["qwen3", "gemma3-causal"])
def test_the_layers_of_a_decoder_are_those_of_the_engine(family: str) -> None:
    model = load(family)
    own = hidden(model)
    assert model.fuse() == 2
    assert [cache[0].shape[:2] for cache in model._caches.values()] == [(1, 1)] * 2
    torch.testing.assert_close(hidden(model), own, rtol=1e-5, atol=1e-5)


def test_a_decoder_that_looks_both_ways_keeps_its_own_code() -> None:
    """The fused layers of the engine are causal."""
    model = load("gemma3")
    own = hidden(model)
    assert model.fuse() == 0
    torch.testing.assert_close(hidden(model), own, rtol=0, atol=0)


def test_merged_weights_take_no_more_memory() -> None:
    model = load("bert")
    model.fuse()
    own = model.base.encoder.layer[0].attention.self
    assert own.query.weight.untyped_storage().data_ptr() == own.value.weight.untyped_storage().data_ptr()
    assert own.query.bias.untyped_storage().data_ptr() == own.value.bias.untyped_storage().data_ptr()


def test_a_call_that_is_not_packed_runs_the_own_code() -> None:
    model = load("bert")
    ids = torch.arange(5, 12)[None]
    with torch.inference_mode():
        wanted = model.base(input_ids=ids).last_hidden_state
        model.fuse()
        torch.testing.assert_close(model.base(input_ids=ids).last_hidden_state, wanted, rtol=0, atol=0)


class DoubledNorm(torch.nn.LayerNorm):
    """Another norm, which has the parts of a layer norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Halved(torch.nn.Module):
    """Another function in the place of a GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh") / 2


@pytest.mark.parametrize("change", ["norm", "hook", "output", "activation"])
def test_a_layer_that_differs_keeps_its_own_code(change: str, monkeypatch) -> None:
    model = load("modernbert" if change == "activation" else "bert")
    if change == "activation":
        for each in model.base.layers:
            each.mlp.act = Halved()
    else:
        layers = model.base.encoder.layer
        if change == "norm":
            layers[1].output.LayerNorm = DoubledNorm(32)
        if change == "hook":
            layers[1].intermediate.register_forward_hook(lambda *_: None)
        if change == "output":
            feed = type(layers[0]).feed_forward_chunk
            monkeypatch.setattr(type(layers[0]), "feed_forward_chunk", lambda self, x: feed(self, x) * 1.001)
    own = hidden(model)
    fused = model.fuse()
    assert fused == (0 if change in ("output", "activation") else 1)
    kept = [isinstance(module.forward, FusedEncoderLayer) for module in model.base.modules()]
    assert sum(kept) == fused
    torch.testing.assert_close(hidden(model), own, rtol=1e-5, atol=1e-5)


def test_layers_that_differ_together_are_unfused(monkeypatch) -> None:
    """The proof replaces the attention, so the model is compared as a whole as well."""
    model = load("bert")
    own = hidden(model)
    monkeypatch.setattr("fa_serve.hf.surgery.fuse.encoder._options_of", lambda call: {"window_size": (0, 0)})
    assert model.fuse() == 0
    torch.testing.assert_close(hidden(model), own, rtol=0, atol=0)


def test_a_model_without_such_layers_has_nothing_to_fuse() -> None:
    assert fuse_encoder(make_encoder("mpnet"), lambda _: pytest.fail("nothing is computed")) == 0
