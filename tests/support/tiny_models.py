"""Small models with random weights and a byte-level tokenizer: what tests of generation need, without a download."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES | {"sliding_window": 9}),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES | {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
    "gpt-oss": lambda: GptOssConfig(**SIZES | {"sliding_window": 9, "num_local_experts": 5, "num_experts_per_tok": 2}),
    # chunks and rotation in one layer, temperature in the other; one is dense
    "llama4": lambda: Llama4TextConfig(
        **SIZES
        | {"attention_chunk_size": 9, "no_rope_layers": [1, 0], "floor_scale": 7, "attn_scale": 0.5}
        | {"moe_layers": [1], "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size_mlp": 40}
    ),
    # norms before and after each part, queries and keys normalised, and a scaled embedding
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"sliding_window": 9, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    "gemma2": lambda: Gemma2Config(**SIZES | {"sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
}
MORE_CONFIGS = {
    # beside the experts that a router chooses, one for every token
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **SIZES
        | {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}
    ),
}
"""Families that `make_model` knows as well, without a place in every test of CONFIGS."""


def make_model(family: str = "llama") -> PreTrainedModel:
    """A float32 model of that family, the same at each call. Its logits are far enough apart for argmax to be stable."""
    torch.manual_seed(0)
    # eager experts wait for the device, and grouped_mm is for bfloat16
    own = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    model = AutoModelForCausalLM.from_config((CONFIGS | MORE_CONFIGS)[family](), dtype=torch.float32, **own)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=-1)  # no token ends an answer
    return model.eval()


def random_prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def greedy(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens that transformers generates with eager attention."""
    model.set_attn_implementation("eager")
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE. All 256 bytes are tokens, so any sequence of ids is a text, possibly with incomplete characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and then the other dog"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
