"""The public functions of linear attention, which `fa_serve.ops` exports: each in two forms.

    out, state = ops.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)
    out = ops.gated_delta_rule_paged(q, k, v, g, beta, states, batch)

The first form takes dense sequences (batch, seqlen, ...), or packed ones, (1, total, ...) with `cu_seqlens` (num_seqs + 1,)
int32. `initial_state` has one state for each sequence; None means zeros. The final states are returned if
`output_final_state` is True, else None. A state is float32 (float64 for float64 inputs), except that the state of a convolution
has the dtype of its input. A sequence without rows keeps its initial state.

The second form takes the packed rows (total, ...) of a step of the engine. It reads states and tails of `states`, as `batch`
says, and writes both in place (problem.py). `<name>_state` describes what this form keeps. In both forms, rows past the last
sequence and padding rows return 0.

All compute gates, sums and states in float32 (float64 for float64 inputs) and round the output once; the kernels for pieces
multiply in the dtype of the rows (prepare.py). Like all of `fa_serve.ops`, the functions do not validate their arguments. Log
gates must be at most 0.

Sources: gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692), SSD
(Dao, Gu 2024, arXiv:2405.21060), selective scan (Gu, Dao 2023, arXiv:2312.00752), lightning attention (Qin et al. 2024,
arXiv:2401.04658), RG-LRU (De et al. 2024, arXiv:2402.19427).
"""

from __future__ import annotations

from math import inf

from torch import Tensor

from fa_serve.ops.linear_attention.problem import MatrixInputs, ScanInputs, Sequences, StateBatch, StateTensors, TimeSteps
from fa_serve.ops.linear_attention.run import (
    run_causal_conv1d,
    run_causal_conv1d_paged,
    run_matrix_rule,
    run_matrix_rule_paged,
    run_scan,
    run_scan_paged,
)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention whose state forgets by a gate, and is corrected along each key instead of added to.

        S = exp(g) S;  S += k (beta (v - S^T k))^T;  out = softmax_scale S^T q

    q, k:          (batch, seqlen, num_key_heads, head_dim)
    v:             (batch, seqlen, num_heads, head_dim_v); num_heads is a multiple of num_key_heads
    g:             (batch, seqlen, num_heads), log gates; or (batch, seqlen, num_heads, head_dim), one for each channel of k
    beta:          (batch, seqlen, num_heads)
    softmax_scale: None is head_dim ** -0.5
    use_qk_l2norm: q and k are divided by sqrt(sum of squares + 1e-6) first
    initial_state: (num_seqs, num_heads, head_dim, head_dim_v)

    Returns (out, final state); out is like v.
    """
    rows, keys, values, gates, weights = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    scale = _scale_of(q, softmax_scale)
    inputs = MatrixInputs(rows, keys, values, gates, weights, None, None, TimeSteps(), scale, use_qk_l2norm)
    out, state = run_matrix_rule(inputs, _sequences(v, cu_seqlens), initial_state)
    return out.view(v.shape), state if output_final_state else None


def gated_delta_rule_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: StateTensors,
    batch: StateBatch,
    *,
    softmax_scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> Tensor:
    """`gated_delta_rule` for the rows of a step: all inputs without their first dimension. Returns out, like v."""
    inputs = MatrixInputs(q, k, v, g, beta, None, None, TimeSteps(), _scale_of(q, softmax_scale), use_qk_l2norm)
    return run_matrix_rule_paged(inputs, states, batch)


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    softmax_scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention whose heads forget at constant rates.

        S = exp(log_decay) S + k v^T;  out = softmax_scale S^T q

    q, k:          (batch, seqlen, num_key_heads, head_dim)
    v:             (batch, seqlen, num_heads, head_dim_v)
    log_decay:     (num_heads,)
    initial_state: (num_seqs, num_heads, head_dim, head_dim_v)

    Returns (out, final state); out is like v.
    """
    rows, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    inputs = MatrixInputs(rows, keys, values, None, None, log_decay, None, TimeSteps(), softmax_scale, False)
    out, state = run_matrix_rule(inputs, _sequences(v, cu_seqlens), initial_state)
    return out.view(v.shape), state if output_final_state else None


