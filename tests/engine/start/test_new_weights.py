"""Weights from a folder and from shared memory, under the names of the model."""

from __future__ import annotations

import multiprocessing.resource_tracker
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import save_llava
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from fa_serve.engine.start import new_weights
from fa_serve.engine.start.new_weights import (
    AnnouncedTensor,
    DryRunEnded,
    SharedTensor,
    from_folder,
    from_group,
    from_shared_memory,
)
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


def test_a_checkpoint_with_towers_has_their_weights_too(tmp_path: Path) -> None:
    """It has other names in its files than in the model, so that transformers loads it."""
    model = save_llava(tmp_path)
    found = dict(from_folder(model, tmp_path))
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert any("vision_tower" in name for name in found)
    assert all(torch.equal(found[name], parameter) for name, parameter in expected.items())


def test_a_checkpoint_of_another_model_is_refused_by_its_names(tmp_path: Path) -> None:
    save_llava(tmp_path)
    with pytest.raises(ParameterError, match="weights must have the names of parameters of LlamaForCausalLM"):
        next(from_folder(make_model(), tmp_path))


def test_a_folder_with_the_models_names_is_not_loaded_as_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    monkeypatch.setattr(new_weights, "auto_class", None)
    assert dict(from_folder(model, tmp_path)).keys() == dict(model.named_parameters()).keys()
    with pytest.raises(ParameterError, match="weight_dir must be a folder on this machine with safetensors files"):
        next(from_folder(model, tmp_path / "nowhere"))


def test_a_checkpoint_has_one_name_of_tied_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(new_weights, "auto_class", None)  # it lacks nothing, so it is not loaded as a model
    assert dict(from_folder(model, tmp_path)).keys() == dict(model.named_parameters()).keys()


def test_a_checkpoint_with_quantised_numbers_is_refused(tmp_path: Path) -> None:
    """Its scales, which the model has no name for, would be left out."""
    model = make_model()
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParameterError, match=rf"weight_dir must have floats of 16 or more bits for {name}.*, got 'F8_E4M3'"):
        next(from_folder(model, tmp_path))


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """The model would keep its old one, or, where a name is not the model's, get the random numbers that transformers draws."""
    model = make_model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    (tmp_path / "config.json").rename(tmp_path / "aside.json")
    for more in ({}, {"model.rotary_emb.inv_freq": torch.ones(8)}):
        if more:  # only then it is loaded as a model
            (tmp_path / "aside.json").rename(tmp_path / "config.json")
        save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            ParameterError, match=r"hold every weight of the model, but model\.layers\.1\.mlp\.down_proj\.weight is missing"
        ):
            next(from_folder(model, tmp_path))
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 3)
    save_file(tensors | more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParameterError, match="weight_dir must hold a checkpoint that transformers can load"):
        next(from_folder(model, tmp_path))


@pytest.mark.parametrize("loaded", [False, True], ids=["read", "loaded"])
def test_buffers_of_a_checkpoint_are_read_too(loaded: bool, tmp_path: Path) -> None:
    """Such as the bias of DeepSeek's router."""
    model = make_model()
    model.model.norm.register_buffer("bias", torch.arange(3.0))
    model.save_pretrained(tmp_path)
    if loaded:
        tensors = load_file(tmp_path / "model.safetensors") | {"model.rotary_emb.inv_freq": torch.ones(8)}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_weights, "_loaded", lambda *_: model)
        found = dict(from_folder(model, tmp_path))
    assert torch.equal(found["model.norm.bias"], torch.arange(3.0))
    assert "model.rotary_emb.inv_freq" not in found


def test_a_folder_that_is_still_being_written_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    last = max(tmp_path.glob("*.safetensors"))
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    with pytest.raises(ParameterError, match=f"weight_dir must hold intact safetensors files, but {last.name} is broken"):
        next(from_folder(model, tmp_path))
    last.unlink()
    with pytest.raises(ParameterError, match=f"every file that model.safetensors.index.json names, but {last.name} is missing"):
        next(from_folder(model, tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ParameterError, match="whose weight_map names the file of each weight"):
        next(from_folder(make_model(), tmp_path))


def test_files_of_an_older_checkpoint_are_not_read(tmp_path: Path) -> None:
    """transformers prefers the whole file."""
    model = make_model()
    model.save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.full((32,), 7.0)}, tmp_path / "model.z-00001-of-00002.safetensors")
    assert torch.equal(dict(from_folder(model, tmp_path))["model.norm.weight"], model.model.norm.weight)


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=100)
    yield memory
    memory.close()
    memory.unlink()


