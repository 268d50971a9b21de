"""Models with quantised linear layers: what is loaded, what is refused, and that no full-precision copy is made."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import quantise
import torch
from every_type import tiny_model
from hf_families import BY_NAME
from quantised_copies import FORMATS, change_config, copy_of, dequantised, layers, load
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig
from typer.testing import CliRunner

from fa_serve.__main__ import app
from fa_serve.demo import model_path
from fa_serve.hf.info import describe
from fa_serve.hf.surgery.quantised import linear as quantized_linear
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear, describe_weights
from fa_serve.ops.products.quantised.weight import FLOAT8, quantize_float8
from fa_serve.spec import ParameterError

LINEARS = 7 * 2


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with two of its layers."""
    folder = tmp_path_factory.mktemp("original")
    shutil.copytree(model_path(), folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(model_path(), num_hidden_layers=2, dtype="auto").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def copies(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives a copy of the original in a format."""
    folder = tmp_path_factory.mktemp("copies")
    return lambda name: copy_of(original, name, folder)


@pytest.fixture
def folder(copies: Callable[[str], Path], tmp_path: Path):
    """Makes a copy that a test may spoil."""

    def make(name: str) -> Path:
        return shutil.copytree(copies(name), tmp_path / name)

    return make


@torch.no_grad()
@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_is_what_its_tensors_say(original: Path, copies: Callable[[str], Path], name: str) -> None:
    """The matrices are near those of the original, and logits are those of the matrices."""
    path = copies(name)
    model = load(path)
    found = layers(model)
    assert len(found) == LINEARS
    plain = AutoModelForCausalLM.from_pretrained(original, dtype="auto")
    for layer, matrix in found.items():
        expected = plain.get_submodule(layer).weight
        error = (matrix.float() - expected.float()).norm() / expected.float().norm()
        assert float(error) < (0.04 if name.startswith("fp8") else 0.15)
    ids = torch.arange(3, 40)[None]
    quantised = model(ids).logits
    assert torch.equal(quantised, dequantised(model)(ids).logits)


@pytest.mark.parametrize("name", ["awq", "fp8"])
def test_nothing_but_the_checkpoints_bytes_is_kept(copies: Callable[[str], Path], name: str) -> None:
    """Weights take the bytes of the format, and no layer keeps the tensors that it was made of."""
    model = load(copies(name))
    kept = sum(m.weight.data.nbytes for m in model.modules() if isinstance(m, QuantizedLinear))
    numbers = sum(m.weight.shape.numel() for m in model.modules() if isinstance(m, QuantizedLinear))
    assert kept <= numbers * (1 if name == "fp8" else 0.75), "320 columns take the words of 512"
    assert not [p for p, _ in model.named_parameters() if p.endswith(("qweight", "qzeros", "scales", "weight_scale"))]


def test_floats_are_rounded_while_they_are_read(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is rounded once, from the dtype of the checkpoint. The head stays as it is."""
    seen = []
    rounded = quantized_linear.quantize_float8
    monkeypatch.setattr(quantized_linear, "quantize_float8", lambda x: seen.append(x.dtype) or rounded(x))
    model = load(original, quantization="fp8")
    assert seen == [torch.bfloat16] * LINEARS
    plain = AutoModelForCausalLM.from_pretrained(original, dtype="auto")
    for layer, matrix in layers(model).items():
        expected = quantize_float8(plain.get_submodule(layer).weight.detach())
        assert model.get_submodule(layer).weight.data.dtype == FLOAT8
        assert torch.equal(matrix, expected.dequantize(torch.bfloat16))
    assert type(model.lm_head) is torch.nn.Linear


def test_biases_stay_and_a_text_models_config_is_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 96}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes))
    torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    loaded = load(copy_of(tmp_path / "model", "gptq", tmp_path, group_size=32))
    assert torch.equal(loaded.model.layers[0].self_attn.q_proj.bias, model.model.layers[0].self_attn.q_proj.bias)
    assert loaded.model.layers[0].self_attn.o_proj.bias is None


def spoil(path: Path, change) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


NAME = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "tensor"), [("awq", "qweight"), ("gptq", "g_idx"), ("pack-quantized", "weight_scale"), ("fp8", "weight")]
)
def test_a_missing_tensor_is_named(folder, name: str, tensor: str) -> None:
    path = folder(name)
    spoil(path, lambda tensors: tensors.pop(f"{NAME}.{tensor}"))
    with pytest.raises(ParameterError, match=rf"model must have the tensor {NAME}.{tensor} in its files, got '1 missing"):
        load(path)


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("awq", "scales", r"\[4, 320\], got \[3, 320\]"),
        ("gptq", "qweight", r"\[32, 320\], got \[31, 320\]"),
        ("pack-quantized", "weight_packed", r"\[320, 32\], got \[319, 32\]"),
        ("fp8-block", "weight_scale_inv", r"\[3, 2\], got \[2, 2\]"),
    ],
)
def test_a_tensor_of_another_shape_is_named(folder, name: str, tensor: str, shape: str) -> None:
    path = folder(name)
    spoil(path, lambda tensors: tensors.update({f"{NAME}.{tensor}": tensors[f"{NAME}.{tensor}"][:-1].contiguous()}))
    with pytest.raises(ParameterError, match=f"{NAME}.{tensor} must have the shape {shape}") as error:
        load(path)
    assert error.value.field == f"{NAME}.{tensor}"


