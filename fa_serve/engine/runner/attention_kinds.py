"""What the engine does for models with unusual kinds of attention.

    prepare_attention(model, config, model_layers(model).indexers)

- Queries choose keys by indexers (DeepSeek V3.2, token-sparse attention). The keys of the indexers are cached in the pages of
  the layers (fa_serve.hf.adapter.indexers).
- The model's code needs the keys of all tokens, and is given the keys of all sequences of a step
  (fa_serve.hf.adapter.gathered_keys).

`least_group_keys` says for which models attention reads the pages that sequences share only once, and when that pays.

Left out: which models these are, and what is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.hf import gathers_keys, patch_indexers
from fa_serve.spec import AttentionSpec, ParameterError

LEAST_GROUP_BYTES = 64 << 20
"""Bytes of one layer's keys and values that the groups of a step must save: what a GPU reads while it runs the two additional
kernels that a layer launches for groups, about 15 us at 4 TB/s. On an H200, 8 sequences that share 2,048 tokens, which saves
56 MiB, take 21.4 us with groups and 21.0 without (results/cascade.jsonl)."""


def prepare_attention(model: Any, config: EngineConfig, indexers: Mapping[int, AttentionSpec]) -> None:
    """Check the settings of a model of such a kind, and let indexers choose from the engine's cache. Ignores other models.

    Raises ParameterError for a setting that such models do not have, and UnsupportedModelError for an unknown kind of indexer.
    """
    if gathers_keys(model):
        _check_settings(model, config, "whose code needs the keys of all tokens")
    elif indexers:
        _check_settings(model, config, "whose queries choose keys")
        patch_indexers(model)


def least_group_keys(model: Any, layers: Collection[AttentionSpec], *, wanted: bool) -> int:
    """How many keys groups of sequences must save (scheduler/prefix_groups.py); 0 for a model whose steps have no groups.

    Groups are only for models with layers that attend to all keys, and without latent keys.
    """
    whole = [layer.cached_bytes for layer in layers if layer.window_size[0] < 0]
    latent = any(layer.values_in_keys for layer in layers)
    if not wanted or latent or gathers_keys(model) or not whole:
        return 0
    return LEAST_GROUP_BYTES // max(whole) or 1


def _check_settings(model: Any, config: EngineConfig, kind: str) -> None:
    name = type(model).__name__
    if config.deterministic:
        rule = f"be False for {name}, {kind}: the order of its sums depends on the batch"
        raise ParameterError("deterministic", rule, config.deterministic)
    if config.kv_cache_dtype == "fp8":
        rule = f'be "auto" for {name}, {kind}: its attention cannot read a float8 cache'
        raise ParameterError("kv_cache_dtype", rule, config.kv_cache_dtype)
