"""Linear attention in PyTorch, on any device: the recurrences in pieces of rows.

It computes in float32, or in float64 for float64 input, and keeps states in that dtype. All exponents are at most 0, so that
strong gates underflow to 0 and nothing overflows. docs/kernels/linear-attention.md derives the forms.

The functional forms can be differentiated by PyTorch. The forms for a step of the engine end in `_paged`: they read states and
tails, and write them in place. The arguments are those of api.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_serve.ops.linear_attention.problem import StateBatch, StateTensors, TimeSteps, state_dtype
from fa_serve.ops.linear_attention.recurrences import (
    Terms,
    add_skip,
    advance_state,
    by_head,
    convolve,
    last_rows,
    matrix_pieces,
    multiply_gate,
    repeat_heads,
    scan_rows,
    scan_terms,
    take_rows,
    time_steps,
)
from fa_serve.ops.linear_attention.rows import PackedGroup, StepGroup, masked, packed_groups, step_groups


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    softmax_scale: float,
    use_qk_l2norm: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final states) of packed or dense sequences."""
    call = _Call(v, cu_seqlens, initial_state, (v.shape[2], k.shape[3], v.shape[3]))
    for group in call.groups:
        queries, keys = (repeat_heads(call.rows(group, x), v.shape[2], use_qk_l2norm) for x in (q, k))
        values, gates, betas = (by_head(call.rows(group, x)) for x in (v, g, beta))
        out, _, state = matrix_pieces(queries * softmax_scale, keys, values, gates, betas, call.state(group))
        call.put(group, out.transpose(1, 2), state)
    return call.rounded_result()


def lightning_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    softmax_scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final states)."""
    g = log_decay.expand(*v.shape[:3])
    out, state = _linear_attention(q, k, v, g, None, softmax_scale, initial_state, cu_seqlens)
    return out.to(v.dtype), state


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    steps: TimeSteps,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final states). A state is (heads, head_dim, state_size) in this form, as in the models."""
    dt = time_steps(dt, steps)
    state = None if initial_state is None else initial_state.mT
    out, state = _linear_attention(c, b, x, dt * a.to(dt.dtype), dt, 1.0, state, cu_seqlens)
    return add_skip(out, x, d if d is None else d[:, None]).to(x.dtype), state.mT


def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    weight: Tensor | None,
    softmax_scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final states), not rounded. What a row adds along its key is v, or weight * v; gates and weights are by head."""
    call = _Call(v, cu_seqlens, initial_state, (v.shape[2], k.shape[3], v.shape[3]))
    for group in call.groups:
        queries, keys = (repeat_heads(call.rows(group, x), v.shape[2], False) for x in (q, k))
        values, gates = (by_head(call.rows(group, x)) for x in (v, g))
        if weight is not None:
            values = values * by_head(call.rows(group, weight))[..., None]
        out, _, state = matrix_pieces(queries * softmax_scale, keys, values, gates, None, call.state(group))
        call.put(group, out.transpose(1, 2), state)
    return call.result()


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    steps: TimeSteps,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final states)."""
    dt = time_steps(dt, steps)
    call = _Call(x, cu_seqlens, initial_state, tuple(a.shape))
    for group in call.groups:
        inputs, sizes, keys, queries = (call.rows(group, y) for y in (x, dt, b, c))
        states = scan_rows(*scan_terms(inputs, sizes, a.to(call.dtype), keys), call.state(group))
        call.put(group, (states * queries[:, :, None]).sum(-1), states[:, -1])
    out, state = call.result()
    return multiply_gate(add_skip(out, x, d), z).to(x.dtype), state


def rg_lru(x: Tensor, log_a: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, final states)."""
    call = _Call(x, cu_seqlens, initial_state, (x.shape[2],))
    for group in call.groups:
        states = scan_rows(call.rows(group, log_a).exp(), call.rows(group, x), call.state(group))
        call.put(group, states, states[:, -1])
    return call.rounded_result()


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, final states): the states are inputs, and have their dtype."""
    width = weight.shape[1]
    call = _Call(x, cu_seqlens, initial_state, (width - 1, weight.shape[0]), page_dtype=x.dtype)
    for group in call.groups:
        inputs = torch.cat((call.state(group), group.gather(x.flatten(0, 1))), 1)
        call.put(group, convolve(inputs, weight, bias, activation), last_rows(inputs, group.lengths, width - 1))
    return call.rounded_result()


