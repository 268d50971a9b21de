"""Layers with latent attention that keep their own code, and leave latent keys in the engine's cache nevertheless.

    attention.expand_kv = LatentKeys(attention, sizes)

transformers' modules of latent attention (DeepSeek V3.2, GLM-DSA, A.X-K2, Mistral 4) make the keys and values of all heads in
the method `expand_kv`. In a forward on a paged cache, `LatentKeys` in its place returns what that method is given:
the latent vectors and rotated keys, as one key for all heads, whose values are its first numbers. The batch that caches them
lets it make queries that fit, and values of what attention returns (see surgery/fuse/latent.py for the equations). So queries,
gates, and keys that queries choose are computed by the module's own code. Without a batch on pages, so is `expand_kv`.

Left out: whether a module's `expand_kv` is a product with one matrix, which surgery/latent_keys.py proves, and layers that are
fused (surgery/fuse).
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fa_serve.hf.adapter.attention import riding_batch
from fa_serve.hf.latent_layers import LatentSizes


@runtime_checkable
class HoldsPages(Protocol):
    """A batch on a paged cache."""

    kv_caches: Any


class LatentKeys:
    """Takes the place of a module's `expand_kv`. sizes: of the parts of keys and values"""

    def __init__(self, module: nn.Module, sizes: LatentSizes) -> None:
        self.module = module
        self.sizes = sizes
        self._key: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module has keys that belong to the copy."""
        return LatentKeys, (self.module, self.sizes)

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """kv_nope: (batch, 1, seqlen, rank); k_rot: (batch, 1, seqlen, rope)"""
        if not isinstance(riding_batch(), HoldsPages):
            return self.expanded(kv_nope, k_rot)
        self._key = torch.cat([kv_nope, k_rot], dim=-1)
        return self._key, self._key[..., : self.sizes.rank]

    def takes(self, key: Tensor) -> bool:
        """Whether a call of attention has this latent key, which is asked for once."""
        found = self._key is key
        self._key = None
        return found

    def expanded(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, by the module's own code."""
        own: Any = type(self.module)
        return cast("tuple[Tensor, Tensor]", own.expand_kv(self.module, kv_nope, k_rot))

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries (total, num_heads, nope + rope) -> (total, num_heads, rank + rope), whose products are with latent keys."""
        rank, rope, nope, _ = self.sizes
        absorbed = query.new_empty(*query.shape[:2], rank + rope)
        absorbed[..., rank:] = query[..., nope:]
        torch.bmm(query[..., :nope].transpose(0, 1), self._up[:, :nope], out=absorbed[..., :rank].transpose(0, 1))
        return absorbed

    def values(self, out: Tensor) -> Tensor:
        """Means of latent vectors (total, num_heads, rank) -> of values, (total, num_heads, head_dim_v)."""
        return torch.bmm(out.transpose(0, 1), self._up[:, self.sizes.nope :].transpose(1, 2)).transpose(0, 1)

    @property
    def _up(self) -> Tensor:
        """(num_heads, nope + head_dim_v, rank)"""
        weight: Tensor = cast(Any, self.module).kv_b_proj.weight.detach()
        return weight.view(-1, self.sizes.nope + self.sizes.head_dim_v, self.sizes.rank)
