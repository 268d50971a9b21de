"""Checkpoints of tiny mixtures with quantised experts, in the names and layouts of their formats, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import quantise
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, make_tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.ops.products.quantised.weight import FLOAT8

_SMALL = SIZES | {"hidden_size": 64, "num_experts_per_tok": 2}
GPT_OSS = GptOssConfig(**_SMALL | {"num_local_experts": 4, "intermediate_size": 32, "head_dim": 16, "sliding_window": 8})
QWEN = Qwen3MoeConfig(**_SMALL | {"num_experts": 4, "moe_intermediate_size": 48})
"""A width that is not a multiple of the block: the last block of gate weights is not whole."""

Tensors = dict[str, Tensor]


def original(config: PreTrainedConfig) -> PreTrainedModel:
    """The random model that the checkpoints with this config were made of."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.bfloat16)


def _write(
    config: PreTrainedConfig, folder: Path, quantization: dict[str, Any], change: Callable[[str, Tensor], Tensors]
) -> Path:
    """Write a random model, each tensor of which is replaced by those that `change` gives."""
    original(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors |= change(name, tensor)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    return folder


def write_mxfp4(folder: Path) -> Path:
    """gpt-oss as it is published: random patterns of 4 bits, biases in bfloat16, everything else as it is."""
    draw = torch.Generator().manual_seed(1)

    def change(name: str, tensor: Tensor) -> Tensors:
        if ".experts." not in name or name.endswith("_bias"):
            return {name: tensor}
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(118, 123, (experts, rows, columns // 32), generator=draw, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _write(GPT_OSS, folder, {"quant_method": "mxfp4", "modules_to_not_convert": skipped}, change)


def _float8(tensor: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and its scales for each block of rows and columns."""
    n, k = tensor.shape
    rows = block[0]
    columns = block[1] or k
    padded = nn.functional.pad(tensor.float(), (0, -k % columns, 0, -n % rows)).view(-(-n // rows), rows, -1, columns)
    scales = padded.abs().amax(dim=(1, 3)) / 448
    data = (padded / scales[:, None, :, None]).to(FLOAT8).view(-(-n // rows) * rows, -1)[:n, :k]
    return data.contiguous(), scales


def _is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_fp8_block(folder: Path) -> Path:
    """Qwen3-MoE-FP8, with blocks of 32 x 32."""

    def change(name: str, tensor: Tensor) -> Tensors:
        if not _is_linear(name):
            return {name: tensor}
        data, scales = _float8(tensor, (32, 32))
        return {name: data, f"{name}_scale_inv": scales}

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "fmt": "e4m3"}
    return _write(QWEN, folder, config | {"modules_to_not_convert": ["lm_head"]}, change)


def _compressed(weights: dict[str, Any], layout: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": layout}
    ignore = ["lm_head", "re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ignore, "config_groups": {"group_0": group}}


def write_fp8_channel(folder: Path) -> Path:
    """compressed-tensors' float8 with a scale for each row."""

    def change(name: str, tensor: Tensor) -> Tensors:
        if not _is_linear(name):
            return {name: tensor}
        data, scales = _float8(tensor, (1, 0))
        return {name: data, f"{name}_scale": scales.bfloat16()}

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return _write(QWEN, folder, _compressed(weights, "float-quantized"), change)


def write_w4a16(folder: Path) -> Path:
    """compressed-tensors' packed integers of 4 bits, symmetric, in groups of 32 (16 of the last group are missing)."""

    def change(name: str, tensor: Tensor) -> Tensors:
        if not _is_linear(name):
            return {name: tensor}
        n, k = tensor.shape
        groups = nn.functional.pad(tensor.float(), (0, -k % 32)).view(n, -1, 32)
        scales = (groups.abs().amax(2) / 7).bfloat16()
        values = (groups / scales.float()[..., None]).round().clamp(-8, 7).int().view(n, -1) + 8
        words = sum((values[:, i::8] & 15) << 4 * i for i in range(8))
        stem = name.removesuffix("weight")
        kept = {"packed": words[:, : -(-k // 8)].contiguous(), "scale": scales, "shape": torch.tensor([n, k])}
        return {f"{stem}weight_{key}": value for key, value in kept.items()}

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return _write(QWEN, folder, _compressed(weights, "pack-quantized"), change)


def _written_by_columns(name: str, tensor: Tensor, convert: Callable[[Tensor, int], Tensors], packed: int) -> Tensors:
    """A matrix as `quantise` writes it in groups of 32, of which the last may have fewer columns. packed: columns in a word."""
    if not _is_linear(name):
        return {name: tensor}
    _, k = tensor.shape
    parts = convert(nn.functional.pad(tensor, (0, -k % 32)), 32)
    parts["qweight"] = parts["qweight"][: k // packed].contiguous()
    if "g_idx" in parts:
        parts["g_idx"] = parts["g_idx"][:k].contiguous()
    return {name.removesuffix("weight") + part: value for part, value in parts.items()}


def write_awq(folder: Path) -> Path:
    """AutoAWQ's integers of 4 bits with zero points."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    config["modules_to_not_convert"] = ["mlp.gate"]
    return _write(QWEN, folder, config, lambda name, tensor: _written_by_columns(name, tensor, quantise.awq, 1))


def write_gptq(folder: Path) -> Path:
    """AutoGPTQ's integers of 4 bits, symmetric. Routers are left out by the list of what is quantised."""
    inside = [f"mlp.experts.{i}.{name}_proj" for i in range(4) for name in ("gate", "up", "down")]
    inside += [f"self_attn.{name}_proj" for name in "qkvo"]
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    config["modules_in_block_to_quantize"] = [[name] for name in inside]
    return _write(QWEN, folder, config, lambda name, tensor: _written_by_columns(name, tensor, quantise.gptq, 8))


WRITERS = {
    "mxfp4": write_mxfp4,
    "fp8-block": write_fp8_block,
    "fp8-channel": write_fp8_channel,
    "w4a16": write_w4a16,
    "awq": write_awq,
    "gptq": write_gptq,
}


def matrices(folder: Path, layer: int) -> tuple[Tensor, Tensor]:
    """gate_up (experts, 2 * width, hidden) and down (experts, hidden, width) of an mxfp4 checkpoint, by transformers' code."""
    tensors = load_file(folder / "model.safetensors")
    stems = [f"model.layers.{layer}.mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    found = [convert_moe_packed_tensors(tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"]) for stem in stems]
    return found[0].transpose(1, 2), found[1].transpose(1, 2)


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """transformers' own model, with the numbers that the quantised weights of `model` stand for."""
    auto: Any = AutoModelForCausalLM
    config = type(model.config)(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    plain = auto.from_config(config, dtype=model.dtype)
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            state[f"{name}.weight"] = module.weight.dequantize(model.dtype)
        elif isinstance(module, QuantizedExperts):
            for projection, weight in (("gate_up_proj", module.weights.gate_up), ("down_proj", module.weights.down)):
                rows = weight.shape[0] // module.num_experts
                matrix = weight.dequantize(model.dtype).view(module.num_experts, rows, -1)
                state[f"{name}.{projection}"] = matrix.transpose(1, 2) if module.is_transposed else matrix
    plain.load_state_dict(state)
    return plain
