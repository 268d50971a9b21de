"""Latent attention of a fused layer (DeepSeek V2, section 2.1, arXiv:2405.04434): a compressed cache of keys and values.

The cache holds a latent vector c and one rotated key r for each token, which all heads share. Head h has keys (U_h c, r) and
values V_h c, where U_h and V_h are rows of `kv_b_proj`. Scores and outputs can be computed in two forms:

    plain     q_h . (U_h c, r)                     sum p V_h c       num_heads keys and values in full
    absorbed  (U_h^T q_nope, q_rope) . (c, r)      V_h (sum p c)     one KV head, whose values are the first part of its keys

For each query, head and key, the plain form takes nope + rope + head_dim_v multiplications and the absorbed form 2 rank + rope,
3.4 times as many in DeepSeek V3. But the plain form first computes the keys and values of each head from the latent vectors, so
it is cheaper only where more than 170 queries see a key. It is used for a step whose keys are all new (`fresh`). Keys from the
cache are read in the absorbed form, whatever the number of queries: this form needs no memory for decompressed keys, which are
70 times as large as the latent ones, and no lengths on the host, so it can be captured in CUDA graphs. Both forms compute the
same sum in another order.

Left out: which layers have latent attention (fa_serve.hf.latent_layers), and the proof that a layer computes this (fusion.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.hf.adapter.translate import LayerCall
from fa_serve.hf.latent_layers import LatentSizes
from fa_serve.hf.lora.product import project
from fa_serve.hf.surgery.fuse.layer import LayerStep
from fa_serve.hf.surgery.fuse.parts import FusedProduct, merge_products, norm_of, product_of
from fa_serve.hf.surgery.proof import NotReplacedError

PLAIN_TOKENS = 2048
"""A step with at least this many tokens whose keys are all new runs in the plain form, without a CUDA graph.

A graph computes the absorbed form, because it also serves steps with cached keys. On one H200, a step of 16 prompts of 512
tokens spends 13.6 of 108 ms in attention of this form, in 27 layers with 16 heads. Going by its number of multiplications, the
plain form takes about 4 ms. Without a graph, the launches cost the host 35 ms, during which the GPU is busy anyway. The plain
form, together with a kernel for experts, shared experts in two products and the kernel of
fa_serve/ops/elementwise/rotary_latent.py, reduces this step to 80 ms.
"""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention on latent keys.

    num_heads: number of query heads
    sizes:     sizes of the parts of keys and values
    down:      the merged projection to queries (or to the input of `q_norm`), latent vectors and rotated keys
    q_norm:    norm between `down` and `q_up`; None if queries have a single projection
    q_up:      second projection of the queries; None if they have a single projection
    kv_norm:   norm of the latent vectors
    kv_up:     (num_heads, nope + head_dim_v, rank): the matrices that make keys and values from latent vectors
    pairing:   which elements of a rotated part form pairs
    """

    num_heads: int
    sizes: LatentSizes
    down: FusedProduct
    q_norm: ops.Norm | None
    q_up: FusedProduct | None
    kv_norm: ops.Norm
    kv_up: Tensor
    pairing: ops.Pairing

    def compute(self, x: Tensor, norm: ops.Norm | None, step: LayerStep) -> Tensor:
        """See `FusedAttention`. `step.attend` gets the queries, keys and values of the plain or of the absorbed form."""
        rank, rope, nope, _ = self.sizes
        down = project(self.down, x, norm=norm)
        q, latent = torch.split_with_sizes(down, [down.shape[1] - rank - rope, rank + rope], dim=1)
        if self.q_up is not None:
            q = project(self.q_up, q, norm=self.q_norm)
        q = q.view(len(x), self.num_heads, nope + rope)
        if step.fresh:
            return self._plain(q, latent, step)
        return self._absorbed(q, latent, step)

    def _plain(self, q: Tensor, latent: Tensor, step: LayerStep) -> Tensor:
        rank, rope, nope, head_dim_v = self.sizes
        keys = self._rotate_and_store(q[..., nope:], latent, step, out=q[..., nope:])
        total = len(q)
        k = q.new_empty(total, self.num_heads, nope + rope)
        v = q.new_empty(total, self.num_heads, head_dim_v)
        c = keys[:, :rank].expand(self.num_heads, -1, -1)
        torch.bmm(c, self.kv_up[:, :nope].transpose(1, 2), out=k[..., :nope].transpose(0, 1))
        torch.bmm(c, self.kv_up[:, nope:].transpose(1, 2), out=v.transpose(0, 1))
        k[..., nope:] = keys[:, None, rank:]
        return step.attend(q, k, v).flatten(1)

    def _absorbed(self, q: Tensor, latent: Tensor, step: LayerStep) -> Tensor:
        rank, rope, nope, _ = self.sizes
        absorbed = q.new_empty(len(q), self.num_heads, rank + rope)
        keys = self._rotate_and_store(q[..., nope:], latent, step, out=absorbed[..., rank:])[:, None]
        torch.bmm(q[..., :nope].transpose(0, 1), self.kv_up[:, :nope], out=absorbed[..., :rank].transpose(0, 1))
        out = step.attend(absorbed, keys, keys[..., :rank])
        return torch.bmm(out.transpose(0, 1), self.kv_up[:, nope:].transpose(1, 2)).transpose(0, 1).flatten(1)

    def _rotate_and_store(self, q: Tensor, latent: Tensor, step: LayerStep, out: Tensor) -> Tensor:
        """Rotate q (total, num_heads, rope) into `out` and write the keys (total, rank + rope) to the cache -> the keys."""
        return ops.rotary_store_latent(
            q,
            latent,
            step.k_cache,
            step.slot_mapping,
            norm=self.kv_norm,
            cos=step.cos,
            sin=step.sin,
            pairing=self.pairing,
            descale=step.descale.get("k_descale"),
            out=out,
        )


def build_latent(attention: Any, call: LayerCall, sizes: LatentSizes, pairing: ops.Pairing) -> LatentAttention:
    """Build the fused form of an attention module with latent keys. call: the module's call of attention"""
    num_heads = call.query.shape[1]
    if call.window_size[0] >= 0 or call.attention_chunk or call.softcap or call.sinks is not None:
        raise NotReplacedError("latent attention with a window, chunks, softcap or sinks is not fused")
    kv_up = product_of(attention.kv_b_proj)
    if not isinstance(kv_up.weight, Tensor) or kv_up.bias is not None:
        raise NotReplacedError("the projection of latent vectors must be a plain matrix without bias")
    if sizes.rope % 2 or min(sizes) < 1:
        raise NotReplacedError(
            f"the parts of its latent keys must have positive sizes, and the rotated one an even size, got {sizes}"
        )
    has_two = getattr(attention, "q_a_proj", None) is not None
    return LatentAttention(
        num_heads=num_heads,
        sizes=sizes,
        down=merge_products(attention, "q_a_proj" if has_two else "q_proj", "kv_a_proj_with_mqa"),
        q_norm=norm_of(attention.q_a_layernorm) if has_two else None,
        q_up=product_of(attention.q_b_proj) if has_two else None,
        kv_norm=norm_of(attention.kv_a_layernorm),
        kv_up=kv_up.weight.detach().view(num_heads, sizes.nope + sizes.head_dim_v, sizes.rank),
        pairing=pairing,
    )
