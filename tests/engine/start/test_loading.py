"""Loading: the sizes of the cache and of sequences, and code that comes with a model."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from fa_serve.demo import model_path
from fa_serve.engine import Engine, EngineConfig
from fa_serve.engine.cache import tensors as kv_cache
from fa_serve.engine.start import loading
from fa_serve.engine.start.loading import load_model, load_tokenizer
from fa_serve.spec import ParameterError


@pytest.mark.parametrize("trusted", [False, True], ids=["default", "trusted"])
def test_code_of_a_model(tmp_path, monkeypatch, trusted):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / f"model_{trusted}"
    ran = tmp_path / "ran"
    folder.mkdir()
    config = {"model_type": f"alien{trusted}", "auto_map": {"AutoConfig": "alien.Alien", "AutoModelForCausalLM": "alien.Alien"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "alien.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise ValueError('the code has run')\n")
    with pytest.raises(ValueError, match="the code has run" if trusted else "trust_remote_code"):
        load_model(EngineConfig(model=folder, trust_remote_code=trusted))
    assert ran.exists() == trusted


def test_sizes_that_cannot_work_are_refused_with_numbers(make_engine) -> None:
    for settings, message in (
        ({"num_pages": 16, "max_model_len": 65}, r"max_model_len must be at most 64.*16 pages of 4 tokens.*got 65"),
        ({"max_model_len": 257}, r"at most 256.*max_position_embeddings, got 257"),
    ):
        with pytest.raises(ParameterError, match=message) as error:
            make_engine(**settings)
        assert error.value.field == "max_model_len"


def test_sizes_follow_from_the_model_and_the_cache(make_engine) -> None:
    assert make_engine(num_pages=16).config.max_model_len == 64
    assert make_engine(num_pages=None, max_num_seqs=2).config.num_pages == 2 * 256 // 4


class SeenError(ValueError):
    """In the place of reading weights, with the device that they would be put on."""


@pytest.mark.parametrize(
    ("settings", "ranks", "device_map"),
    [
        pytest.param({"device": "cuda"}, None, {"": torch.device("cuda")}, id="gpu"),
        pytest.param(
            {"device": "cuda"},
            SimpleNamespace(device=torch.device("cuda:0"), all_reduce=None, local_rank=0),
            {"": torch.device("cuda:0")},
            id="one-rank",
        ),
        pytest.param(
            {"device": "cuda"},
            SimpleNamespace(device=torch.device("cuda:1"), all_reduce=object(), local_rank=1),
            None,
            id="divided",
        ),
        pytest.param({"device": "cuda", "quantization": "fp8"}, None, None, id="rounded"),
        pytest.param({"device": "cpu"}, None, None, id="cpu"),
    ],
)
def test_weights_are_put_on_the_gpu_as_they_are_read(monkeypatch, settings, ranks, device_map) -> None:
    """Unless the model is made smaller after it was read."""

    def from_pretrained(path, **options):
        raise SeenError(options["device_map"])

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(SeenError) as seen:
        load_model(EngineConfig(**settings), ranks)
    assert seen.value.args == (device_map,)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "generation_config.json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name) -> None:
    shutil.copytree(model_path(), tmp_path / "model")
    file = tmp_path / "model" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    config = EngineConfig(model=tmp_path / "model", device="cpu")
    with pytest.raises(OSError, match=str(file)):
        (load_tokenizer if name == "tokenizer.json" else load_model)(config)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", '{"max_new_tokens": 0}', "transformers refuses: `max_new_tokens` must be greater than 0"),
        ("adapter_config.json", "{}", "must be a JSON object with a peft_type"),
        ("model.safetensors.index.json", "{}", "must hold a JSON object with a weight_map"),
    ],
)
def test_a_file_with_a_useless_value_is_named(tmp_path, name, content, message) -> None:
    if name.startswith("adapter"):
        pytest.importorskip("peft")  # without it, transformers does not read this file
    shutil.copytree(model_path(), tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    if "index" in name:
        (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "model-00001-of-00001.safetensors")
    with pytest.raises(OSError, match=f"{name}.* {message}"):
        load_model(EngineConfig(model=tmp_path / "model", device="cpu"))


@pytest.mark.parametrize("chosen", [0, 7])
def test_a_mixture_that_chooses_no_expert_or_more_than_there_are_is_refused(tmp_path, chosen: int) -> None:
    make_model("qwen3-moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": chosen}))
    with pytest.raises(ParameterError, match="num_experts_per_tok must be between 1 and 6, the number of experts"):
        load_model(EngineConfig(model=tmp_path, device="cpu"))


def test_an_error_that_is_not_a_files_stays_as_it_is(tmp_path) -> None:
    shutil.copytree(model_path(), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"model_type": "alien"}))
    with pytest.raises(ValueError, match="alien"):
        load_model(EngineConfig(model=tmp_path / "model", device="cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, name: x.pop(name), "model must have the tensor {} in its files, got '1 missing tensors'"),
        (lambda x, name: x.update({name: x[name][1:].clone()}), r"{} must have the shape \[256\], got \[255\]"),
    ],
    ids=["missing", "mis-shaped"],
)
def test_a_tensor_that_is_missing_or_has_another_shape_is_named(tmp_path, change, message) -> None:
    """Otherwise transformers would make random numbers in its place, with a warning."""
    shutil.copytree(model_path(), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "model.layers.3.input_layernorm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ParameterError, match=message.format("model.layers.3.input_layernorm.weight")):
        load_model(EngineConfig(model=tmp_path / "model", device="cpu"))


def test_weights_that_transformers_computes_are_said_in_the_log(tmp_path, monkeypatch, caplog) -> None:
    shutil.copytree(model_path(), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = {"quantization_config": {"quant_method": "torchao", "quant_type": "int8_weight_only"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    model = load_model(EngineConfig(device="cpu"))
    given = []
    report = {"missing_keys": set(), "mismatched_keys": set()}
    fake = lambda path, config, **options: given.append(config) or (model, report)  # noqa: E731
    monkeypatch.setattr("fa_serve.engine.start.loading.AutoModelForCausalLM.from_pretrained", fake)
    with caplog.at_level("INFO", "fa_serve.engine"):
        load_model(EngineConfig(model=tmp_path / "model", device="cpu"))
    assert given[0].quantization_config["quant_method"] == "torchao"
    assert "the format torchao are computed by transformers' own modules, in layers that are not fused" in caplog.text


def test_pages_beyond_the_memory_are_refused_with_the_arithmetic(make_engine, monkeypatch) -> None:
    size = 4 * 2 * 2 * (16 + 16) * 4  # tokens, layers, heads, dimensions of keys and values, bytes
    monkeypatch.setattr(kv_cache, "reclaimable_memory", lambda: 100 * size + 1)
    assert make_engine(num_pages=100).config.num_pages == 100
    with pytest.raises(
        ParameterError, match=r"num_pages must be at most 100: a page of 4 tokens takes .* KiB in 2 layers"
    ) as error:
        make_engine(num_pages=101)
    assert error.value.field == "num_pages"


@pytest.mark.parametrize(
    ("left_out", "what"),
    [
        (("tokenizer.json", "tokenizer_config.json"), "a tokenizer \\(one of tokenizer.json, "),
        (("model.safetensors",), "weights \\(one of \\*.safetensors, \\*.bin\\)"),
    ],
    ids=["tokenizer", "weights"],
)
def test_a_folder_without_some_files_says_what_is_missing(tmp_path, left_out, what) -> None:
    for file in model_path().iterdir():
        if file.is_file() and file.name not in left_out:
            shutil.copy(file, tmp_path)
    with pytest.raises(OSError, match=f"the model's folder {tmp_path} must hold {what}.*got none: copy all files of the model"):
        Engine(EngineConfig(model=tmp_path, device="cpu", num_pages=32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_engine_on_a_gpu_that_is_not_there_is_refused_first(tmp_path) -> None:
    for device in ("cuda", "cuda:3"):
        with pytest.raises(ParameterError, match="device must be auto or cpu, because PyTorch") as refused:
            Engine(EngineConfig(model=tmp_path / "none", device=device))
        assert (refused.value.field, refused.value.value) == ("device", device)


IMPOSSIBLE = {
    "no heads": {"num_attention_heads": 0},
    "a vocabulary of a negative size": {"vocab_size": -1},
    "a vocabulary beyond any memory": {"vocab_size": 10**13},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_values_of_a_config_that_cannot_be_are_refused_with_the_folder(tmp_path, name) -> None:
    folder = copy_with(tmp_path, IMPOSSIBLE[name])
    with pytest.raises(OSError, match=f"the model's folder {folder} cannot be loaded"):
        load_model(EngineConfig(model=folder, device="cpu"))


def test_more_layers_than_tensors_are_refused_before_they_are_made(tmp_path) -> None:
    """Before: a billion layers were made until the memory was full."""
    folder = copy_with(tmp_path, {"num_hidden_layers": 10**9})
    with pytest.raises(ParameterError, match="num_hidden_layers must be at most the number of tensors in the files of"):
        load_model(EngineConfig(model=folder, device="cpu"))


class Runs:
    """Its pickle runs a command where it is read."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("old", [True, False], ids=["of-2019", "zip"])
def test_a_pickle_of_weights_runs_nothing(tmp_path, old) -> None:
    folder = copy_with(tmp_path, {})
    (folder / "model.safetensors").unlink()
    pickled = {"model.embed_tokens.weight": Runs(tmp_path / "ran")}
    torch.save(pickled, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    with pytest.raises(OSError, match=str(folder)):
        load_model(EngineConfig(model=folder, device="cpu"))
    assert not (tmp_path / "ran").exists()


def copy_with(tmp_path: Path, values: dict) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_path(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder
