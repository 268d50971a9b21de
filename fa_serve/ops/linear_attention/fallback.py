"""Linear attention in PyTorch, on any device: the recurrences in pieces of rows.

It computes in float32, or in float64 for float64 input, and keeps states in that dtype. All exponents are at most 0, so that
strong gates underflow to 0 and nothing overflows. docs/kernels/linear-attention.md derives the forms.

PyTorch can differentiate the functional forms. The names of the forms for a step of the engine end in `_paged`: these read
states and tails, and write them in place. The arguments are those of api.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_serve.ops.linear_attention.problem import MatrixInputs, ScanInputs, Sequences, StateBatch, StateTensors, state_dtype
from fa_serve.ops.linear_attention.recurrences import (
    Terms,
    add_skip,
    advance_state,
    by_head,
    convolve,
    expand_heads,
    last_rows,
    matrix_pieces,
    multiply_gate,
    scan_rows,
    scan_terms,
    take_rows,
    time_steps,
)
from fa_serve.ops.linear_attention.rows import PackedGroup, StepGroup, masked, packed_groups, step_groups


def matrix_rule(inputs: MatrixInputs, sequences: Sequences, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, final states) of a recurrence whose state is a matrix."""
    v = inputs.v
    call = _Call(v, sequences, initial_state, (v.shape[1], inputs.k.shape[2], v.shape[2]))
    weight = _weights(inputs)
    for group in call.groups:
        k, u, g, beta = _row_terms(inputs, call.rows(group, inputs.k), call.rows(group, v), group, weight)
        q = expand_heads(call.rows(group, inputs.q), v.shape[1], inputs.use_qk_l2norm) * inputs.softmax_scale
        out, _, state = matrix_pieces(q, k, u, g, beta, call.state(group))
        call.put(group, _with_inputs(out.transpose(1, 2), inputs, group), state)
    return call.rounded_result()


def scan_sequences(inputs: ScanInputs, sequences: Sequences, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, final states) of a recurrence whose states are vectors."""
    x = inputs.x
    dt = _scan_steps(inputs)
    call = _Call(x, sequences, initial_state, tuple(x.shape[1:] if inputs.a is None else inputs.a.shape))
    for group in call.groups:
        rows = [call.rows(group, y) for y in (x, dt, inputs.b) if y is not None]
        states = scan_rows(*_terms_of_rows(inputs, rows), call.state(group))
        call.put(group, _read_states(inputs, states, group), states[:, -1])
    return call.rounded_result()


def convolve_sequences(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    sequences: Sequences,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final states): the states are inputs, and have their dtype."""
    width = weight.shape[1]
    call = _Call(x, sequences, initial_state, (width - 1, weight.shape[0]), page_dtype=x.dtype)
    for group in call.groups:
        inputs = torch.cat((call.state(group), group.gather(x)), 1)
        call.put(group, convolve(inputs, weight, bias, activation), last_rows(inputs, group.lengths, width - 1))
    return call.rounded_result()


def matrix_rule_paged(inputs: MatrixInputs, states: StateTensors, batch: StateBatch) -> Tensor:
    """The outputs of a step's rows of a recurrence whose state is a matrix."""
    v = inputs.v
    heads = v.shape[1]
    dtype = state_dtype(v.dtype)
    weight = _weights(inputs)
    out = torch.zeros_like(v, dtype=dtype)
    for group in step_groups(batch):
        tail = [group.read_tail(ring).to(dtype) for ring in states.tails]
        tail_keys = expand_heads(tail[0], heads, inputs.use_qk_l2norm)
        if inputs.a is None:
            before = tail_keys, by_head(tail[1]), by_head(tail[2])
        else:
            gates, values = _linear_terms(inputs.a, tail[1], group.in_tail, tail[2] if len(tail) > 2 else None)
            before = tail_keys, by_head(values), by_head(gates)
        start = group.start_state(states.pages)
        k, u, g, beta = _row_terms(inputs, group.gather(inputs.k).to(dtype), group.gather(v).to(dtype), group, weight)
        q = expand_heads(group.gather(inputs.q).to(dtype), heads, inputs.use_qk_l2norm) * inputs.softmax_scale
        rows, added, _ = matrix_pieces(q, k, u, g, beta, advance_state(start, *before))
        out = group.scatter(out, _with_inputs(rows.transpose(1, 2), inputs, group))
        kept = [group.gather(x) for x in (inputs.k, v, inputs.g if inputs.a is None else weight) if x is not None]
        if inputs.a is None:
            kept[1] = added.transpose(1, 2)
        group.write_tail(states.tails, kept)
        _store_matrix_states(group, states.pages, start, before, (k, added, g))
    return out.to(v.dtype)


