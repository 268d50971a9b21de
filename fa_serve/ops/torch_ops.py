"""The backend of ops for any device, in plain PyTorch.

It computes in float32, or in float64 for float64 input, and rounds the result once. Sampling is in `sampling/fallback.py`,
experts are in `moe/fallback.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve.api import store_kv
from fa_serve.ops.elementwise.torch_gradients import (
    torch_act_and_mul_backward,
    torch_rms_norm_backward,
    torch_rotary_backward,
)
from fa_serve.ops.lora.fallback import torch_add_lora
from fa_serve.ops.lora.problem import LoraBatch, LoraWeights
from fa_serve.ops.lora.separate import separate_linear_lora
from fa_serve.ops.moe.fallback import torch_activation, torch_experts, torch_route
from fa_serve.ops.ops_backend import DeltaHeads, GateActivation, LayerNorm, Norm, Pairing, RoundedRows, Weight
from fa_serve.ops.products.quantised.weight import QuantizedWeight
from fa_serve.ops.rows import RowTable
from fa_serve.ops.sampling.fallback import torch_sample_rows
from fa_serve.ops.selected_keys.fallback import torch_select_slots, torch_sparse_attention
from fa_serve.spec import OpSpec


class TorchOps:
    """The arguments are documented in `fa_serve.ops`."""

    name = "torch"
    sample_rows = staticmethod(torch_sample_rows)
    route = staticmethod(torch_route)
    experts = staticmethod(torch_experts)
    add_lora = staticmethod(torch_add_lora)
    sparse_attention = staticmethod(torch_sparse_attention)
    select_slots = staticmethod(torch_select_slots)
    rms_norm_backward = staticmethod(torch_rms_norm_backward)
    act_and_mul_backward = staticmethod(torch_act_and_mul_backward)
    rotary_backward = staticmethod(torch_rotary_backward)

    def supports(self, spec: OpSpec) -> str | None:
        return None

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
    ) -> Tensor:
        """As `fa_serve.ops.linear`. Nothing is rounded here, so x never is `RoundedRows`."""
        assert isinstance(x, Tensor)
        if norm is not None:
            x = self.rms_norm(x, norm, None, None)
        y = product(x, _matrix(weight, x.dtype), bias, residual, alpha)
        return y if activation is None else self.act_and_mul(y, activation)

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
    ) -> Tensor:
        return separate_linear_lora(self, x, weight, bias, weights, batch, norm, activation, residual, alpha)

    def rms_norm(self, x: Tensor, norm: Norm, residual: Tensor | None, out: Tensor | None, /) -> Tensor:
        y = _normed(x, norm)
        if residual is not None:
            y = y + residual
        return y.to(x.dtype) if out is None else out.copy_(y)

    def layer_norm(self, x: Tensor, norm: LayerNorm, residual: Tensor | None, keep_sum: bool, /) -> Tensor:
        total = _wide(x)
        if residual is not None:
            total = total + residual
            if keep_sum:
                residual.copy_(total)
        bias = None if norm.bias is None else norm.bias.to(total.dtype)
        weight = norm.weight.to(total.dtype)
        return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, norm.eps).to(x.dtype)

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
    ) -> None:
        num_kv_heads, dim = k_cache.shape[2:]
        heads = qkv.view(len(qkv), -1, dim)
        # a query may be followed by its gate
        queries = heads.shape[1] - 2 * num_kv_heads
        q, k, v = torch.split_with_sizes(heads, [queries, num_kv_heads, num_kv_heads], dim=1)
        q = q[:, :: queries // num_heads]
        _rotate(q, _wide(q) if q_norm is None else _normed(q, q_norm), cos, sin)
        _rotate(k, _wide(k) if k_norm is None else _normed(k, k_norm), cos, sin)
        store_kv(k, v, k_cache, v_cache, slot_mapping, k_descale=k_descale, v_descale=v_descale)

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
    ) -> Tensor:
        rank = len(norm.weight)
        keys = latent.new_empty(len(latent), 1, latent.shape[1])
        keys[:, 0, :rank] = _normed(latent[:, :rank], norm)
        _rotate_pairs(out, q, cos, sin, pairing)
        _rotate_pairs(keys[..., rank:], latent[:, None, rank:], cos, sin, pairing)
        # both parts of a key are written by one call, as if the second one were its value
        parts = (keys[..., :rank], keys[..., rank:], kv_cache[..., :rank], kv_cache[..., rank:])
        store_kv(*parts, slot_mapping, k_descale=descale, v_descale=descale)
        return keys[:, 0]

    def rotary_tables(
        self, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, repeats: int, /
    ) -> tuple[Tensor, Tensor]:
        angles = (positions[:, None].float() * frequencies.float()).repeat(1, repeats)
        return (scale * angles.cos()).to(dtype), (scale * angles.sin()).to(dtype)

    def gate_heads(self, x: Tensor, gate: Tensor, activation: GateActivation, norm: Norm | None, /) -> Tensor:
        y = _wide(x) if norm is None else _normed(x, norm)
        wide = _wide(gate)
        y = y * wide.sigmoid()
        return (y * wide if activation == "silu" else y).to(x.dtype)

    def delta_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, /) -> tuple[Tensor, Tensor]:
        g = -_wide(a_log).exp() * torch.nn.functional.softplus(_wide(a) + _wide(dt_bias))
        return g, _wide(b).sigmoid()

    def ungroup_delta_inputs(
        self, x: Tensor, heads: DeltaHeads, a_log: Tensor, dt_bias: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        share = heads.values // heads.keys
        sizes = [heads.key_dim, heads.key_dim, share * heads.dim, share * heads.dim]
        groups = x[:, : heads.columns].view(len(x), heads.keys, sum(sizes))
        q, k, v, z = [part.flatten(1) for part in torch.split_with_sizes(groups, sizes, dim=2)]
        b, a = [part.flatten(1) for part in x[:, heads.columns :].view(len(x), heads.keys, 2 * share).chunk(2, dim=2)]
        return torch.cat([q, k, v], dim=1), z, *self.delta_gates(a, b, a_log, dt_bias)

    def add(self, x: Tensor, y: Tensor, alpha: float, /) -> Tensor:
        return x.copy_(_wide(x).add(_wide(y), alpha=alpha))

    def add_gated(self, x: Tensor, y: Tensor, shared: Tensor, rows: Tensor, gate: Tensor, alpha: float, /) -> Tensor:
        share = (_wide(rows) * _wide(gate)).sum(dim=1, keepdim=True).sigmoid()
        return x.copy_(_wide(x).add(_wide(y) + share * _wide(shared), alpha=alpha))

    def merge_attention(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, /) -> Tensor:
        share = (lse - torch.logaddexp(lse, other_lse)).exp().nan_to_num_(0.0).t()[..., None]
        other_share = (other_lse - torch.logaddexp(lse, other_lse)).exp().nan_to_num_(0.0).t()[..., None]
        return out.copy_(_wide(out) * share + _wide(other) * other_share)

    def move_rows(self, table: RowTable, rows: Tensor, packed: Tensor, pack: bool, /) -> None:
        first = 0
        for words in table.words:
            part = packed[:, first : first + words.shape[1]]
            if pack:
                part.copy_(words.index_select(0, rows))
            else:
                words.index_copy_(0, rows, part)
            first += words.shape[1]

    def act(self, x: Tensor, activation: str, /) -> Tensor:
        return torch_activation(_wide(x), activation).to(x.dtype)

    def act_and_mul(self, x: Tensor, activation: str, /) -> Tensor:
        gate, up = _wide(x).chunk(2, dim=1)
        return (torch_activation(gate, activation) * up).to(x.dtype)

    def invariant_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, /) -> Tensor:
        matrix = _matrix(weight, x.dtype)
        if len(x) == 0:
            return x @ matrix.t()
        # a library chooses its algorithm by the number of rows, so each row is computed by itself
        return torch.cat([torch.nn.functional.linear(row[None], matrix, bias) for row in x])

    def invariant_sum(self, x: Tensor, /) -> Tensor:
        if len(x) == 0:
            return _wide(x).sum(-1)
        return torch.stack([_wide(row).sum() for row in x])


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, alpha: float) -> Tensor:
    """PyTorch's x @ weight.T + bias. With `residual`, alpha times that is added to it in place.

    x: (total, k); weight: (n, k); bias: (n,); residual: (total, n). Returns (total, n).
    """
    if residual is None:
        return torch.nn.functional.linear(x, weight, bias)
    if bias is not None:
        residual.add_(bias, alpha=alpha)
    return residual.addmm_(x, weight.t(), alpha=alpha)


def _matrix(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A weight as a matrix of floats, (n, k)."""
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight


