"""Models whose queries choose keys by indexers (DeepSeek V3.2, token-sparse attention): what the engine needs of them.

    prepare_indexers(model, config, model_layers(model).indexers)

Such a model caches the keys of its indexers in the pages of its layers (fa_serve.hf.adapter.indexers). Left out: which models
these are, and what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.hf import seat_indexers
from fa_serve.spec import AttentionSpec, ParameterError


def prepare_indexers(model: Any, config: EngineConfig, indexers: Mapping[int, AttentionSpec]) -> None:
    """Check the settings of a model with indexers, and let these choose from the engine's cache. Without any, do nothing.

    Raises ParameterError for a setting that such models do not have, and UnsupportedModelError for an indexer of another kind.
    """
    if not indexers:
        return
    name = type(model).__name__
    if config.deterministic:
        rule = f"be False for {name}, whose queries choose keys: the order of their sums depends on the batch"
        raise ParameterError("deterministic", rule, config.deterministic)
    if config.kv_cache_dtype == "fp8":
        rule = f'be "auto" for {name}, whose queries choose keys: their attention reads no float8 cache'
        raise ParameterError("kv_cache_dtype", rule, config.kv_cache_dtype)
    seat_indexers(model)
