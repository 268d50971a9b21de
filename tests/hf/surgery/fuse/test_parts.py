"""What a fused layer is made of, and which parts no fused layer can have. Whole layers are compared in test_fusion.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_families import BY_NAME
from latent_families import LATENT
from torch import Tensor, nn

from fa_serve.hf.surgery.fuse.latent import LatentAttention
from fa_serve.hf.surgery.fuse.layer import HeadsAttention
from fa_serve.hf.surgery.fuse.parts import Call, NotFusedError, build, rotations

V3 = next(family for family in LATENT if family.name == "deepseek-v3")
OPTIONS = {"left": -1, "attention_chunk": 0, "softmax_scale": 0.3, "softcap": 0.0, "sinks": None}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def call_of(*shapes: tuple[int, ...], **options: Any) -> Call:
    heads: tuple[Tensor, ...] = tuple(torch.zeros(7, *shape) for shape in shapes)
    return Call(torch.zeros(1, 7, 64), {}, 3, heads, OPTIONS | options)


def latent_call(**options: Any) -> Call:
    return call_of((4, 24), (4, 24), (4, 16), **options)


def test_kinds_of_attention_are_built_for_the_rotations_they_may_have() -> None:
    llama = BY_NAME["llama"].build().model.layers[0]
    call = call_of((4, 16), (2, 16), (2, 16))
    attention = build(llama, call, "none").attention
    assert isinstance(attention, HeadsAttention)
    assert (attention.num_heads, attention.head_dim, attention.tables) == (4, 16, None)
    assert build(llama, call, "halves").attention.tables == "twice"
    assert build(llama, call, "half tables").attention.tables == "once"
    for angles, tried in ((16, ("halves", "none")), (8, ("halves", "half tables", "none"))):
        call.kwargs["position_embeddings"] = (torch.zeros(1, 7, angles), torch.zeros(1, 7, angles))
        assert rotations(llama, call) == tried, "a head of 16 has at most 8 angles"
    layer = V3.build().model.layers[0]
    assert rotations(layer, latent_call()) == ("halves", "neighbours")
    fused = build(layer, latent_call(), "neighbours")
    assert isinstance(fused.attention, LatentAttention)
    assert (fused.index, fused.attention.pairing, fused.attention.sizes) == (3, "neighbours", (16, 8, 16, 16))
    assert fused.attention.kv_up.data_ptr() == layer.self_attn.kv_b_proj.weight.data_ptr()
    merged = fused.attention.down.weight
    assert merged.data_ptr() == layer.self_attn.q_a_proj.weight.data_ptr()
    assert merged.shape == (16 + 24, 64)


def test_the_scale_of_latent_keys_is_that_of_heads() -> None:
    layer = V3.build().model.layers[0]
    assert build(layer, latent_call(), "halves").options["softmax_scale"] == 0.3
    assert build(layer, latent_call(softmax_scale=None), "halves").options["softmax_scale"] == 24**-0.5


@pytest.mark.parametrize(
    "option", [{"left": 9}, {"attention_chunk": 4}, {"softcap": 5.0}, {"sinks": torch.zeros(4)}], ids=lambda x: next(iter(x))
)
def test_latent_attention_with_other_options_is_left_alone(option) -> None:
    with pytest.raises(NotFusedError, match="latent attention with a window, chunks, softcap or sinks"):
        build(V3.build().model.layers[0], latent_call(**option), "halves")


def test_a_projection_of_latent_vectors_with_a_bias_is_left_alone() -> None:
    layer = V3.build().model.layers[0]
    layer.self_attn.kv_b_proj.bias = nn.Parameter(torch.zeros(4 * 32))
    with pytest.raises(NotFusedError, match="must be a plain matrix without bias"):
        build(layer, latent_call(), "halves")
