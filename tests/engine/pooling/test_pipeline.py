"""Limits, activations and results of a loaded pipeline."""

import json

import numpy as np
import pytest
from encoder_folders import LENGTH, save_encoder

from fa_serve.engine import Encoder, EngineConfig, PoolingParams
from fa_serve.engine.pooling.inputs import EncoderInput, EncoderInputs
from fa_serve.spec import ParameterError


def load(path, **settings) -> Encoder:
    return Encoder(EngineConfig(model=path, device="cpu", dtype="float32", **settings))


def test_the_limit_is_the_least_of_folder_model_and_setting(tmp_path) -> None:
    path = save_encoder(tmp_path, transformer={"max_seq_length": 20})
    assert load(path).card.max_tokens == 20
    assert load(path, max_model_len=10).config.max_model_len == 10
    assert load(path, max_model_len=LENGTH).card.max_tokens == LENGTH  # the operator's word counts above the folder's
    with pytest.raises(ParameterError, match=f"at most {LENGTH}"):
        load(path, max_model_len=LENGTH + 1)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [(None, "sigmoid"), ("torch.nn.modules.linear.Identity", "none"), ("torch.nn.modules.activation.Sigmoid", "sigmoid")],
)
def test_the_activation_of_a_score_is_the_folders(tmp_path, told, wanted: str) -> None:
    path = save_encoder(tmp_path, "bert", None, head="ForSequenceClassification", num_labels=1)
    if told is not None:
        config = json.loads((path / "config.json").read_text()) | {"sentence_transformers": {"activation_fn": told}}
        (path / "config.json").write_text(json.dumps(config))
    encoder = load(path)
    raw = encoder.score("a", ["b"], params=PoolingParams(activation="none"))
    found = encoder.score("a", ["b"])
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-raw)) if wanted == "sigmoid" else raw, rtol=1e-6)


def test_an_activation_that_is_not_known_is_refused(tmp_path) -> None:
    path = save_encoder(tmp_path, "bert", None, head="ForSequenceClassification", num_labels=1)
    (path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": "os.system"}))
    with pytest.raises(ParameterError, match=r"os\.system"):
        load(path)


def test_several_labels_that_do_not_exclude_each_other_get_sigmoids(tmp_path) -> None:
    own = {"num_labels": 3, "problem_type": "multi_label_classification"}
    encoder = load(save_encoder(tmp_path, "bert", None, head="ForSequenceClassification", **own))
    raw = encoder.classify(["a"], params=PoolingParams(activation="none"))
    np.testing.assert_allclose(encoder.classify(["a"]), 1 / (1 + np.exp(-raw)), rtol=1e-6)
    softmax = encoder.classify(["a"], params=PoolingParams(activation="softmax"))
    assert softmax.sum() == pytest.approx(1, abs=1e-6)


def test_inputs_of_one_token_have_rows_of_tokens(tmp_path) -> None:
    """As many tokens as inputs: rows of tokens are still told from vectors."""
    pipeline = load(save_encoder(tmp_path))._pipeline
    ones = EncoderInputs.of([EncoderInput(np.array([5], dtype=np.int32)) for _ in range(3)])
    params = PoolingParams(tokens=True)
    rows = pipeline.rows(pipeline.compute(ones, params), ones, params)
    assert [row.values.shape for row in rows] == [(1, 32)] * 3
    plain = PoolingParams()
    assert [row.values.shape for row in pipeline.rows(pipeline.compute(ones, plain), ones, plain)] == [(32,)] * 3


@pytest.mark.parametrize("size", [-10, 100, 4, 0])
@pytest.mark.parametrize("subfolder", ["", "0_Transformer"])
def test_weights_that_are_cut_off_are_named(tmp_path, subfolder: str, size: int) -> None:
    file = save_encoder(tmp_path, subfolder=subfolder) / subfolder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(OSError, match=rf"the model's file {file} cannot be read: SafetensorError: .* \(\d+ bytes\)$"):
        load(tmp_path)


@pytest.mark.parametrize("subfolder", ["", "0_Transformer"])
def test_a_folder_without_weights_is_named(tmp_path, subfolder: str) -> None:
    folder = save_encoder(tmp_path, subfolder=subfolder) / subfolder
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match=rf"the model's folder {folder} must hold weights \(one of .*\), got none"):
        load(tmp_path)


def test_a_tokenizer_in_a_subfolder_that_is_cut_off_is_named(tmp_path) -> None:
    file = save_encoder(tmp_path, subfolder="0_Transformer") / "0_Transformer" / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(OSError, match=rf"the model's file {file} cannot be read: JSONDecodeError"):
        load(tmp_path)


def test_a_value_in_an_encoders_config_that_no_library_checks_names_the_folder(tmp_path) -> None:
    file = save_encoder(tmp_path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 0}))
    with pytest.raises(OSError, match=rf"the model's folder {tmp_path} cannot be loaded: .* \(ZeroDivisionError: "):
        load(tmp_path)
