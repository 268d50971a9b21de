"""Indexers are patched where that is proven to choose the same keys, and a module that would choose others is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_families import BY_NAME, LENGTH, assert_same, tokens
from transformers.models.hy_v4 import modeling_hy_v4 as hy_v4

from fa_serve import hf
from fa_serve.hf.adapter.indexers import IndexerRotation, find_indexers
from fa_serve.hf.adapter.paged import OneSequence
from fa_serve.hf.surgery.divide.plan import plan_division
from fa_serve.hf.surgery.indexers import patch_indexers, unpatch_indexers
from fa_serve.spec import UnsupportedModelError

NAMES = {
    "deepseek-v3.2": IndexerRotation("halves"),
    "glm-moe-dsa": IndexerRotation("neighbours"),
    "a.x-k2": IndexerRotation("halves"),
    # from 5.25 on, HY-V4 rotates neighbouring numbers
    "hy-v4": IndexerRotation("neighbours" if hasattr(hy_v4, "apply_rotary_pos_emb_interleave") else "halves", at_end=True),
}


@pytest.mark.parametrize("name", NAMES)
def test_patched_indexers_choose_what_the_model_does(name: str) -> None:
    """Also those of a copy, and `generate` runs the model's own code."""
    model = BY_NAME[name].build()
    ids = tokens(1, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
    model = hf.patch(model)
    patch_indexers(model)
    patched = [module.forward for module in find_indexers(model)]
    assert [forward.rotation for forward in patched] == [NAMES[name]] * len(patched)
    patch_indexers(model)
    assert [module.forward for module in find_indexers(model)] == patched
    places = torch.arange(LENGTH)
    for each in (model, copy.deepcopy(model)):
        with torch.no_grad():
            assert_same(hf.paged_forward(each, ids[0], places, OneSequence(), places), expected[0])
            assert_same(each(ids).logits, expected)
    unpatch_indexers(model)
    assert not any("forward" in vars(module) for module in find_indexers(model))


def test_an_indexer_that_would_choose_other_keys_is_refused() -> None:
    model = BY_NAME["deepseek-v3.2"].build()
    indexer = find_indexers(model)[1]
    own = type(indexer).forward

    class Squared(type(indexer)):  # type: ignore[misc]
        def forward(self, hidden_states, *args, **caches):
            for cache in caches.values():
                cache.update_indexer(hidden_states, self.layer_idx)
            return own(self, hidden_states.square(), *args)

    indexer.__class__ = Squared
    with pytest.raises(
        UnsupportedModelError, match=r"chooses keys in a way that is not known .*its choice of keys would change"
    ):
        patch_indexers(model)
    assert not any("forward" in vars(module) for module in find_indexers(model))


def test_an_indexer_of_other_parts_is_refused() -> None:
    model = hf.patch(BY_NAME["deepseek-v3.2"].build())
    del find_indexers(model)[0].softmax_scale
    for refuses in (patch_indexers, hf.model_layers):
        with pytest.raises(UnsupportedModelError, match="code that fa_serve cannot replace: it has no softmax_scale"):
            refuses(model)


def test_an_indexer_with_other_arguments_is_refused() -> None:
    """Mistral Large 4 makes its queries of hidden states, and is given no latent vector of them."""
    model = hf.patch(BY_NAME["deepseek-v3.2"].build())
    indexer = find_indexers(model)[0]

    class Hidden(type(indexer)):  # type: ignore[misc]
        def forward(self, hidden_states, position_embeddings, attention_mask, cache=None):
            return cache.update_indexer(hidden_states, self.layer_idx)

    indexer.__class__ = Hidden
    for refuses in (patch_indexers, hf.model_layers):
        with pytest.raises(UnsupportedModelError, match="its forward takes hidden_states, position_embeddings, attention_mask"):
            refuses(model)


def test_models_with_indexers_are_not_divided() -> None:
    with torch.device("meta"):
        model = hf.patch(BY_NAME["deepseek-v3.2"].build())
    with pytest.raises(UnsupportedModelError, match="between 2 ranks: its queries choose keys by indexers"):
        plan_division(model, 2)
