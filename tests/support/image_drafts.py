"""Draft models and heads for the tiny models of image_cases.py.

engine = case.engine(speculative=save_twin(case.model, tmp_path))
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import SIZES, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM


def save_twin(model: PreTrainedModel, folder: Path) -> str:
    """The language model by itself, which sees no image, or a random one where transformers has no class for it.

    Returns the engine's `speculative`.
    """
    own: Any = model
    config = own.config.get_text_config()
    if type(config) in AutoModelForCausalLM._model_mapping:
        text: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        text.model.load_state_dict(own.get_decoder().state_dict())
        text.lm_head.load_state_dict(own.get_output_embeddings().state_dict())
    else:
        text = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": config.vocab_size}))
    text.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return f"draft={folder}"


def save_random_head(model: PreTrainedModel, folder: Path) -> str:
    """An EAGLE-3 head that has learnt nothing. Returns the engine's `speculative`."""
    text = model.config.get_text_config()
    width = text.hidden_size
    vocab = text.vocab_size
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (width, 3 * width),
        "midlayer.self_attn.q_proj.weight": (64, 2 * width),
        "midlayer.self_attn.k_proj.weight": (32, 2 * width),
        "midlayer.self_attn.v_proj.weight": (32, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, 64),
        "midlayer.mlp.gate_proj.weight": (48, width),
        "midlayer.mlp.up_proj.weight": (48, width),
        "midlayer.mlp.down_proj.weight": (width, 48),
        "lm_head.weight": (vocab, width),
    }
    tensors = {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(width) for name in norms}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return f"eagle3={folder}"
