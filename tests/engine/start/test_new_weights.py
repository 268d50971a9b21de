"""Weights from a folder and from shared memory, under the names of the model."""

from __future__ import annotations

import multiprocessing.resource_tracker
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
from tiny_models import make_model

from fa_serve.engine.start import new_weights
from fa_serve.engine.start.new_weights import SharedTensor, from_folder, from_shared_memory
from fa_serve.spec import ParameterError


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_checkpoint_has_every_weight_under_the_models_name(family: str, tmp_path: Path) -> None:
    """That of a mixture keeps the matrices of its experts apart, and the model keeps them together."""
    model = make_model(family)
    model.save_pretrained(tmp_path)
    found = dict(from_folder(model, tmp_path))
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in expected.items())


def test_a_folder_with_the_models_names_is_not_loaded_as_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    monkeypatch.setattr(new_weights, "AutoModelForCausalLM", None)
    assert dict(from_folder(model, tmp_path)).keys() == dict(model.named_parameters()).keys()
    with pytest.raises(ParameterError, match="weight_dir must be a folder of this machine with safetensors files"):
        next(from_folder(model, tmp_path / "nowhere"))


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=100)
    yield memory
    memory.close()
    memory.unlink()


def test_tensors_are_read_where_the_list_says(segment: SharedMemory) -> None:
    numbers = torch.arange(6, dtype=torch.bfloat16)
    segment.buf[16:28] = numbers.view(torch.uint8).numpy().tobytes()
    places = [SharedTensor("a", "bfloat16", (2, 3), 16), SharedTensor("b", "float32", (0, 4), 100)]
    found = dict(from_shared_memory(segment.name, places))
    assert torch.equal(found["a"], numbers.view(2, 3))
    assert found["b"].shape == (0, 4)


def test_a_reader_leaves_the_segment_to_its_creator(segment: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker of a process that attaches by Python's class would remove the segment at its end (before 3.13)."""
    tracked: list[object] = []
    monkeypatch.setattr(multiprocessing.resource_tracker, "register", lambda *told: tracked.append(told))
    assert dict(from_shared_memory(segment.name, [SharedTensor("a", "float32", (2,), 0)]))["a"].tolist() == [0.0, 0.0]
    assert tracked == []
    SharedMemory(segment.name).close()
    assert tracked, "the guard: this is how the class attaches"


def test_what_is_not_in_the_segment_is_refused(segment: SharedMemory) -> None:
    for name in ("no-such-segment", "../shm/x", "/etc/passwd"):
        with pytest.raises(ParameterError, match="shared_memory must be the name of a segment of this machine"):
            next(from_shared_memory(name, []))
    for shape, offset in (((50000,), 0), ((1,), -4), ((-1,), 8)):
        with pytest.raises(ParameterError, match=r"have a within the \d+ bytes of the segment"):
            next(from_shared_memory(segment.name, [SharedTensor("a", "float32", shape, offset)]))
    with pytest.raises(ParameterError, match="dtype must be float64, float32, bfloat16, float16"):
        next(from_shared_memory(segment.name, [SharedTensor("a", "int8", (1,), 0)]))
