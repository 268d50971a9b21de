"""Mixtures with quantised experts: what is loaded, what is refused, and that numbers are those of the checkpoint."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import quantised_experts
import torch
from dequantisers import of_autoawq, of_autogptq
from quantised_copies import change_config, load
from quantised_experts import GPT_OSS, QWEN, WRITERS, dequantised, matrices, original
from rank_threads import run_ranks
from safetensors.torch import load_file, save_file
from sampled_cases import each_nth
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fa_serve.hf import plan_division
from fa_serve.hf.adapter.paged import OneSequence, paged_forward
from fa_serve.hf.info import RankShare, describe
from fa_serve.hf.surgery.divide.weights import divide_model
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.ops.products.quantised.weight import quantize_float8
from fa_serve.spec import ParameterError, UnsupportedModelError

KINDS = {
    "mxfp4": "4-bit floats in groups of 32 (mxfp4)",
    "fp8-block": "float8 with a scale for each 32 x 32",
    "fp8-channel": "float8 with a scale for each row",
    "w4a16": "4 bits in groups of 32 (compressed-tensors)",
    "awq": "4 bits in groups of 32 with zero points (AWQ)",
    "gptq": "4 bits in groups of 32 (GPTQ)",
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for name, write in WRITERS.items():
        write(folder / name)
    return folder


def experts_of(model: torch.nn.Module) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@torch.no_grad()
@pytest.mark.parametrize("name", WRITERS)
def test_a_forward_is_that_of_the_dequantised_model(checkpoints: Path, name: str) -> None:
    model = load(checkpoints / name, dtype="float32")
    found = experts_of(model)
    assert [module.description for module in found] == [KINDS[name]] * model.config.num_hidden_layers
    ids = torch.arange(3, 20)[None]
    expected = dequantised(model)(ids).logits
    assert float((model(ids).logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_mxfp4_has_the_bits_of_transformers(checkpoints: Path) -> None:
    path = checkpoints / "mxfp4"
    for layer, module in enumerate(experts_of(load(path))):
        for weight, expected in zip((module.weights.gate_up, module.weights.down), matrices(path, layer), strict=True):
            found = weight.dequantize(torch.bfloat16).view(expected.shape)
            assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_experts_have_the_bits_of_their_tools(checkpoints: Path, name: str) -> None:
    path = checkpoints / name
    tensors = load_file(path / "model.safetensors")

    def of_tool(stem: str) -> Tensor:
        own = {
            part: tensors[f"{stem}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx") if f"{stem}.{part}" in tensors
        }
        return (of_autoawq(own, 32) if name == "awq" else of_autogptq(own, subtracted=True)).t()

    for layer, module in enumerate(experts_of(load(path, dtype="bfloat16"))):
        for weight, kinds in ((module.weights.gate_up, ("gate", "up")), (module.weights.down, ("down",))):
            stems = [f"model.layers.{layer}.mlp.experts.{i}.{kind}_proj" for i in range(4) for kind in kinds]
            expected = torch.cat([of_tool(stem) for stem in stems])
            assert torch.equal(weight.dequantize(torch.bfloat16), expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "bound"), [("fp8-block", 0.04), ("fp8-channel", 0.04), ("w4a16", 0.15), ("awq", 0.15), ("gptq", 0.15)]
)
def test_matrices_are_near_those_that_were_quantised(checkpoints: Path, name: str, bound: float) -> None:
    """Gates and up values of each expert in their places, with their scales, in the last block of 16 rows too."""
    plain = original(QWEN)
    for layer, module in enumerate(experts_of(load(checkpoints / name))):
        own = plain.model.layers[layer].mlp.experts
        for weight, expected in ((module.weights.gate_up, own.gate_up_proj), (module.weights.down, own.down_proj)):
            found = weight.dequantize(torch.float32).view(expected.shape)
            error = (found - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
            assert float(error.max()) < 1.5 * bound


def test_nothing_but_the_checkpoints_bytes_is_kept(checkpoints: Path) -> None:
    """4 bits a number and a byte of scale for 32, with columns filled up to 256; biases are the only parameters."""
    module = experts_of(load(checkpoints / "mxfp4"))[0]
    assert {name for name, _ in module.named_parameters()} == {"gate_up_proj_bias", "down_proj_bias"}
    assert module.weights.sizes == (4, 64, 32)
    for weight, rows in ((module.weights.gate_up, 4 * 64), (module.weights.down, 4 * 64)):
        assert weight.data.nbytes == rows * 128
        assert weight.scales.nbytes == rows * weight.width // 32


@pytest.fixture
def spoilt(checkpoints: Path, tmp_path: Path):
    """Makes a copy of a checkpoint whose tensors are changed."""

    def make(name: str, change=lambda tensors: None) -> Path:
        path = shutil.copytree(checkpoints / name, tmp_path / name, dirs_exist_ok=True)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    return make


LAYER = "model.layers.1.mlp.experts"


@pytest.mark.parametrize("name", WRITERS)
def test_a_spoilt_checkpoint_of_each_format_is_refused_in_one_sentence(spoilt, name: str) -> None:
    """The sentence names the file, the tensor or the option. `fa-serve serve` prints it and ends with code 1."""
    stem = "gate_up_proj_" if name == "mxfp4" else "2.up_proj."
    last = {"mxfp4": "scales", "fp8-block": "weight_scale_inv", "w4a16": "weight_scale", "awq": "qzeros", "gptq": "qzeros"}
    tensor = f"{LAYER}.{stem}{last.get(name, 'weight')}"
    linear = "model.layers.0.self_attn.o_proj.bias" if name == "mxfp4" else "model.layers.0.self_attn.q_norm.weight"

    def shortened(tensors: dict[str, Tensor], name: str) -> None:
        tensors[name] = tensors[name][1:].clone()

    changes = {
        f"model must have the tensor {tensor} in its files": lambda tensors: tensors.pop(tensor),
        f"{tensor} must have the ": lambda tensors: shortened(tensors, tensor),
        f"{linear} must have the shape ": lambda tensors: shortened(tensors, linear),
    }
    for message, change in changes.items():
        with pytest.raises(ParameterError) as error:
            load(spoilt(name, change))
        assert str(error.value).startswith(message)
        assert "\n" not in str(error.value)
    path = spoilt(name)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OSError, match=f"the model's file {file} cannot be read: [^\n]*bytes\\)$"):
        load(path)
    change_config(path, quant_method="other")
    with pytest.raises(ParameterError, match=r"quantization_config.quant_method must be one of awq, .*, got 'other'"):
        load(path)


def test_a_scale_that_is_no_number_is_named(spoilt) -> None:
    path = spoilt("mxfp4", lambda tensors: tensors[f"{LAYER}.down_proj_scales"].fill_(255))
    with pytest.raises(ParameterError, match=f"{LAYER}.down_proj_scales must be at most 254, because 255 stands for NaN"):
        load(path)


@pytest.mark.parametrize("bias", ["gate_up_proj_bias", "down_proj_bias"])
def test_a_bias_of_another_shape_is_named(spoilt, bias: str) -> None:
    path = spoilt("mxfp4", lambda tensors: tensors.update({f"{LAYER}.{bias}": torch.zeros(3, 64)}))
    with pytest.raises(ParameterError, match=rf"{LAYER}.{bias} must have the shape \[4, 64\], got \[3, 64\]"):
        load(path)


def test_options_that_are_not_known_are_refused(spoilt) -> None:
    path = spoilt("mxfp4")
    change_config(path, dequantize=True)
    with pytest.raises(ParameterError, match=r"quantization_config.dequantize must be None or False, got True"):
        load(path)


def test_act_order_is_refused_by_the_config_and_by_the_files(spoilt) -> None:
    """Each expert may have another order of columns, and the kernels know one order for all."""

    def swapped(tensors: dict[str, Tensor]) -> None:
        order = tensors[f"{LAYER}.2.up_proj.g_idx"]
        order[[0, 40]] = order[[40, 0]]

    path = spoilt("gptq", swapped)
    with pytest.raises(ParameterError, match=rf"{LAYER}.gate_up_proj_g_idx must assign columns to groups in ascending order"):
        load(path)
    change_config(path, desc_act=True)
    rule = r"quantization_config must have no act-order for the experts of model.layers.0.mlp.experts, got '4 bits in"
    with pytest.raises(ParameterError, match=rule):
        load(path)
    assert str(describe(str(path)).engine).startswith("quantization_config must have no act-order")


def test_static_scales_of_activations_are_left_out(spoilt, checkpoints: Path) -> None:
    def scaled(tensors: dict[str, Tensor]) -> None:
        names = [name for name in tensors if name.endswith("_scale")]
        tensors.update({name.replace("weight_scale", "input_scale"): torch.tensor([0.1]) for name in names})

    path = spoilt("fp8-channel", scaled)
    groups = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}
    change_config(path, config_groups=groups)
    for found, expected in zip(experts_of(load(path)), experts_of(load(checkpoints / "fp8-channel")), strict=True):
        assert found.weights.down.input_scale is None
        assert torch.equal(found.weights.down.dequantize(torch.float32), expected.weights.down.dequantize(torch.float32))


@torch.no_grad()
def test_a_scale_of_a_whole_matrix_may_have_no_axes(spoilt) -> None:
    """As transformers' own float8 writes it. compressed-tensors writes one number in a list."""

    def written(shape: list[int]) -> Tensor:
        def change(tensors: dict[str, Tensor]) -> None:
            for key in [key for key in tensors if key.endswith("weight_scale")]:
                weight = key.removesuffix("_scale")
                scale = tensors[key].float().amax()
                tensors[weight] = (tensors[weight].float() * tensors[key].float() / scale).to(torch.float8_e4m3fn)
                tensors[key] = scale.reshape(shape).clone()

        path = spoilt("fp8-channel", change)
        group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
        change_config(path, config_groups={"group_0": group})
        model = load(path, dtype="float32")
        assert experts_of(model)[0].description == "float8 with a scale for the matrix"
        return model(torch.arange(3, 20)[None]).logits

    assert torch.equal(written([]), written([1]))


