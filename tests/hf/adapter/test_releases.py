"""What a release of transformers names otherwise is found in the installed one, which is any of those that are supported."""

from __future__ import annotations

import pytest
from hf_families import BY_NAME
from hybrids import BY_NAME as HYBRIDS
from transformers.cache_utils import DynamicCache

from fa_serve.hf.adapter.releases import CHOOSING_LAYERS, PAGED_LAYERS


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-moe-dsa", "a.x-k2", "hy-v4"])
def test_layers_whose_queries_choose_keys_are_known_by_name(name: str) -> None:
    assert set(BY_NAME[name].make_config().layer_types) <= CHOOSING_LAYERS
    assert not CHOOSING_LAYERS & {"full_attention", "sliding_attention", "linear_attention", "conv"}


@pytest.mark.parametrize("name", ["mistral", "gemma4-shared-cache", "llama4", "deepseek-v3.2"])
def test_layers_that_keep_what_pages_hold(name: str) -> None:
    assert {type(layer) for layer in DynamicCache(config=BY_NAME[name].make_config()).layers} <= PAGED_LAYERS


def test_layers_that_keep_a_state_are_others() -> None:
    state, attention = (type(layer) for layer in DynamicCache(config=HYBRIDS["qwen3.5"].make_config()).layers)
    assert state not in PAGED_LAYERS
    assert attention in PAGED_LAYERS
