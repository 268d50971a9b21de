"""Quantised numbers that no quantization_config describes are refused by the header of their file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from every_type import tiny_model
from hf_families import BY_NAME
from packaging.version import Version
from quantised_copies import change_config, copy_of, load
from quantised_experts import QWEN, write_fp8_channel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fa_serve.hf.weights.float_files import check_float_files
from fa_serve.spec import ParameterError

UP = "model.layers.1.mlp.up_proj.weight"


def spoil(path: Path, **tensors: torch.Tensor) -> None:
    save_file(load_file(path) | tensors, path, {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool])
def test_a_tensor_that_is_no_float_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    model = BY_NAME["llama"].build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    check_float_files(tmp_path, model)
    index = tmp_path / "model.safetensors.index.json"
    name = json.loads(index.read_text())["weight_map"][UP]
    spoil(tmp_path / name, **{UP: model.state_dict()[UP].to(dtype)})
    with pytest.raises(ParameterError, match=rf"^{UP} must have floats of 16 or more bits, because its checkpoint has no"):
        load(tmp_path)
    (tmp_path / name).unlink()
    check_float_files(tmp_path, model)  # what is missing is told by others


def test_a_layer_that_a_list_leaves_out_by_mistake_is_named(tmp_path: Path) -> None:
    path = copy_of(None, "fp8", tmp_path)
    load(path)
    change_config(path, ignore=["lm_head", "re:.*up_proj"])
    with pytest.raises(ParameterError, match=r"up_proj.weight must have floats of 16 or more bits.*, got 'F8_E4M3'"):
        load(path)


def test_experts_without_their_config_are_named(tmp_path: Path) -> None:
    path = write_fp8_channel(tmp_path)
    load(path)
    file = path / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "quantization_config"}))
    model = AutoModelForCausalLM.from_config(QWEN)
    with pytest.raises(ParameterError, match=r"must have floats of 16 or more bits"):
        check_float_files(path, model)
    tensors = {k: v if ".experts." in k else v.float() for k, v in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParameterError, match=r"experts.\d.*_proj.weight must have floats of 16 or more bits"):
        load(path)
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({k: v.float() if k != up else v for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParameterError, match=rf"{up} must have floats of 16 or more bits"):
        load(path)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        pytest.param("qwen2_5_vl", UP, id="renamed"),
        pytest.param("llava", "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", id="of a tower"),
        pytest.param(
            "qwen2_5_vl",
            "model.language_model.model.layers.1.mlp.up_proj.weight",
            id="of an older release",
            marks=pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="cannot be loaded"),
        ),
    ],
)
def test_a_tensor_with_another_name_in_the_files_is_named(tmp_path: Path, model_type: str, name: str) -> None:
    """transformers loads each of these names into a parameter of another name."""
    model = tiny_model(model_type)
    save_file({name: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParameterError, match=rf"^{name} must have floats of 16 or more bits"):
        check_float_files(tmp_path, model)
