"""The warps of the backward kernel for wide heads: a warpgroup of scores, a warpgroup of gradients, and a producer warp.

    scores      S^T = K Q^T     P = exp(S - lse)            dV += P^T dO
    gradients   dP^T = V dO^T   dS = P * (dP - delta)       dK += dS^T Q      dQ = dS K

The warpgroup of scores hands P over in shared memory and runs ahead. With `shares_dq` the warpgroup of gradients hands dS^T
back, and the warpgroup of scores computes the first part of the columns of dQ. It does so after it has handed over P of the
next block, so that it need not wait for the warpgroup of gradients.

In this file `i` counts the blocks that the tile has begun, and selects a stage or a slot and the phase of its barrier.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.backends.hopper.backward.consumer import block_probabilities, wait_gradients, wait_queries
from fa_serve.backends.hopper.backward.dq_accumulator import add_to_dq
from fa_serve.backends.hopper.backward.producer import next_block
from fa_serve.backends.hopper.backward.wide.types import FIRST_PART, SLOTS_OF_SCORES
from fa_serve.backends.hopper.forward.consumer import FIRST_NAMED_BARRIER, named_barrier
from fa_serve.backends.hopper.forward.output import copy_output
from fa_serve.backends.hopper.forward.producer import copy_rows
from fa_serve.launching.gluon_names import async_load


@gluon.jit
def _copy_wide_queries(i, m, head, desc, smem, bars, tile, var: gl.constexpr):
    """Start copying the `i`-th block of Q and its lse, once both warpgroups have freed its stage."""
    STAGES: gl.constexpr = var.tiles.q_stages
    stage = i % STAGES
    full = bars.q_full.index(stage)
    mbarrier.wait(bars.q_empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full, 64 * (2 * (FIRST_PART + var.d1) + 4))
    row = m * 64
    copy_rows(desc.q, tile.q_origin, tile.q_len, row, head, 0, full, smem.q.index(stage), var.varlen)
    copy_rows(desc.q1, tile.q_origin, tile.q_len, row, head, FIRST_PART, full, smem.q1.index(stage), var.varlen)
    async_load(desc.lse, [tile.stats_row + head, tile.stats_column + row], full, smem.lse.index(stage))


@gluon.jit
def _copy_wide_gradients(i, m, head, desc, smem, bars, tile, var: gl.constexpr):
    """Start copying the `i`-th block of dO and its delta, once both warpgroups have freed its stage."""
    STAGES: gl.constexpr = var.tiles.do_stages
    stage = i % STAGES
    full = bars.do_full.index(stage)
    mbarrier.wait(bars.do_empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full, 64 * (2 * (FIRST_PART + var.dv1) + 4))
    row = m * 64
    copy_rows(desc.dout, tile.q_origin, tile.q_len, row, head, 0, full, smem.dout.index(stage), var.varlen)
    if var.dv1 > 0:
        copy_rows(desc.dout1, tile.q_origin, tile.q_len, row, head, FIRST_PART, full, smem.dout1.index(stage), var.varlen)
    async_load(desc.delta, [tile.stats_row + head, tile.stats_column + row], full, smem.delta.index(stage))


@gluon.jit
def wide_backward_producer(desc, smem, bars, args, tile, var: gl.constexpr):
    """Copy the tile's K and V once, and Q, dO and their statistics block by block. A tile without blocks copies nothing."""
    if tile.count > 0:
        k_full = bars.k_full.index(0)
        v_full = bars.v_full.index(0)
        kv_head = tile.kv_head
        mbarrier.expect(k_full, 2 * var.block_n * (FIRST_PART + var.d1))
        mbarrier.expect(v_full, 2 * var.block_n * (FIRST_PART + var.dv1))
        copy_rows(desc.k, tile.k_origin, tile.kv_len, tile.first, kv_head, 0, k_full, smem.k.index(0), var.varlen)
        copy_rows(desc.k1, tile.k_origin, tile.kv_len, tile.first, kv_head, FIRST_PART, k_full, smem.k1.index(0), var.varlen)
        m = tile.start
        head = kv_head * args.heads_per_kv
        _copy_wide_queries(0, m, head, desc, smem, bars, tile, var)
        copy_rows(desc.v, tile.k_origin, tile.kv_len, tile.first, kv_head, 0, v_full, smem.v.index(0), var.varlen)
        if var.dv1 > 0:
            copy_rows(
                desc.v1, tile.k_origin, tile.kv_len, tile.first, kv_head, FIRST_PART, v_full, smem.v1.index(0), var.varlen
            )
        _copy_wide_gradients(0, m, head, desc, smem, bars, tile, var)
        for i in range(1, tile.count):
            m, head = next_block(m, head, tile)
            _copy_wide_queries(i, m, head, desc, smem, bars, tile, var)
            _copy_wide_gradients(i, m, head, desc, smem, bars, tile, var)


