"""Loads what the engine needs from disk, tokenizer and model, and decides how large the cache and the sequences may be.

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
from fa_serve.spec import ParameterError


def load_tokenizer(config: EngineConfig) -> Any:
    """The model's tokenizer. Raises what transformers raises."""
    return AutoTokenizer.from_pretrained(config.model_path(), trust_remote_code=config.trust_remote_code)


def load_model(config: EngineConfig) -> PreTrainedModel:
    """The model on its device, with fa_serve as its attention. Raises what transformers raises."""
    model = AutoModelForCausalLM.from_pretrained(
        config.model_path(), dtype=config.dtype, attn_implementation=NAME, trust_remote_code=config.trust_remote_code
    )
    cast(torch.nn.Module, model).to(config.resolve_device())
    return cast(PreTrainedModel, model)


def sizes(config: EngineConfig, runner: ModelRunner) -> tuple[int, int]:
    """num_pages and max_model_len, from the settings, the model and the memory.

    Raises ParameterError if the settings ask for more than the model or the cache can hold.
    """
    model_limit = getattr(runner.model.config.get_text_config(), "max_position_embeddings", None)
    length = config.max_model_len or model_limit
    if length is None:
        rule = "be given, because the model's config has no max_position_embeddings"
        raise ParameterError("max_model_len", rule, config.max_model_len)
    if model_limit is not None and length > model_limit:
        raise ParameterError("max_model_len", f"be at most {model_limit}, the model's max_position_embeddings", length)
    num_pages = config.num_pages or runner.fit_num_pages(config, length)
    capacity = num_pages * config.page_size
    if config.max_model_len is not None and length > capacity:
        rule = f"be at most {capacity}, which is what {num_pages} pages of {config.page_size} tokens hold"
        raise ParameterError("max_model_len", rule, length)
    return num_pages, min(length, capacity)


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an answer, as model.generate takes them."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
