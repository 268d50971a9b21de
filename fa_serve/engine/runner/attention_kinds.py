"""What the engine does for models whose attention is of another kind than most.

    prepare_attention(model, config, model_layers(model).indexers)

- Queries choose keys by indexers (DeepSeek V3.2, token-sparse attention), whose keys are cached in the pages of the layers
  (fa_serve.hf.adapter.indexers).
- The model's code needs the keys of all tokens, and is given those of all sequences of a step
  (fa_serve.hf.adapter.gathered_keys).

Left out: which models these are, and what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.hf import gathers_keys, seat_indexers
from fa_serve.spec import AttentionSpec, ParameterError


def prepare_attention(model: Any, config: EngineConfig, indexers: Mapping[int, AttentionSpec]) -> None:
    """Check the settings of a model of such a kind, and let indexers choose from the engine's cache. For others, do nothing.

    Raises ParameterError for a setting that such models do not have, and UnsupportedModelError for an indexer of another kind.
    """
    if gathers_keys(model):
        _check_settings(model, config, "whose code needs the keys of all tokens")
    elif indexers:
        _check_settings(model, config, "whose queries choose keys")
        seat_indexers(model)


def _check_settings(model: Any, config: EngineConfig, kind: str) -> None:
    name = type(model).__name__
    if config.deterministic:
        rule = f"be False for {name}, {kind}: the order of its sums depends on the batch"
        raise ParameterError("deterministic", rule, config.deterministic)
    if config.kv_cache_dtype == "fp8":
        rule = f'be "auto" for {name}, {kind}: its attention reads no float8 cache'
        raise ParameterError("kv_cache_dtype", rule, config.kv_cache_dtype)