def test_a_tensor_of_another_kind_is_named(folder) -> None:
    path = folder("fp8")
    spoil(path, lambda tensors: tensors.update({f"{NAME}.weight": tensors[f"{NAME}.weight"].view(torch.int8)}))
    with pytest.raises(ParameterError, match=f"{NAME}.weight must have the dtype float8_e4m3fn, got 'int8'"):
        load(path)


@torch.no_grad()
@pytest.mark.parametrize("name", ["awq", "fp8-block"])
def test_tensors_of_other_names_have_the_models_dtype(folder, name: str) -> None:
    """transformers leaves the dtypes of tensors that it renames: the names of old checkpoints lack "model."."""
    path = folder(name)
    expected = load(path, dtype="float32")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    spoil(path, rename)
    model = load(path, dtype="float32")
    assert {x.dtype for x in [*model.parameters(), *model.buffers()]} == {torch.float32}
    ids = torch.arange(3, 40)[None]
    assert torch.equal(model(ids).logits, expected(ids).logits)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.scales.dtype == torch.float32
    assert weight.data.dtype == expected.model.layers[0].mlp.up_proj.weight.data.dtype


def test_what_a_model_keeps_in_float32_stays(tmp_path: Path) -> None:
    """The bias of a router, in a checkpoint whose other tensors are bfloat16."""
    model = BY_NAME["deepseek-v3"].build().bfloat16()
    model._keep_in_fp32_modules_strict = ["e_score_correction_bias"]
    made = quantized_linear.Quantizer(quantized_linear.SourceConfig({}))
    made.dtype = torch.bfloat16
    made.shapes = {}
    made.dtypes = dict.fromkeys(model.state_dict(), torch.bfloat16)
    made._process_model_after_weight_loading(model)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    precise = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert precise == {name for name in dtypes if "e_score_correction_bias" in name} != set()


@pytest.mark.parametrize(
    ("convert", "config"),
    [
        (quantise.awq, {"quant_method": "awq", "modules_to_not_convert": ["visual"]}),
        (quantise.gptq, {"quant_method": "gptq", "desc_act": False}),
    ],
    ids=["awq", "gptq"],
)
def test_towers_are_left_out(tmp_path: Path, convert, config: dict[str, object]) -> None:
    """Qwen2.5-VL: AWQ has a list with the names of the files, where the tower is not in `model`. GPTQ has no list."""
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    is_quantised = re.compile(r"model\.layers\..*_proj\.weight").fullmatch

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if is_quantised(key)]:
            parts = convert(tensors.pop(key), 32)
            tensors.update({key.replace("weight", part): tensor for part, tensor in parts.items()})

    spoil(tmp_path, change)
    file = tmp_path / "config.json"
    config = {"bits": 4, "group_size": 32} | config
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    found = layers(load(tmp_path))
    assert len(found) == LINEARS
    assert all(name.startswith("model.language_model.layers.") for name in found)


def test_content_that_cannot_be_is_refused_with_the_layer(folder) -> None:
    path = folder("gptq")
    spoil(path, lambda tensors: tensors[f"{NAME}.g_idx"].zero_())
    with pytest.raises(ParameterError, match=f"{NAME}.g_idx must put 64 columns into each group"):
        load(path)


def test_a_truncated_file_is_named(folder) -> None:
    path = folder("awq")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(OSError, match=r"the model's file .*model.safetensors cannot be read"):
        load(path)


def test_weights_that_the_config_does_not_name_are_missed(folder) -> None:
    path = folder("awq")
    change_config(path, modules_to_not_convert=["up_proj"])
    with pytest.raises(ParameterError, match=r"model must have the tensor .*up_proj.weight in its files"):
        load(path)


def test_a_config_that_names_no_layer_is_refused(folder) -> None:
    path = folder("awq")
    change_config(path, modules_to_not_convert=["model"])
    with pytest.raises(ParameterError, match=r"model must have layers that its quantization_config \(awq\) names"):
        load(path)


def test_unknown_options_and_two_quantisations_are_refused_before_weights_are_read(folder) -> None:
    path = folder("awq")
    (path / "model.safetensors").unlink()
    with pytest.raises(ParameterError, match=r"quantization must be None for a checkpoint .* already \(awq\), got 'fp8'"):
        load(path, quantization="fp8")
    change_config(path, bits=8)
    with pytest.raises(ParameterError, match=r"quantization_config.bits must be 4, got 8"):
        load(path)


