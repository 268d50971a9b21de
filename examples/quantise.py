"""Write a quantised copy of a model: the embedded one, or any folder with a model of transformers.

    python examples/quantise.py awq model-awq                      # the embedded model in 4 bits
    python examples/quantise.py fp8 model-fp8 --model Qwen/Qwen3-0.6B
    fa-serve serve ./model-awq

Every number is rounded to the nearest, without calibration: enough to try a format, and for tests. Tools such as
llm-compressor, GPTQModel and AutoAWQ lose less. The formats:

    awq              AutoAWQ: 4 bits in groups, with zero points
    gptq             AutoGPTQ: 4 bits in groups, symmetric
    gptq-act-order   the same with zero points, and with columns in groups that are not neighbours (in place of the order of the
                     activations, an order that is the same for all layers of a width)
    pack-quantized   compressed-tensors: 4 bits in groups, symmetric
    fp8              compressed-tensors: float8 with a scale for each row
    fp8-static       compressed-tensors: float8 with one scale for a matrix and one for its input
    fp8-block        DeepSeek's: float8 with a scale for each 128 x 128 numbers

Linear layers inside of decoder layers are quantised, and experts that a checkpoint names gate_proj, up_proj and down_proj
(Qwen, DeepSeek, GLM, OLMoE). Experts with act-order are refused when the copy is loaded. Left out: experts of other names
(Mixtral, gpt-oss), and models that do not fit into memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fa_serve.demo import model_path

Tensors = dict[str, Tensor]


def round_to_int4(weight: Tensor, group_size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values from 0 to 15 (n, k), zero points (n, groups) and scales (n, groups) of a matrix (n, k)."""
    groups = weight.float().unflatten(1, (-1, group_size))
    low = groups.amin(2).clamp(max=0)
    high = groups.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / 15).clamp(min=1e-8).to(weight.dtype)
    zeros = torch.full_like(low, 8) if symmetric else (-low / scales.float()).round().clamp(0, 15)
    values = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    return values.flatten(1).int(), zeros.int(), scales


