"""Encoders are loaded with all of their weights or refused."""

import json

import pytest
import torch
from encoder_folders import save_encoder
from safetensors.torch import load_file, save_file

from fa_serve.hf.encoders.folder import read_folder
from fa_serve.hf.encoders.load import load_encoder
from fa_serve.spec import ParameterError

CPU = torch.device("cpu")


def test_an_encoder_is_loaded_with_fa_serves_attention(tmp_path) -> None:
    loaded = load_encoder(read_folder(str(save_encoder(tmp_path)), "embed"), dtype="float32", device=CPU)
    assert loaded.model.model.config._attn_implementation == "fa_serve"
    assert loaded.model.packs
    assert loaded.max_positions == 48
    assert not any(parameter.requires_grad for parameter in loaded.model.model.parameters())


def test_a_model_with_its_own_attention_is_padded(tmp_path) -> None:
    loaded = load_encoder(read_folder(str(save_encoder(tmp_path, "mpnet")), "embed"), dtype="float32", device=CPU)
    assert not loaded.model.packs
    assert loaded.max_positions == 48  # of 50, because positions begin behind that of the padding


def test_a_mixture_that_chooses_more_experts_than_it_has_is_refused(tmp_path) -> None:
    path = save_encoder(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_experts": 4, "num_experts_per_tok": 5}))
    with pytest.raises(ParameterError, match="num_experts_per_tok must be between 1 and 4"):
        load_encoder(read_folder(str(path), "embed"), dtype="float32", device=CPU)


@pytest.mark.parametrize("told", [True, False])
def test_t5_is_loaded_without_a_decoder(tmp_path, told: bool) -> None:
    """Folders of sentence-transformers say that T5 has a decoder. A T5EncoderModel that was saved says that it has none."""
    path = save_encoder(tmp_path, "t5")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": told}))
    loaded = load_encoder(read_folder(str(path), "embed"), dtype="float32", device=CPU)
    assert type(loaded.model.model).__name__ == "T5EncoderModel"
    assert not loaded.model.packs  # its bias is that of the distance in the batch


@pytest.mark.parametrize("task", ["score", "classify", "sparse"])
def test_a_head_without_weights_is_refused(tmp_path, task) -> None:
    """transformers would fill it with random numbers."""
    path = save_encoder(tmp_path, "bert", None)
    with pytest.raises(ParameterError, match=rf"for the task {task} \(--task\), but .* are missing"):
        load_encoder(read_folder(str(path), task), dtype="float32", device=CPU)


def test_labels_are_in_the_order_of_logits(tmp_path) -> None:
    names = {2: "c", 0: "a", 1: "b"}
    path = save_encoder(tmp_path, "bert", None, head="ForSequenceClassification", id2label=names, label2id={})
    loaded = load_encoder(read_folder(str(path), "classify"), dtype="float32", device=CPU)
    assert loaded.labels == ("a", "b", "c")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("subfolder", "head", "task", "name"),
    [
        ("", "Model", "embed", "encoder.layer.0.attention.self.query.weight"),
        ("0_Transformer", "Model", "embed", "encoder.layer.0.attention.self.query.weight"),
        ("", "ForMaskedLM", "embed", "bert.encoder.layer.0.attention.self.query.weight"),
        ("", "ForSequenceClassification", "classify", "classifier.weight"),
    ],
)
def test_quantised_numbers_without_a_format_are_refused(tmp_path, dtype, subfolder: str, head: str, task, name: str) -> None:
    """transformers would take them without their scales."""
    path = save_encoder(tmp_path, "bert", None if head != "Model" else (("Pooling", {}),), head=head, subfolder=subfolder)
    file = path / subfolder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {name: weights[name].to(dtype)}, file, metadata={"format": "pt"})
    with pytest.raises(ParameterError, match=rf"{name} must have floats of 16 or more bits"):
        load_encoder(read_folder(str(path), task), dtype="float32", device=CPU)
