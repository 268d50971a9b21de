"""Attention of vision towers that read images end to end, with a rotary embedding that is one kernel.

    forward = prove_attention(module)(module)          # raises NotReplacedError if it is another attention

Towers of Qwen2-VL and those like it multiply once for queries, keys and values, and rotate queries and keys in float32 by about
fourteen small kernels. This form rotates in place, in the memory of the product, and calls attention with views of it, without
the interfaces between a model and attention.

The module's own code computes while gradients are recorded, and whatever is asked of it that is not here: other implementations
of attention, and weights of attention. It also does if the two halves of the angles differ: pairs share an angle in this form,
of which the first call makes sure, once for modules of one kind.

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
    """Whether both halves of the angles are equal, once a call has told."""

    are_halves: bool | None = None

    def told_by(self, cos: Tensor, sin: Tensor) -> bool:
        """Whether the form may be used for these angles, and for those of all later calls."""
        if self.are_halves is None:
            half = cos.shape[-1] // 2
            if not sin.any():
                return False  # the first place alone, where every angle is zero
            self.are_halves = all(torch.equal(x[:, :half], x[:, half:]) for x in (cos, sin))
            if not self.are_halves:
                log.info("attention of the tower stays as it is: the halves of its angles differ")
        return self.are_halves


def may_be_packed_attention(module: nn.Module) -> bool:
    """Whether it has one product for queries, keys and values, one behind attention, and nothing else."""
    if {*dict(module.named_children())} != {"qkv", "proj"} or not hasattr(module, "scaling"):
        return False
    qkv = cast(Any, module).qkv
    heads, dim = (getattr(module, name, None) for name in ("num_heads", "head_dim"))
    if type(qkv) is not nn.Linear or not isinstance(heads, int) or not isinstance(dim, int):
        return False
    return qkv.out_features == 3 * heads * dim and not dim % 2 and _uses_fa_serve(module)


def prove_attention(module: nn.Module) -> Callable[[Any], Callable[..., Any]]:
    """Raises NotReplacedError, or an error of the module's code."""
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
            raise NotReplacedError("it is another attention than that to packed images")
    angles_of_kind = _Angles()
    return lambda each: PackedAttention(each, angles_of_kind)


class PackedAttention:
    """The forward of such a module. angles: what is known of those that modules of its kind are given"""

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
        no_page = all_heads[None, :1, :heads]  # is not written, because no row has a slot
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
        """Whether this form computes what a call asks for."""
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
