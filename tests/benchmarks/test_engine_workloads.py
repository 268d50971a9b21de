"""Models that the benchmarks of the engine make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.engine import engine_workloads


def test_a_file_with_holes_has_one_layer_and_a_few_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = engine_workloads.SHAPES["llama70b"] | engine_workloads.tiny_sizes("llama70b")
    monkeypatch.setitem(engine_workloads.SHAPES, "llama70b", sizes)
    engine_workloads.make_folder("llama70b", tmp_path, "cpu")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, because a file is no mapping
    written = {name for name, tensor in tensors.items() if tensor.any()}
    assert written == {name for name in tensors if name.startswith("model.layers.0.")} | {"model.embed_tokens.weight"}
    embeddings = tensors["model.embed_tokens.weight"]
    assert embeddings.shape == (sizes["vocab_size"], sizes["hidden_size"])
    assert embeddings[:64].any(dim=1).all()
    assert not embeddings[64:].any()


def test_a_model_that_is_kept_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        engine_workloads.SHAPES, "qwen06", engine_workloads.SHAPES["qwen06"] | engine_workloads.tiny_sizes("qwen06")
    )
    monkeypatch.setenv(engine_workloads.KEPT_MODELS, str(tmp_path / "kept"))
    written = []
    write = engine_workloads.write_folder

    def write_half_at_first(shape: str, folder: Path, device: str) -> None:
        written.append(folder)
        if len(written) == 1:
            (folder / "config.json").write_text("{")
            raise OSError("no space")
        write(shape, folder, device)

    monkeypatch.setattr(engine_workloads, "write_folder", write_half_at_first)
    (tmp_path / "kept").mkdir()
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    with pytest.raises(OSError, match="no space"):
        engine_workloads.make_folder("qwen06", folders[0], "cpu")
    assert not list(folders[0].iterdir()), "a model that is not complete is not used"
    for folder in folders[1:]:
        engine_workloads.make_folder("qwen06", folder, "cpu")
        assert (
            AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == engine_workloads.SHAPES["qwen06"]["hidden_size"]
        )
    assert written == [tmp_path / "kept" / "qwen06"] * 2


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("shape", ["qwen06", "qwen30a3b", "gptoss20b", "deepseek-lite"])
def test_a_model_saved_by_layers_is_that_of_save_pretrained(tmp_path: Path, shape: str) -> None:
    """Weights that are tied, experts that are written one by one, and experts that are written as they are."""
    model = engine_workloads.make_model(shape, "cpu", dtype=torch.bfloat16, **engine_workloads.tiny_sizes(shape))
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "layers").mkdir()
    engine_workloads.save_by_layers(model, tmp_path / "layers")
    expected = tensors_of(tmp_path / "whole")
    written = tensors_of(tmp_path / "layers")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("whole", "layers")]
    assert configs[0] == configs[1]
    assert len(list((tmp_path / "layers").glob("*.safetensors"))) == model.config.num_hidden_layers + 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "layers", dtype="auto")
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), model.parameters(), strict=True))


def test_only_shapes_with_more_layers_lose_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_workloads, "SHAPES", dict(engine_workloads.SHAPES))
    engine_workloads.cut_layers(20)
    layers = {shape: engine_workloads.SHAPES[shape]["num_hidden_layers"] for shape in ("llama70b", "tiny")}
    assert layers == {"llama70b": 20, "tiny": 2}
