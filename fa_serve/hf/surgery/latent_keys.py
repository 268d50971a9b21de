"""Lets layers with latent attention that are not fused cache latent keys, if this is proven to change nothing.

    patch_latent_keys(layers)

In the proof, the module's own code computes keys and values from random latent vectors and rotated keys. Scores and outputs for
random queries and attention weights are computed from these keys and values, and again from the latent vectors and the module's
matrix, and must agree. Left out: how a layer computes with latent keys (adapter/latent_keys.py), and fused layers, which cache
latent keys by themselves (fuse/latent.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve.hf.adapter.latent_keys import LatentKeys
from fa_serve.hf.latent_layers import LatentSizes
from fa_serve.hf.surgery.proof import float32_copy, kind_of, results_agree

log = logging.getLogger("fa_serve.hf")
_TOKENS = 5


@torch.no_grad()
def patch_latent_keys(layers: Iterable[nn.Module]) -> None:
    """Replace `expand_kv` of layers' attention with `LatentKeys` if it computes the same. The log says why a kind is left out.

    layers: modules of a model. Modules without such attention are ignored
    """
    reasons: dict[str, str] = {}
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if not hasattr(attention, "expand_kv"):
            continue
        kind = kind_of(attention)
        if kind not in reasons:
            reasons[kind] = _reason_against(attention)
            if reasons[kind]:
                log.warning(
                    "%s caches the keys and values of all heads, not latent keys: %s", type(attention).__name__, reasons[kind]
                )
        if not reasons[kind]:
            attention.expand_kv = LatentKeys(attention, _sizes_of(attention))


def unpatch_latent_keys(model: nn.Module) -> None:
    """Give modules with latent attention their own `expand_kv` again."""
    for module in model.modules():
        if isinstance(vars(module).get("expand_kv"), LatentKeys):
            del module.expand_kv


def _sizes_of(attention: Any) -> LatentSizes:
    rank = int(attention.kv_a_layernorm.weight.shape[0])
    return LatentSizes(rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim, attention.v_head_dim)


def _reason_against(attention: Any) -> str:
    """Why a module keeps its own `expand_kv`; "" if products with its matrix compute the same."""
    parts = ("kv_b_proj", "kv_a_layernorm", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    missing = [name for name in parts if not hasattr(attention, name)]
    if missing:
        return f"it has no {missing[0]}"
    up = attention.kv_b_proj
    if type(up) is not nn.Linear or "forward" in vars(up) or up.bias is not None or not up.weight.is_floating_point():
        return "the projection of latent vectors must be a plain matrix without bias"
    if min(_sizes_of(attention)) < 1:
        return f"the parts of its latent keys must have positive sizes, got {_sizes_of(attention)}"
    return _difference(LatentKeys(float32_copy(attention), _sizes_of(attention)))


def _difference(latent: LatentKeys) -> str:
    rank, rope, nope, _ = latent.sizes
    up = latent.module.kv_b_proj.weight  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(up.device)  # type: ignore[arg-type]

    c = random(1, 1, _TOKENS, rank)
    r = random(1, 1, _TOKENS, rope)
    keys, values = latent.expanded(c, r)
    num_heads = keys.shape[1]
    query = random(_TOKENS, num_heads, nope + rope)
    own = torch.einsum("thd,hsd->hts", query, keys[0])
    ours = torch.einsum("thd,sd->hts", latent.absorbed(query), torch.cat([c, r], dim=-1)[0, 0])
    weights = random(_TOKENS, num_heads, _TOKENS)
    own_out = torch.einsum("ths,hsd->thd", weights, values[0])
    our_out = latent.values(torch.einsum("ths,sd->thd", weights, c[0, 0]))
    if not results_agree(ours, own):
        return "its scores would change"
    return "" if results_agree(our_out, own_out) else "its values would change"
