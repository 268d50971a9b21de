"""Layers with latent attention that run their own code, and still put latent keys in the engine's cache.

    attention.expand_kv = LatentKeys(attention, sizes)

transformers' modules of latent attention (DeepSeek V3.2, GLM-DSA, A.X-K2, Mistral 4) compute the keys and values of all heads
in the method `expand_kv`. In a forward on a paged cache, `LatentKeys` replaces this method and returns the method's arguments:
the latent vectors and rotated keys, joined to one key for all heads, whose first numbers are also the values. The batch that
caches this key calls `absorbed` for queries that fit it, and `values` to turn the output of attention into values of the heads
(see surgery/fuse/latent.py for the equations). So the module's own code computes queries, gates and the keys that queries
choose. Without a batch on a paged cache, the module's own `expand_kv` runs.

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
    """Replaces a module's `expand_kv`. sizes: sizes of the parts of keys and values"""

    def __init__(self, module: nn.Module, sizes: LatentSizes) -> None:
        self.module = module
        self.sizes = sizes
        self._key: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copying the module makes a LatentKeys for the copy."""
        return LatentKeys, (self.module, self.sizes)

    def __call__(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """kv_nope: (batch, 1, seqlen, rank); k_rot: (batch, 1, seqlen, rope)"""
        if not isinstance(riding_batch(), HoldsPages):
            return self.expanded(kv_nope, k_rot)
        self._key = torch.cat([kv_nope, k_rot], dim=-1)
        return self._key, self._key[..., : self.sizes.rank]

    def takes(self, key: Tensor) -> bool:
        """Whether `key` is the latent key that was returned last. Can be asked once, because the key is then forgotten."""
        found = self._key is key
        self._key = None
        return found

    def expanded(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, by the module's own code."""
        own: Any = type(self.module)
        return cast("tuple[Tensor, Tensor]", own.expand_kv(self.module, kv_nope, k_rot))

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries (total, num_heads, nope + rope) -> queries for latent keys (total, num_heads, rank + rope)."""
        rank, rope, nope, _ = self.sizes
        absorbed = query.new_empty(*query.shape[:2], rank + rope)
        absorbed[..., rank:] = query[..., nope:]
        torch.bmm(query[..., :nope].transpose(0, 1), self._up[:, :nope], out=absorbed[..., :rank].transpose(0, 1))
        return absorbed

    def values(self, out: Tensor) -> Tensor:
        """Means of latent vectors (total, num_heads, rank) -> means of values (total, num_heads, head_dim_v)."""
        return torch.bmm(out.transpose(0, 1), self._up[:, self.sizes.nope :].transpose(1, 2)).transpose(0, 1)

    @property
    def _up(self) -> Tensor:
        """(num_heads, nope + head_dim_v, rank)"""
        weight: Tensor = cast(Any, self.module).kv_b_proj.weight.detach()
        return weight.view(-1, self.sizes.nope + self.sizes.head_dim_v, self.sizes.rank)