def gated_delta_rule_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: StateTensors,
    batch: StateBatch,
    softmax_scale: float,
    use_qk_l2norm: bool,
) -> Tensor:
    """The outputs of a step's rows."""
    dtype = state_dtype(v.dtype)
    heads = v.shape[1]
    out = torch.zeros_like(v)
    for group in step_groups(batch):
        tail_keys, tail_values, tail_gates = (group.read_tail(ring).to(dtype) for ring in states.tails)
        before = repeat_heads(tail_keys, heads, use_qk_l2norm), by_head(tail_values), by_head(tail_gates)
        start = group.start_state(states.pages)
        queries, keys = (repeat_heads(group.gather(x).to(dtype), heads, use_qk_l2norm) for x in (q, k))
        values, gates, betas = (by_head(group.gather(x).to(dtype)) for x in (v, g, beta))
        rows, added, _ = matrix_pieces(queries * softmax_scale, keys, values, gates, betas, advance_state(start, *before))
        out = group.scatter(out, rows.transpose(1, 2))
        group.write_tail(states.tails, (group.gather(k), added.transpose(1, 2), group.gather(g)))
        _store_matrix_states(group, states.pages, start, before, (keys, added, gates))
    return out


def lightning_attention_paged(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, states: StateTensors, batch: StateBatch, softmax_scale: float
) -> Tensor:
    """The outputs of a step's rows."""
    return _linear_attention_paged(q, k, v, log_decay, None, states, batch, softmax_scale).to(v.dtype)


def ssd_paged(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    states: StateTensors,
    batch: StateBatch,
    steps: TimeSteps,
) -> Tensor:
    """The outputs of a step's rows."""
    out = _linear_attention_paged(c, b, x, a, time_steps(dt, steps), states, batch, 1.0)
    return add_skip(out, x, d if d is None else d[:, None]).to(x.dtype)