@gluon.jit
def _zero_parts(of_keys: gl.constexpr, var: gl.constexpr):
    """The two parts of dK or dV before any query. Where dV has no second part, nothing reads it."""
    FIRST: gl.constexpr = var.first_layout
    SECOND: gl.constexpr = var.second_key_layout if of_keys else var.second_value_layout
    WIDTH: gl.constexpr = var.d1 if of_keys else (var.dv1 if var.dv1 > 0 else FIRST_PART)
    first = gl.zeros([64, FIRST_PART], gl.float32, layout=FIRST)
    return first, gl.zeros([64, WIDTH], gl.float32, layout=SECOND)


@gluon.jit
def _no_dq(part: gl.constexpr, var: gl.constexpr):
    """Registers for one part of the columns of dQ, [64, 128 or d1]."""
    WIDTH: gl.constexpr = FIRST_PART if part == 0 else var.d1
    LAYOUT: gl.constexpr = var.first_layout if part == 0 else var.second_key_layout
    return gl.zeros([64, WIDTH], gl.float32, layout=LAYOUT)


@gluon.jit
def _issue_wide_dq(i, dq, smem, part: gl.constexpr, var: gl.constexpr):
    """Start one part of the columns of dQ = dS K of block `i` in the registers of `dq`, whose numbers are ignored.

    Two products that follow one another share these registers. Otherwise ptxas gives each product separate ones, and then
    serialises every product because there are too few registers (its note C7512).
    """
    WIDTH: gl.constexpr = FIRST_PART if part == 0 else var.d1
    k = (smem.k if part == 0 else smem.k1).index(0).reshape([64, WIDTH])
    ds = smem.ds.index(i % SLOTS_OF_SCORES)
    return warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=False, is_async=True)


@gluon.jit
def _add_wide_dq(dq, m, head, args, tile, part: gl.constexpr, var: gl.constexpr):
    """Add one part of the columns of dQ of query block `m` to the sum."""
    row = tile.stats + head * args.stats_width + m * 64
    add_to_dq(args.dq_accum + row.to(gl.int64) * var.width + 64 * FIRST_PART * part, dq)


