"""Ops: what a model computes besides attention, for packed tokens. On a GPU most ops are one kernel.

    qkv = ops.linear(x, qkv_weight, norm=Norm(weight, 1e-6))
    ops.rotary_store_kv(qkv, k_cache, v_cache, slots, num_heads=32, cos=cos, sin=sin)     # in place
    h = ops.linear(x, gate_up_weight, norm=Norm(weight, 1e-6), activation="silu")
    x = ops.linear(h, down_weight, residual=x)                                            # in place
    tokens = ops.sample_rows(logits)

    products/       products with weight matrices; quantised/ has those with quantised weights
    moe/            the experts of a mixture (mixture of experts)
    elementwise/    norms, activations, additions, rotary embeddings
    collectives/    sums over the ranks of tensor parallelism
    sampling/       tokens from logits
    lora/           low-rank adapters of products; each token of a step may have a different adapter
    linear_attention/   recurrences and short convolutions, whose functions are exported here as well
    selected_keys/      the choice of keys by an indexer, and attention to them (token-sparse attention)

Each function selects the backend for the device of its input and calls it. There are two backends: `triton_ops.py` (kernels,
on GPUs) and `torch_ops.py` (plain PyTorch, on any device). Both implement the Protocol of `ops_backend.py`. Both compute in
float32 and round the result once; PyTorch computes float64 input in float64.

In the forward of `fa_serve.exact`, autograd records `linear`, `rms_norm`, `add`, `gate_heads` and `route`. They then overwrite
nothing (gradients.py). The other functions have no gradients.

The functions do not validate their arguments: the engine makes about ten calls for each layer at each step, and `hf.surgery`
has already compared their results with those of the model's own layers.

Sources: RMS norm (Zhang, Sennrich 2019, arXiv:1910.07467), rotary embedding (Su et al. 2021, arXiv:2104.09864), gated units
(Shazeer 2020, arXiv:2002.05202), experts (Shazeer et al. 2017, arXiv:1701.06538), deterministic sums (He et al., "Defeating
Nondeterminism in LLM Inference", 2025). This package leaves out attention, which is in `api.py`.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from fa_serve.ops import gradients
from fa_serve.ops.linear_attention.api import causal_conv1d as causal_conv1d
from fa_serve.ops.linear_attention.api import causal_conv1d_paged as causal_conv1d_paged
from fa_serve.ops.linear_attention.api import gated_delta_rule as gated_delta_rule
from fa_serve.ops.linear_attention.api import gated_delta_rule_paged as gated_delta_rule_paged
from fa_serve.ops.linear_attention.api import lightning_attention as lightning_attention
from fa_serve.ops.linear_attention.api import lightning_attention_paged as lightning_attention_paged
from fa_serve.ops.linear_attention.api import rg_lru as rg_lru
from fa_serve.ops.linear_attention.api import rg_lru_paged as rg_lru_paged
from fa_serve.ops.linear_attention.api import selective_scan as selective_scan
from fa_serve.ops.linear_attention.api import selective_scan_paged as selective_scan_paged
from fa_serve.ops.linear_attention.api import ssd as ssd
from fa_serve.ops.linear_attention.api import ssd_paged as ssd_paged
from fa_serve.ops.linear_attention.problem import FEW_ROWS as FEW_ROWS
from fa_serve.ops.linear_attention.problem import PIECE_ROWS as PIECE_ROWS
from fa_serve.ops.linear_attention.problem import StateBatch as StateBatch
from fa_serve.ops.linear_attention.problem import StateSpec as StateSpec
from fa_serve.ops.linear_attention.problem import StateTensors as StateTensors
from fa_serve.ops.linear_attention.problem import causal_conv1d_state as causal_conv1d_state
from fa_serve.ops.linear_attention.problem import gated_delta_rule_state as gated_delta_rule_state
from fa_serve.ops.linear_attention.problem import lightning_attention_state as lightning_attention_state
from fa_serve.ops.linear_attention.problem import rg_lru_state as rg_lru_state
from fa_serve.ops.linear_attention.problem import selective_scan_state as selective_scan_state
from fa_serve.ops.linear_attention.problem import ssd_state as ssd_state
from fa_serve.ops.linear_attention.problem import tail_rows as tail_rows
from fa_serve.ops.lora.problem import PAGE_RANKS as PAGE_RANKS
from fa_serve.ops.lora.problem import LoraBatch as LoraBatch
from fa_serve.ops.lora.problem import LoraWeights as LoraWeights
from fa_serve.ops.modes import records_gradients
from fa_serve.ops.ops_backend import ACTIVATIONS as ACTIVATIONS
from fa_serve.ops.ops_backend import DeltaHeads as DeltaHeads
from fa_serve.ops.ops_backend import ExpertWeights as ExpertWeights
from fa_serve.ops.ops_backend import Gate as Gate
from fa_serve.ops.ops_backend import GateActivation as GateActivation
from fa_serve.ops.ops_backend import LayerNorm as LayerNorm
from fa_serve.ops.ops_backend import Norm as Norm
from fa_serve.ops.ops_backend import OpsBackend as OpsBackend
from fa_serve.ops.ops_backend import Pairing as Pairing
from fa_serve.ops.ops_backend import RoundedRows as RoundedRows
from fa_serve.ops.ops_backend import Router as Router
from fa_serve.ops.ops_backend import Weight as Weight
from fa_serve.ops.products.quantised.weight import QuantizedWeight as QuantizedWeight
from fa_serve.ops.products.quantised.weight import merge_rows as merge_rows
from fa_serve.ops.rows import RowTable as RowTable
from fa_serve.ops.rows import row_bytes as row_bytes
from fa_serve.ops.sampling.fallback import most_likely as most_likely
from fa_serve.ops.select import TABLE as TABLE
from fa_serve.ops.select import select_ops as select_ops
from fa_serve.ops.selected_keys.api import select_slots as select_slots
from fa_serve.ops.selected_keys.api import sparse_attention as sparse_attention


@overload
def linear(
    x: Tensor | RoundedRows,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    next_weight: None = None,
) -> Tensor: ...


@overload
def linear(
    x: Tensor | RoundedRows,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str,
    next_weight: Weight,
) -> Tensor | RoundedRows: ...


def linear(
    x: Tensor | RoundedRows,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    next_weight: Weight | None = None,
) -> Tensor | RoundedRows:
    """Multiply by a weight matrix, with an optional RMS norm before the product and a gate or a residual sum after it.

        y = norm(x) @ weight.T + bias
        y = activation(y[:, : n / 2]) * y[:, n / 2 :]      with `activation`
        residual += alpha * y                              with `residual`, in place

    On a GPU a single token takes one kernel; more tokens take PyTorch's product and one kernel each for the norm and the gate.
    A quantised weight gives the same product as its matrix in x's dtype, unless activations are rounded to float8 as well
    (products/table.py).

    x:           (total, k), or what a call with this weight as `next_weight` returned
    weight:      (n, k), contiguous, or a QuantizedWeight of that shape
    bias:        (n,)
    activation:  one of ACTIVATIONS; not together with `residual`
    residual:    (total, n), updated in place
    next_weight: weight of the only product that takes the result. If that product rounds its input to float8, the gate does it

    Returns `residual` if it is given, else a tensor of (total, n), or of (total, n / 2) with `activation`; `RoundedRows` where
    the gate has rounded for `next_weight`.
    """
    if (
        isinstance(x, Tensor)
        and isinstance(weight, Tensor)
        and records_gradients(x, weight, bias, residual, None if norm is None else norm.weight)
    ):
        return gradients.recorded_linear(x, weight, bias, norm, activation, residual, alpha, [(weight, bias)])
    return select_ops(weight.device).linear(x, weight, bias, norm, activation, residual, alpha, next_weight)


def rms_norm(x: Tensor, norm: Norm, *, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * (weight + offset), plus `residual` if it is given, for each row.

    x, residual: (total, width), the elements of a row contiguous
    out:         (total, width), written and returned if given; may be `x`
    """
    if out is None and records_gradients(x, norm.weight, residual):
        return gradients.recorded_rms_norm(x, norm, residual)
    return select_ops(x.device).rms_norm(x, norm, residual, out)


