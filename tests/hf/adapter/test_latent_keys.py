"""Latent keys in the place of a module's `expand_kv`: for a batch on pages, and for the call that they were made for."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_families import BY_NAME, assert_same, check_pages, tokens

from fa_serve import hf
from fa_serve.hf.adapter.latent_keys import LatentKeys
from fa_serve.hf.adapter.paged import OneSequence
from fa_serve.hf.surgery.latent_keys import patch_latent_keys, unpatch_latent_keys


@pytest.mark.parametrize("name", ["deepseek-v3.2", "a.x-k2", "deepseek-v3"])
@torch.no_grad()
def test_a_model_computes_the_same_with_pages_and_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pages, and in a copy of the model, by its own code."""
    model = BY_NAME[name].build()
    eager = copy.deepcopy(model)
    ids = tokens(1, 12)
    expected = model(ids).logits
    model = hf.patch(model)
    hf.patch_indexers(model)
    patch_latent_keys(model.modules())
    for each in (model, copy.deepcopy(model)):
        places = torch.arange(12)
        assert_same(hf.paged_forward(each, ids[0], places, OneSequence(), places), expected[0])
        assert_same(each(ids).logits, expected)
        attention = each.model.layers[0].self_attn
        assert isinstance(attention.expand_kv, LatentKeys)
        assert attention.expand_kv.module is attention
    unpatch_latent_keys(model)
    check_pages(model, eager)  # whose pages hold keys and values of all heads


def test_a_key_is_taken_once() -> None:
    attention = BY_NAME["deepseek-v3.2"].build().model.layers[0].self_attn
    patch_latent_keys([torch.nn.ModuleDict({"self_attn": attention})])
    latent = attention.expand_kv

    class OnPages:
        kv_caches = ()

        def attend(self, call):  # type: ignore[no-untyped-def]
            raise AssertionError

    with hf.adapter.attention.riding(OnPages()):
        key, value = latent(torch.zeros(1, 1, 3, 24), torch.ones(1, 1, 3, 8))
    assert key.shape == (1, 1, 3, 32)
    assert value.shape == (1, 1, 3, 24)
    assert value.data_ptr() == key.data_ptr()
    assert not latent.takes(key.clone())
    assert not latent.takes(key), "what another call did not take is forgotten"