class Pair(torch.nn.Module):
    """What has the names of the tensors below."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(2, 3))
        self.b = torch.nn.Parameter(torch.zeros(0, 4))


PAIR: Any = Pair()


def test_tensors_are_read_where_the_list_says(segment: SharedMemory) -> None:
    numbers = torch.arange(6, dtype=torch.bfloat16)
    segment.buf[16:28] = numbers.view(torch.uint8).numpy().tobytes()
    places = [SharedTensor("a", "bfloat16", (2, 3), 16), SharedTensor("b", "float32", (0, 4), 100)]
    found = dict(from_shared_memory(PAIR, segment.name, places))
    assert torch.equal(found["a"], numbers.view(2, 3))
    assert found["b"].shape == (0, 4)


def test_a_reader_leaves_the_segment_to_its_creator(segment: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker of a process that attaches by Python's class would remove the segment at its end (before 3.13)."""
    tracked: list[object] = []
    monkeypatch.setattr(multiprocessing.resource_tracker, "register", lambda *told: tracked.append(told))
    assert (
        dict(from_shared_memory(PAIR, segment.name, [SharedTensor("a", "float32", (2, 3), 0)]))["a"].tolist() == [[0.0] * 3] * 2
    )
    assert tracked == []
    SharedMemory(segment.name).close()
    assert tracked, "the guard: this is how the class attaches"


def test_what_is_not_in_the_segment_is_refused(segment: SharedMemory) -> None:
    for name in ("no-such-segment", "../shm/x", "/etc/passwd"):
        with pytest.raises(ParameterError, match="shared_memory must be the name of a shared memory segment on this machine"):
            next(from_shared_memory(PAIR, name, []))
    for shape, offset in (((50000,), 0), ((1,), -4), ((-1,), 8)):
        with pytest.raises(ParameterError, match=r"have a within the \d+ bytes of the segment"):
            next(from_shared_memory(PAIR, segment.name, [SharedTensor("a", "float32", shape, offset)]))
    with pytest.raises(ParameterError, match="dtype must be float64, float32, bfloat16, float16"):
        next(from_shared_memory(PAIR, segment.name, [SharedTensor("a", "int8", (1,), 0)]))


def test_nothing_is_given_of_weights_of_which_a_later_one_is_refused(segment: SharedMemory, tmp_path: Path) -> None:
    first = SharedTensor("a", "float32", (2, 3), 0)
    later = {
        "within the 100 bytes": ("b", (0, 4), 200),
        "names of parameters": ("c", (1,), 0),
        "have the shape": ("b", (1, 4), 0),
    }
    for told, (name, shape, offset) in later.items():
        with pytest.raises(ParameterError, match=told):
            next(from_shared_memory(PAIR, segment.name, [first, SharedTensor(name, "float32", shape, offset)]))
    save_file({"a": torch.ones(2, 3), "b": torch.ones(1, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ParameterError, match="have the shape"):
        next(from_folder(PAIR, tmp_path))


class FilledGroup:
    """A trainer's group, in which each tensor has its number in all places."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []

    def broadcast(self, x: torch.Tensor) -> None:
        self.received.append(x.fill_(len(self.received)))


def test_announced_tensors_are_received_one_at_a_time_in_their_order() -> None:
    group: Any = FilledGroup()
    given = from_group(PAIR, group, [AnnouncedTensor("b", "float32", (0, 4)), AnnouncedTensor("a", "float32", (2, 3))])
    assert next(given)[0] == "b"
    assert len(group.received) == 1
    name, tensor = next(given)
    assert (name, tensor.tolist()) == ("a", [[1.0] * 3] * 2)


def test_what_is_announced_is_checked_before_anything_is_received() -> None:
    group: Any = FilledGroup()
    good = AnnouncedTensor("a", "float32", (2, 3))
    for wrong, told in (
        (AnnouncedTensor("c", "float32", (1,)), "weights must have the names of parameters of Pair"),
        (AnnouncedTensor("b", "float32", (4, 0)), r"weights must have the shape \(0, 4\) for b"),
        (AnnouncedTensor("b", "bfloat16", (0, 4)), "weights must have the dtype float32 for b: convert it in the trainer"),
        (AnnouncedTensor("b", "object", (0, 4)), "weights must have the dtype float32 for b"),
    ):
        with pytest.raises(ParameterError, match=told):
            next(from_group(PAIR, group, [good, wrong]))
    with pytest.raises(DryRunEnded):
        next(from_group(PAIR, group, [good], dry_run=True))
    assert group.received == []
