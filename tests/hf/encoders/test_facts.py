"""What the small files of an encoder tell is what the loaded encoder has."""

import json
from pathlib import Path

import pytest
from encoder_folders import FAMILIES, PADDED, save_encoder
from transformers import AutoConfig

from fa_serve.engine import Encoder, EngineConfig
from fa_serve.hf.encoders import facts
from fa_serve.hf.encoders.facts import encoder_facts
from fa_serve.hf.encoders.folder import recognise_task

DENSE = {"in_features": 32, "out_features": 16, "bias": False}
FOLDERS = {
    **{family: {"family": family} for family in FAMILIES},
    "two poolings": {"modules": [("Pooling", {"pooling_mode": ["cls", "max"]}), ("Dense", DENSE | {"in_features": 64})]},
    "prompts": {"general": {"prompts": {"query": "q: "}}, "transformer": {"max_seq_length": 20}},
    "tokens": {"modules": [("Dense", DENSE)]},
    "score": {"modules": None, "head": "ForSequenceClassification", "num_labels": 1},
    "classify": {"modules": None, "head": "ForSequenceClassification", "num_labels": 3},
    "sparse": {"modules": [("SpladePooling", {})], "head": "ForMaskedLM"},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_facts_are_those_of_the_loaded_encoder(tmp_path: Path, name: str) -> None:
    path = str(save_encoder(tmp_path, **FOLDERS[name]))
    encoder = Encoder(EngineConfig(model=path, device="cpu", dtype="float32"))
    card = encoder.card
    facts = encoder_facts(path, recognise_task(path))
    assert (facts.task, facts.size, facts.normalizes, facts.labels) == (card.task, card.size, card.normalizes, card.labels)
    assert (", ".join(facts.pooling) or facts.task, facts.prompts) == (card.pooling, tuple(card.prompts))
    assert facts.max_tokens in (None, card.max_tokens)
    assert facts.packs == encoder._pipeline.model.packs == (name not in PADDED)


def test_a_large_vocabulary_is_not_made(tmp_path: Path) -> None:
    """Its embeddings would take 4 TB."""
    path = save_encoder(tmp_path, "qwen3")
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": 1 << 35, "pad_token_id": 151643}
    (path / "config.json").write_text(json.dumps(config))
    assert encoder_facts(str(path), "embed").packs


def test_a_layer_that_cannot_be_made_leaves_the_question_open(tmp_path: Path) -> None:
    path = save_encoder(tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"hidden_size": 33}
    (path / "config.json").write_text(json.dumps(config))
    assert encoder_facts(str(path), "embed").packs is None


@pytest.mark.parametrize(
    ("model_type", "sizes", "size"),
    [
        ("funnel", {"block_sizes": [1, 1], "d_model": 32}, 32),
        ("llava", {}, 4096),
    ],
)
def test_a_model_that_cannot_be_made_smaller_leaves_the_question_open(
    tmp_path: Path, model_type: str, sizes, size: int
) -> None:
    """The config of Funnel refuses a number of layers. The towers of LLaVA, which has 7 billion weights, keep their layers."""
    AutoConfig.for_model(model_type, **sizes).save_pretrained(tmp_path)
    found = encoder_facts(str(tmp_path), "embed")
    assert (found.size, found.packs) == (size, None)


def test_no_layer_of_a_model_with_towers_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PaliGemma's config takes the smaller sizes, and makes towers and a language model of 3 billion weights all the same."""
    tried: list[object] = []
    monkeypatch.setattr(facts, "with_its_attention", lambda make: tried.append(make) or {}["nothing"])
    AutoConfig.for_model("paligemma").save_pretrained(tmp_path)
    assert encoder_facts(str(tmp_path), "embed").packs is None
    assert tried == []


def test_a_config_without_an_id_of_padding_is_tried(tmp_path: Path) -> None:
    AutoConfig.for_model("codegen", n_embd=32, n_head=4, rotary_dim=8).save_pretrained(tmp_path)
    assert encoder_facts(str(tmp_path), "embed").packs