def in_words(values: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """(rows, 8 * m) numbers from 0 to 15 -> (rows, m) int32. The number order[i] of eight is in bits 4i to 4i + 3."""
    eight = values.unflatten(1, (-1, 8)).long()
    words = sum(eight[:, :, number] << 4 * i for i, number in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def awq(weight: Tensor, group_size: int) -> Tensors:
    values, zeros, scales = round_to_int4(weight, group_size, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": in_words(values.t(), order).contiguous(),
        "qzeros": in_words(zeros.t(), order).contiguous(),
        "scales": scales.t().contiguous(),
    }


def gptq(weight: Tensor, group_size: int, *, act_order: bool = False) -> Tensors:
    k = weight.shape[1]
    columns = torch.randperm(k, generator=torch.Generator().manual_seed(k)) if act_order else torch.arange(k)
    values, zeros, scales = round_to_int4(weight[:, columns], group_size, symmetric=not act_order)
    group_of = torch.empty(k, dtype=torch.int32)
    group_of[columns] = (torch.arange(k) // group_size).int()
    natural = torch.empty_like(values)
    natural[:, columns] = values
    return {
        "qweight": in_words(natural).t().contiguous(),
        "qzeros": in_words((zeros - 1).t() & 15).contiguous(),
        "scales": scales.t().contiguous(),
        "g_idx": group_of,
    }


def pack_quantized(weight: Tensor, group_size: int) -> Tensors:
    values, _, scales = round_to_int4(weight, group_size, symmetric=True)
    return {"weight_packed": in_words(values), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def to_float8(weight: Tensor, scales: Tensor) -> Tensor:
    return (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(weight: Tensor) -> Tensors:
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": to_float8(weight, scales), "weight_scale": scales}


def fp8_static(weight: Tensor) -> Tensors:
    """The scale of the input is a guess: inputs of these layers follow a norm, so few numbers are beyond 30."""
    scale = weight.float().abs().amax() / 448
    return {"weight": to_float8(weight, scale), "weight_scale": scale[None], "input_scale": torch.tensor([30 / 448])}


def fp8_block(weight: Tensor) -> Tensors:
    n, k = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -k % 128, 0, -n % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = (padded.abs().amax((1, 3)) / 448).clamp(min=1e-12)
    spread = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return {"weight": to_float8(weight, spread), "weight_scale_inv": scales}


def compressed_tensors(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def formats(group_size: int) -> dict[str, tuple[Callable[[Tensor], Tensors], dict[str, Any]]]:
    """For each format: how a matrix becomes tensors, and the quantization_config."""
    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    dynamic = float8 | {"dynamic": True, "strategy": "token"}
    static = float8 | {"dynamic": False, "strategy": "tensor"}
    in_groups = {"bits": 4, "group_size": group_size}
    gptq_config = in_groups | {"quant_method": "gptq", "checkpoint_format": "gptq"}
    return {
        "awq": (
            lambda w: awq(w, group_size),
            in_groups | {"quant_method": "awq", "version": "gemm", "zero_point": True},
        ),
        "gptq": (lambda w: gptq(w, group_size), gptq_config | {"desc_act": False, "sym": True}),
        "gptq-act-order": (
            lambda w: gptq(w, group_size, act_order=True),
            gptq_config | {"desc_act": True, "sym": False},
        ),
        "pack-quantized": (
            lambda w: pack_quantized(w, group_size),
            compressed_tensors("pack-quantized", int4, None),
        ),
        "fp8": (fp8, compressed_tensors("float-quantized", float8 | {"strategy": "channel"}, dynamic)),
        "fp8-static": (fp8_static, compressed_tensors("float-quantized", float8 | {"strategy": "tensor"}, static)),
        "fp8-block": (
            fp8_block,
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        ),
    }


def quantise(model: str, name: str, out: Path, group_size: int = 64) -> None:
    """Write the model, its config and its tokenizer to the folder `out`."""
    write(AutoModelForCausalLM.from_pretrained(model, dtype="auto"), name, out, group_size)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


@torch.no_grad()
def write(loaded: Any, name: str, out: Path, group_size: int) -> None:
    """Write a model that has been loaded, in a format, and its config."""
    convert, config = formats(group_size)[name]
    inside = {id(linear) for layer in loaded.modules() if hasattr(layer, "self_attn") for linear in layer.modules()}
    tensors = {key: value for key, value in loaded.state_dict().items() if key != "lm_head.weight" or not _is_tied(loaded)}
    for layer, module in loaded.named_modules():
        if isinstance(module, nn.Linear) and id(module) in inside:
            del tensors[f"{layer}.weight"]
            tensors |= {f"{layer}.{part}": tensor for part, tensor in convert(module.weight.detach()).items()}
        elif hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            del tensors[f"{layer}.gate_up_proj"], tensors[f"{layer}.down_proj"]
            for name, matrix in matrices_of_experts(module).items():
                tensors |= {f"{layer}.{name}.{part}": tensor for part, tensor in convert(matrix).items()}
    out.mkdir(parents=True, exist_ok=True)
    loaded.config.save_pretrained(out)
    loaded.generation_config.save_pretrained(out)
    file = out / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}, indent=2) + "\n")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / "model.safetensors", {"format": "pt"})


def matrices_of_experts(experts: Any) -> dict[str, Tensor]:
    """The matrices of a module of experts by their names in a checkpoint, such as "3.up_proj"."""
    if getattr(experts, "is_transposed", False) or getattr(experts, "has_bias", False):
        raise ValueError(
            f"the experts of {type(experts).__name__} are transposed or have biases, which this script does not write"
        )
    found = {}
    for i, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        gate, up = gate_up.chunk(2)
        found |= {f"{i}.gate_proj": gate, f"{i}.up_proj": up, f"{i}.down_proj": down}
    return found


def _is_tied(model: Any) -> bool:
    return bool(model.config.get_text_config().tie_word_embeddings)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("format", choices=formats(64))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=str(model_path()), help="a folder or a hub name; by default the embedded model")
    parser.add_argument("--group-size", type=int, default=64, help="columns that share a scale in 4-bit formats")
    args = parser.parse_args()
    quantise(args.model, args.format, args.out, args.group_size)
    print(f"{args.out}: {sum(file.stat().st_size for file in args.out.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
