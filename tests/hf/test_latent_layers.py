"""Which layers have latent attention, and what the engine caches for them."""

from __future__ import annotations

import torch
from hf_families import BY_NAME
from latent_families import LATENT

from fa_serve.hf.latent_layers import LatentSizes, latent_sizes, latent_spec
from fa_serve.spec import AttentionSpec


def test_structure_tells_latent_attention() -> None:
    for family in LATENT:
        attention = family.build().model.layers[0].self_attn
        config = family.make_config()
        wanted = (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)
        assert latent_sizes(attention, 4, config.qk_nope_head_dim + config.qk_rope_head_dim) == wanted
    assert latent_sizes(BY_NAME["llama"].build().model.layers[0].self_attn, 4, 16) is None


def test_deepseek_caches_576_numbers() -> None:
    heads = AttentionSpec("paged", "cpu", 0, torch.bfloat16, torch.float8_e4m3fn, 192, 128, 128, 128, (-1, 0))
    assert heads.cached_bytes == 128 * 320
    latent = latent_spec(heads, LatentSizes(512, 64, 128, 128))
    assert (latent.num_kv_heads, latent.head_dim, latent.head_dim_v, latent.values_in_keys) == (1, 576, 512, True)
    assert latent.cached_bytes == 576
    assert (latent.num_heads, latent.window_size) == (128, (-1, 0))
    assert "values_in_keys" in str(latent)
