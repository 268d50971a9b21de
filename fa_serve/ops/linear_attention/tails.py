"""Device functions of few_rows.py: they read the rows before a row in tiles, from the tail and from the step, and sum them."""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.linear_attention.primitives import L2NORM_EPS, load_old_or_new, normalised_row, time_step


@triton.jit
def gates_and_weights(
    old,
    new,
    place,
    j,
    a,
    bias,
    g_ptr,
    weight_ptr,
    tail_g_ptr,
    stride_g,
    stride_w,
    limit_low,
    limit_high,
    HEADS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
):
    """Log gates by head, and the weights of values, for rows of the tail (old) at `place` and for rows j of the step (new).

    The pointers point to the head's first row. OLD, NEW: whether any row can be in the tail, or in the step
    """
    if g_ptr is not None:
        if NEW:
            gates = tl.load(g_ptr + j * stride_g, mask=new, other=0.0).to(tl.float32)
            if OLD and tail_g_ptr is not None:
                gates += tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        else:
            gates = tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        weights = gates
    elif weight_ptr is None:
        gates = tl.where(old | new, a, 0.0)
        weights = tl.where(old | new, 1.0, 0.0)
    else:
        if NEW:
            given = tl.load(weight_ptr + j * stride_w, mask=new, other=0.0)
            weights = tl.where(new, time_step(given, bias, limit_low, limit_high, SOFTPLUS), 0.0)
            if OLD and tail_g_ptr is not None:
                weights += tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        else:
            weights = tl.load(tail_g_ptr + place * HEADS, mask=old, other=0.0)
        gates = a * weights
    return gates, weights


