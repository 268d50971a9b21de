"""What settings name is told before weights are loaded, which takes minutes for a large model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft_adapters import ATTENTION, save_adapter

from fa_serve.demo import model_path
from fa_serve.engine import Encoder, Engine, EngineConfig
from fa_serve.engine.parallel.ranks import Alone
from fa_serve.engine.start.loading import load_model
from fa_serve.engine.start.named import settle_names
from fa_serve.spec import ParameterError

CPU = EngineConfig(device="cpu", num_pages=32, dtype="float32")


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_serve.engine.start.loading.load_model", lambda *_: pytest.fail("weights are loaded"))


@pytest.fixture
def french(tmp_path: Path) -> Path:
    model = load_model(EngineConfig(model=model_path(), device="cpu", dtype="float32"))
    return save_adapter(tmp_path / "french", model=model, seed=1, target_modules=ATTENTION)


def write_config(folder: Path, **changes: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": ["a=./nope"]}, "lora must be NAME=FOLDER with an existing folder"),
        ({"lora": ["a/b={french}"]}, "lora must be NAME=FOLDER, where NAME must have at most 128 characters, only letters"),
        ({"lora": ["a={french}", "a={french}"]}, "lora must give each adapter a different name"),
        ({"lora": ["a={french}"], "changes": {"peft_type": "LOHA"}}, "lora must name adapters .*: peft_type must be LORA"),
        ({"lora": ["a={french}"], "lora_host_bytes": 10}, "lora must name adapters .*: .* 10 bytes, as lora_host_bytes"),
        ({"generation_config": "{french}"}, "generation_config must be auto, none, or a folder with a generation_config.json"),
        ({"generation_config": "{bad}"}, "generation_config must be auto, none, .* that can be read"),
        ({"speculative": "draft=./nope"}, "speculative must name a draft model: model must be a hub name"),
        ({"speculative": "draft=org/nope"}, "speculative must name a draft model: the model org/nope is not on this machine"),
        ({"speculative": "eagle3=org/nope"}, "speculative must name an EAGLE-3 head of .*: the model org/nope is not on this"),
        ({"speculative": "draft={other}"}, "speculative must name a draft model with the same vocabulary: its tokenizer"),
        ({"kv_host_folder": "/dev/null", "kv_host_memory": 1 << 20}, "kv_host_folder must be a folder that can be read and"),
        ({"revision": "v1"}, "revision must be left out for the embedded model"),
        ({"max_model_len": 10_000_000}, "max_model_len must be at most [0-9]+, the model's max_position_embeddings"),
    ],
)
def test_it_is_told_before_weights_are_loaded(settings, said, french: Path, tmp_path: Path) -> None:
    if "changes" in settings:
        settings = dict(settings)
        write_config(french, **settings.pop("changes"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "generation_config.json").write_text("[")
    other = tmp_path / "other"
    other.mkdir()
    for file in model_path().iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 90_000, "content": "<|another|>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    places = {"{french}": french, "{bad}": tmp_path / "bad", "{other}": other}

    def filled(value):
        for name, place in places.items():
            if isinstance(value, str):
                value = value.replace(name, str(place))
        return [filled(each) for each in value] if isinstance(value, list) else value

    with pytest.raises(ParameterError, match=said):
        Engine(replace(CPU, **{name: filled(value) for name, value in settings.items()}))


def test_what_is_there_is_settled(french: Path) -> None:
    config = EngineConfig(device="cpu", lora=[f"french={french}"])
    assert settle_names(config, Alone(torch.device("cpu"))) == config


def test_an_encoder_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa_serve.engine.pooling.pipeline.load_encoder", lambda *_, **__: pytest.fail("weights are loaded"))
    with pytest.raises(ParameterError, match="model must be a hub name"):
        Encoder(EngineConfig(model="./nope", task="embed", device="cpu"))
    with pytest.raises(ParameterError, match="revision must be left out for a folder"):
        Encoder(EngineConfig(model=model_path(), revision="v1", task="embed", device="cpu"))
