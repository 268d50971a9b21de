"""An EAGLE-3 head computes its equation, is loaded from every published form of it, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eagle3_heads import CONFIG, HIDDEN, copying_head, quiet_model, reference, save_head
from safetensors.torch import save_file
from tiny_models import VOCAB

from fa_serve.hf import OneSequence, paged_output
from fa_serve.hf.eagle3 import head_config, load_head
from fa_serve.spec import UnsupportedModelError
from fa_serve.testing import assert_matches_reference

TOKENS = [token for token in range(VOCAB) if token % 8 != 2]


@pytest.fixture(scope="module")
def model():
    return quiet_model()


@pytest.fixture(scope="module")
def tensors(model):
    return copying_head(model, 0.2, TOKENS, focus=2.5)


def load(folder: Path, tensors, model, **changes):
    return load_head(Path(save_head(folder, tensors, **changes).removeprefix("eagle3=")), model)


@pytest.mark.parametrize("before", [True, False], ids=["norm-before-residual", "norm-after-residual"])
@torch.no_grad()
def test_the_head_computes_its_equation(tmp_path, model, tensors, monkeypatch, before) -> None:
    monkeypatch.setitem(CONFIG, "norm_before_residual", before)
    head = load(tmp_path, tensors, model)
    features = torch.randn(9, HIDDEN)
    tokens = torch.randint(VOCAB, (9,))
    rows = torch.tensor([2, 8])
    output = paged_output(head, tokens, torch.arange(9), OneSequence(), rows, hidden_states=features[None])
    embedding = model.get_input_embeddings().weight
    exact, exact_hidden = reference(tensors, embedding, features.double(), tokens)
    eager, eager_hidden = reference(tensors, embedding, features, tokens)
    assert_matches_reference(output.hidden_states[0], exact_hidden, eager_hidden)
    assert_matches_reference(output.logits[0][:, TOKENS], exact[rows], eager[rows])
    others = [token for token in range(VOCAB) if token % 8 == 2]
    assert (output.logits[0][:, others] == float("-inf")).all()
    states = [torch.randn(1, 4, HIDDEN) for _ in range(3)]
    combined = torch.cat(states, dim=-1)[0] @ tensors["fc.weight"].T
    torch.testing.assert_close(head.combine(states), combined)


def published(tensors, name: str, folder: Path) -> None:
    """Write the head as others publish it."""
    told: dict[str, object] = CONFIG | {"draft_vocab_size": len(TOKENS)}
    layers = {key.replace("midlayer.", "layers.0."): x for key, x in tensors.items()}
    if name == "authors":
        (folder / "config.json").write_text(json.dumps(told))
        torch.save(tensors, folder / "pytorch_model.bin")
    elif name == "vllm":
        outside = ("d2t", "t2d", "lm_head.weight")
        prefixed = {key if key in outside else f"model.{key}": x for key, x in layers.items()}
        save_head(folder, prefixed, architectures=["Eagle3LlamaForCausalLM"])
    elif name == "sglang":
        told = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
        inverse = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        save_head(folder, tensors | inverse, **told)
    else:
        own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "architectures")
        top = {key: told[key] for key in own[:2]}
        layer = {key: value for key, value in told.items() if key not in own}
        config = top | {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "target_hidden_size": None}
        save_head(folder, layers)
        (folder / "config.json").write_text(json.dumps(config | {"transformer_layer_config": layer}))


@pytest.mark.parametrize("name", ["authors", "vllm", "sglang", "speculators"])
def test_every_published_form_is_read(tmp_path, model, tensors, name) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = load(tmp_path / "plain", tensors, model)
    published(tensors, name, tmp_path / "other")
    head = load_head(tmp_path / "other", model)
    assert head.state_dict().keys() == plain.state_dict().keys()
    for key, x in plain.state_dict().items():
        assert torch.equal(head.state_dict()[key], x), key
    assert torch.equal(head.targets, plain.targets)
    assert head.targets.tolist() == TOKENS
    assert head.depths == plain.depths == (0, 1, 2)
    assert head.config.norm_before_residual
    assert head.config.rope_parameters["rope_theta"] == 10000.0


def test_which_layers_a_head_reads() -> None:
    """As vLLM and SGLang read it: by default, before layers 2, n / 2 and n - 3."""
    without = {key: value for key, value in CONFIG.items() if key != "eagle_aux_hidden_state_layer_ids"}
    assert head_config(without, 32).depths == [2, 16, 29]
    listed = without | {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}
    assert head_config(listed, 36).depths == [1, 17, 32]
    nested = without | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    assert head_config(nested, 36).depths == [2, 18, 33], "outputs of these layers"
    nested["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
    assert head_config(nested, 36).depths == [2, 18, 33]


def test_a_head_has_the_dtype_of_its_model(tmp_path, tensors) -> None:
    """Angles stay in float32: positions are large."""
    head = load(tmp_path, tensors, quiet_model().bfloat16())
    assert {x.dtype for x in head.parameters()} == {torch.bfloat16}
    assert head.rotary_emb.inv_freq.dtype == torch.float32


def test_embeddings_are_shared_where_they_are_the_same(tmp_path, model, tensors) -> None:
    shared = model.get_input_embeddings()
    assert load(tmp_path, tensors, model).embed_tokens is shared
    same = tensors | {"embed_tokens.weight": shared.weight.detach().clone()}
    assert load(tmp_path, same, model).embed_tokens is shared
    own = tensors | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    assert torch.equal(load(tmp_path, own, model).embed_tokens.weight, own["embed_tokens.weight"])


def test_a_head_that_knows_all_tokens_has_no_table(tmp_path, model) -> None:
    whole = copying_head(model)
    assert load(tmp_path, whole, model).targets is None
    del whole["d2t"]
    assert load(tmp_path, whole, model).targets is None


REFUSED = {
    "another kind": ({"speculators_model_type": "dflash"}, {}, "its config says dflash instead of"),
    "no architecture": ({"architectures": None}, {}, "its config says no architecture instead of"),
    "layers": ({"num_hidden_layers": 2}, {}, "a value of num_hidden_layers that fa_serve does not support"),
    "layer": ({"model_type": "qwen3"}, {}, "a value of model_type"),
    "norm": ({"norm_before_fc": True}, {}, "a value of norm_before_fc"),
    "top layer": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "a value of use_aux_hidden_state"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, {}, "a value of quantization_config"),
    "states": (
        {"target_hidden_size": 48},
        {},
        "each hidden state that it takes has the size 48, but the size in the model is 32",
    ),
    "vocabulary": ({"vocab_size": 400}, {}, "its vocabulary has the size 400, but the size in the model is 320"),
    "number of states": (
        {"eagle_aux_hidden_state_layer_ids": [0, 1]},
        {},
        r"its tensor fc.weight has the shape \(32, 96\), but its config says \(32, 64\)",
    ),
    "missing": ({}, {"lm_head.weight": None}, "its checkpoint lacks lm_head.weight"),
    "unknown": ({}, {"fc_norm.weight": torch.ones(3)}, "tensors that fa_serve does not know: fc_norm.weight"),
    "no table": ({}, {"d2t": None}, "its vocabulary has 280 tokens, but its checkpoint has no d2t"),
    "short table": ({}, {"d2t": torch.zeros(3, dtype=torch.int64)}, r"its tensor d2t has the shape \(3,\)"),
    "wrong table": ({}, {"d2t": torch.full((280,), 300)}, "its d2t names a token twice, or one outside the model's 320 tokens"),
    "embedding": ({}, {"embed_tokens.weight": torch.ones(320, 8)}, r"embed_tokens.weight has the shape \(320, 8\)"),
    "no embedding": (
        {"hidden_size": 16, "target_hidden_size": 32},
        {},
        "each embedding that it takes \\(its checkpoint has none\\) has the size 16, but the size in the model is 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, model, tensors, case) -> None:
    changes, other, reason = REFUSED[case]
    written = {name: x for name, x in (tensors | other).items() if x is not None}
    told = {"draft_vocab_size": len(TOKENS)} | changes
    folder = Path(save_head(tmp_path, tensors, **told).removeprefix("eagle3="))
    save_file(written, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=reason):
        load_head(folder, model)


def test_folders_without_a_head(tmp_path, model) -> None:
    with pytest.raises(UnsupportedModelError, match=r"its folder has no config\.json"):
        load_head(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UnsupportedModelError, match=r"its folder has neither \*\.safetensors nor pytorch_model\*\.bin"):
        load_head(tmp_path, model)