def layer_norm(x: Tensor, norm: LayerNorm, *, residual: Tensor | None = None, keep_sum: bool = False) -> Tensor:
    """Compute (s - mean(s)) / sqrt(var(s) + eps) * weight + bias for each row of s = x + residual.

    x:        (total, width), the elements of a row contiguous
    residual: (total, width), contiguous; without it, s is x
    keep_sum: write s to residual, in place
    Returns (total, width), in x's dtype.
    """
    return select_ops(x.device).layer_norm(x, norm, residual, keep_sum)


def rotary_tables(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype, repeats: int
) -> tuple[Tensor, Tensor]:
    """Compute scale * cos(angle) and scale * sin(angle) for angle = position * frequency, in float32.

    positions:   (total,) integers
    frequencies: (angles,), contiguous
    repeats:     1 or 2: how often each angle follows in a row
    Returns cos and sin, (total, repeats * angles) each, in dtype. Source: RoFormer (Su et al. 2021), section 3.4.2.
    """
    return select_ops(positions.device).rotary_tables(positions, frequencies, scale, dtype, repeats)


def rotary_store_kv(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Normalise and rotate queries and keys in place, then write keys and values into the paged cache.

    qkv:          (total, (num_heads + 2 * num_kv_heads) * head_dim): the heads of q, then those of k, then those of v; or
                  (total, 2 * (num_heads + num_kv_heads) * head_dim) with the gate of each query head after that head. Gates are
                  not changed
    k_cache:      (num_pages, page_size, num_kv_heads, head_dim), last dimension contiguous, of qkv's dtype or float8_e4m3fn
    v_cache:      same shape and dtype as `k_cache`
    slot_mapping: (total,) int64: page * page_size + position in the page; -1 writes the token to no page
    cos, sin:     (total, rotary_dim / 2), with any strides. The first rotary_dim elements of a head are rotated, the first
                  half of them against the second. None rotates nothing
    q_norm:       RMS norm of each query head, of width head_dim, applied before the rotation
    k_norm:       RMS norm of each key head. Both norms are given or none; they may differ only in their weights
    k_descale:    (num_kv_heads,) float32, required for a float8 cache, which stores k / k_descale saturated at +-448
    v_descale:    (num_kv_heads,) float32, the same for v
    """
    select_ops(qkv.device).rotary_store_kv(
        qkv, k_cache, v_cache, slot_mapping, num_heads, cos, sin, q_norm, k_norm, k_descale, v_descale
    )


def rotary_store_latent(
    q: Tensor,
    latent: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm: Norm,
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
    descale: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Rotate the parts of queries and keys of latent attention that have a position, normalise latent vectors, and write the
    keys into the paged cache.

    q:            (total, num_heads, rope), the parts of queries that are rotated, last dimension contiguous
    latent:       (total, rank + rope), the elements of a row contiguous: a latent vector, and the part of the key to be rotated
    kv_cache:     (num_pages, page_size, 1, rank + rope), last dimension contiguous, of latent's dtype or float8_e4m3fn
    slot_mapping: (total,) int64: page * page_size + position in the page; -1 skips the token
    norm:         RMS norm of the latent vectors
    cos, sin:     (total, rope / 2 or more), with any strides; the first rope / 2 columns are the angles of the pairs
    pairing:      which elements of a part are rotated as a pair. Elements keep their places
    descale:      (1,) float32, required for a float8 cache, which stores key / descale saturated at +-448
    out:          like q: gets the rotated queries; may be `q`

    Returns the keys, (total, rank + rope).
    """
    return select_ops(q.device).rotary_store_latent(q, latent, kv_cache, slot_mapping, norm, cos, sin, pairing, descale, out)


def act(x: Tensor, activation: str) -> Tensor:
    """Compute an activation of each number. It has no gradients.

    x:          of any shape
    activation: one of ACTIVATIONS

    Returns a contiguous tensor of the same shape.
    """
    return select_ops(x.device).act(x, activation)


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """Compute activation(x[:, :width]) * x[:, width:].

    x:          (total, 2 * width), the elements of a row contiguous
    activation: one of ACTIVATIONS

    Returns (total, width).
    """
    return select_ops(x.device).act_and_mul(x, activation)


def gate_heads(x: Tensor, gate: Tensor, activation: GateActivation, *, norm: Norm | None = None) -> Tensor:
    """Compute norm(x) * sigmoid(gate), or norm(x) * silu(gate), for each head: the gates of attention and of linear attention.

    x:          (total, heads, dim), contiguous
    gate:       (total, heads, dim), the elements of a head contiguous
    activation: "sigmoid" or "silu"
    norm:       RMS norm of each head of x; None leaves x as it is

    Returns (total, heads, dim). Sources: gated attention (Qiu et al. 2025, arXiv:2505.06708), gated norm (Yang et al. 2024,
    arXiv:2412.06464).
    """
    if norm is None and records_gradients(x, gate):
        return gradients.recorded_gate_heads(x, gate, activation)
    return select_ops(x.device).gate_heads(x, gate, activation, norm)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gates of the delta rule as models compute them: g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b).

    a, b:           (total, heads), the elements of a row contiguous
    a_log, dt_bias: (heads,)

    Returns (g, beta), float32 (float64 for float64 inputs) of (total, heads), as `gated_delta_rule` takes them (Yang et al.
    2024, arXiv:2412.06464).
    """
    return select_ops(a.device).delta_gates(a, b, a_log, dt_bias)


def ungroup_delta_inputs(x: Tensor, heads: DeltaHeads, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs of a gated delta net from a projection that groups its columns by key head, as in Qwen3-Next.

    x:              (total, heads.columns + 2 * heads.values), the elements of a row contiguous. A group has a query, a key, the
                    values of its heads and the gates of their outputs; behind all groups come b and a of each group
    a_log, dt_bias: (heads.values,)

    Returns (qkv, z, g, beta): queries, keys and values, (total, 2 * keys * key_dim + values * dim); the gates of the output,
    (total, values * dim); and both gates of the delta rule, as `delta_gates` returns them.
    """
    return select_ops(x.device).ungroup_delta_inputs(x, heads, a_log, dt_bias)


