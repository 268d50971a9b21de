"""Tiny mixtures of experts with random weights: the layouts of weights, routers and gates that models of transformers have."""

from __future__ import annotations

from hf_families import BY_NAME, WINDOW, Family

_QWEN = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3}
_GROUPED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_SHARED = {"shared_intermediate_size": 32, "attention_multiplier": 0.3, "residual_multiplier": 0.5}
_GEMMA4 = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
_ERNIE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24}

MIXTURES = [
    *[BY_NAME[name] for name in ("qwen3-moe", "mixtral", "phimoe", "gpt-oss", "deepseek-v3")],
    Family("qwen2-moe", "Qwen2MoeForCausalLM", config={**_QWEN, "shared_expert_intermediate_size": 32}),
    Family("olmoe", "OlmoeForCausalLM", config={"num_experts": 6, "num_experts_per_tok": 3}),
    Family("granitemoe", "GraniteMoeForCausalLM", config={**_LOCAL, "residual_multiplier": 0.5}),
    Family("granitemoe-shared", "GraniteMoeSharedForCausalLM", config={**_LOCAL, **_SHARED}),
    Family("glm4-moe", "Glm4MoeForCausalLM", config={**_GROUPED, "head_dim": 16}),
    Family("minimax-m2", "MiniMaxM2ForCausalLM", config={**_LOCAL, "head_dim": 16}),
    Family("ernie4.5-moe", "Ernie4_5_MoeForCausalLM", config=_ERNIE),
    Family("gemma4-moe", "Gemma4ForCausalLM", config={**BY_NAME["gemma4"].config, **_GEMMA4}),
    Family(
        "cohere2-moe", "Cohere2MoeForCausalLM", config={**_QWEN, "head_dim": 16, "sliding_window": WINDOW, "logit_scale": 1.0}
    ),
    Family("hunyuan-moe", "HunYuanMoEV1ForCausalLM", config={"num_experts": 6, "moe_topk": 3, "head_dim": 16}),
]