def _linear_attention_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    weight: Tensor | None,
    states: StateTensors,
    batch: StateBatch,
    softmax_scale: float,
) -> Tensor:
    """The outputs of a step's rows, not rounded. The log gate of a row is a (heads,), and what it adds along its key is v; with
    `weight` (total, heads) they are weight * a and weight * v, and the weight is kept in the tail too."""
    dtype = state_dtype(v.dtype)
    heads = v.shape[1]

    def terms(keys: Tensor, values: Tensor, valid: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(k, u, g) of rows (n, rows, ...)"""
        gates = masked(a.to(dtype).expand(*valid.shape, heads), valid)
        values = values.to(dtype)
        if weights is not None:
            gates = gates * weights.to(dtype)
            values = values * weights.to(dtype)[..., None]
        return repeat_heads(keys.to(dtype), heads, False), by_head(values), by_head(gates)

    out = torch.zeros_like(v, dtype=dtype)
    for group in step_groups(batch):
        tail = [group.read_tail(ring) for ring in states.tails]
        kept = [group.gather(x) for x in (k, v, weight) if x is not None]
        before = terms(tail[0], tail[1], group.in_tail, None if weight is None else tail[2])
        rows = terms(kept[0], kept[1], group.valid, None if weight is None else kept[2])
        start = group.start_state(states.pages)
        queries = repeat_heads(group.gather(q).to(dtype), heads, False) * softmax_scale
        outputs, _, _ = matrix_pieces(queries, *rows, None, advance_state(start, *before))
        out = group.scatter(out, outputs.transpose(1, 2))
        group.write_tail(states.tails, kept)
        _store_matrix_states(group, states.pages, start, before, rows)
    return out


def selective_scan_paged(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    states: StateTensors,
    batch: StateBatch,
    steps: TimeSteps,
) -> Tensor:
    """The outputs of a step's rows."""
    dt = time_steps(dt, steps)
    a = a.to(dt.dtype)
    out = torch.zeros_like(x, dtype=dt.dtype)
    for group in step_groups(batch):
        rows = [group.gather(y) for y in (x, dt, b)]
        tail_inputs, tail_steps, tail_keys = (group.read_tail(ring).to(a.dtype) for ring in states.tails)
        inputs, sizes, keys = (y.to(a.dtype) for y in rows)
        before = scan_terms(tail_inputs, tail_steps, a, tail_keys)
        after = _scan_step(group, states, before, scan_terms(inputs, sizes, a, keys))
        out = group.scatter(out, (after * group.gather(c).to(a.dtype)[:, :, None]).sum(-1))
        group.write_tail(states.tails, rows)
    return multiply_gate(add_skip(out, x, d), z).to(x.dtype)


def rg_lru_paged(x: Tensor, log_a: Tensor, states: StateTensors, batch: StateBatch) -> Tensor:
    """The outputs of a step's rows."""
    dtype = state_dtype(x.dtype)
    out = torch.zeros_like(x)
    for group in step_groups(batch):
        rows = [group.gather(y) for y in (x, log_a)]
        tail_inputs, tail_gates = (group.read_tail(ring).to(dtype) for ring in states.tails)
        before = tail_gates.exp(), tail_inputs
        out = group.scatter(out, _scan_step(group, states, before, (rows[1].to(dtype).exp(), rows[0].to(dtype))))
        group.write_tail(states.tails, rows)
    return out


def causal_conv1d_paged(
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
    """Inputs of dense or packed sequences, and the outputs and final states that are put together."""

    def __init__(
        self,
        like: Tensor,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        state: tuple[int, ...],
        page_dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = state_dtype(like.dtype)
        self.like = like
        self.groups = packed_groups(cu_seqlens, like.shape[0], like.shape[1], like.device)
        count = like.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        self.states = like.new_zeros(count, *state, dtype=page_dtype or self.dtype)
        if initial_state is not None:
            self.states = initial_state.to(self.states)
        self.out = like.new_zeros(like.shape[0] * like.shape[1], *like.shape[2:], dtype=self.dtype)

    def rows(self, group: PackedGroup, x: Tensor) -> Tensor:
        """An input's rows of a group, (n, most, ...)."""
        return group.gather(x.flatten(0, 1)).to(self.dtype)

    def state(self, group: PackedGroup) -> Tensor:
        """The states that a group begins with."""
        return self.states[group.sequences]

    def put(self, group: PackedGroup, out: Tensor, state: Tensor) -> None:
        """A group's outputs and final states."""
        self.out = group.scatter(self.out, out)
        self.states = self.states.index_put((group.sequences,), state)

    def rounded_result(self) -> tuple[Tensor, Tensor]:
        """`result` with the outputs in the dtype of the input."""
        out, states = self.result()
        return out.to(self.like.dtype), states

    def result(self) -> tuple[Tensor, Tensor]:
        """(out, final states), not rounded; the state of a sequence without rows is its initial state."""
        return self.out.view(self.like.shape), self.states


def _store_matrix_states(
    group: StepGroup, pages: Tensor, start: Tensor, before: Sequence[Tensor], rows: Sequence[Tensor]
) -> None:
    """Write the states that the step is to keep, from those at `start`, the tail (k, u, g) and the rows (k, u, g)."""
    for i, position, page in group.stores:
        tail = group.in_tail[i]
        counted = group.valid[i] & (group.positions[i] < position)
        parts = [torch.cat((x[i][:, tail], y[i][:, counted]), 1)[None] for x, y in zip(before, rows, strict=True)]
        pages[page] = advance_state(start[i : i + 1], *parts)[0]


def _scan_step(group: StepGroup, states: StateTensors, before: Terms, rows: Terms) -> Tensor:
    """All states of a step's rows, by the terms of the tail and of the rows. It writes those that the step is to keep."""
    state = group.start_state(states.pages)
    if before[0].shape[1]:
        state = scan_rows(*before, state)[:, -1]
    after = scan_rows(*rows, state)
    for i, position, page in group.stores:
        states.pages[page] = after[i, position - 1 - int(group.first[i])]
    return after
