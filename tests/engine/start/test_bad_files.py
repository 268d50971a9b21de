"""The file of a model that cannot be read is named, where a library says only how it has failed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from fa_serve.engine.start.bad_files import (
    FEW_LAYERS,
    find_model_folder,
    name_bad_adapter,
    name_bad_file,
    name_bad_folder,
    require_any_file,
    require_readable_config,
    require_tensors_for_layers,
)
from fa_serve.spec import ParameterError

ERROR = RuntimeError("how it has failed")


def test_the_bad_file_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("{}")
    name_bad_file(str(tmp_path), ERROR)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(OSError, match=r"the model's file .*/model.safetensors cannot be read: .* \(4 bytes\)") as refused:
        name_bad_file(str(tmp_path), ERROR)
    assert refused.value.__cause__ is ERROR


def test_a_folder_is_named_for_values_that_no_library_checks(tmp_path: Path) -> None:
    name_bad_folder("org/model", ERROR)
    name_bad_folder(str(tmp_path), ValueError("a sentence"))
    with pytest.raises(
        OSError,
        match=r"folder .* cannot be loaded: its files can be read, but a value in them is unusable \(RuntimeError: how it has",
    ):
        name_bad_folder(str(tmp_path), ERROR)


@pytest.mark.parametrize("error", [AttributeError("no such name"), KeyError("rope"), re.error("nothing to repeat")])
def test_a_folder_is_named_for_errors_of_every_kind(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(OSError, match=rf"folder .* cannot be loaded: .* \({type(error).__name__}: "):
        name_bad_folder(str(tmp_path), error)
    for own in (torch.OutOfMemoryError("full"), MemoryError(), ImportError("pip install it"), ParameterError("x", "be y", 1)):
        name_bad_folder(str(tmp_path), own)


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "cannot be read: JSONDecodeError"), ("[]", "must hold a JSON object, got list")]
)
def test_a_config_that_transformers_would_ignore_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    require_readable_config(str(tmp_path), "generation_config.json")
    require_readable_config("org/nope", "generation_config.json")
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(OSError, match=f"generation_config.json {reason}"):
        require_readable_config(str(tmp_path), "generation_config.json")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"must hold weights \(one of \*\.safetensors, \*\.bin\), got none"):
        require_any_file(str(tmp_path), ("*.safetensors", "*.bin"), "weights", ERROR)
    (tmp_path / "model.bin").touch()
    require_any_file(str(tmp_path), ("*.safetensors", "*.bin"), "weights", ERROR)
    assert find_model_folder(str(tmp_path)) == tmp_path
    assert find_model_folder("org/nope") is None


def test_a_config_has_no_more_layers_than_there_are_tensors(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2)}, tmp_path / "a.safetensors")

    def config(layers: int) -> SimpleNamespace:
        return SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=layers))

    require_tensors_for_layers(str(tmp_path), config(FEW_LAYERS))
    with pytest.raises(ParameterError, match=r"num_hidden_layers must be at most the number of tensors in the files of .*, 1"):
        require_tensors_for_layers(str(tmp_path), config(FEW_LAYERS + 1))


@pytest.mark.parametrize("content", ["{}", "[]", '{"peft_type": "LORA"}'])
def test_an_adapter_beside_the_model_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    name_bad_adapter(str(tmp_path), ERROR)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(
        OSError, match=r"has the file adapter_config.json, so transformers loads an adapter into the model, but"
    ):
        name_bad_adapter(str(tmp_path), ERROR)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    name_bad_adapter(str(tmp_path), ERROR)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "with a weight_map"),
        ("[]", "with a weight_map"),
        ('{"weight_map": []}', "with a weight_map"),
        ('{"metadata": {}, "weight_map": {"a": 3}}', "with a weight_map"),
        ('{"weight_map": {"a": "a.safetensors"}}', "with metadata"),
    ],
)
def test_an_index_that_names_no_files_is_named(tmp_path: Path, content: str, reason: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {}, "weight_map": {"a": "a.safetensors"}}')
    name_bad_file(str(tmp_path), ERROR)
    index.write_text(content)
    with pytest.raises(OSError, match=f"the model's file {index} cannot be read: it must hold a JSON object {reason}"):
        name_bad_file(str(tmp_path), ERROR)
