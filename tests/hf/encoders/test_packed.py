"""Packed sequences give what the model's own eager code gives for each of them alone, for every family and row."""

from typing import Any

import numpy as np
import pytest
import torch
from encoder_folders import FAMILIES, PADDED, SIZES, TEXTS, VOCABULARY, load_eager, make_encoder, save_encoder, word_pieces
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from fa_serve.hf.adapter import masks
from fa_serve.hf.encoders.load import encoder_class
from fa_serve.hf.encoders.packed import PackedInputs, PackedModel, require_text
from fa_serve.spec import UnsupportedModelError

PACKED = [family for family in FAMILIES if family not in PADDED]


def inputs_of(ids: list[list[int]]) -> PackedInputs:
    flat = np.array([token for each in ids for token in each])
    return PackedInputs.of(flat, None, [0, *np.cumsum([len(each) for each in ids])], torch.device("cpu"))


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path):
    return request.param, save_encoder(tmp_path, request.param, None)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("clip", "it returns CLIPOutput, which has no last_hidden_state"),
        ("vit", "its main input is pixel_values"),
        ("bark", "its forward takes no input_ids"),
        ("pe_audio", "its forward needs input_values"),
        ("canine", "its config has no vocab_size"),
    ],
)
def test_a_model_that_reads_more_than_text_is_refused_with_the_reason(model_type: str, why: str) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(model_type))
    with pytest.raises(UnsupportedModelError, match=f" does not compute hidden states of text alone, because {why}: "):
        PackedModel(model)


@pytest.mark.parametrize("model_type", ["bert", "bart", "longformer", "xlm", "qwen2_vl", "fuyu", "sam3_lite_text_text_model"])
def test_models_that_read_text_are_not_refused(model_type: str) -> None:
    """Also those whose images may be left out."""
    with torch.device("meta"):
        require_text(AutoModel.from_config(AutoConfig.for_model(model_type)))


def test_a_hint_that_names_nothing_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the code that some models bring along."""
    model = make_encoder("bert")

    def forward(self, input_ids=None) -> "Unknown":  # noqa: F821
        raise NotImplementedError

    monkeypatch.setattr(type(model.base_model), "forward", forward)
    require_text(model.base_model)


def test_hidden_states_of_packed_sequences_are_those_of_each_alone(folder) -> None:
    family, path = folder
    ids = word_pieces(pad=1 if family == "mpnet" else 0)(list(TEXTS))["input_ids"]
    config, auto = encoder_class(AutoConfig.from_pretrained(path), "embed")
    eager = load_eager(path)
    attention = "eager" if family == "mpnet" else "fa_serve"
    model = PackedModel(auto.from_pretrained(path, config=config, attn_implementation=attention).eval())
    assert model.packs == (family in PACKED)
    with torch.inference_mode():
        wanted = torch.cat([eager(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids])
        found = model.hidden(inputs_of(ids))
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_captured_forward_forms_no_mask(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of 16,384 tokens takes 256 MB, and the kernels that form it took a fifth of the time of BERT's CUDA graphs."""
    family, path = folder
    if family not in PACKED:
        pytest.skip("computed in padded batches, which are not captured")
    ids = word_pieces()(list(TEXTS))["input_ids"]
    config, auto = encoder_class(AutoConfig.from_pretrained(path), "embed")
    model = PackedModel(auto.from_pretrained(path, config=config, attn_implementation="fa_serve").eval())
    with torch.inference_mode():
        wanted = model.hidden(inputs_of(ids))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(masks, "sdpa_mask", lambda **_: pytest.fail("a mask has been formed"))
        found = model.hidden(inputs_of(ids))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_model_that_ignores_the_borders_of_sequences_is_padded(tmp_path) -> None:
    """Without the probe, sequences would see each other: eager attention gets the same words and does nothing with them. From
    5.25 on, transformers' masks of BERT read the positions, those of ModernBERT do not."""
    model = PackedModel(make_encoder("modernbert"))
    assert not model.packs
    ids = word_pieces()(list(TEXTS))["input_ids"]
    with torch.inference_mode():
        wanted = [model.model(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids]
        torch.testing.assert_close(model.hidden(inputs_of(ids)), torch.cat(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "row", "settings"),
    [
        ("bert", "first", {}),
        ("roberta", "first", {}),
        ("xlm-roberta", "first", {}),
        ("mpnet", "first", {}),
        ("modernbert", "first", {"classifier_pooling": "cls"}),
        ("modernbert", "mean", {"classifier_pooling": "mean"}),
        ("nomic", "first", {}),
        ("qwen3", "last", {}),
    ],
)
def test_the_row_that_a_head_reads_is_found(tmp_path, family: str, row: str, settings: dict) -> None:
    path = save_encoder(tmp_path, family, None, head="ForSequenceClassification", num_labels=3, **settings)
    eager = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    attention = "eager" if family == "mpnet" else "fa_serve"
    model = PackedModel(AutoModelForSequenceClassification.from_pretrained(path, attn_implementation=attention).eval())
    assert model._reads == row
    ids = word_pieces(pad=1 if family == "mpnet" else 0)(list(TEXTS))["input_ids"]
    with torch.inference_mode():
        inputs = inputs_of(ids)
        found = model.label_logits(model.hidden(inputs), inputs)
        wanted = torch.cat([eager(input_ids=torch.tensor([each])).logits for each in ids])
        model._reads = None
        padded = model.label_logits(torch.empty(0), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded, wanted, rtol=1e-4, atol=1e-4)


_HALVES = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in (("layers", 1), ("ffn_dim", 48))}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "n_head": 4}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
_WIDTHS = {"vocab_size": len(VOCABULARY), "d_model": 32, "d_inner": 48, "d_head": 8}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "convbert": ("convbert", SIZES | {"embedding_size": 32}),
    "fnet": ("fnet", SIZES),
    "xlnet": ("xlnet", _WIDTHS | _HEADS | {"n_layer": 2}),
    "funnel": ("funnel", _WIDTHS | _HEADS | {"block_sizes": [1, 1]}),
    "ibert": ("ibert", SIZES | {"type_vocab_size": 1, "max_position_embeddings": 64}),
    "t5": ("t5", FAMILIES["t5"][1] | _TOKENS | {"relative_attention_max_distance": 64}),
    "bart": ("bart", _WIDTHS | _HEADS | _HALVES | _TOKENS),
}
"""Models whose results change with padding, or whose heads read no row of the transformer. All texts here end with token 3."""