def add(x: Tensor, y: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Add alpha * y to x in place.

    x: contiguous
    y: of the shape of x

    Returns x.
    """
    if records_gradients(x, y):
        return gradients.recorded_add(x, y, alpha)
    return select_ops(x.device).add(x, y, alpha)


def add_gated(x: Tensor, y: Tensor, shared: Tensor, rows: Tensor, gate: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Add alpha * (y + sigmoid(rows @ gate) * shared) to x in place: a mixture whose shared expert has a gate.

    x:               (total, width), contiguous
    y, shared, rows: (total, width), the elements of a row contiguous
    gate:            (width,), contiguous

    Returns x. Left out: gradients.
    """
    return select_ops(x.device).add_gated(x, y, shared, rows, gate, alpha)


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Merge the attention of the same queries over two disjoint sets of keys, in place.

        out = out * exp(lse - sum) + other * exp(other_lse - sum)      with sum = log(exp(lse) + exp(other_lse))

    out, other:     (total, num_heads, head_dim_v), contiguous, what `attention_paged` returns for each set of keys
    lse, other_lse: (num_heads, total) float32, contiguous; -inf where a query has seen no key

    Returns out. Where one part has seen no key, the result is the other part. Source: the combination of splits in
    Flash-Decoding (Dao et al. 2023).
    """
    return select_ops(out.device).merge_attention(out, lse, other, other_lse)


def move_rows(table: RowTable, rows: Tensor, packed: Tensor, *, pack: bool) -> None:
    """Copy rows of all tensors of a table into packed rows (pack=True), or back (pack=False).

    rows:   (n,) int64, the rows of the table's tensors, each once
    packed: (n, table.num_words) int64, contiguous
    """
    select_ops(packed.device).move_rows(table, rows, packed, pack)


def add_lora(
    y: Tensor, x: Tensor, weights: LoraWeights, batch: LoraBatch, *, norm: Norm | None = None, bias: Tensor | None = None
) -> Tensor:
    """Add the adapters of a product to its result in place: see `LoraWeights`. Rows without an adapter stay as they are.

    y:    (total, n), the elements of a row contiguous: the result of the product, without a gate or a residual sum
    x:    (total, k), the elements of a row contiguous: the input of the product, before the norm if there is one
    bias: (n,), the bias of the base product, which DoRA does not scale

    Returns y.
    """
    return select_ops(y.device).add_lora(y, x, weights, batch, norm, bias)


def linear_lora(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    weights: LoraWeights,
    batch: LoraBatch,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """As `linear` with the adapters of a step: they are added to norm(x) @ weight.T + bias, before a gate or a residual sum.

    On a GPU, the launches of most products of a matrix with up to 128 tokens compute the adapters as well (lora/run.py).

    x: (total, k), one row for each token of the step. The other arguments and the result are those of `linear` and `add_lora`.
    """
    return select_ops(weight.device).linear_lora(x, weight, bias, weights, batch, norm, activation, residual, alpha)


def route(logits: Tensor, bias: Tensor | None, router: Router, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, and weigh them.

    logits: (tokens, num_experts), the elements of a row contiguous
    bias:   (num_experts,), added to scores for the choice only, or None
    dtype:  dtype of the returned weights

    Returns (weights, index), both (tokens, top_k), from the largest score + bias to the smallest; index is int64.
    """
    if records_gradients(logits):
        return gradients.recorded_route(logits, bias, router, dtype)
    return select_ops(logits.device).route(logits, bias, router, dtype)


def experts(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights, *, invariant: bool = False
) -> Tensor:
    """Compute the experts that each token takes, and sum their results by the weights of the router.

        h = gate(x @ gate_up[e].T + gate_up_bias[e])            for each expert e that the token takes
        y = sum over them of weight * (h @ down[e].T + down_bias[e])

    On a GPU it takes two launches for few tokens and at least four for more, and reads nothing back; PyTorch reads back which
    experts are taken. Quantised experts give the same result as their matrices in x's dtype.

    x:             (tokens, hidden), of the dtype of the weights if these are matrices
    top_k_index:   (tokens, top_k), int64 or int32; an expert below 0 or at least num_experts adds nothing
    top_k_weights: (tokens, top_k), any floating dtype
    invariant:     the bits of a row do not depend on the other rows

    Returns (tokens, hidden).
    """
    return select_ops(x.device).experts(x, top_k_index, top_k_weights, experts, invariant)


def sample_rows(
    logits: Tensor,
    keys: Tensor | None = None,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    slots: Tensor | None = None,
    last_tokens: Tensor | None = None,
    largest_top_k: int | None = None,
) -> Tensor:
    """Sample a token from each row of logits.

    A row's token depends on the row, its key and its parameters only, not on the other rows. The limits keep the first tokens
    of one order: larger logits come first, and of equal logits the one with the lower id. `top_k` keeps the first k tokens,
    `top_p` the fewest whose probabilities, among the tokens that top_k keeps, sum to top_p, and `min_p` those that are at least
    min_p times as likely as the first. A greedy row takes the first token.

    logits:        (n, vocab), any floating dtype
    keys:          (n,) int64, each row's key of its random numbers; None if every row is greedy
    temperature:   (n,) float32, 0 is greedy; required with `keys`
    top_k:         (n,) int64, at least 1; None if no row uses it
    top_p, min_p:  (n,) float32; None if no row uses them
    slots:         (n,) int64, where each row's token is written in `last_tokens`
    last_tokens:   (num_slots,) int64, gets the tokens at `slots`, and 0 for a token of -1
    largest_top_k: maximum of `top_k`. Without it PyTorch sorts the whole vocabulary; the kernel does not need it

    Returns (n,) int64: the tokens, or -1 for a row that holds NaN or whose maximum is infinite.
    """
    return select_ops(logits.device).sample_rows(
        logits, keys, temperature, top_k, top_p, min_p, slots, last_tokens, largest_top_k
    )


def invariant_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Compute x @ weight.T + bias such that the bits of a row do not depend on the number of rows.

    x:      (..., k)
    weight: (n, k), any strides, or a QuantizedWeight
    bias:   (n,) or None

    Returns (..., n).
    """
    rows = x.reshape(-1, x.shape[-1])
    return select_ops(x.device).invariant_linear(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])


def invariant_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension such that the bits of a row do not depend on the number of rows.

    x: (..., width)

    Returns (...), float32 (PyTorch returns float64 for float64 input).
    """
    return select_ops(x.device).invariant_sum(x.reshape(-1, x.shape[-1])).view(x.shape[:-1])
