"""What a quantization_config says, and the options that are refused with their name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from fa_serve.hf.weights.formats import Awq, Float8, Gptq, Mxfp4, PackQuantized
from fa_serve.hf.weights.quantization_plan import is_ours, read_config
from fa_serve.spec import ParameterError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": None}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
UP = "model.layers.3.mlp.up_proj"
LINEAR = nn.Linear(1, 1)


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    top = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed", "ignore": ["lm_head"]}
    return top | {"config_groups": {"group_0": group}} | changes


def scheme(config: dict[str, Any], name: str = UP) -> Any:
    return read_config(config).scheme_of(name, LINEAR)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ, Awq(128)),
        (AWQ | {"group_size": -1}, Awq(-1)),
        (AWQ | {"version": "GEMM"}, Awq(128)),
        (GPTQ, Gptq(128, True, True)),
        (GPTQ | {"group_size": -1}, Gptq(-1, True)),
        (GPTQ | {"desc_act": False}, Gptq(128, True)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, Gptq(128, False, True)),
        (GPTQ | {"format": "gptq_v2"}, Gptq(128, False, True)),
        (FP8, Float8("weight_scale_inv", (128, 128))),
        (
            FP8 | {"weight_block_size": None, "activation_scheme": "static"},
            Float8("weight_scale_inv", (0, 0), "activation_scale"),
        ),
        (compressed("pack-quantized", INT4), PackQuantized(128, True, False)),
        (compressed("pack-quantized", INT4 | {"symmetric": False}), PackQuantized(128, False, False)),
        (compressed("pack-quantized", INT4 | {"actorder": "group"}), PackQuantized(128, True, True)),
        (compressed("pack-quantized", INT4 | {"actorder": "weight"}), PackQuantized(128, True, False)),
        (compressed("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}), PackQuantized(-1, True, False)),
        (compressed("float-quantized", FLOAT8), Float8("weight_scale", (1, 0))),
        (compressed("float-quantized", FLOAT8, {"dynamic": True, "strategy": "token"}), Float8("weight_scale", (1, 0))),
        (
            compressed("naive-quantized", FLOAT8 | {"strategy": "tensor"}, {"dynamic": False, "strategy": "tensor"}),
            Float8("weight_scale", (0, 0), "input_scale"),
        ),
        (
            compressed("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128]}),
            Float8("weight_scale", (128, 128)),
        ),
    ],
)
def test_what_is_read(config: dict[str, Any], expected: Any) -> None:
    assert is_ours(config)
    assert scheme(config) == expected
    assert scheme(config, "lm_head") is None


@pytest.mark.parametrize(
    ("config", "name", "quantised"),
    [
        (AWQ | {"modules_to_not_convert": ["up_proj"]}, UP, False),
        (AWQ | {"modules_to_not_convert": ["model.layers.3"]}, UP, False),
        (AWQ | {"modules_to_not_convert": ["model.layers.0"]}, UP, True),
        (FP8 | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}, UP, True),
        (GPTQ | {"lm_head": True}, "lm_head", True),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]}, UP, True),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, UP, False),
        (compressed("pack-quantized", INT4, ignore=["re:.*up_proj"]), UP, False),
        (compressed("pack-quantized", INT4, ignore=["re:up_proj"]), UP, True),
        (compressed("pack-quantized", INT4, ignore=[UP]), UP, False),
    ],
)
def test_which_layers_are_quantised(config: dict[str, Any], name: str, quantised: bool) -> None:
    assert (scheme(config, name) is not None) == quantised


def test_a_config_may_have_the_names_of_the_files() -> None:
    names = {UP: "block.3.up", "model.layers.3.mlp.experts.gate_up_proj": "block.3.experts.0.w1"}
    for ignore in (["re:block.*"], [UP, "block.3.experts.0.w1"], ["block.3.up", "model.layers.3.mlp.experts.0.gate_proj"]):
        plan = read_config(compressed("pack-quantized", INT4, ignore=ignore)).with_names(names)
        assert plan.scheme_of(UP, LINEAR) is None
        assert plan.scheme_of("model.layers.3.mlp.down_proj", LINEAR) is not None
        with pytest.raises(ParameterError, match="name one format for all products of"):
            plan.scheme_of_experts("model.layers.3.mlp.experts")
    inside = GPTQ | {"desc_act": False, "modules_in_block_to_quantize": [["experts.0.w1"], ["experts.0.w2"]]}
    names |= {"model.layers.3.mlp.experts.down_proj": "block.3.experts.0.w2"}
    assert read_config(inside).with_names(names).scheme_of_experts("model.layers.3.mlp.experts") is not None


@pytest.mark.parametrize("target", ["re:.*up_proj", UP])
def test_a_name_counts_before_a_pattern_and_a_pattern_before_a_class(target: str) -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "b": {"targets": ["re:.*mlp.*" if target == UP else "Linear"], "weights": INT4, "format": "pack-quantized"},
        "c": {"targets": [target], "weights": FLOAT8, "format": "float-quantized"},
    }
    config = compressed("mixed-precision", {}, config_groups=groups)
    assert scheme(config) == Float8("weight_scale", (1, 0))
    assert scheme(config, "model.layers.3.mlp.down_proj") == PackQuantized(128, True, False)


def test_groups_choose_their_layers() -> None:
    groups = {
        "a": {"targets": ["re:.*self_attn.*"], "weights": FLOAT8, "format": "float-quantized"},
        "b": {"targets": ["re:.*mlp.*"], "weights": INT4, "format": "pack-quantized"},
    }
    config = compressed("mixed-precision", {}, config_groups=groups)
    assert scheme(config) == PackQuantized(128, True, False)
    assert scheme(config, "model.layers.3.self_attn.q_proj") == Float8("weight_scale", (1, 0))
    assert scheme(config, "model.other") is None


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (AWQ | {"bits": 3}, "bits"),
        (AWQ | {"version": "gemv"}, "version"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"group_size": 24}, "group_size"),
        (GPTQ | {"bits": 8}, "bits"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (GPTQ | {"format": "marlin"}, "checkpoint_format"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype"),
        (GPTQ | {"group_size": None}, "group_size"),
        (FP8 | {"activation_scheme": "sometimes"}, "activation_scheme"),
        (FP8 | {"weight_block_size": [128, 100]}, "weight_block_size"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt"),
        (compressed("marlin-24", INT4), "config_groups.group_0.format"),
        (compressed("int-quantized", INT4), "config_groups.group_0.format"),
        (compressed("pack-quantized", INT4 | {"num_bits": 8}), "config_groups.group_0.weights.num_bits"),
        (compressed("pack-quantized", INT4 | {"type": "float"}), "config_groups.group_0.weights.type"),
        (compressed("pack-quantized", INT4 | {"strategy": "tensor"}), "config_groups.group_0.weights.strategy"),
        (compressed("pack-quantized", INT4 | {"actorder": "dynamic"}), "config_groups.group_0.weights.actorder"),
        (compressed("pack-quantized", INT4, {"num_bits": 8}), "config_groups.group_0.input_activations"),
        (compressed("float-quantized", FLOAT8 | {"type": "int"}), "config_groups.group_0.weights.type"),
        (compressed("float-quantized", FLOAT8 | {"symmetric": False}), "config_groups.group_0.weights.symmetric"),
        (compressed("float-quantized", FLOAT8 | {"strategy": "group"}), "config_groups.group_0.weights.strategy"),
        (
            compressed("float-quantized", FLOAT8, {"dynamic": False, "strategy": "channel"}),
            "config_groups.group_0.input_activations.strategy",
        ),
        (compressed("pack-quantized", INT4, transform_config={"config_groups": {}}), "transform_config"),
        (compressed("pack-quantized", INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (compressed("pack-quantized", INT4, quantization_status="calibration"), "quantization_status"),
    ],
)
def test_an_unknown_option_is_refused_with_its_name(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as error:
        read_config(config)
    assert error.value.field == f"quantization_config.{field}"


@pytest.mark.parametrize("config", [{"quant_method": "hqq"}, {"bits": 4}])
def test_an_unknown_format_is_refused_with_its_name(config: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"quant_method must be one of awq, bitsandbytes, .*, got '(hqq|None)'"):
        is_ours(config)


@pytest.mark.parametrize("config", [{"load_in_4bit": True}, {"quant_method": "torchao"}])
def test_other_formats_are_left_to_transformers(config: dict[str, Any]) -> None:
    assert not is_ours(config)


def test_mxfp4_is_the_format_of_experts_only() -> None:
    skipped = ["model.layers.1.mlp", "lm_head"]
    plan = read_config({"quant_method": "mxfp4", "modules_to_not_convert": skipped})
    linear = nn.Linear(1, 1, device="meta")
    assert plan.scheme_of("model.layers.0.self_attn.q_proj", linear) is None
    assert plan.scheme_of("model.layers.0.mlp.shared_experts.up_proj", linear) is None
    assert isinstance(plan.scheme_of_experts("model.layers.0.mlp.experts"), Mxfp4)
    assert plan.scheme_of_experts("model.layers.1.mlp.experts") is None


def test_experts_have_the_scheme_of_their_linear_layers() -> None:
    plan = read_config({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.0"]})
    assert plan.scheme_of_experts("model.layers.0.mlp.experts") is None
    scheme = plan.scheme_of_experts("model.layers.3.mlp.experts")
    assert scheme is plan.scheme_of("model.layers.3.self_attn.q_proj", nn.Linear(1, 1, device="meta"))
    static = plan_of_experts({"quant_method": "fp8", "activation_scheme": "static"})
    assert static == Float8("weight_scale_inv", (0, 0))
    assert plan_of_experts(AWQ) == Awq(128)


def plan_of_experts(config: dict[str, Any]) -> Any:
    return read_config(config).scheme_of_experts("model.layers.0.mlp.experts")


@pytest.mark.parametrize("config", [GPTQ, compressed("pack-quantized", INT4 | {"actorder": "group"})])
def test_experts_with_act_order_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(
        ParameterError, match=r"quantization_config must have no act-order for the experts of model.layers.0.mlp"
    ):
        plan_of_experts(config)


@pytest.mark.parametrize(
    ("config", "field", "rule"),
    [
        (AWQ | {"modules_to_not_convert": ["*.mlp"]}, "modules_to_not_convert", "hold regular expressions"),
        (AWQ | {"modules_to_not_convert": "mlp"}, "modules_to_not_convert", "be a list of names of layers"),
        (FP8 | {"modules_to_not_convert": [3]}, "modules_to_not_convert", "be a list of names of layers"),
        (GPTQ | {"modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize", "be a list of names of layers"),
        (FP8 | {"weight_block_size": ["a", "b"]}, "weight_block_size", "be two sizes"),
        (compressed("pack-quantized", INT4, ignore=["re:*("]), "ignore", "hold regular expressions"),
        (compressed("pack-quantized", INT4, ignore="lm_head"), "ignore", "be a list of names of layers"),
        (compressed("pack-quantized", INT4, config_groups=["a"]), "config_groups", "be an object with fields"),
        (compressed("pack-quantized", INT4, config_groups={"a": 3}), "config_groups.a", "be an object with fields"),
        (compressed("pack-quantized", "int4"), "config_groups.group_0.weights", "be an object with fields"),  # type: ignore
    ],
)
def test_values_of_a_wrong_form_are_refused_by_their_field(config: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(ParameterError, match=rule) as refused:
        read_config(config)
    assert refused.value.field == f"quantization_config.{field}"