def _weights(inputs: MatrixInputs) -> Tensor | None:
    """beta, or the time steps of SSD: (total, heads)."""
    if inputs.a is None or inputs.weight is None:
        return inputs.weight
    return time_steps(inputs.weight, inputs.steps)


def _row_terms(
    inputs: MatrixInputs, keys: Tensor, values: Tensor, group: PackedGroup, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(k, v, log gates, beta) of a group's rows, as `matrix_pieces` takes them; beta is None except for the delta rule."""
    heads = values.shape[2]
    weights = None if weight is None else group.gather(weight).to(values.dtype)
    beta = None
    if inputs.a is None:
        assert inputs.g is not None
        assert weights is not None
        gates = group.gather(inputs.g).to(values.dtype)
        beta = by_head(weights)
    else:
        gates, values = _linear_terms(inputs.a, values, group.valid, weights)
    return expand_heads(keys, heads, inputs.use_qk_l2norm), by_head(values), by_head(gates), beta


def _linear_terms(a: Tensor, values: Tensor, valid: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log gates (n, rows, heads), and what rows add along their keys: a and v, each times the weights, if there are weights."""
    gates = masked(a.to(values.dtype).expand(*valid.shape, len(a)), valid)
    return (gates, values) if weights is None else (gates * weights, values * weights[..., None])


def _with_inputs(out: Tensor, inputs: MatrixInputs, group: PackedGroup) -> Tensor:
    """The outputs of a group (n, rows, heads, dim_v), with d * v added if there is a d."""
    return out if inputs.d is None else add_skip(out, group.gather(inputs.v), inputs.d[:, None])


def scan_paged(inputs: ScanInputs, states: StateTensors, batch: StateBatch) -> Tensor:
    """The outputs of a step's rows of a recurrence whose states are vectors."""
    x = inputs.x
    dt = _scan_steps(inputs)
    out = torch.zeros_like(x, dtype=dt.dtype)
    for group in step_groups(batch):
        rows = [group.gather(y) for y in (x, dt, inputs.b) if y is not None]
        before = _terms_of_rows(inputs, [group.read_tail(ring).to(dt.dtype) for ring in states.tails])
        after = _scan_step(group, states, before, _terms_of_rows(inputs, [y.to(dt.dtype) for y in rows]))
        out = group.scatter(out, _read_states(inputs, after, group))
        group.write_tail(states.tails, rows)
    return out.to(x.dtype)


def _scan_steps(inputs: ScanInputs) -> Tensor:
    """Time steps, or log gates, in the dtype of states."""
    dt = inputs.dt.to(state_dtype(inputs.x.dtype))
    return dt if inputs.a is None else time_steps(dt, inputs.steps)


def _terms_of_rows(inputs: ScanInputs, rows: Sequence[Tensor]) -> Terms:
    """`Terms` of rows of (x, dt, b), or of (x, log gates) for RG-LRU."""
    if inputs.a is None:
        return rows[1].exp(), rows[0]
    x, dt, b = rows
    return scan_terms(x, dt, inputs.a.to(dt.dtype), b)


def _read_states(inputs: ScanInputs, states: Tensor, group: PackedGroup) -> Tensor:
    """The outputs of a group's rows, from the states after them (n, rows, channels, size)."""
    if inputs.c is None:
        return states
    out = (states * group.gather(inputs.c).to(states.dtype)[:, :, None]).sum(-1)
    out = add_skip(out, group.gather(inputs.x), inputs.d)
    return multiply_gate(out, None if inputs.z is None else group.gather(inputs.z))


def convolve_paged(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, states: StateTensors, batch: StateBatch
) -> Tensor:
    """The outputs of a step's rows."""
    reach = weight.shape[1] - 1
    out = torch.zeros_like(x)
    for group in step_groups(batch):
        rows = group.gather(x)
        # inputs from position start - reach on, without a gap between the tail and the rows
        read = torch.cat((group.start_state(states.pages), group.read_tail(states.tails[0]), rows), 1)
        tail = group.first - group.start
        width = group.tail_positions.shape[1]
        offsets = torch.arange(read.shape[1], device=x.device).expand(len(read), -1)
        index = offsets + (width - tail)[:, None] * (offsets >= (reach + tail)[:, None])
        inputs = take_rows(read, index.clamp(max=read.shape[1] - 1))
        before = take_rows(inputs, tail[:, None] + torch.arange(reach, device=x.device))
        out = group.scatter(out, convolve(torch.cat((before, rows), 1), weight, bias, activation))
        group.write_tail(states.tails, (rows,))
        for i, position, page in group.stores:
            offset = position - int(group.start[i])
            states.pages[page] = inputs[i, offset : offset + reach]
    return out


class _Call:
    """Splits the inputs of dense or packed sequences into groups, and puts their outputs and final states together."""

    def __init__(
        self,
        like: Tensor,
        sequences: Sequences,
        initial_state: Tensor | None,
        state: tuple[int, ...],
        page_dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = state_dtype(like.dtype)
        self.like = like
        self.groups = packed_groups(sequences, like.device)
        self.states = like.new_zeros(sequences.num_seqs, *state, dtype=page_dtype or self.dtype)
        if initial_state is not None:
            self.states = initial_state.to(self.states)
        self.out = torch.zeros_like(like, dtype=self.dtype)

    def rows(self, group: PackedGroup, x: Tensor) -> Tensor:
        """The rows of an input that belong to a group, (n, most, ...)."""
        return group.gather(x).to(self.dtype)

    def state(self, group: PackedGroup) -> Tensor:
        """The initial states of a group."""
        return self.states[group.sequences]

    def put(self, group: PackedGroup, out: Tensor, state: Tensor) -> None:
        """Store a group's outputs and final states."""
        self.out = group.scatter(self.out, out)
        self.states = self.states.index_put((group.sequences,), state)

    def rounded_result(self) -> tuple[Tensor, Tensor]:
        """(out in the dtype of the input, final states); the state of a sequence without rows is its initial state."""
        return self.out.to(self.like.dtype), self.states


def _store_matrix_states(
    group: StepGroup, pages: Tensor, start: Tensor, before: Sequence[Tensor], rows: Sequence[Tensor]
) -> None:
    """Write the states that the step must keep, from the states at `start`, the tail (k, u, g) and the rows (k, u, g)."""
    for i, position, page in group.stores:
        tail = group.in_tail[i]
        counted = group.valid[i] & (group.positions[i] < position)
        parts = [torch.cat((x[i][:, tail], y[i][:, counted]), 1)[None] for x, y in zip(before, rows, strict=True)]
        pages[page] = advance_state(start[i : i + 1], *parts)[0]


def _scan_step(group: StepGroup, states: StateTensors, before: Terms, rows: Terms) -> Tensor:
    """All states of a step's rows, from the terms of the tail and of the rows. Writes the states that the step must keep."""
    state = group.start_state(states.pages)
    if before[0].shape[1]:
        state = scan_rows(*before, state)[:, -1]
    after = scan_rows(*rows, state)
    for i, position, page in group.stores:
        states.pages[page] = after[i, position - 1 - int(group.first[i])]
    return after
