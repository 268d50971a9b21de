"""Tiny models that keep recurrent or convolution states, with random weights, for tests of the adapter and of the engine.

    eager, ours = pair(BY_NAME["qwen3-next"])        # of hf_families, which knows weights and the common sizes
    pages = HybridPages(ours, count=2)
    logits = pages.step({0: ids[0, :20], 1: ids[1, :3]})

`HybridPages` is a small engine's part of a step: pages, state pages and slots. All memory that is not written is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hf_families import Family, in_this_release
from state_steps import Part, StateSteps
from torch import Tensor
from transformers import PreTrainedModel

from fa_serve import hf
from fa_serve.hf.adapter.step_cache import PagedStates

_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_LINEAR = {
    **_LAYERS,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_KIMI = {
    **_LAYERS,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
}
_MAMBA_ALONE = {"state_size": 8, "num_hidden_layers": 2}
_WINDOWED = {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5}

HYBRIDS = [
    Family("qwen3-next", "Qwen3NextForCausalLM", config={**_LINEAR, **_EXPERTS}),
    Family("qwen3.5", "Qwen3_5ForCausalLM", config=_LINEAR),
    Family("qwen3.5-moe", "Qwen3_5MoeForCausalLM", config={**_LINEAR, **_EXPERTS}),
    Family("olmo-hybrid", "OlmoHybridForCausalLM", config=_LINEAR),
    Family("kimi-linear", "KimiLinearForCausalLM", config=_KIMI),
    Family(
        "nemotron-h",
        "NemotronHForCausalLM",
        config={
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
        },
    ),
    Family("bamba", "BambaForCausalLM", config={"attn_layer_indices": [1], **_MAMBA2}),
    Family("falcon-h1", "FalconH1ForCausalLM", config={"num_hidden_layers": 1, "mamba_d_ssm": 128, **_MAMBA2}),
    Family(
        "granite-hybrid",
        "GraniteMoeHybridForCausalLM",
        config={"layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 32, **_MAMBA2},
    ),
    Family(
        "jamba",
        "JambaForCausalLM",
        config={
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "num_experts": 2,
            "use_mamba_kernels": False,
        },
    ),
    Family("lfm2", "Lfm2ForCausalLM", config={"full_attn_idxs": [1], "block_ff_dim": 96}),
    Family(
        "lfm2-moe",
        "Lfm2MoeForCausalLM",
        config={"layer_types": ["conv", "full_attention"], **_EXPERTS, "num_dense_layers": 1},
    ),
    Family(
        "zamba",
        "ZambaForCausalLM",
        config={
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "num_hidden_layers": 3,
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
            "num_key_value_heads": 4,
        },
    ),
    Family(
        "zamba2",
        "Zamba2ForCausalLM",
        config={
            "layers_block_type": ["mamba", "hybrid", "hybrid"],
            "hybrid_layer_ids": [1, 2],
            "num_hidden_layers": 3,
            "mamba_d_state": 16,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    Family("mamba", "MambaForCausalLM", config=_MAMBA_ALONE),
    Family(
        "mamba2",
        "Mamba2ForCausalLM",
        config={"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
    Family("falcon-mamba", "FalconMambaForCausalLM", config=_MAMBA_ALONE),
    Family(
        "minimax",
        "MiniMaxForCausalLM",
        config={
            "layer_types": ["full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "block_size": 8,
        },
    ),
    Family(
        "recurrent-gemma",
        "RecurrentGemmaForCausalLM",
        config={
            "block_types": ["recurrent", "attention"],
            "lru_width": 64,
            "conv1d_width": 4,
            "attention_window_size": 9,
        },
    ),
    *in_this_release(
        Family(
            "lfm3",
            "Lfm3ForCausalLM",
            config={**_WINDOWED, "layer_types": ["conv", "sliding_attention", "full_attention"]},
        ),
        Family(
            "bailing-hybrid",
            "BailingHybridForCausalLM",
            config={
                **_KIMI,
                "head_dim": 16,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "num_local_experts": 4,
                "first_k_dense_replace": 1,
            },
        ),
        Family(
            "lara-mini",
            "LaraMiniForCausalLM",
            config={
                **_LINEAR,
                **_EXPERTS,
                **_WINDOWED,
                "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
            },
        ),
    ),
]
BY_NAME = {family.name: family for family in HYBRIDS}
PAGE = 4


class HybridPages:
    """Sequences that grow by any number of tokens in each step."""

    def __init__(self, model: PreTrainedModel, count: int, max_tokens: int = 64) -> None:
        self.model = model
        self.lengths = [0] * count
        layers = hf.model_layers(model)
        num_pages = -(-max_tokens // PAGE)
        self.table = torch.randperm(count * num_pages, generator=torch.Generator().manual_seed(0)).view(count, num_pages).int()
        self.caches = {
            i: (torch.full((*shape, s.head_dim), torch.nan), torch.full((*shape, s.head_dim_v), torch.nan))
            for i, s in layers.attention.items()
            for shape in [(count * num_pages, PAGE, s.num_kv_heads)]
        }
        tables = {key: StateSteps(spec, PAGE, slots=count) for key, spec in layers.states.items()}
        self.states = {key: table.states for key, table in tables.items()}
        self.steps = next(iter(tables.values()))

    def step(self, new: Mapping[int, Tensor], dropped: Mapping[int, int] | None = None) -> dict[int, Tensor]:
        """The logits (tokens, vocab) of the new tokens of some sequences.

        dropped: how many of the last ones are drafts that are not accepted, by sequence
        """
        dropped = dropped or {}
        states = self.steps.begin([Part(b, len(ids), dropped.get(b, 0)) for b, ids in new.items()])
        at = {b: torch.arange(self.lengths[b], self.lengths[b] + len(ids)) for b, ids in new.items()}
        slots = [self.table[b, p // PAGE].long() * PAGE + p % PAGE for b, p in at.items()]
        counts = [len(ids) for ids in new.values()]
        batch = hf.PagedBatch(
            kv_caches=self.caches,
            slot_mapping=torch.cat(slots),
            block_table=self.table[list(new)],
            seqused_k=states.seqused_k,
            cu_seqlens_q=states.cu_seqlens,
            max_seqlen_q=max(counts),
            max_seqlen_k=int(states.seqused_k.max()),
            states=PagedStates(self.states, states),
        )
        rows = torch.arange(sum(counts))
        logits = hf.paged_forward(self.model, torch.cat(list(new.values())), torch.cat(list(at.values())), batch, rows)
        self.steps.end()
        for b, ids in new.items():
            self.lengths[b] += len(ids) - dropped.get(b, 0)
        return dict(zip(new, logits.split(counts), strict=True))