@pytest.mark.parametrize("family", OTHERS)
def test_scores_of_models_that_cannot_be_padded_are_those_of_each_text_alone(monkeypatch, family: str) -> None:
    monkeypatch.setitem(FAMILIES, family, OTHERS[family])
    own = make_encoder(family, "ForSequenceClassification", num_labels=3)
    model = PackedModel(own)
    assert not model.packs
    ids = word_pieces()(list(TEXTS))["input_ids"]
    inputs = inputs_of(ids)
    with torch.inference_mode():
        wanted = torch.cat([own(input_ids=torch.tensor([each])).logits for each in ids])
        hidden = model.hidden(inputs) if model.reads_rows else torch.empty(0)
        torch.testing.assert_close(model.label_logits(hidden, inputs), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["convbert", "fnet", "ibert"])
def test_vectors_of_models_that_cannot_be_padded_are_those_of_each_text_alone(monkeypatch, family: str) -> None:
    monkeypatch.setitem(FAMILIES, family, OTHERS[family])
    own = make_encoder(family)
    model = PackedModel(own)
    assert model.batches == ("padded" if family == "ibert" else "single")
    ids = word_pieces()(list(TEXTS))["input_ids"]
    with torch.inference_mode():
        wanted = torch.cat([own(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids])
        torch.testing.assert_close(model.hidden(inputs_of(ids)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_a_padding_token_in_a_text_has_the_position_that_the_model_gives_it(family: str) -> None:
    """RoBERTa counts no padding tokens."""
    own = make_encoder(family)
    model = PackedModel(AutoModel.from_config(own.config, attn_implementation="fa_serve").eval())
    model.base.load_state_dict(own.state_dict())
    assert model.packs
    ids = [[2, 7, 0, 8, 0, 0, 9, 3], [0, 0], [2, 8, 3], [0, 7, 8, 0]]
    with torch.inference_mode():
        wanted = torch.cat([own(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids])
        torch.testing.assert_close(model.hidden(inputs_of(ids)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "padding"), [("qwen3", 0), ("qwen3", 3), ("qwen3", None), ("gemma3-causal", 3)])
def test_a_head_that_passes_over_padding_reads_the_last_other_token(family: str, padding: int | None) -> None:
    """Many decoders have the same token for padding and for the end of a text."""
    own = make_encoder(family, "ForSequenceClassification", num_labels=3, pad_token_id=padding)
    model = PackedModel(own)
    assert model._reads == (None if padding is None else "last")  # transformers takes no batch without a padding token
    ids = [[2, 7, 9, 8, 3], [2, 7, 0, 0], [3, 3, 3], [0, 0], [2, 8, 11], [2, 3, 7, 0, 3]]
    inputs = inputs_of(ids)
    with torch.inference_mode():
        wanted = torch.cat([own(input_ids=torch.tensor([each])).logits for each in ids])
        torch.testing.assert_close(model.label_logits(model.hidden(inputs), inputs), wanted, rtol=1e-4, atol=1e-4)