def test_quantised_experts_are_refused_by_the_header(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes))
    model.save_pretrained(tmp_path)
    key = "model.layers.0.mlp.experts.0.up_proj.qweight"
    spoil(tmp_path, lambda tensors: tensors.update({key: torch.zeros(8, 4, dtype=torch.int32)}))
    file = tmp_path / "config.json"
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": [r"model.layers.\d+.mlp"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": awq}))
    with pytest.raises(
        ParameterError, match=f"model must have no experts with quantised weights in this layout, but its files have {key}"
    ):
        load(tmp_path)


def test_layers_of_other_names_are_rounded_too(tmp_path: Path) -> None:
    """GPT-NeoX, whose layers have neither `self_attn` nor `q_proj`, and which is not fused."""
    model = BY_NAME["gpt-neox"].build()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, quantization="fp8")
    names = {name.split(".")[-1] for name in layers(loaded)}
    assert names == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        rounded = loaded(ids).logits
        assert torch.equal(rounded, dequantised(loaded)(ids).logits)
        assert 0 < float((rounded - model(ids).logits).abs().max()) < 0.1 * float(rounded.abs().max())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which the model's module calls
@torch.no_grad()
def test_a_model_that_draws_numbers_for_weights_of_its_layers_is_loaded(tmp_path: Path) -> None:
    """GPTBigCode (StarCoder), whose `_init_weights` asks each block for the weight of `c_proj`."""
    tiny_model("gpt_bigcode").save_pretrained(tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.endswith(("c_fc.weight", "c_proj.weight"))]:
            parts = quantise.awq(tensors.pop(key), 32)
            tensors.update({key.removesuffix("weight") + part: tensor for part, tensor in parts.items()})

    spoil(tmp_path, change)
    file = tmp_path / "config.json"
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["c_attn"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    model = load(tmp_path, dtype="float32")
    assert len(layers(model)) == 3 * model.config.num_hidden_layers
    ids = torch.arange(3, 20)[None]
    expected = model(ids).logits
    assert torch.allclose(expected, dequantised(model)(ids).logits, atol=1e-5)


@torch.no_grad()
def test_routers_are_not_rounded(tmp_path: Path) -> None:
    """HunYuan's code asks for the dtype of its router, which a rounded weight does not have."""
    tiny_model("hunyuan_v1_moe").save_pretrained(tmp_path)
    model = load(tmp_path, quantization="fp8")
    assert type(model.model.layers[0].mlp.gate.wg) is torch.nn.Linear
    assert isinstance(model.model.layers[0].mlp.shared_mlp.up_proj, QuantizedLinear)
    assert bool(model(torch.arange(3, 20)[None]).logits.isfinite().all())


def test_info_says_what_weights_are_and_who_computes_them(copies: Callable[[str], Path]) -> None:
    described = describe(str(copies("awq")), "cuda", 90)
    assert described.engine is None
    int4, plain = described.weights.items()
    assert int4[0] == (
        "4 bits in groups of 64 with zero points (AWQ), "
        "computed by gemv for 1 token, unpack_wgmma for 2 to 128, dequantise for more"
    )
    assert int4[1].startswith("model.layers.*.self_attn.q_proj (2), model.layers.*.self_attn.k_proj (2), ")
    assert plain == ("bfloat16", "lm_head")
    assert describe(str(model_path()), "cpu").weights == {"bfloat16": "all layers"}


def test_info_says_what_is_refused_and_what_is_left_to_transformers(folder) -> None:
    path = folder("awq")
    change_config(path, bits=8)
    described = describe(str(path))
    assert described.engine == described.weights == "quantization_config.bits must be 4, got 8"
    done = CliRunner().invoke(app, ["info", str(path)])
    assert done.exit_code == 1
    assert "weights: refused: quantization_config.bits must be 4, got 8\n" in done.stdout
    config = AutoConfig.from_pretrained(model_path())
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (kept,) = describe_weights(config, "cuda", 90)
    assert kept == "bitsandbytes, computed by transformers' own modules in layers that are not fused"


def test_the_copies_are_real_checkpoints(copies: Callable[[str], Path]) -> None:
    """The names and dtypes that the tools write."""
    wanted = {
        "awq": {"qweight": "I32", "qzeros": "I32", "scales": "BF16"},
        "gptq-act-order": {"qweight": "I32", "qzeros": "I32", "scales": "BF16", "g_idx": "I32"},
        "pack-quantized": {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
        "fp8-static": {"weight": "F8_E4M3", "weight_scale": "F32", "input_scale": "F32"},
    }
    for name, tensors in wanted.items():
        with safe_open(copies(name) / "model.safetensors", framework="pt") as file:
            keys = [key for key in file.keys() if key.startswith(f"{NAME}.")]  # noqa: SIM118
            assert {key.rpartition(".")[2]: file.get_slice(key).get_dtype() for key in keys} == tensors
