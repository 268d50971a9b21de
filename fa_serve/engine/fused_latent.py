"""Latent attention of a fused layer (DeepSeek V2, section 2.1, arXiv:2405.04434): a compressed cache of keys and values.

A token leaves a latent vector c and one rotated key r in the cache, which all heads share. Head h has keys (U_h c, r) and
values V_h c, where U_h and V_h are rows of `kv_b_proj`. Scores and outputs follow in either of two forms:

    plain     q_h . (U_h c, r)                     sum p V_h c       num_heads keys and values in full
    absorbed  (U_h^T q_nope, q_rope) . (c, r)      V_h (sum p c)     one KV head, whose values are the first part of its keys

For each query, head and key the plain form multiplies nope + rope + v pairs of numbers and the absorbed form 2 rank + rope, 3.4
times as many in DeepSeek V3. The plain form first computes the keys and values of a head from each latent vector, so it is the
cheaper one where more than 170 queries see a key. It is used where all keys of a step are new (`fresh`). Keys that come from
the cache are read in the absorbed form, whatever the number of queries: it needs no memory for decompressed keys, which are 70
times as large as the latent ones, and no lengths on the host, so it can be captured in CUDA graphs. Both forms are the same sum
in another order.

Left out: which layers have latent attention (fa_serve.hf.latent_layers), and the proof that a layer computes this (fusion.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.api import store_kv
from fa_serve.engine.fused_layer import LayerStep, Product
from fa_serve.hf.latent_layers import LatentSizes

Pairing = Literal["halves", "neighbours"]
"""Which numbers a rotation pairs: i and i + dim / 2, or 2 i and 2 i + 1."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention on latent keys.

    num_heads: of the queries
    sizes:     of the parts of keys and values
    down:      the merged projection to queries, or to what `q_up` takes, and to latent vectors and rotated keys
    q_norm:    norm between `down` and `q_up`; q_up: projection to queries. None for queries that have one projection
    kv_norm:   norm of the latent vectors
    kv_up:     (num_heads, nope + head_dim_v, rank): what makes keys and values of latent vectors
    pairing:   of the rotary embedding
    """

    num_heads: int
    sizes: LatentSizes
    down: Product
    q_norm: ops.Norm | None
    q_up: Product | None
    kv_norm: ops.Norm
    kv_up: Tensor
    pairing: Pairing

    def compute(self, x: Tensor, norm: ops.Norm | None, step: LayerStep) -> Tensor:
        """As in `FusedAttention`. `step.attend` is given queries and keys of either form."""
        rank, rope, nope, _ = self.sizes
        total = len(x)
        down = ops.linear(x, self.down.weight, self.down.bias, norm=norm)
        q, latent, k_rope = torch.split_with_sizes(down, [down.shape[1] - rank - rope, rank, rope], dim=1)
        if self.q_up is not None:
            q = ops.linear(q, self.q_up.weight, self.q_up.bias, norm=self.q_norm)
        q_nope, q_rope = torch.split_with_sizes(q.view(total, self.num_heads, nope + rope), [nope, rope], dim=2)
        keys = down.new_empty(total, 1, rank + rope)
        c = keys[:, 0, :rank]
        ops.rms_norm(latent, self.kv_norm, out=c)
        q_rope = rotate(q_rope, step.cos, step.sin, self.pairing)
        keys[..., rank:] = rotate(k_rope[:, None], step.cos, step.sin, self.pairing)
        # both parts of a key are written by one launch, as if the second one were its value
        store_kv(
            keys[..., :rank],
            keys[..., rank:],
            step.k_cache[..., :rank],
            step.k_cache[..., rank:],
            step.slot_mapping,
            **step.descale,
        )
        if step.fresh:
            return self._plain(q_nope, q_rope, keys, step)
        return self._absorbed(q_nope, q_rope, keys, step)

    def _plain(self, q_nope: Tensor, q_rope: Tensor, keys: Tensor, step: LayerStep) -> Tensor:
        rank, _, nope, head_dim_v = self.sizes
        kv = ops.linear(keys[:, 0, :rank].contiguous(), self.kv_up.flatten(0, 1)).view(len(keys), self.num_heads, -1)
        k_nope, v = torch.split_with_sizes(kv, [nope, head_dim_v], dim=2)
        k = torch.cat([k_nope, keys[..., rank:].expand(-1, self.num_heads, -1)], dim=2)
        return step.attend(torch.cat([q_nope, q_rope], dim=2), k, v).flatten(1)

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, keys: Tensor, step: LayerStep) -> Tensor:
        rank, _, nope, _ = self.sizes
        q = torch.bmm(q_nope.transpose(0, 1), self.kv_up[:, :nope]).transpose(0, 1)
        out = step.attend(torch.cat([q, q_rope], dim=2), keys, keys[..., :rank])
        return torch.bmm(out.transpose(0, 1), self.kv_up[:, nope:].transpose(1, 2)).transpose(0, 1).flatten(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> Tensor:
    """x (total, heads, dim), rotated by the angles (total, dim / 2 or more) of pairs -> the same shape and dtype.

    Of each pair, the first numbers come before the second ones in the result, so scores of rotated queries and keys are right
    and their numbers may be in another order than the model's.
    """
    half = x.shape[2] // 2
    cos = cos[:, None, :half]
    sin = sin[:, None, :half]
    first, second = x.chunk(2, dim=2) if pairing == "halves" else (x[..., 0::2], x[..., 1::2])
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2).to(x.dtype)
