"""The Protocol that every backend of ops implements, and the types of its arguments.

`fa_serve.ops` documents the arguments. A backend gets all of them, by position and with defaults filled in. This module leaves
out the choice among backends (`__init__.py`) and their code (`torch_ops.py`, `triton_ops.py`).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fa_serve.ops.lora.problem import LoraBatch, LoraWeights
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.rows import RowTable
from fa_serve.spec import OpSpec

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""Names of the activations: SiLU, GELU in its tanh approximation, and GELU by the error function."""


Weight: TypeAlias = Tensor | QuantizedWeight
"""The weight of a product: a matrix (n, k), or a quantised one."""


Pairing: TypeAlias = Literal["halves", "neighbours"]
"""Which elements a rotation pairs: i and i + dim / 2, or 2 i and 2 i + 1."""
GateActivation: TypeAlias = Literal["sigmoid", "silu"]
"""The activation of a gate, before it multiplies."""


class Norm(NamedTuple):
    """The parameters of an RMS norm.

    weight: (width,)
    eps:    added to the mean square
    offset: added to the weight; 1 for models that store weights around 0
    """

    weight: Tensor
    eps: float
    offset: float = 0.0


class LayerNorm(NamedTuple):
    """The parameters of a layer norm (Ba, Kiros, Hinton 2016, arXiv:1607.06450).

    weight, bias: (width,); bias may be None
    eps:          added to the variance
    """

    weight: Tensor
    bias: Tensor | None
    eps: float


class DeltaHeads(NamedTuple):
    """The heads of a gated delta net.

    keys, key_dim: number and size of the heads of queries, and of those of keys
    values, dim:   number and size of the heads of values, a multiple of `keys`
    """

    keys: int
    key_dim: int
    values: int
    dim: int

    @property
    def columns(self) -> int:
        """The columns of queries, keys, values, and gates of the output."""
        return 2 * self.keys * self.key_dim + 2 * self.values * self.dim


class RoundedRows(NamedTuple):
    """Rows that were rounded to float8 for the product that takes them.

    data:   (total, k) float8_e4m3fn
    scales: (total, 1) float32; a row is data * scale
    dtype:  dtype of the product's result
    """

    data: Tensor
    scales: Tensor
    dtype: torch.dtype


class Gate(NamedTuple):
    """How an expert computes one number from a gate and an up value: f(min(gate, limit)) * (clamp(up, -limit, limit) + offset).

    f is x -> activation(slope * x) / slope. With SiLU that is x * sigmoid(slope * x).

    activation:  one of ACTIVATIONS
    interleaved: rows 2n and 2n + 1 of the weights give gate and up n; else rows n and width + n
    """

    activation: str
    interleaved: bool = False
    slope: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


class ExpertSizes(NamedTuple):
    """The sizes of a mixture's experts."""

    num_experts: int
    hidden: int
    width: int