def _rotate(out: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Rotate the first 2 * cos.shape[1] elements of each head of x (total, heads, dim) and write x into `out`."""
    if cos is None or sin is None:
        out.copy_(x)
        return
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim < x.shape[2]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
        out = out[..., :rotary_dim]
        x = x[..., :rotary_dim]
    first, second = x.chunk(2, dim=2)
    cos = _wide(cos).unsqueeze(1)
    sin = _wide(sin).unsqueeze(1)
    turned = torch.addcmul(first * cos, second, sin, value=-1)  # x and out may be the same memory
    torch.addcmul(second * cos, first, sin, out=out[..., rotary_dim // 2 :])
    out[..., : rotary_dim // 2] = turned


def _rotate_pairs(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing) -> None:
    """Rotate the pairs of elements of each head of x (total, heads, dim) and write x into `out`, which may be x."""
    half = x.shape[2] // 2
    cos = _wide(cos[:, None, :half])
    sin = _wide(sin[:, None, :half])
    first, second = _pairs(_wide(x), pairing)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    for part, value in zip(_pairs(out, pairing), turned, strict=True):
        part.copy_(value)


def _pairs(x: Tensor, pairing: Pairing) -> tuple[Tensor, ...]:
    """Views of x: the first element of each pair, and the second."""
    return x.chunk(2, dim=2) if pairing == "halves" else (x[..., 0::2], x[..., 1::2])


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """The RMS norm over the last dimension, in float32 or wider."""
    weight = _wide(norm.weight)
    if norm.offset:
        weight = weight + norm.offset
    return torch.nn.functional.rms_norm(_wide(x), weight.shape, weight, norm.eps)


def _wide(x: Tensor) -> Tensor:
    """x in float32, or x itself if it is float32 or float64."""
    return x.float() if x.dtype.itemsize < 4 else x
