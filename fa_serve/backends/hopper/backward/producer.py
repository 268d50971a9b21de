"""The walk of a backward tile over query blocks, and the producer warp that copies what the tile reads to shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fa_serve.backends.hopper.backward.types import KeyTile
from fa_serve.backends.hopper.forward.producer import copy_rows
from fa_serve.backends.triton.row_statistics import STATS_ROWS
from fa_serve.launching.gluon_names import async_load


@gluon.jit
def key_tile(index, args, var: gl.constexpr):
    """The `index`-th tile. Tiles of one KV head follow one another, first the keys that the most causal queries see."""
    BLOCK_M: gl.constexpr = var.tiles.block_m
    BLOCK_N: gl.constexpr = var.block_n
    number = index % args.num_n
    kv_heads = args.num_heads // args.heads_per_kv
    kv_head = index // args.num_n % kv_heads
    batch = index // args.num_n // kv_heads
    q_origin = batch
    k_origin = batch
    q_len = args.seqlen_q
    kv_len = args.seqlen_k
    stats_row = batch * args.num_heads
    stats_column = batch * 0
    if var.varlen:
        q_origin = gl.load(args.cu_seqlens_q + batch)
        q_len = gl.load(args.cu_seqlens_q + batch + 1) - q_origin
        k_origin = gl.load(args.cu_seqlens_k + batch)
        kv_len = gl.load(args.cu_seqlens_k + batch + 1) - k_origin
        stats_row = batch * 0
        stats_column = (q_origin + batch * STATS_ROWS) // STATS_ROWS * STATS_ROWS
    first = number * BLOCK_N
    offset = kv_len - q_len
    low = q_len * 0
    end = q_len
    if var.has_right:
        low = gl.maximum(first - offset - args.right, 0) // BLOCK_M
    if var.has_left:
        last = gl.minimum(first + BLOCK_N, kv_len) - 1
        end = gl.minimum(end, last - offset + args.left + 1)
    high = gl.maximum((gl.maximum(end, 0) + BLOCK_M - 1) // BLOCK_M, low)
    blocks = gl.where(first < kv_len, high - low, 0)
    start = low
    if var.tiles.stagger:
        # the tiles of a head start at different query blocks
        start = low + number * (BLOCK_N // BLOCK_M) % gl.maximum(blocks, 1)
    stats = stats_row * args.stats_width + stats_column
    count = blocks * args.heads_per_kv
    return KeyTile(first, kv_head, q_origin, q_len, k_origin, kv_len, stats_row, stats_column, stats, low, high, start, count)


@gluon.jit
def next_block(m, head, tile):
    """The query block and the head that follow in the tile's walk."""
    m = gl.where(m + 1 == tile.high, tile.low, m + 1)
    return m, gl.where(m == tile.start, head + 1, head)


@gluon.jit
def _copy_queries(i, m, head, desc, smem, bars, tile, var: gl.constexpr):
    """Start copying the `i`-th block of Q and its lse, once the consumers have freed its stage."""
    STAGES: gl.constexpr = var.tiles.q_stages
    BLOCK_M: gl.constexpr = var.tiles.block_m
    stage = i % STAGES
    full = bars.q_full.index(stage)
    mbarrier.wait(bars.q_empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full, BLOCK_M * (2 * var.width + 4))
    row = m * BLOCK_M
    copy_rows(desc.q, tile.q_origin, tile.q_len, row, head, 0, full, smem.q.index(stage), var.varlen)
    async_load(desc.lse, [tile.stats_row + head, tile.stats_column + row], full, smem.lse.index(stage))


@gluon.jit
def _copy_gradients(i, m, head, desc, smem, bars, tile, var: gl.constexpr):
    """Start copying the `i`-th block of dO and its delta, once the consumers have freed its stage."""
    STAGES: gl.constexpr = var.tiles.do_stages
    BLOCK_M: gl.constexpr = var.tiles.block_m
    stage = i % STAGES
    full = bars.do_full.index(stage)
    mbarrier.wait(bars.do_empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(full, BLOCK_M * (2 * var.width + 4))
    row = m * BLOCK_M
    copy_rows(desc.dout, tile.q_origin, tile.q_len, row, head, 0, full, smem.dout.index(stage), var.varlen)
    async_load(desc.delta, [tile.stats_row + head, tile.stats_column + row], full, smem.delta.index(stage))


@gluon.jit
def backward_producer(desc, smem, bars, args, tile, var: gl.constexpr):
    """Copy the tile's K and V once, and Q, dO and their statistics block by block. A tile without blocks copies nothing."""
    GROUPS: gl.constexpr = var.groups
    if tile.count > 0:
        mbarrier.expect(bars.k_full.index(0), 2 * 64 * GROUPS * var.width)
        mbarrier.expect(bars.v_full.index(0), 2 * 64 * GROUPS * var.width)
        for g in gl.static_range(GROUPS):
            key = tile.first + 64 * g
            full = bars.k_full.index(0)
            copy_rows(desc.k, tile.k_origin, tile.kv_len, key, tile.kv_head, 0, full, smem.k.index(g), var.varlen)
        m = tile.start
        head = tile.kv_head * args.heads_per_kv
        _copy_queries(0, m, head, desc, smem, bars, tile, var)
        for g in gl.static_range(GROUPS):
            key = tile.first + 64 * g
            full = bars.v_full.index(0)
            copy_rows(desc.v, tile.k_origin, tile.kv_len, key, tile.kv_head, 0, full, smem.v.index(g), var.varlen)
        _copy_gradients(0, m, head, desc, smem, bars, tile, var)
        for i in range(1, tile.count):
            m, head = next_block(m, head, tile)
            _copy_queries(i, m, head, desc, smem, bars, tile, var)
            _copy_gradients(i, m, head, desc, smem, bars, tile, var)