class ExpertWeights(NamedTuple):
    """The weights of a mixture's experts. Both products have matrices, or both have quantised weights without `columns`.

    gate_up:      (num_experts, 2 * width, hidden), any strides: transposed weights are a view; or a QuantizedWeight of
                  (num_experts * 2 * width, hidden)
    gate_up_bias: (num_experts, 2 * width), last dimension contiguous
    down:         (num_experts, hidden, width), any strides; or a QuantizedWeight of (num_experts * hidden, width)
    down_bias:    (num_experts, hidden), last dimension contiguous
    """

    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None
    gate: Gate

    @property
    def sizes(self) -> ExpertSizes:
        """Quantised weights have no dimension of experts: the number follows from the columns, which are hidden and width."""
        if isinstance(self.down, QuantizedWeight):
            rows, width = self.down.shape
            hidden = self.gate_up.shape[-1]
            return ExpertSizes(rows // hidden, hidden, width)
        return ExpertSizes(*self.down.shape)


class Router(NamedTuple):
    """How a router chooses experts from logits, and weighs them.

    The score of an expert is a softmax over all experts or, with `sigmoid`, the sigmoid of its logit. The top_k experts with
    the largest score + bias are chosen. With several groups they are chosen among top_groups of num_groups equal groups: those
    whose two largest values of score + bias have the largest sum. The weights are scores without bias.

    renormalise: the weights are divided by their sum
    scale:       they are then multiplied by it
    num_groups:  if it is above 1, the number of experts and the size of a group must be powers of two
    """

    top_k: int
    sigmoid: bool = False
    renormalise: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


class OpsBackend(Protocol):
    """Computes every function of `fa_serve.ops`; shapes and conventions are documented there."""

    name: str

    def supports(self, spec: OpSpec) -> str | None:
        """None if the backend serves the spec, else the reason why it does not."""
        ...

    def linear(
        self,
        x: Tensor | RoundedRows,
        weight: Weight,
        bias: Tensor | None,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        alpha: float,
        next_weight: Weight | None,
        /,
    ) -> Tensor | RoundedRows: ...

    def rms_norm(self, x: Tensor, norm: Norm, residual: Tensor | None, out: Tensor | None, /) -> Tensor: ...

    def layer_norm(self, x: Tensor, norm: LayerNorm, residual: Tensor | None, keep_sum: bool, /) -> Tensor: ...

    def rotary_store_kv(
        self,
        qkv: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        num_heads: int,
        cos: Tensor | None,
        sin: Tensor | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        /,
    ) -> None: ...

    def rotary_store_latent(
        self,
        q: Tensor,
        latent: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        norm: Norm,
        cos: Tensor,
        sin: Tensor,
        pairing: Pairing,
        descale: Tensor | None,
        out: Tensor,
        /,
    ) -> Tensor: ...

    def act(self, x: Tensor, activation: str, /) -> Tensor: ...

    def act_and_mul(self, x: Tensor, activation: str, /) -> Tensor: ...

    def rms_norm_backward(self, dy: Tensor, x: Tensor, norm: Norm, needs_weight: bool, /) -> tuple[Tensor, Tensor | None]:
        """The gradients of `rms_norm` without a residual: that of x, and that of the norm's weight, None unless needs_weight.

        dy, x: (total, width), the elements of a row contiguous
        """
        ...

    def act_and_mul_backward(self, dy: Tensor, x: Tensor, activation: str, /) -> Tensor:
        """The gradient of `act_and_mul`, (total, 2 * width). dy: (total, width); x: (total, 2 * width); both contiguous"""
        ...

    def rotary_backward(
        self,
        dqkv: Tensor,
        qkv: Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        cos: Tensor | None,
        sin: Tensor | None,
        q_norm: Norm | None,
        k_norm: Norm | None,
        needs_weights: bool,
        /,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `rotary_store_kv`. dqkv is the gradient of its result, and becomes that of its input.

        dqkv: like qkv, contiguous: the gradients of the queries and keys that attention has read, and of the values
        qkv:  before the norms; not needed without norms

        Returns the gradients of the weights of q_norm and k_norm; both are None without norms, or unless needs_weights.
        """
        ...

    def rotary_tables(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, repeats: int, /
    ) -> tuple[Tensor, Tensor]: ...

    def gate_heads(self, x: Tensor, gate: Tensor, activation: GateActivation, norm: Norm | None, /) -> Tensor: ...

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, /) -> tuple[Tensor, Tensor]: ...

    def ungroup_delta_inputs(
        self, x: Tensor, heads: DeltaHeads, a_log: Tensor, dt_bias: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...

    def add(self, x: Tensor, y: Tensor, alpha: float, /) -> Tensor: ...

    def add_gated(self, x: Tensor, y: Tensor, shared: Tensor, rows: Tensor, gate: Tensor, alpha: float, /) -> Tensor: ...

    def merge_attention(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, /) -> Tensor: ...

    def move_rows(self, table: RowTable, rows: Tensor, packed: Tensor, pack: bool, /) -> None: ...

    def add_lora(
        self, y: Tensor, x: Tensor, weights: LoraWeights, batch: LoraBatch, norm: Norm | None, bias: Tensor | None, /
    ) -> Tensor: ...

    def linear_lora(
        self,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        weights: LoraWeights,
        batch: LoraBatch,
        norm: Norm | None,
        activation: str | None,
        residual: Tensor | None,
        alpha: float,
        /,
    ) -> Tensor: ...

    def sample_rows(
        self,
        logits: Tensor,
        keys: Tensor | None,
        temperature: Tensor | None,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        slots: Tensor | None,
        last_tokens: Tensor | None,
        largest_top_k: int | None,
        /,
    ) -> Tensor: ...

    def route(self, logits: Tensor, bias: Tensor | None, router: Router, dtype: torch.dtype, /) -> tuple[Tensor, Tensor]: ...

    def experts(
        self,
        x: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        experts: ExpertWeights,
        invariant: bool,
        kept: Tensor | None = None,
        /,
    ) -> Tensor:
        """kept: (tokens, top_k, 2 * width), only with `invariant`: gets the values before the gate, for `moe.gradients`"""
        ...

    def invariant_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, /) -> Tensor: ...

    def invariant_sum(self, x: Tensor, /) -> Tensor: ...

    def sparse_attention(
        self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, sinks: Tensor | None, softmax_scale: float, num_splits: int, /
    ) -> Tensor: ...

    def select_slots(
        self,
        q: Tensor,
        keys: Tensor,
        weights: Tensor,
        block_table: Tensor,
        seqused_k: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        topk: int,
        /,
    ) -> Tensor: ...
