"""Layers cache latent keys where products with their matrix are proven to be the keys and values that their code computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_families import BY_NAME
from torch import nn

from fa_serve.hf.adapter.latent_keys import LatentKeys
from fa_serve.hf.surgery.latent_keys import patch_latent_keys, unpatch_latent_keys


def layers() -> list[nn.Module]:
    return [*BY_NAME["deepseek-v3.2"].build().model.layers]


def test_layers_are_patched_and_unpatched() -> None:
    found = layers()
    patch_latent_keys(found)
    assert all(isinstance(layer.self_attn.expand_kv, LatentKeys) for layer in found)
    unpatch_latent_keys(found[0])
    assert not isinstance(found[0].self_attn.expand_kv, LatentKeys)


def with_bias(attention: Any) -> None:
    attention.kv_b_proj = nn.Linear(24, attention.kv_b_proj.out_features)


def with_other_code(scale_of: str) -> Callable[[Any], None]:
    def change(attention: Any) -> None:
        own = type(attention).expand_kv

        class Scaled(type(attention)):  # type: ignore[misc]
            def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> Any:
                keys, values = own(self, kv_nope, k_rot)
                return (keys * 1.1, values) if scale_of == "keys" else (keys, values * 1.1)

        attention.__class__ = Scaled

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(with_bias, "must be a plain matrix without bias", id="bias"),
        pytest.param(with_other_code("keys"), "its scores would change", id="scores"),
        pytest.param(with_other_code("values"), "its values would change", id="values"),
        pytest.param(lambda attention: delattr(attention, "v_head_dim"), "it has no v_head_dim", id="no size"),
    ],
)
@torch.no_grad()
def test_other_layers_keep_their_code(change: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    found = layers()
    change(found[1].self_attn)
    with caplog.at_level(logging.WARNING, "fa_serve.hf"):
        patch_latent_keys(found)
    assert [isinstance(vars(layer.self_attn).get("expand_kv"), LatentKeys) for layer in found] == [True, False, True]
    assert (
        "DeepseekV32Attention caches the keys and values" in caplog.text or "Scaled caches the keys and values" in caplog.text
    )
    assert reason in caplog.text