def test_products_of_one_layer_have_one_format(spoilt) -> None:
    path = spoilt("fp8-channel")
    change_config(path, ignore=["lm_head", r"re:.*experts.*down_proj$"])
    with pytest.raises(
        ParameterError, match=r"quantization_config must name one format for all products of model.layers.0.mlp"
    ):
        load(path)


def test_experts_that_the_config_leaves_out_stay_floats(spoilt) -> None:
    """Their own tensors are then the floats that a module of transformers takes."""

    def change(tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensor = tensors.pop(name)
            if name.endswith("weight"):
                tensors[name] = tensor.float()

    path = spoilt("fp8-channel", change)
    change_config(path, ignore=["lm_head", r"re:.*mlp.experts.*"])
    model = load(path, dtype="float32")
    assert not experts_of(model)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float32


def test_experts_that_compute_something_else_are_refused(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Qwen3MoeExperts.forward

    def other(self: Any, *args: Any) -> Tensor:
        return 1.01 * forward.__wrapped__(self, *args)

    other.__wrapped__ = other
    monkeypatch.setattr(Qwen3MoeExperts, "forward", other)
    with pytest.raises(UnsupportedModelError, match="the quantised experts of Qwen3MoeExperts cannot be loaded"):
        load(checkpoints / "fp8-block")


def test_mxfp4_experts_of_a_model_without_a_plan_are_not_divided(checkpoints: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"mlp.experts has quantised experts \(4-bit .*\), which cannot be divided"):
        plan_division(load(checkpoints / "mxfp4"), 2)
    described = describe(str(checkpoints / "mxfp4"), "cuda", 90, tensor_parallel=2)
    assert "has quantised experts" in str(described.share)


@torch.no_grad()
@pytest.mark.parametrize("name", each_nth(2, ["fp8-block", "fp8-channel", "awq", "w4a16", "gptq"]))
def test_experts_on_two_ranks(checkpoints: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank keeps half of the width of every expert, if the columns of a group stay together."""
    if name != "fp8-channel":
        with pytest.raises(
            UnsupportedModelError, match=r"the 48 columns of .*down_proj .* divided by 2: 32 columns share a scale"
        ):
            plan_division(load(checkpoints / name), 2)
    monkeypatch.setattr(quantised_experts, "QWEN", Qwen3MoeConfig(**QWEN.to_dict() | {"moe_intermediate_size": 64}))
    WRITERS[name](tmp_path)
    model = load(tmp_path, dtype="float32")
    ids = torch.arange(3, 20)
    positions = torch.arange(17)
    expected = paged_forward(model, ids, positions, OneSequence(), positions)
    whole = experts_of(model)[0].width
    division = plan_division(model, 2)

    def work(rank: int, all_reduce: Any) -> tuple[Tensor, int]:
        own = copy.deepcopy(model)
        divide_model(own, division, rank, all_reduce, torch.device("cpu"))
        return paged_forward(own, ids, positions, OneSequence(), positions), experts_of(own)[0].weights.sizes.width

    for actual, width in run_ranks(2, work):
        assert width == whole // 2
        assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    share = describe(str(tmp_path), tensor_parallel=2).share
    assert isinstance(share, RankShare)
    assert share.divided + share.whole < 0.8 * share.total


MANY = "expert_rows for 1 token, expert_wgmma for 2 to 1024, dequantise_experts for more"


@pytest.mark.parametrize(("device", "who"), [("cuda", MANY), ("cpu", "torch")])
def test_info_says_what_experts_are_and_who_computes_them(checkpoints: Path, device: str, who: str) -> None:
    described = describe(str(checkpoints / "mxfp4"), device, 90)
    assert described.engine is None
    assert described.weights[f"{KINDS['mxfp4']}, computed by {who}"] == "model.layers.*.mlp.experts (2)"


@pytest.mark.parametrize("config", [QWEN, GPT_OSS], ids=["qwen3-moe", "gpt-oss"])
@torch.no_grad()
def test_experts_of_floats_are_rounded_while_they_are_read(config: PreTrainedConfig, tmp_path: Path) -> None:
    """Each row of each expert gets a scale, also where a checkpoint has transposed weights. Routers stay as they are."""
    plain = original(config)
    plain.save_pretrained(tmp_path)
    model = load(tmp_path, quantization="fp8", dtype="bfloat16")
    first = experts_of(model)[0]
    own = plain.model.layers[0].mlp.experts
    for weight, matrices_ in ((first.weights.gate_up, own.gate_up_proj), (first.weights.down, own.down_proj)):
        rows = (matrices_.transpose(1, 2) if own.is_transposed else matrices_).flatten(0, 1)
        assert torch.equal(weight.dequantize(torch.bfloat16), quantize_float8(rows).dequantize(torch.bfloat16))
    router = model.model.layers[0].mlp.router if own.is_transposed else model.model.layers[0].mlp.gate
    assert router.weight.dtype == torch.bfloat16
    wide = load(tmp_path, quantization="fp8", dtype="float32")
    ids = torch.arange(3, 20)[None]
    expected = dequantised(wide)(ids).logits
    assert float((wide(ids).logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_experts_that_cannot_be_rounded_keep_their_floats(tmp_path: Path, monkeypatch, caplog) -> None:
    AutoModelForCausalLM.from_config(QWEN, dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(
        Qwen3MoeExperts, "_apply_gate", lambda self, x: torch.relu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1]
    )
    model = load(tmp_path, quantization="fp8")
    assert not experts_of(model)
    assert "model.layers.0.mlp.experts is not quantised: Qwen3MoeExperts gates its experts in a way" in caplog.text