def lightning_attention_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    states: StateTensors,
    batch: StateBatch,
    *,
    softmax_scale: float = 1.0,
) -> Tensor:
    """`lightning_attention` for the rows of a step: q, k and v without their first dimension. Returns out, like v."""
    inputs = MatrixInputs(q, k, v, None, None, log_decay, None, TimeSteps(), softmax_scale, False)
    return run_matrix_rule_paged(inputs, states, batch)


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The state space model of Mamba-2, whose state forgets by one number for each head.

        dt = clamp(softplus(dt + dt_bias), *dt_limit);  S = exp(dt a) S + dt x b^T;  out = S c + d x

    x:             (batch, seqlen, num_heads, head_dim)
    dt:            (batch, seqlen, num_heads)
    a:             (num_heads,), below 0
    b, c:          (batch, seqlen, num_groups, state_size); num_heads is a multiple of num_groups
    d, dt_bias:    (num_heads,)
    initial_state: (num_seqs, num_heads, head_dim, state_size)

    Returns (out, final state); out is like x.
    """
    steps = TimeSteps(dt_bias, dt_softplus, dt_limit)
    queries, keys, values, sizes = (y.flatten(0, 1) for y in (c, b, x, dt))
    inputs = MatrixInputs(queries, keys, values, None, sizes, a, d, steps, 1.0, False)
    state = None if initial_state is None else initial_state.mT
    out, final = run_matrix_rule(inputs, _sequences(x, cu_seqlens), state)
    return out.view(x.shape), final.mT if output_final_state else None


def ssd_paged(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: StateTensors,
    batch: StateBatch,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
) -> Tensor:
    """`ssd` for the rows of a step: x, dt, b and c without their first dimension. Returns out, like x."""
    inputs = MatrixInputs(c, b, x, None, dt, a, d, TimeSteps(dt_bias, dt_softplus, dt_limit), 1.0, False)
    return run_matrix_rule_paged(inputs, states, batch)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The state space model of Mamba, in which each number of a channel's state forgets at its own rate.

        dt = softplus(dt + dt_bias);  h = exp(dt a) h + dt b x;  out = (sum(h c) + d x) * silu(z)

    x, dt, z:      (batch, seqlen, channels)
    a:             (channels, state_size), below 0
    b, c:          (batch, seqlen, state_size)
    d, dt_bias:    (channels,)
    initial_state: (num_seqs, channels, state_size)

    Returns (out, final state); out is like x.
    """
    steps = TimeSteps(dt_bias, dt_softplus)
    rows, sizes, keys, queries = (y.flatten(0, 1) for y in (x, dt, b, c))
    inputs = ScanInputs(rows, sizes, a, keys, queries, d, None if z is None else z.flatten(0, 1), steps)
    out, state = run_scan(inputs, _sequences(x, cu_seqlens), initial_state)
    return out.view(x.shape), state if output_final_state else None


def selective_scan_paged(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: StateTensors,
    batch: StateBatch,
    *,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """`selective_scan` for the rows of a step: x, dt, z, b and c without their first dimension. Returns out, like x."""
    return run_scan_paged(ScanInputs(x, dt, a, b, c, d, z, TimeSteps(dt_bias, dt_softplus)), states, batch)


def rg_lru(
    x: Tensor,
    log_a: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of RG-LRU, h = exp(log_a) h + x. The output of each row is its h.

    x:             (batch, seqlen, channels): inputs after their gate, times sqrt(1 - exp(2 log_a))
    log_a:         (batch, seqlen, channels)
    initial_state: (num_seqs, channels)

    Returns (out, final state); out is like x.
    """
    inputs = ScanInputs(x.flatten(0, 1), log_a.flatten(0, 1), None, None, None, None, None, TimeSteps())
    out, state = run_scan(inputs, _sequences(x, cu_seqlens), initial_state)
    return out.view(x.shape), state if output_final_state else None


def rg_lru_paged(x: Tensor, log_a: Tensor, states: StateTensors, batch: StateBatch) -> Tensor:
    """`rg_lru` for the rows of a step: x and log_a without their first dimension. Returns out, like x."""
    return run_scan_paged(ScanInputs(x, log_a, None, None, None, None, None, TimeSteps()), states, batch)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A short convolution of each channel over the last `width` rows of its sequence.

        out[t] = activation(bias + sum over i < width of weight[:, i] * x[t - width + 1 + i])

    x:             (batch, seqlen, channels); inputs before a sequence are `initial_state`, or 0
    weight:        (channels, width), width at least 2
    bias:          (channels,)
    activation:    None or "silu"
    initial_state: (num_seqs, width - 1, channels)

    Returns (out, final state); out is like x.
    """
    rows = x.flatten(0, 1)
    out, state = run_causal_conv1d(rows, weight, bias, activation, _sequences(x, cu_seqlens), initial_state)
    return out.view(x.shape), state if output_final_state else None


def causal_conv1d_paged(
    x: Tensor,
    weight: Tensor,
    states: StateTensors,
    batch: StateBatch,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """`causal_conv1d` for the rows of a step, (total, channels). Returns out, like x."""
    return run_causal_conv1d_paged(x, weight, bias, activation, states, batch)


def _sequences(x: Tensor, cu_seqlens: Tensor | None) -> Sequences:
    return Sequences(x.shape[0], x.shape[1], cu_seqlens)


def _scale_of(q: Tensor, softmax_scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
