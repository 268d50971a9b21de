"""Quantised copies of small models, and the matrices that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import quantise
import torch
from torch import nn
from transformers import PreTrainedModel

from fa_serve.demo import model_path
from fa_serve.engine import EngineConfig
from fa_serve.engine.start.loading import load_model
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear

FORMATS = ("awq", "gptq", "gptq-act-order", "pack-quantized", "fp8", "fp8-static", "fp8-block")


def copy_of(model: Path | None, name: str, folder: Path, group_size: int = 64) -> Path:
    """A copy in a format in `folder`, which is made once. model: None is the embedded model."""
    out = folder / name
    if not out.exists():
        quantise.quantise(str(model or model_path()), name, out, group_size)
    return out


def change_config(folder: Path, **changes: Any) -> None:
    """Change the quantization_config of a copy."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


def load(folder: Path, **settings: Any) -> PreTrainedModel:
    return load_model(EngineConfig(model=folder, device="cpu", **settings))


def dequantised(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with plain linear layers."""
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=model.dtype)
            linear.weight = nn.Parameter(module.weight.dequantize(model.dtype), requires_grad=False)
            linear.bias = module.bias
            model.set_submodule(name, linear)
    return model


def layers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The matrix of each quantised layer, in the model's dtype."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    return {name: module.weight.dequantize(model.dtype) for name, module in found.items()}
