"""Which files of a folder are loaded, and what their headers say."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from fa_serve.hf.weights.headers import Header, headers, weight_files


def test_files_are_those_that_transformers_loads(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "lost.safetensors"}}))
    for name in ("a", "consolidated"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"x")
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors"]
    index.write_text('{"weight_map": {"a": 1, "b": null, "c": ["x"], "d": "a.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors"]
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        assert weight_files(tmp_path) == []
    (tmp_path / "model.safetensors").write_bytes(b"x")
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"], "which transformers takes before an index"
    assert weight_files(tmp_path / "nowhere") == []


def test_headers_have_names_dtypes_and_shapes(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2, 3, dtype=torch.bfloat16), "y": torch.zeros(0)}, tmp_path / "a.safetensors")
    save_file({"z": torch.tensor(1, dtype=torch.int8)}, tmp_path / "b.safetensors")
    (tmp_path / "c.bin").touch()
    files = [*sorted(tmp_path.iterdir())]
    assert dict(headers(files)) == {"x": Header("BF16", (2, 3)), "y": Header("F32", (0,)), "z": Header("I8", ())}
