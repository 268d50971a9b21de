"""Latent attention (MLA): which layers of transformers have it, by their structure, and what the engine caches for them.

    sizes = latent_sizes(layer.self_attn, num_heads=128, head_dim=192)    # LatentSizes(512, 64, 128, 128), or None
    spec = latent_spec(spec, sizes)                    # one KV head of 576, whose values are the first 512 numbers of its keys

The attention of DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, Youtu and MiniCPM3 has a projection `kv_a_proj_with_mqa` to a
latent vector and a rotated key that all heads share, a norm `kv_a_layernorm` of the latent vector, and a projection `kv_b_proj`
from the latent vector to the keys and values of all heads. Left out: whether a layer computes what these names say, which the
engine proves (fa_serve.hf.surgery.fuse.fusion, and fa_serve.hf.surgery.latent_keys for layers that run their own code).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from fa_serve.spec import AttentionSpec


class LatentSizes(NamedTuple):
    """The sizes of the parts of keys and values.

    rank:       size of a latent vector (kv_lora_rank)
    rope:       size of the rotated part of a key, which all heads share
    nope:       size of the part of a head's key that is not rotated
    head_dim_v: size of a head's value
    """

    rank: int
    rope: int
    nope: int
    head_dim_v: int


def latent_sizes(attention: nn.Module, num_heads: int, head_dim: int) -> LatentSizes | None:
    """The sizes of a module's latent attention, or None for a module with another kind of attention.

    num_heads, head_dim: of the module's queries
    """
    found: Any = attention
    if not all(hasattr(found, name) for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")):
        return None
    rank = int(found.kv_a_layernorm.weight.shape[0])
    rope = int(found.kv_a_proj_with_mqa.weight.shape[0]) - rank
    nope = head_dim - rope
    return LatentSizes(rank, rope, nope, int(found.kv_b_proj.weight.shape[0]) // num_heads - nope)


def latent_spec(spec: AttentionSpec, sizes: LatentSizes) -> AttentionSpec:
    """The spec of a layer on the engine's cache if the cache holds latent keys. spec: the layer's spec with expanded keys"""
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=sizes.rank + sizes.rope,
        head_dim_v=sizes.rank,
        values_in_keys=True,
    )
