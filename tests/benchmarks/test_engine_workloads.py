"""Models that the benchmarks of the engine make."""

from __future__ import annotations

from pathlib import Path

import engine_workloads
import pytest
from safetensors import safe_open


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


def test_only_shapes_with_more_layers_lose_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_workloads, "SHAPES", dict(engine_workloads.SHAPES))
    engine_workloads.cut_layers(20)
    layers = {shape: engine_workloads.SHAPES[shape]["num_hidden_layers"] for shape in ("llama70b", "tiny")}
    assert layers == {"llama70b": 20, "tiny": 2}
