"""peft's format is read as it is written, and whatever else a folder holds is refused by its name."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fa_serve.hf.lora import format as format_module
from fa_serve.hf.lora.format import MAX_CONFIG_BYTES, MAX_HEADER_BYTES, file_facts, is_finite, read_adapter
from fa_serve.spec import ParameterError

Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def tensors(rank: int = 4, module: str = Q) -> dict[str, torch.Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(rank, 6), f"{module}.lora_B.weight": torch.ones(8, rank)}


def write(folder: Path, given: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors() if given is None else given, folder / "adapter_model.safetensors")
    return folder


def refused(folder: Path, **options: Any) -> ParameterError:
    with pytest.raises(ParameterError) as caught:
        read_adapter(folder, **options)
    return caught.value


def test_a_plain_adapter(tmp_path) -> None:
    adapter = read_adapter(write(tmp_path))
    low = adapter.modules["model.layers.0.self_attn.q_proj"]
    assert (low.a.shape, low.b.shape, low.scale, low.bias, low.magnitude) == ((4, 6), (8, 4), 2.0, None, None)
    assert adapter.rank == 4
    assert not adapter.embeddings
    assert not adapter.saved


@pytest.mark.parametrize(
    ("config", "rank", "scale"),
    [
        ({"use_rslora": True}, 4, 4.0),
        ({"rank_pattern": {"q_proj": 16}}, 16, 0.5),
        ({"rank_pattern": {"v_proj": 16}}, 4, 2.0),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 1}}, 4, 0.25),
        ({"alpha_pattern": {r"model\.layers\.[0-3]\..*q_proj": 12}, "rank_pattern": {"q_proj": 3}}, 3, 4.0),
        ({"lora_dropout": 0.3, "fan_in_fan_out": True, "init_lora_weights": "gaussian", "bias": "none"}, 4, 2.0),
    ],
)
def test_scales(tmp_path, config, rank, scale) -> None:
    [low] = read_adapter(write(tmp_path, tensors(rank), **config)).modules.values()
    assert low.scale == pytest.approx(scale)


def test_whole_weights_and_embeddings(tmp_path) -> None:
    given = tensors() | {
        "base_model.model.lm_head.weight": torch.ones(9, 6),
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(6, 4),
        "base_model.model.model.embed_tokens.base_layer.weight": torch.zeros(9, 6),
    }
    adapter = read_adapter(write(tmp_path, given, modules_to_save=["lm_head"]))
    assert list(adapter.saved) == ["lm_head", "model.embed_tokens"]
    assert adapter.embeddings["model.embed_tokens"].b.shape == (6, 4)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": "experts"}, "target_parameters"),
        ({"target_modules": [1]}, "target_modules"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config"),
        ({"a_field_of_tomorrow": 3}, "a_field_of_tomorrow"),
        ({"r": 0}, "r"),
        ({"r": "4"}, "r"),
        ({"r": 10**9}, "r"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"use_dora": 1}, "use_dora"),
        ({"ensure_weight_tying": "yes"}, "ensure_weight_tying"),
        ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern"),
        ({"rank_pattern": {"a*b*c*": 4}}, "rank_pattern"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_settings_are_refused_by_name(tmp_path, config, field) -> None:
    assert refused(write(tmp_path, **config)).field == field


def test_fields_of_tomorrow_that_are_off_are_no_obstacle(tmp_path) -> None:
    assert read_adapter(write(tmp_path, use_tomorrow=False, tomorrow_config=None)).rank == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({f"{Q}.lora_A.weight": torch.full((4, 6), torch.nan)}, f"{Q}.lora_A.weight"),
        ({f"{Q}.lora_B.weight": torch.full((8, 4), torch.inf)}, f"{Q}.lora_B.weight"),
        ({f"{Q}.lora_B.weight": torch.ones(8, 4, dtype=torch.int64)}, f"{Q}.lora_B.weight"),
        ({f"{Q}.lora_B.weight": torch.ones(8, 5)}, "model.layers.0.self_attn.q_proj"),
        ({f"{Q}.lora_A.weight": torch.ones(5, 6), f"{Q}.lora_B.weight": torch.ones(8, 5)}, "model.layers.0.self_attn.q_proj"),
        ({f"{Q}.lora_A.weight": torch.ones(4)}, "model.layers.0.self_attn.q_proj.lora_A.weight"),
        ({f"{Q}.lora_A.weight": torch.tensor(1.0)}, "model.layers.0.self_attn.q_proj.lora_A.weight"),
        ({f"{Q}.lora_A.weight": torch.ones(0, 6)}, "model.layers.0.self_attn.q_proj.lora_A.weight"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(8)}, "model.layers.0.self_attn.q_proj"),
        ({f"{Q}.lora_C.weight": torch.ones(8)}, "model.layers.0.self_attn.q_proj.lora_C.weight"),
        ({"model.layers.0.q_proj.lora_A.weight": torch.ones(8)}, "tensor"),
        ({"base_model.model.../../etc/passwd.lora_A.weight": torch.ones(8)}, "tensor"),
        ({"base_model.model.a/b.lora_A.weight": torch.ones(8)}, "tensor"),
        ({"base_model.model.embed.token_adapter.trainable_tokens_delta": torch.ones(8)}, "tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_tensors_are_refused_by_name(tmp_path, change, field) -> None:
    assert refused(write(tmp_path, tensors() | change)).field == field


EXPERTS = "base_model.model.model.layers.0.mlp.experts"


@pytest.mark.parametrize("targets", [["q_proj"], r".*self_attn\.(q|v)_proj"])
def test_parameters_are_told_from_linear_layers_and_whole_weights(tmp_path, targets) -> None:
    """peft names what is below linear layers, below parameters and in the place of whole weights alike."""
    given = {**tensors(), **tensors(12, EXPERTS), "base_model.model.lm_head.weight": torch.ones(9, 6)}
    adapter = read_adapter(write(tmp_path, given, target_modules=targets, target_parameters=["mlp.experts.down_proj"]))
    assert [*adapter.modules] == ["model.layers.0.self_attn.q_proj"]
    assert [*adapter.parameters] == ["model.layers.0.mlp.experts"]
    assert [*adapter.saved] == ["lm_head"]


def test_a_regular_expression_beside_parameters_is_bounded(tmp_path) -> None:
    slow = "(.*.*.*)q_proj"
    assert refused(write(tmp_path, target_modules=slow, target_parameters=["experts.down_proj"])).field == "target_modules"
    read_adapter(write(tmp_path, target_modules=slow))  # which is not matched with anything


def test_the_weight_of_a_linear_layer_is_a_parameter(tmp_path) -> None:
    """Its rank and scale are those of the parameter. Experts stay as they are."""
    config = {"target_modules": [], "target_parameters": ["q_proj.weight", "experts.down_proj"]}
    given = {**tensors(16), **tensors(12, EXPERTS)}
    folder = write(tmp_path, given, rank_pattern={"q_proj.weight": 16}, alpha_pattern={"q_proj.weight": 4}, **config)
    name = "model.layers.0.self_attn.q_proj"
    found = read_adapter(folder).with_weights_as_modules({name})
    assert (found.modules[name].rank, found.modules[name].scale) == (16, 0.25)
    assert [*found.parameters] == ["model.layers.0.mlp.experts"]
    with pytest.raises(ParameterError, match="have two matrices of rank 4 for its weight"):
        read_adapter(write(tmp_path, given, **config)).with_weights_as_modules({name})


def test_whole_weights_of_other_modules_are_refused(tmp_path) -> None:
    error = refused(write(tmp_path, {"base_model.model.model.norm.weight": torch.ones(8)}))
    assert error.field == "model.norm.weight"
    assert "modules_to_save may name only the embedding and the head" in error.rule


def test_dora_needs_its_magnitudes_and_a_bias_its_numbers(tmp_path) -> None:
    assert "lora_magnitude_vector" in refused(write(tmp_path, use_dora=True)).rule
    assert "lora_B.bias" in refused(write(tmp_path, lora_bias=True)).rule
    given = tensors() | {f"{Q}.lora_B.bias": torch.ones(7)}
    assert refused(write(tmp_path, given, lora_bias=True)).field.endswith("q_proj.lora_B.bias")


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def test_pickles_are_never_opened(tmp_path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Evil(tmp_path / "opened")))
    error = refused(tmp_path)
    assert "pickles are not read" in error.rule
    assert error.value == ["adapter_model.bin"]
    (tmp_path / "adapter_model.safetensors").write_bytes(pickle.dumps(Evil(tmp_path / "opened")))
    assert refused(tmp_path).field == "adapter_model.safetensors"
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 1 << 30, 2**64 - 1])
def test_long_headers_are_refused_before_they_are_read(tmp_path, length) -> None:
    write(tmp_path)
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(min(length + 8, 1 << 31))  # a sparse file
    error = refused(tmp_path)
    assert (error.field, error.value) == ("adapter_model.safetensors", length)


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, struct.pack("<Q", 4) + b"{{{{", struct.pack("<Q", 100) + b"{}"])
def test_broken_files_are_refused(tmp_path, content) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    assert refused(tmp_path).field == "adapter_model.safetensors"


def test_sizes_are_bounded(tmp_path) -> None:
    error = refused(write(tmp_path), max_bytes=100)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    rule = "must have at most 100 bytes, as lora_host_bytes (--lora-host-bytes) says"
    assert str(error) == f"adapter_model.safetensors {rule}, got {size}"
    (tmp_path / "adapter_config.json").write_text(" " * (MAX_CONFIG_BYTES + 1))
    assert refused(tmp_path).field == "adapter_config.json"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": ' + "[" * 5000, "NaN"])
def test_broken_configs_are_refused(tmp_path, text) -> None:
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text(text)
    assert refused(tmp_path).field in ("adapter_config.json", "peft_type")


def test_missing_files(tmp_path) -> None:
    assert refused(tmp_path / "nothing").rule == "be an existing folder"
    assert refused(None).rule == "be the path of a folder"
    assert refused(tmp_path).rule == "hold adapter_config.json"
    with pytest.raises(FileNotFoundError):
        file_facts(tmp_path)


def test_facts_change_with_the_files(tmp_path) -> None:
    before = file_facts(write(tmp_path))
    assert file_facts(tmp_path) == before
    write(tmp_path, tensors(5), r=5)
    assert file_facts(tmp_path) != before


def test_parameters_are_told_from_linear_layers(tmp_path) -> None:
    experts = "base_model.model.model.layers.0.mlp.experts"
    given = tensors() | tensors(12, experts) | tensors(24, f"{experts}.base_layer")
    config = {"target_parameters": ["gate_up_proj", "down_proj"], "rank_pattern": {r".*\.gate_up_proj": 8}}
    adapter = read_adapter(write(tmp_path, given, **config))
    assert list(adapter.modules) == ["model.layers.0.self_attn.q_proj"]
    [pairs] = adapter.parameters.values()
    assert sorted(len(a) for a, _ in pairs) == [12, 24]
    assert adapter.config.rank_of("model.layers.0.mlp.experts.gate_up_proj") == 8
    assert adapter.config.scale_of("model.layers.0.mlp.experts.down_proj") == 2.0
    assert refused(write(tmp_path, given | {f"{experts}.lora_B.bias": torch.ones(8)}, **config)).field.endswith("experts")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    largest = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)
    assert is_finite(-largest.t())
    assert is_finite(largest[:0])
    assert not is_finite(torch.cat([largest, largest.new_full((1, 5), torch.nan)]))
    for infinity in (torch.inf, -torch.inf):
        assert not is_finite(torch.cat([largest, largest.new_full((1, 5), infinity)]))


@pytest.mark.parametrize("spaces", [0, 1, 2, 5])
def test_tensors_of_all_dtypes_are_read_from_any_address(tmp_path, spaces: int) -> None:
    """A header of odd length, which other writers leave, puts tensors where PyTorch has no view of their dtype."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    given = {}
    for layer, dtype in enumerate(dtypes):
        both = tensors(module=f"base_model.model.model.layers.{layer}.self_attn.q_proj").values()
        names = (f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{x}.weight" for x in "AB")
        given |= {name: torch.randn(x.shape).to(dtype) for name, x in zip(names, both, strict=True)}
    path = write(tmp_path, given) / "adapter_model.safetensors"
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = whole[8:end].rstrip() + b" " * spaces
    path.write_bytes(struct.pack("<Q", len(header)) + header + whole[end:])
    modules = read_adapter(tmp_path).modules
    assert len(modules) == 3
    for name, low in modules.items():
        assert torch.equal(low.a, given[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(low.b, given[f"base_model.model.{name}.lora_B.weight"])
        assert low.a.dtype == given[f"base_model.model.{name}.lora_A.weight"].dtype


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch) -> None:
    path = write(tmp_path) / "adapter_model.safetensors"
    opened = format_module.safe_open

    @contextmanager
    def open_and_shrink(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with opened(*args, **kwargs) as file:
            yield file
        path.write_bytes(path.read_bytes()[:16])

    monkeypatch.setattr(format_module, "safe_open", open_and_shrink)
    assert "not change" in refused(tmp_path).rule
