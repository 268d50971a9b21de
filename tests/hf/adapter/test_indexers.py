"""Which modules choose keys, what their keys take in the cache, and which batches can answer for them."""

from __future__ import annotations

import pytest
import torch
from hf_families import BY_NAME, tokens

from fa_serve import hf
from fa_serve.hf.adapter.indexers import find_indexers, indexer_layer
from fa_serve.hf.surgery.indexers import patch_indexers
from fa_serve.spec import UnsupportedModelError


def test_indexers_are_found_by_their_own_code() -> None:
    model = BY_NAME["glm-moe-dsa"].build()
    assert [type(module).__name__ for module in find_indexers(model)] == ["GlmMoeDsaIndexer"] * 2
    assert find_indexers(BY_NAME["deepseek-v3"].build()) == []


def test_what_indexers_cache() -> None:
    """The second layer of this model has no indexer. Weights are not needed to know it."""
    layers = hf.model_layers(BY_NAME["glm-moe-dsa"].make_config())
    assert list(layers.attention) == [0, 1, 2]
    assert sorted(layers.indexers) == [indexer_layer(2), indexer_layer(0)]
    assert {spec.cached_bytes for spec in layers.indexers.values()} == {16 * 4}


def test_a_batch_that_cannot_choose_is_refused() -> None:
    class Attends:
        def attend(self, call):  # type: ignore[no-untyped-def]
            raise AssertionError

    model = hf.patch(BY_NAME["deepseek-v3.2"].build())
    patch_indexers(model)
    ids = tokens(1, 4)[0]
    with pytest.raises(UnsupportedModelError, match="lets its queries choose keys, which Attends cannot do"):
        hf.paged_forward(model, ids, torch.arange(4), Attends(), torch.arange(4))
