"""What the persistent kernel of a decoding step is given: the weights of its layers, what they do beside, and one step.

This module imports no Triton, so that models are fused where it is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fa_serve.ops.ops_backend import Norm


class UnsupportedStackError(Exception):
    """Why layers are not computed by the persistent kernel."""


class StackLayer(NamedTuple):
    """The weights of one layer, whose projections of queries, keys and values, and of gate and up, are merged.

    qkv:      ((num_heads + 2 * num_kv_heads) * head_dim, hidden); qkv_bias: as many numbers, or None
    o:        (hidden, num_heads * head_dim)
    gate_up:  (2 * intermediate, hidden); down: (hidden, intermediate)
    before_attention, before_mlp: norms of the residual stream
    q_norm, k_norm: of each head, or None
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    before_attention: Norm
    before_mlp: Norm
    q_norm: Norm | None
    k_norm: Norm | None

    def weights(self) -> dict[str, Tensor | None]:
        """The tensors by the names of `kernel.ADDRESSES`."""
        return {
            "qkv": self.qkv,
            "o": self.o,
            "gate_up": self.gate_up,
            "down": self.down,
            "qkv_bias": self.qkv_bias,
            "before_attention": self.before_attention.weight,
            "before_mlp": self.before_mlp.weight,
            "q_norm": None if self.q_norm is None else self.q_norm.weight,
            "k_norm": None if self.k_norm is None else self.k_norm.weight,
        }

    def constants(self) -> tuple[object, ...]:
        """What must be equal in all layers of a stack."""
        norms = (self.before_attention, self.before_mlp, self.q_norm, self.k_norm)
        tensors = [None if x is None else (x.shape, x.dtype) for x in self.weights().values()]
        return (tensors, [None if norm is None else (norm.eps, norm.offset) for norm in norms])


class StackOptions(NamedTuple):
    """What the layers do beside their products.

    num_heads, head_dim: of the queries; rotary_dim: numbers of a head that are rotated, in halves; 0 for none
    activation:    one of `fa_serve.ops.ACTIVATIONS`
    multiplier:    what each part is multiplied by before it is added to the residual stream
    softmax_scale: of the scores
    """

    num_heads: int
    head_dim: int
    rotary_dim: int
    activation: str
    multiplier: float
    softmax_scale: float


class StackStep(NamedTuple):
    """The tensors of one step, with shapes as in `fa_serve.api.attention_paged`.

    cos, sin: (total, at least rotary_dim / 2), of the positions of the tokens
    caches:   (k_cache, v_cache) of each layer
    """

    cos: Tensor
    sin: Tensor
    caches: Sequence[tuple[Tensor, Tensor]]
    slot_mapping: Tensor
    block_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
