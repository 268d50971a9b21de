"""The recurrences of linear attention in PyTorch, for several sequences at once and in pieces of rows, and their helpers.

All tensors have one dtype, float32 or float64. Exponents are at most 0, so that strong gates underflow and nothing overflows.
docs/kernels/linear-attention.md derives the forms. Left out: sequences of different lengths, and states of the engine
(fallback.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve.ops.linear_attention.problem import PIECE_ROWS, TimeSteps, state_dtype

Terms = tuple[Tensor, Tensor]
"""For each row, (n, rows, ...): the factor of the state, and what is added to the state."""

CHANNEL_PIECE = 16
"""Rows of a piece with gates by channel. They are fewer, because products of two rows are formed for each channel."""
NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key that is normalised."""


def time_steps(dt: Tensor, steps: TimeSteps) -> Tensor:
    """The time steps of dt, in float32 or wider."""
    dt = dt.to(state_dtype(dt.dtype))
    if steps.bias is not None:
        dt = dt + steps.bias.to(dt.dtype)
    if steps.softplus:
        dt = torch.nn.functional.softplus(dt)
    return dt.clamp(*steps.limit)


def add_skip(out: Tensor, x: Tensor, d: Tensor | None) -> Tensor:
    return out if d is None else out + d.to(out.dtype) * x.to(out.dtype)


def multiply_gate(out: Tensor, z: Tensor | None) -> Tensor:
    return out if z is None else out * torch.nn.functional.silu(z.to(out.dtype))


def expand_heads(x: Tensor, heads: int, normalise: bool) -> Tensor:
    """Queries or keys (n, rows, key heads, dim) as (n, heads, rows, dim)."""
    if normalise:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
    return by_head(x).repeat_interleave(heads // x.shape[2], 1)


def by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def matrix_pieces(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The recurrence of a state that is a matrix, in pieces.

    q, k:  (n, heads, rows, dim), q scaled
    v:     (n, heads, rows, dim_v)
    g:     (n, heads, rows), or (n, heads, rows, dim): log gates
    beta:  (n, heads, rows) for the delta rule; None adds v itself
    state: (n, heads, dim, dim_v)

    Returns (out, u, state): the rows of out, what each row adds along its key, and the state after the last row.
    """
    size = PIECE_ROWS if g.dim() == 3 else CHANNEL_PIECE
    outs = []
    added = []
    for first in range(0, k.shape[2], size):
        piece = slice(first, first + size)
        queries = q[:, :, piece]
        keys = k[:, :, piece]
        gates = g[:, :, piece]
        u = v[:, :, piece]
        through = _column(gates.cumsum(2).exp())  # decay of the state before the piece, up to each row
        if beta is not None:
            factors = beta[:, :, piece, None]
            system = (factors * _gated_products(keys, keys, gates)).tril(-1)
            u = factors * (u - (keys * through) @ state)
            u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
        outs.append((queries * through) @ state + _gated_products(queries, keys, gates) @ u)
        added.append(u)
        state = advance_state(state, keys, u, gates)
    return torch.cat(outs, 2), torch.cat(added, 2), state


def _gated_products(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """(q_i . k_j) decayed by the gates from row j to row i, (n, heads, rows, rows), and 0 for j > i.

    The log gates between two rows are summed directly. The difference of two sums that begin at row 0 would have the rounding
    error of the larger sum, which reaches -1000 for 64 strong gates.
    """
    rows = q.shape[2]
    earlier = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril(-1)
    earlier = earlier.view(rows, rows, *[1] * (g.dim() - 3))
    between = g.unsqueeze(3).where(earlier, g.new_zeros(())).cumsum(2).exp()
    if g.dim() == 3:
        return ((q @ k.mT) * between).tril()
    return torch.einsum("nhid,nhjd,nhijd->nhij", q, k, between).tril()


def advance_state(state: Tensor, k: Tensor, u: Tensor, g: Tensor) -> Tensor:
    """The state after rows that add u (n, heads, rows, dim_v) along k (n, heads, rows, dim) after log gates g."""
    if k.shape[2] == 0:
        return state
    whole = g.flip(2).cumsum(2).flip(2)  # from each row to the last one
    after = torch.cat((whole[:, :, 1:], torch.zeros_like(g[:, :, :1])), 2)
    return _column(whole[:, :, :1].exp()).mT * state + (k * _column(after.exp())).mT @ u


def _column(x: Tensor) -> Tensor:
    """Numbers by head, (n, heads, rows), with a dimension of channels added; numbers by channel unchanged."""
    return x[..., None] if x.dim() == 3 else x


def scan_rows(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """All states h_t = a_t * h_(t-1) + b_t of a recurrence without sums. a, b: (n, rows, ...), state: (n, ...).

    Each piece of PIECE_ROWS rows is computed by doubling: after pass i, (a, b) of a row takes the state before the 2^i rows
    that end with it to the state after it. The factors are products of a, which do not exceed 1.
    """
    found = []
    for first in range(0, a.shape[1], PIECE_ROWS):
        decay = a[:, first : first + PIECE_ROWS]
        added = b[:, first : first + PIECE_ROWS]
        distance = 1
        while distance < decay.shape[1]:
            earlier = slice(None, -distance)
            later = slice(distance, None)
            added = torch.cat((added[:, :distance], added[:, later] + decay[:, later] * added[:, earlier]), 1)
            decay = torch.cat((decay[:, :distance], decay[:, later] * decay[:, earlier]), 1)
            distance *= 2
        found.append(decay * state[:, None] + added)
        state = found[-1][:, -1]
    return torch.cat(found, 1)


def scan_terms(x: Tensor, dt: Tensor, a: Tensor, b: Tensor) -> Terms:
    """`Terms` of the selective scan, (n, rows, channels, size) each."""
    return (dt[..., None] * a).exp(), (dt * x)[..., None] * b[:, :, None]


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """A depthwise convolution of inputs (n, width - 1 + rows, channels): each output is a sum over the last `width` inputs."""
    inputs = inputs.to(state_dtype(inputs.dtype))
    width = weight.shape[1]
    rows = inputs.shape[1] - width + 1
    out = sum(inputs[:, i : i + rows] * weight[:, i].to(inputs.dtype) for i in range(width))
    assert isinstance(out, Tensor)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return torch.nn.functional.silu(out) if activation == "silu" else out


def last_rows(inputs: Tensor, lengths: Tensor, count: int) -> Tensor:
    """The last `count` inputs of each sequence. `inputs` has `count` earlier inputs, then the sequence's `lengths` rows."""
    return take_rows(inputs, lengths[:, None] + torch.arange(count, device=inputs.device))


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[i, index[i, j]] for all i and j. x: (n, rows, channels), index: (n, count)"""
    return x.gather(1, index[..., None].expand(*index.shape, x.shape[2]))
