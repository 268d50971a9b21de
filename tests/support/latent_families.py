"""Tiny models with latent attention (MLA) and random weights: with and without a second projection of queries, with either
rotary embedding, and with parts of keys and values of different sizes."""

from __future__ import annotations

from typing import Any

import torch
from hf_families import BY_NAME, Family
from torch import nn

from fa_serve.hf import LayerCall

_PARTS = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
_DENSE = {**_PARTS, "q_lora_rank": 20}
_MOE = {
    **_PARTS,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_V2: dict[str, Any] = {**_MOE, "head_dim": 8, "num_experts_per_tok": 2, "topk_method": "greedy"}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7}
_SCALED = {**_YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}

LATENT = [
    BY_NAME["deepseek-v3"],
    Family("deepseek-v3-yarn", "DeepseekV3ForCausalLM", config={**_MOE, "q_lora_rank": None, "rope_parameters": _YARN}),
    Family("deepseek-v3-halves", "DeepseekV3ForCausalLM", config={**_MOE, "q_lora_rank": 20, "rope_interleave": False}),
    Family("deepseek-v2", "DeepseekV2ForCausalLM", config={**_V2, "q_lora_rank": 20}),
    Family("deepseek-v2-lite", "DeepseekV2ForCausalLM", config={**_V2, "q_lora_rank": None}),
    Family(
        "glm4-moe-lite", "Glm4MoeLiteForCausalLM", config={**_MOE, "q_lora_rank": 20, "mlp_layer_types": ["dense", "sparse"]}
    ),
    Family("minicpm3", "MiniCPM3ForCausalLM", config={**_DENSE, "scale_depth": 1.4, "scale_emb": 1, "dim_model_base": 64}),
    Family("youtu", "YoutuForCausalLM", config=_DENSE),
]
SCALED_QUERIES = Family("mistral4", "Mistral4ForCausalLM", config={**_MOE, "q_lora_rank": 20, "rope_parameters": _SCALED})
"""Its queries grow with their positions, which the fused form does not know."""


def attention_call(layer: nn.Module, *shapes: tuple[int, int], **options: Any) -> LayerCall:
    """What a layer asks of attention for 7 tokens. shapes: (heads, head_dim) of queries, keys and values"""
    q, k, v = (torch.zeros(1, heads, 7, head_dim) for heads, head_dim in shapes)
    plain: dict[str, Any] = {"window_size": (-1, 0), "softmax_scale": None, "softcap": 0.0, "sinks": None}
    attention: Any = layer.self_attn
    return LayerCall(attention, q, k, v, mask=None, is_causal=True, position_bias=None, **plain | options)