@triton.jit
def read_tile(
    low,
    r,
    tail,
    start,
    c,
    x,
    in_c,
    in_x,
    a,
    bias,
    k_ptr,
    v_ptr,
    g_ptr,
    weight_ptr,
    tail_k_ptr,
    tail_u_ptr,
    tail_g_ptr,
    stride_k,
    stride_v,
    stride_g,
    stride_w,
    limit_low,
    limit_high,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    RING: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """(keys, u, log gates, weights of u) of the rows from `low` on that precede row r; 0 for other rows.

    With ONE_ROW, all of these rows are in the tail. Weights are 1 for the delta rule.
    """
    t = low + tl.arange(0, BLOCK_T)
    seen = t < r
    old = t < tail
    place = (start + t) % RING
    j = t - tail
    new_cells = k_ptr + j[:, None] * stride_k + c[None, :]
    keep = seen[:, None] & in_c[None, :]
    if tail_k_ptr is None:
        keys = tl.load(new_cells, mask=keep, other=0.0)
    else:
        cells = tail_k_ptr + place[:, None] * (KEY_HEADS * DIM) + c[None, :]
        keys = tl.load(cells, mask=keep, other=0.0) if ONE_ROW else load_old_or_new(cells, new_cells, old[:, None], keep)
    keys = keys.to(tl.float32)  # [BLOCK_T, BLOCK_K]
    new_cells = v_ptr + j[:, None] * stride_v + x[None, :]
    keep = seen[:, None] & in_x[None, :]
    if tail_u_ptr is None:
        u = tl.load(new_cells, mask=keep, other=0.0)
    else:
        cells = tail_u_ptr + place[:, None] * (HEADS * DIM_V) + x[None, :]
        if ONE_ROW or g_ptr is not None:
            u = tl.load(cells, mask=keep, other=0.0)
        else:
            u = load_old_or_new(cells, new_cells, old[:, None], keep)
    u = u.to(tl.float32)  # [BLOCK_T, BLOCK_V]
    if BY_CHANNEL:
        gates = tl.zeros([BLOCK_T, c.shape[0]], tl.float32)
        if not ONE_ROW:
            at = g_ptr + j[:, None] * stride_g + c[None, :]
            gates += tl.load(at, mask=(seen & (t >= tail))[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        if tail_g_ptr is not None:
            at = tail_g_ptr + place[:, None] * (HEADS * DIM) + c[None, :]
            gates += tl.load(at, mask=(seen & old)[:, None] & in_c[None, :], other=0.0)
    else:
        gates, weights = gates_and_weights(
            old & seen,
            seen & (t >= tail),
            place,
            j,
            a,
            bias,
            g_ptr,
            weight_ptr,
            tail_g_ptr,
            stride_g,
            stride_w,
            limit_low,
            limit_high,
            HEADS,
            SOFTPLUS,
            True,
            not ONE_ROW,
        )
    if g_ptr is not None:
        weights = tl.full([BLOCK_T], 1.0, tl.float32)
    return keys, u, gates, weights


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _sums_of_tiles(state, factors, BLOCK_T: tl.constexpr):
    """The sums over channels of factors * state [BLOCK_K, BLOCK_V], as BLOCK_T partial sums [BLOCK_T, BLOCK_V]: channels that
    are BLOCK_T apart are in registers of one thread."""
    product = state * factors[:, None]
    return tl.sum(tl.reshape(product, [state.shape[0] // BLOCK_T, BLOCK_T, state.shape[1]]), 0)


@triton.jit
def compare_key_and_query(key, query, scale, NORMALISE: tl.constexpr):
    """(key, scaled query, their product) of a row, in float32. With NORMALISE, key and query are normalised, and one reduction
    computes all three sums."""
    alike = key * query
    if NORMALISE:
        squares_of_key, squares_of_query, alike = tl.reduce((key * key, query * query, alike), 0, _add_triples)
        length_of_key = tl.rsqrt(squares_of_key + L2NORM_EPS)
        length_of_query = tl.rsqrt(squares_of_query + L2NORM_EPS) * scale
        key *= length_of_key
        query *= length_of_query
        alike *= length_of_key * length_of_query
    else:
        query *= scale
        alike = tl.sum(alike, 0) * scale
    return key, query, alike


@triton.jit
def add_tile(
    part_of_known,
    part_of_out,
    after,
    keys,
    u,
    gates,
    weights,
    key,
    query,
    DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Adds a tile to two partial sums of a row: what the state already holds under its key (`known`), and its output.

    after: sum of the log gates after the tile, up to the row; it is returned with the gates of the tile added
    """
    decayed = keys
    factor = weights
    if BY_CHANNEL:
        decayed *= tl.exp(tl.cumsum(gates, 0, reverse=True) - gates + after[None, :])
    else:
        factor *= tl.exp(tl.cumsum(gates, 0, reverse=True) - gates + after)
    after += tl.sum(gates, 0)
    if NORMALISE:
        factor *= tl.rsqrt(tl.sum(keys * keys, 1) + L2NORM_EPS)
    if DELTA:
        of_key, of_query = tl.reduce((decayed * key[None, :], decayed * query[None, :]), 1, _add_pairs)
        part_of_known += (of_key * factor)[:, None] * u
    else:
        of_query = tl.sum(decayed * query[None, :], 1)
    part_of_out += (of_query * factor)[:, None] * u
    return part_of_known, part_of_out, after


@triton.jit
def finish_row(
    state,
    part_of_known,
    part_of_out,
    after,
    key,
    query,
    value,
    alike,
    beta,
    weight,
    DELTA: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """(output, u) of a row, from its partial sums and its products with the state. u is the value, except for the delta rule.

    weight: the weight of the value; the delta rule has none
    """
    of_state = query * tl.exp(after)
    part_of_out += _sums_of_tiles(state, of_state, BLOCK_T)
    if DELTA:
        part_of_known += _sums_of_tiles(state, key * tl.exp(after), BLOCK_T)
        known, y = tl.reduce((part_of_known, part_of_out), 0, _add_pairs)
        u = beta * (value - known)
        y += alike * u
    else:
        y = tl.sum(part_of_out, 0) + (alike * weight) * value
        u = value
    return y, u


@triton.jit
def pass_rows(
    state,
    count,
    tail,
    start,
    c,
    x,
    in_c,
    in_x,
    a,
    bias,
    k_ptr,
    v_ptr,
    g_ptr,
    weight_ptr,
    tail_k_ptr,
    tail_u_ptr,
    tail_g_ptr,
    stride_k,
    stride_v,
    stride_g,
    stride_w,
    limit_low,
    limit_high,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    RING: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NORMALISE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """The state after `count` rows of the tail and of the step, by the recurrence itself.

    The pointers point to the head's first row.
    """
    for row in range(count):
        row_place = (start + row) % RING
        is_old = row < tail
        new_key = k_ptr + (row - tail) * stride_k + c
        if tail_k_ptr is None:
            row_key = tl.load(new_key, mask=in_c, other=0.0)
        else:
            row_key = load_old_or_new(tail_k_ptr + row_place * (KEY_HEADS * DIM) + c, new_key, is_old, in_c)
        row_key = normalised_row(row_key, NORMALISE)
        new_value = v_ptr + (row - tail) * stride_v + x
        if tail_u_ptr is None:
            added = tl.load(new_value, mask=in_x, other=0.0)
        else:
            old_u = tail_u_ptr + row_place * (HEADS * DIM_V) + x
            added = (
                tl.load(old_u, mask=in_x, other=0.0) if g_ptr is not None else load_old_or_new(old_u, new_value, is_old, in_x)
            )
        added = added.to(tl.float32)
        if BY_CHANNEL:
            row_gate = tl.load(g_ptr + (row - tail) * stride_g + c, mask=in_c & (row >= tail), other=0.0).to(tl.float32)
            if tail_g_ptr is not None:
                row_gate += tl.load(tail_g_ptr + row_place * (HEADS * DIM) + c, mask=in_c & is_old, other=0.0)
            state *= tl.exp(row_gate)[:, None]
        else:
            row_gate, weight = gates_and_weights(
                is_old,
                row >= tail,
                row_place,
                row - tail,
                a,
                bias,
                g_ptr,
                weight_ptr,
                tail_g_ptr,
                stride_g,
                stride_w,
                limit_low,
                limit_high,
                HEADS,
                SOFTPLUS,
                True,
                True,
            )
            state *= tl.exp(row_gate)
            if g_ptr is None:
                added *= weight
        state += row_key[:, None] * added[None, :]
    return state
