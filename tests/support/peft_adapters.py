"""Adapters that peft makes for tiny models, and the tokens that peft's own forward generates with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import make_model
from torch import Tensor
from transformers import PreTrainedModel

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def save_adapter(folder: Path, family: str = "llama", *, model: PreTrainedModel | None = None, seed: int = 0, **options: Any) -> Path:
    """Let peft write an adapter with random weights that change most tokens of the model."""
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL} | options
    wrapped = get_peft_model(model or make_model(family), LoraConfig(init_lora_weights=False, **given))
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 0.5 + torch.rand(parameter.shape, generator=draw)
        elif "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.15
        elif "modules_to_save" in name:
            parameter.data += torch.randn(parameter.shape, generator=draw) * 0.2
    wrapped.save_pretrained(str(folder))
    return folder


def peft_model(folder: Path, family: str = "llama", model: PreTrainedModel | None = None) -> PeftModel:
    """The model as peft runs it with a saved adapter."""
    return PeftModel.from_pretrained(model or make_model(family), str(folder)).eval()


@torch.no_grad()
def peft_tokens(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy tokens by whole forwards, without a cache."""
    ids: Tensor = torch.tensor([list(prompt)])
    for _ in range(max_tokens):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()
