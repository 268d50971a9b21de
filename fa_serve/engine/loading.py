"""What is on disk as an engine wants it: tokenizer, model, and how large the cache and the sequences may be.

    tokenizer, model = load_tokenizer(config), load_model(config)
    num_pages, max_model_len = sizes(config, runner)

Left out: which models can be served at all (fa_serve.hf).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.model_runner import ModelRunner
from fa_serve.hf import NAME


def load_tokenizer(config: EngineConfig) -> Any:
    return AutoTokenizer.from_pretrained(config.model_path(), trust_remote_code=config.trust_remote_code)


def load_model(config: EngineConfig) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        config.model_path(), dtype=config.dtype, attn_implementation=NAME, trust_remote_code=config.trust_remote_code
    )
    device = config.resolve_device()
    cast(torch.nn.Module, model).to(device)
    return cast(PreTrainedModel, model)


def sizes(config: EngineConfig, runner: ModelRunner) -> tuple[int, int]:
    """num_pages and max_model_len, from the settings, the model and the memory."""
    own_limit = getattr(runner.model.config.get_text_config(), "max_position_embeddings", None)
    length = config.max_model_len or own_limit
    if length is None:
        raise ValueError("max_model_len must be given: the model's config has no max_position_embeddings")
    if own_limit is not None and length > own_limit:
        raise ValueError(f"max_model_len must be at most {own_limit}, the model's max_position_embeddings, got {length}")
    num_pages = config.num_pages or runner.fit_num_pages(config, length)
    capacity = num_pages * config.page_size
    if config.max_model_len is not None and length > capacity:
        raise ValueError(
            f"max_model_len must be at most {capacity}, what {num_pages} pages of {config.page_size} tokens hold, got {length}"
        )
    return num_pages, min(length, capacity)


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an answer, as model.generate takes them."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)