@gluon.jit
def _publish_weights(i, m, smem, bars, args, tile, dtype: gl.constexpr, var: gl.constexpr):
    """Hand over P^T of block `i` times the slope of the softcap -> P^T in `dtype`, [64, 64]."""
    S_LAYOUT: gl.constexpr = var.score_layout
    stage = i % var.tiles.q_stages
    slot = i % SLOTS_OF_SCORES
    wait_queries(i, bars, var)
    zeros = gl.zeros([64, 64], gl.float32, layout=S_LAYOUT)
    q = smem.q.index(stage).reshape([64, FIRST_PART])
    q1 = smem.q1.index(stage).reshape([64, var.d1])
    k = smem.k.index(0).reshape([64, FIRST_PART])
    k1 = smem.k1.index(0).reshape([64, var.d1])
    token = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    token = warpgroup_mma(k1, q1.permute((1, 0)), token, is_async=True)
    s = warpgroup_mma_wait(0, deps=[token])
    p, weight = block_probabilities(s, m, i, tile.first, smem, args, tile, var)
    # wait until the weights that this slot held, two blocks ago, have been turned into dS
    mbarrier.wait(bars.ds_full.index(slot), ((i // SLOTS_OF_SCORES) & 1) ^ 1)
    smem.weights.index(slot).store(weight.to(dtype))
    mbarrier.arrive(bars.weights_full.index(slot), count=1)
    mbarrier.arrive(bars.q_empty.index(stage), count=1)
    return p.to(dtype)


@gluon.jit
def _issue_wide_dv(p, dv, dv1, i, smem, var: gl.constexpr):
    """Start dV += P^T dO of block `i`."""
    FIRST: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=var.first_layout, k_width=2)
    SECOND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=var.second_value_layout, k_width=2)
    stage = i % var.tiles.do_stages
    dout = smem.dout.index(stage).reshape([64, FIRST_PART])
    dv = warpgroup_mma(gl.convert_layout(p, FIRST), dout, dv, is_async=True)
    if var.dv1 > 0:
        dout1 = smem.dout1.index(stage).reshape([64, var.dv1])
        dv1 = warpgroup_mma(gl.convert_layout(p, SECOND), dout1, dv1, is_async=True)
    return dv, dv1


@gluon.jit
def _finish_dv(dv, dv1, var: gl.constexpr):
    """Wait for every product."""
    if var.dv1 > 0:
        dv, dv1 = warpgroup_mma_wait(0, deps=[dv, dv1])
    else:
        dv = warpgroup_mma_wait(0, deps=[dv])
    return dv, dv1


@gluon.jit
def _wait_ds(i, bars):
    mbarrier.wait(bars.ds_full.index(i % SLOTS_OF_SCORES), (i // SLOTS_OF_SCORES) & 1)


@gluon.jit
def _walk_scores(smem, bars, args, tile, dtype: gl.constexpr, var: gl.constexpr):
    """-> both parts of dV of a tile with blocks."""
    dv, dv1 = _zero_parts(False, var)
    m = tile.start
    head = tile.kv_head * args.heads_per_kv
    for i in range(tile.count):
        p = _publish_weights(i, m, smem, bars, args, tile, dtype, var)
        wait_gradients(i, bars, var)
        dv, dv1 = _issue_wide_dv(p, dv, dv1, i, smem, var)
        dv, dv1 = _finish_dv(dv, dv1, var)
        mbarrier.arrive(bars.do_empty.index(i % var.tiles.do_stages), count=1)
        m, head = next_block(m, head, tile)
    return dv, dv1


@gluon.jit
def _walk_scores_and_dq(smem, bars, args, tile, dtype: gl.constexpr, var: gl.constexpr):
    """`_walk_scores`, and the first part of dQ. The first block is outside the loop, which adds dQ of the previous block."""
    m = tile.start
    head = tile.kv_head * args.heads_per_kv
    p = _publish_weights(0, m, smem, bars, args, tile, dtype, var)
    dv, dv1 = _zero_parts(False, var)
    wait_gradients(0, bars, var)
    dv, dv1 = _issue_wide_dv(p, dv, dv1, 0, smem, var)
    dv, dv1 = _finish_dv(dv, dv1, var)
    mbarrier.arrive(bars.do_empty.index(0), count=1)
    for i in range(1, tile.count):
        next_m, next_head = next_block(m, head, tile)
        p = _publish_weights(i, next_m, smem, bars, args, tile, dtype, var)
        _wait_ds(i - 1, bars)
        dq_token = _issue_wide_dq(i - 1, _no_dq(0, var), smem, 0, var)
        wait_gradients(i, bars, var)
        dv, dv1 = _issue_wide_dv(p, dv, dv1, i, smem, var)
        dq = warpgroup_mma_wait(var.value_products, deps=[dq_token])
        _add_wide_dq(dq, m, head, args, tile, 0, var)
        dv, dv1 = _finish_dv(dv, dv1, var)
        mbarrier.arrive(bars.do_empty.index(i % var.tiles.do_stages), count=1)
        m = next_m
        head = next_head
    _wait_ds(tile.count - 1, bars)
    dq = warpgroup_mma_wait(0, deps=[_issue_wide_dq(tile.count - 1, _no_dq(0, var), smem, 0, var)])
    _add_wide_dq(dq, m, head, args, tile, 0, var)
    return dv, dv1


@gluon.jit
def wide_scores(desc, smem, bars, args, tile, var: gl.constexpr):
    """The warpgroup of scores: dV of the tile's keys."""
    dtype: gl.constexpr = desc.q.dtype
    dv, dv1 = _zero_parts(False, var)
    if tile.count > 0:
        mbarrier.wait(bars.k_full.index(0), 0)
        if var.tiles.shares_dq:
            dv, dv1 = _walk_scores_and_dq(smem, bars, args, tile, dtype, var)
        else:
            dv, dv1 = _walk_scores(smem, bars, args, tile, dtype, var)
    # dV leaves through the buffer of V: wait until the other warpgroup has read it for dP
    named_barrier("sync", FIRST_NAMED_BARRIER)
    origin = tile.k_origin
    head = tile.kv_head
    buffer = smem.v.index(0)
    copy_output(dv.to(dtype), origin, tile.kv_len, tile.first, head, 0, FIRST_PART, buffer, desc.dv, var.varlen)
    if var.dv1 > 0:
        buffer = smem.v1.index(0)
        copy_output(dv1.to(dtype), origin, tile.kv_len, tile.first, head, FIRST_PART, var.dv1, buffer, desc.dv1, var.varlen)
    tma.store_wait(0)


@gluon.jit
def _issue_wide_dp(i, smem, var: gl.constexpr):
    """Start dP^T = V dO^T of block `i`, [64, 64]."""
    S_LAYOUT: gl.constexpr = var.score_layout
    stage = i % var.tiles.do_stages
    zeros = gl.zeros([64, 64], gl.float32, layout=S_LAYOUT)
    dout = smem.dout.index(stage).reshape([64, FIRST_PART])
    token = warpgroup_mma(smem.v.index(0).reshape([64, FIRST_PART]), dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if var.dv1 > 0:
        dout1 = smem.dout1.index(stage).reshape([64, var.dv1])
        v1 = smem.v1.index(0).reshape([64, var.dv1])
        token = warpgroup_mma(v1, dout1.permute((1, 0)), token, is_async=True)
    return token


@gluon.jit
def _publish_ds(dp, i, smem, bars, dtype: gl.constexpr, var: gl.constexpr):
    """Hand over dS^T of block `i`, and free its dO and delta -> dS^T in `dtype`, [64, 64]."""
    stage = i % var.tiles.do_stages
    slot = i % SLOTS_OF_SCORES
    delta = smem.delta.index(stage).load(var.score_layout)
    mbarrier.wait(bars.weights_full.index(slot), (i // SLOTS_OF_SCORES) & 1)
    weight = smem.weights.index(slot).load(var.score_layout).to(gl.float32)
    ds = (weight * (dp - delta)).to(dtype)
    smem.ds.index(slot).store(ds)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(slot), count=1)
    mbarrier.arrive(bars.do_empty.index(stage), count=1)
    return ds


@gluon.jit
def _issue_wide_dk(ds, dk, dk1, i, smem, var: gl.constexpr):
    """Start dK += dS^T Q of block `i`."""
    FIRST: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=var.first_layout, k_width=2)
    SECOND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=var.second_key_layout, k_width=2)
    stage = i % var.tiles.q_stages
    q = smem.q.index(stage).reshape([64, FIRST_PART])
    q1 = smem.q1.index(stage).reshape([64, var.d1])
    dk = warpgroup_mma(gl.convert_layout(ds, FIRST), q, dk, is_async=True)
    dk1 = warpgroup_mma(gl.convert_layout(ds, SECOND), q1, dk1, is_async=True)
    return dk, dk1


@gluon.jit
def _walk_gradients(smem, bars, args, tile, dtype: gl.constexpr, var: gl.constexpr):
    """-> both parts of dK of a tile with blocks, not yet scaled."""
    LAST_PART: gl.constexpr = 1 if var.tiles.shares_dq else 0
    dk, dk1 = _zero_parts(True, var)
    m = tile.start
    head = tile.kv_head * args.heads_per_kv
    for i in range(tile.count):
        wait_gradients(i, bars, var)
        dp = warpgroup_mma_wait(0, deps=[_issue_wide_dp(i, smem, var)])
        ds = _publish_ds(dp, i, smem, bars, dtype, var)
        dq = _no_dq(LAST_PART, var)
        if not var.tiles.shares_dq:
            dq1 = warpgroup_mma_wait(0, deps=[_issue_wide_dq(i, _no_dq(1, var), smem, 1, var)])
            _add_wide_dq(dq1, m, head, args, tile, 1, var)
            if var.d1 == FIRST_PART:
                dq = dq1
        dq_token = _issue_wide_dq(i, dq, smem, LAST_PART, var)
        wait_queries(i, bars, var)
        dk_token, dk1_token = _issue_wide_dk(ds, dk, dk1, i, smem, var)
        dq = warpgroup_mma_wait(2, deps=[dq_token])
        _add_wide_dq(dq, m, head, args, tile, LAST_PART, var)
        dk, dk1 = warpgroup_mma_wait(0, deps=[dk_token, dk1_token])
        mbarrier.arrive(bars.q_empty.index(i % var.tiles.q_stages), count=1)
        m, head = next_block(m, head, tile)
    return dk, dk1


@gluon.jit
def wide_gradients(desc, smem, bars, args, tile, var: gl.constexpr):
    """The warpgroup of gradients: dK of the tile's keys, and dQ of each block or, with `shares_dq`, its second part."""
    dtype: gl.constexpr = desc.q.dtype
    dk, dk1 = _zero_parts(True, var)
    if tile.count > 0:
        mbarrier.wait(bars.v_full.index(0), 0)
        # K is read for dQ
        mbarrier.wait(bars.k_full.index(0), 0)
        dk, dk1 = _walk_gradients(smem, bars, args, tile, dtype, var)
    # dK leaves through the buffer of K: wait until the other warpgroup has read it for S and dQ
    named_barrier("sync", FIRST_NAMED_BARRIER)
    origin = tile.k_origin
    head = tile.kv_head
    dk = (dk * args.softmax_scale).to(dtype)
    dk1 = (dk1 * args.softmax_scale).to(dtype)
    copy_output(dk, origin, tile.kv_len, tile.first, head, 0, FIRST_PART, smem.k.index(0), desc.dk, var.varlen)
    copy_output(dk1, origin, tile.kv_len, tile.first, head, FIRST_PART, var.d1, smem.k1.index(0), desc.dk1, var.varlen)
    tma.store_wait(0)
