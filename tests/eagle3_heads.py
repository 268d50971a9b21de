"""EAGLE-3 heads for tiny models, as the checkpoints in which such heads are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES, VOCAB, make_model
from torch import Tensor
from transformers import PreTrainedModel

HIDDEN = SIZES["hidden_size"]
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
"""A config of the EAGLE authors and SpecForge. Tiny models have two layers: too few for the depths that are the default."""


def quiet_model(family: str = "llama", loudness: float = 0.0) -> PreTrainedModel:
    """A model whose next token depends on the last token alone, or nearly so: its layers add `loudness` of what they would."""
    model = make_model(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= loudness
    return model


def copying_head(model: PreTrainedModel, noise: float = 0.0, draft_vocab: int = VOCAB) -> dict[str, Tensor]:
    """The tensors of a head that draws what a quiet model draws: it hands on the embedding of the last token.

    Large equal biases of queries and keys let a position attend to itself alone. noise: how much of the hidden states it
    adds. The ids of a smaller vocabulary are every second one of the model's, and then those at the end.
    """
    torch.manual_seed(2)
    eye = torch.eye(HIDDEN)
    ones = torch.ones(HIDDEN)
    out = torch.zeros(HIDDEN, 4 * 16)
    out[:16, :16] = eye[:16, :16]
    out[16:, 32:48] = eye[:16, :16]
    layer = {
        "self_attn.q_proj.weight": torch.zeros(64, 2 * HIDDEN),
        "self_attn.k_proj.weight": torch.zeros(32, 2 * HIDDEN),
        "self_attn.v_proj.weight": torch.cat([eye, 0 * eye], dim=1),
        "self_attn.o_proj.weight": out,
        "self_attn.q_proj.bias": 20 * torch.ones(64),
        "self_attn.k_proj.bias": 20 * torch.ones(32),
        "self_attn.v_proj.bias": torch.zeros(32),
        "self_attn.o_proj.bias": torch.zeros(HIDDEN),
        "mlp.gate_proj.weight": torch.randn(48, HIDDEN),
        "mlp.up_proj.weight": torch.randn(48, HIDDEN),
        "mlp.down_proj.weight": 0.1 * noise * torch.randn(HIDDEN, 48),
        "input_layernorm.weight": ones,
        "hidden_norm.weight": noise * ones,
        "post_attention_layernorm.weight": ones.clone(),
    }
    targets = torch.cat([torch.arange(0, VOCAB, 2), torch.arange(VOCAB - 1, 0, -2)])[:draft_vocab].sort().values
    top: Any = model.get_output_embeddings()
    return {
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN) / 10,
        **{f"midlayer.{name}": x for name, x in layer.items()},
        "norm.weight": model.model.norm.weight.detach().clone(),
        "lm_head.weight": top.weight.detach()[targets].clone(),
        "d2t": targets - torch.arange(draft_vocab),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, targets, True),
    }


def save_head(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> str:
    """Write a checkpoint. Returns the engine's `speculative`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return f"eagle3={folder}"


MakeHead = Callable[..., str]
