"""Attention of vision towers over images that are packed end to end, with rotary embedding in one kernel.

    forward = prove_attention(module)(module)          # raises NotReplacedError for a module with another kind of attention

Towers like that of Qwen2-VL have one product for queries, keys and values, and rotate queries and keys in float32 by about
fourteen small kernels. The replacement rotates in place, in the output of the product, and calls attention with views of it,
without the interfaces between a model and attention.

The module's own code runs while autograd records, and for calls that the replacement does not support, such as calls with
another implementation of attention or calls that ask for attention weights. It also runs if the two halves of the angles
differ, because here both elements of a pair share an angle. The first call checks this, once for all modules of a kind.

Left out: norms of queries and keys, and towers that pad images to one length.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fa_serve import api, ops
from fa_serve.hf.adapter.attention import asks_for_weights, riding_batch
from fa_serve.hf.adapter.models import NAME
from fa_serve.hf.surgery.proof import NotReplacedError, check_untouched, float32_copy, results_agree

_BORDERS = (0, 3, 3, 7, 8)
log = logging.getLogger("fa_serve.hf")


@dataclass(slots=True)
class _Angles:
    """Whether both halves of the angles are equal; None until a call has shown it."""

    are_halves: bool | None = None

    def told_by(self, cos: Tensor, sin: Tensor) -> bool:
        """Whether the replacement may be used for these angles. Decides for all later calls too, unless all angles are zero."""
        if self.are_halves is None:
            half = cos.shape[-1] // 2
            if not sin.any():
                return False  # all angles are zero, as for a single patch, so they show nothing
            self.are_halves = all(torch.equal(x[:, :half], x[:, half:]) for x in (cos, sin))
            if not self.are_halves:
                log.info("attention of the tower is not replaced: the two halves of its rotary angles differ")
        return self.are_halves


def may_be_packed_attention(module: nn.Module) -> bool:
    """Whether a module has one product for queries, keys and values, one after attention, and no other parts."""
    if {*dict(module.named_children())} != {"qkv", "proj"} or not hasattr(module, "scaling"):
        return False
    qkv = cast(Any, module).qkv
    heads, dim = (getattr(module, name, None) for name in ("num_heads", "head_dim"))
    if type(qkv) is not nn.Linear or not isinstance(heads, int) or not isinstance(dim, int):
        return False
    return qkv.out_features == 3 * heads * dim and not dim % 2 and _uses_fa_serve(module)


def prove_attention(module: nn.Module) -> Callable[[Any], Callable[..., Any]]:
    """Prove `PackedAttention`. Returns what makes the forward. Raises NotReplacedError, or an error of the module's code."""
    check_untouched(module)
    own: Any = float32_copy(module, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    for borders in (_BORDERS, (0, 1)):
        rows = borders[-1]
        x = torch.randn(rows, own.qkv.in_features, generator=draw)
        angles = torch.randn(rows, own.head_dim // 2, generator=draw).repeat(1, 2)
        ends = torch.tensor(borders, dtype=torch.int32)
        given = {"cu_seqlens": ends, "position_embeddings": (angles.cos(), angles.sin()), "max_seqlen": int(ends.diff().max())}
        with torch.no_grad():
            expected = own(x, **given)
            found = PackedAttention(own, _Angles(True))(x, **given)
        if not isinstance(expected, Tensor) or not results_agree(found, expected):
            raise NotReplacedError("its result differs from attention over packed images")
    angles_of_kind = _Angles()
    return lambda each: PackedAttention(each, angles_of_kind)


class PackedAttention:
    """The replacing forward of a module. angles: what is known about the angles, shared by all modules of a kind"""

    def __init__(self, module: Any, angles: _Angles) -> None:
        self._module = module
        self._angles = angles

    def __call__(self, hidden_states: Tensor, *args: Any, **words: Any) -> Any:
        """hidden_states: (rows, width); cu_seqlens: (n + 1,) int32; position_embeddings: cos and sin, (rows, head_dim) each"""
        module = self._module
        if args or not self._is_taken(hidden_states, words):
            return type(module).forward(module, hidden_states, *args, **words)
        borders = words["cu_seqlens"]
        longest = words["max_seqlen"]
        rows = len(hidden_states)
        heads = module.num_heads
        dim = module.head_dim
        qkv = module.qkv(hidden_states)
        all_heads = qkv.view(rows, 3 * heads, dim)
        nowhere = qkv.new_full((rows,), -1, dtype=torch.int64)
        no_page = all_heads[None, :1, :heads]  # never written, because no row has a slot
        cos, sin = (x[:, : dim // 2] for x in words["position_embeddings"])
        ops.rotary_store_kv(qkv, no_page, no_page, nowhere, num_heads=heads, cos=cos, sin=sin)
        q, k, v = all_heads.view(rows, 3, heads, dim).unbind(1)
        out: Any = api.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=borders,
            cu_seqlens_k=borders,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=module.scaling,
        )
        return module.proj(out.flatten(1))

    def _is_taken(self, hidden_states: Tensor, words: Mapping[str, Any]) -> bool:
        """Whether the replacement supports a call."""
        angles = words.get("position_embeddings")
        return (
            not torch.is_grad_enabled()
            and isinstance(words.get("cu_seqlens"), Tensor)
            and type(words.get("max_seqlen")) is int
            and type(angles) is tuple
            and hidden_states.ndim == 2
            and len(hidden_states) > 0
            and _uses_fa_serve(self._module)
            and not asks_for_weights(words.get("output_attentions"))
            and riding_batch() is None
            and self._angles.told_by(*angles)
        )


def _uses_fa_serve(module: Any) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == NAME
