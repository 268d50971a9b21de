"""The consumer warpgroups of the backward kernel: five products for each block of queries, and dK and dV in registers.

Each warpgroup owns 64 keys of the tile. Scores are transposed, so that P^T and dS^T are left operands in registers:

    S^T = K Q^T     P = exp(S - lse)            dV += P^T dO
    dP^T = V dO^T   dS = P * (dP - delta)       dK += dS^T Q
                                                dQ  = dS K, over the keys of both warpgroups

For dQ both warpgroups write dS^T to shared memory, wait for each other, and compute one square of 64 by 64 each.

In this file `i` counts the blocks that the tile has begun, and selects a ring's stage and its barrier's phase.
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

from fa_serve.backends.hopper.backward.dq_accumulator import add_to_dq
from fa_serve.backends.hopper.backward.producer import next_block
from fa_serve.backends.hopper.forward.consumer import FIRST_NAMED_BARRIER, named_barrier
from fa_serve.backends.hopper.forward.output import copy_output


@gluon.jit
def _issue_transposed_scores(i, smem, group: gl.constexpr, var: gl.constexpr):
    """Start S^T = K Q^T of block `i`, [64, block_m]."""
    BLOCK_M: gl.constexpr = var.tiles.block_m
    WIDTH: gl.constexpr = var.width
    S_LAYOUT: gl.constexpr = var.score_layout
    zeros = gl.zeros([64, BLOCK_M], gl.float32, layout=S_LAYOUT)
    k = smem.k.index(group).reshape([64, WIDTH])
    q = smem.q.index(i % var.tiles.q_stages).reshape([BLOCK_M, WIDTH])
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_dp(i, smem, group: gl.constexpr, var: gl.constexpr):
    """Start dP^T = V dO^T of block `i`, [64, block_m]."""
    BLOCK_M: gl.constexpr = var.tiles.block_m
    WIDTH: gl.constexpr = var.width
    S_LAYOUT: gl.constexpr = var.score_layout
    zeros = gl.zeros([64, BLOCK_M], gl.float32, layout=S_LAYOUT)
    v = smem.v.index(group).reshape([64, WIDTH])
    dout = smem.dout.index(i % var.tiles.do_stages).reshape([BLOCK_M, WIDTH])
    return warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_dq(i, smem, group: gl.constexpr, var: gl.constexpr):
    """Start this warpgroup's square of dQ = dS K, [64, 64]: one product for each warpgroup's keys."""
    GROUPS: gl.constexpr = var.groups
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    row_chunk: gl.constexpr = group // var.column_chunks
    column_chunk: gl.constexpr = group % var.column_chunks
    dq = gl.zeros([64, 64], gl.float32, layout=SQUARE)
    for g in gl.static_range(GROUPS):
        ds = smem.ds_chunks.index((i % 2 * GROUPS + g) * var.row_chunks + row_chunk)
        k = smem.k_chunks.index(g * var.column_chunks + column_chunk)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=g > 0, is_async=True)
    return dq


@gluon.jit
def block_probabilities(s, m, i, first, smem, args, tile, var: gl.constexpr):
    """-> P^T of a block, [64, block_m], and P^T times the slope of the softcap. `first` is the first of the 64 keys."""
    BLOCK_M: gl.constexpr = var.tiles.block_m
    S_LAYOUT: gl.constexpr = var.score_layout
    scale = args.scale
    if var.softcap:
        s = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [s * args.scale], dtype=gl.float32, is_pure=True, pack=1
        )
        scale = args.softcap
    lse = smem.lse.index(i % var.tiles.q_stages).load(S_LAYOUT)
    p = gl.exp2(s * scale - lse)
    # rows past the end of the sequence have lse +inf, so their P is 0 without a mask
    top = m * BLOCK_M + tile.kv_len - tile.q_len
    crosses = first + 64 > tile.kv_len
    if var.has_right:
        crosses = crosses | (first + 63 > top + args.right)
    if var.has_left:
        crosses = crosses | (first < top + BLOCK_M - 1 - args.left)
    if crosses:
        keys = gl.expand_dims(first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
        rows = gl.expand_dims(top + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
        keep = keys < tile.kv_len
        if var.has_right:
            keep = keep & (keys <= rows + args.right)
        if var.has_left:
            keep = keep & (keys >= rows - args.left)
        p = gl.where(keep, p, 0.0)
    weight = p
    if var.softcap:
        weight = p * (1.0 - s * s)
    return p, weight


@gluon.jit
def _share_ds(weight, dp, i, smem, dtype: gl.constexpr, group: gl.constexpr, var: gl.constexpr):
    """Share dS^T of block `i` through shared memory, and wait for the other warpgroup's -> dS^T in `dtype`, [64, block_m]."""
    delta = smem.delta.index(i % var.tiles.do_stages).load(var.score_layout)
    ds = (weight * (dp - delta)).to(dtype)
    # the other warpgroup had read this buffer when it arrived at the barrier of the previous block
    smem.ds.index(i % 2 * var.groups + group).store(ds)
    fence_async_shared()
    named_barrier("sync", FIRST_NAMED_BARRIER)
    return ds


@gluon.jit
def _issue_dv(p, dv, i, smem, dtype: gl.constexpr, var: gl.constexpr):
    """Start dV += P^T dO of block `i`."""
    BLOCK_M: gl.constexpr = var.tiles.block_m
    WIDTH: gl.constexpr = var.width
    dout = smem.dout.index(i % var.tiles.do_stages).reshape([BLOCK_M, WIDTH])
    return warpgroup_mma(gl.convert_layout(p.to(dtype), var.operand_layout), dout, dv, is_async=True)


@gluon.jit
def _issue_dk(ds, dk, i, smem, var: gl.constexpr):
    """Start dK += dS^T Q of block `i`."""
    BLOCK_M: gl.constexpr = var.tiles.block_m
    WIDTH: gl.constexpr = var.width
    q = smem.q.index(i % var.tiles.q_stages).reshape([BLOCK_M, WIDTH])
    return warpgroup_mma(gl.convert_layout(ds, var.operand_layout), q, dk, is_async=True)


@gluon.jit
def _add_square(dq, m, head, args, tile, group: gl.constexpr, var: gl.constexpr):
    """Add this warpgroup's square of dQ of query block `m` to the sum."""
    row_chunk: gl.constexpr = group // var.column_chunks
    column_chunk: gl.constexpr = group % var.column_chunks
    row = tile.stats + head * args.stats_width + m * var.tiles.block_m + 64 * row_chunk
    add_to_dq(args.dq_accum + row.to(gl.int64) * var.width + 4096 * column_chunk, dq)


@gluon.jit
def wait_queries(i, bars, var: gl.constexpr, alive=True):
    """Wait for Q and lse of block `i`, unless `alive` is false."""
    mbarrier.wait(bars.q_full.index(i % var.tiles.q_stages), (i // var.tiles.q_stages) & 1, pred=alive)


@gluon.jit
def wait_gradients(i, bars, var: gl.constexpr):
    """Wait for dO and delta of block `i`."""
    mbarrier.wait(bars.do_full.index(i % var.tiles.do_stages), (i // var.tiles.do_stages) & 1)


@gluon.jit
def _no_gradient(var: gl.constexpr):
    """dK or dV before any query."""
    WIDTH: gl.constexpr = var.width
    KEYS: gl.constexpr = var.key_layout
    return gl.zeros([64, WIDTH], gl.float32, layout=KEYS)


@gluon.jit
def _walk(first, desc, smem, bars, args, tile, group: gl.constexpr, var: gl.constexpr):
    """-> dK, not yet scaled, and dV of a tile with blocks. S is issued at a block's start, as in FlashAttention-3."""
    dtype: gl.constexpr = desc.q.dtype
    dk = _no_gradient(var)
    dv = _no_gradient(var)
    m = tile.start
    head = tile.kv_head * args.heads_per_kv
    for i in range(tile.count):
        wait_queries(i, bars, var)
        s_token = _issue_transposed_scores(i, smem, group, var)
        wait_gradients(i, bars, var)
        dp_token = _issue_dp(i, smem, group, var)
        s = warpgroup_mma_wait(1, deps=[s_token])
        p, weight = block_probabilities(s, m, i, first, smem, args, tile, var)
        dv_token = _issue_dv(p, dv, i, smem, dtype, var)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        ds = _share_ds(weight, dp, i, smem, dtype, group, var)
        dq_token = _issue_dq(i, smem, group, var)
        dk_token = _issue_dk(ds, dk, i, smem, var)
        dv, dq = warpgroup_mma_wait(1, deps=[dv_token, dq_token])
        mbarrier.arrive(bars.do_empty.index(i % var.tiles.do_stages), count=1)
        _add_square(dq, m, head, args, tile, group, var)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        mbarrier.arrive(bars.q_empty.index(i % var.tiles.q_stages), count=1)
        m, head = next_block(m, head, tile)
    return dk, dv


@gluon.jit
def backward_consumer(desc, smem, bars, args, tile, group: gl.constexpr, var: gl.constexpr):
    """Compute dK and dV of 64 keys, and this warpgroup's part of dQ of each block."""
    WIDTH: gl.constexpr = var.width
    dtype: gl.constexpr = desc.q.dtype
    first = tile.first + 64 * group
    dk = _no_gradient(var)
    dv = _no_gradient(var)
    if tile.count > 0:
        mbarrier.wait(bars.k_full.index(0), 0)
        mbarrier.wait(bars.v_full.index(0), 0)
        dk, dv = _walk(first, desc, smem, bars, args, tile, group, var)
    # dK leaves through the buffer of K: wait until the other warpgroup has read it for dQ
    named_barrier("sync", FIRST_NAMED_BARRIER)
    origin = tile.k_origin
    head = tile.kv_head
    v_buffer = smem.v.index(group)
    k_buffer = smem.k.index(group)
    copy_output(dv.to(dtype), origin, tile.kv_len, first, head, 0, WIDTH, v_buffer, desc.dv, var.varlen)
    dk = (dk * args.softmax_scale).to(dtype)
    copy_output(dk, origin, tile.kv_len, first, head, 0, WIDTH, k_buffer, desc.dk, var.varlen)
    tma.store_wait(0)
