"""The warps of the Hopper kernel of latent attention: one warpgroup of scores, two of values, and four producer warps.

`plan` describes the algorithm. In this file `block_count`, `item` and `count` count the blocks of keys, the items of P
and the sequences that the program has begun: they select a stage and the phase of its barriers. A sequence has an item for each
block and a last item, which carries the factor 1 / sum and no probabilities. After the last sequence comes an item whose record
says 0 blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.backends.hopper.forward.consumer import SUM_LAYOUT, Softmax, rescale_part
from fa_serve.backends.hopper.forward.producer import PagedOperand, field_of, load_pages, pages_of
from fa_serve.backends.hopper.latent.types import PARTS, ROPE, SLOTS, latent_work
from fa_serve.backends.triton.primitives import LN2, SCORE_GROWTH
from fa_serve.backends.triton.splits import lse_of_splits
from fa_serve.launching.gluon_names import copy_to_shared, sync_threads

RECORD_LAYOUT = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""A record [4] in a warpgroup: each thread has all of it."""
ROPE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Layout of the last part of the queries [64, 64] on its way to shared memory."""


@gluon.jit
def latent_keys(k_desc, smem, bars, args, part: gl.constexpr, var: gl.constexpr):
    """A producer warp: start the copies of a part of every block of keys. The pages of the next block are read ahead."""
    BYTES: gl.constexpr = 2 * var.tiles.block_n * (var.width + (ROPE if part == 0 else 0))
    WIDTH: gl.constexpr = var.width
    c = PagedOperand(k_desc, smem.c_boxes, args.k_pitch)
    cr = PagedOperand(k_desc, smem.cr_boxes, args.k_pitch)
    seq_start = args.seq_start
    block_count = args.share * 0
    for index in range(args.first, args.stop):
        work, seq_start = latent_work(index, seq_start, args, var)
        if work.live:
            pages = pages_of(work, work.begin, args, var)
            for j in range(work.blocks):
                stage = (block_count + j) % var.tiles.stages
                block = work.begin + j
                next_pages = pages_of(work, block + 1, args, var)
                mbarrier.wait(bars.k_empty.index(stage), (((block_count + j) // var.tiles.stages) & 1) ^ 1)
                full = bars.k_full.index(stage)
                mbarrier.expect(full, BYTES)
                load_pages(c, pages, work, args.kv_head, block, stage * PARTS + part, part * WIDTH, full, WIDTH, var)
                if part == 0:
                    load_pages(cr, pages, work, args.kv_head, block, stage, var.split.dim_v, full, ROPE, var)
                pages = next_pages
        block_count += work.blocks


@gluon.jit
def _query_rows(work, args, layout: gl.constexpr, var: gl.constexpr):
    """-> where the rows of a tile's queries begin, [64, 1], and which of the rows exist.

    The assembly makes LLVM believe that the numbers of the rows change from sequence to sequence. Otherwise it would compute
    the offsets of the rows once for all sequences, and keep them in registers that the scores need.
    """
    GROUPS: gl.constexpr = var.split.groups
    offs_m = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    offs_m = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [offs_m], dtype=gl.int32, is_pure=False, pack=1)
    rows = args.row_first + offs_m
    token = work.row0.to(gl.int64) + rows // GROUPS
    starts = token * args.stride_qt + (args.kv_head.to(gl.int64) * GROUPS + rows % GROUPS) * args.stride_qh
    return gl.expand_dims(starts, 1), gl.expand_dims(rows < work.q_len * GROUPS, 1)


@gluon.jit
def receive_queries(work, smem, args, var: gl.constexpr):
    """Copy a tile's queries after all scores of the previous sequence. Rows and columns that do not exist are 0."""
    WIDTH: gl.constexpr = var.width
    QUERIES: gl.constexpr = var.query_layout
    starts, live = _query_rows(work, args, QUERIES, var)
    columns = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, QUERIES)), 0)
    for i in gl.static_range(PARTS):
        copy_to_shared(smem.q.index(i), args.q + (starts + (i * WIDTH + columns)), mask=live)
    starts, live = _query_rows(work, args, ROPE_LAYOUT, var)
    columns = gl.expand_dims(gl.arange(0, ROPE, layout=gl.SliceLayout(0, ROPE_LAYOUT)), 0)
    if var.rest < ROPE:
        live = live & (columns < var.rest)
    copy_to_shared(smem.qr, args.q + (starts + (var.split.dim_v + columns)), mask=live)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    sync_threads()


@gluon.jit
def issue_latent_scores(block_count, smem, var: gl.constexpr):
    """Start S = Q K^T of a block, [64, block_n]."""
    S_LAYOUT: gl.constexpr = var.score_layout
    BLOCK_N: gl.constexpr = var.tiles.block_n
    stage = block_count % var.tiles.stages
    s = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    s = warpgroup_mma(smem.qr, smem.cr.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
    for i in gl.static_range(PARTS):
        s = warpgroup_mma(smem.q.index(i), smem.c.index(stage * PARTS + i).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def wait_latent_keys(block_count, bars, var: gl.constexpr):
    """Wait for a block of keys."""
    mbarrier.wait(bars.k_full.index(block_count % var.tiles.stages), (block_count // var.tiles.stages) & 1)
    if var.gathers:
        fence_async_shared()  # the tensor cores read what threads have copied


@gluon.jit
def wait_slot(item, bars):
    """Wait until the warpgroups of values have read what this slot held before."""
    mbarrier.wait(bars.p_empty.index(item % SLOTS), ((item // SLOTS) & 1) ^ 1)


@gluon.jit
def hand_over(item, bars):
    """Let the warpgroups of values read a slot. The arrival waits until all threads have written to it."""
    fence_async_shared()
    mbarrier.arrive(bars.p_full.index(item % SLOTS), count=1)


@gluon.jit
def record_of(work):
    """What the warpgroups of values must know of a sequence, see `types.LatentMemory`."""
    i = gl.arange(0, 4, layout=RECORD_LAYOUT)
    record = gl.where(i == 0, work.blocks, gl.where(work.whole, -1, work.place))
    record = gl.where(i == 1, work.row0, record)
    return gl.where(i == 2, work.q_len, record)


@gluon.jit
def publish_block(s, state, block, item, work, record, scale, smem, bars, args, var: gl.constexpr):
    """Update the online softmax by a block of scores, and hand P and the output's factors over -> the new state.

    The maximum of a row is raised only when scores exceed it by more than SCORE_GROWTH, as in `consumer`.
    """
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = var.score_layout
    if block >= work.inner_end:
        columns = gl.expand_dims(block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
        last = gl.zeros([64], gl.int32, layout=gl.SliceLayout(1, S_LAYOUT)) + work.kv_len
        if var.has_right:
            rows = args.row_first + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
            last = gl.minimum(last, rows // var.split.groups + (work.kv_len - work.q_len + args.window_right + 1))
        s = gl.where(columns < gl.expand_dims(last, 1), s, float("-inf"))
    m = gl.max(s, 1) * scale
    m = gl.where(m - state.m > SCORE_GROWTH, m, state.m)  # the comparison is false where both are -inf
    safe = gl.where(m == float("-inf"), 0.0, m)  # a row that has seen no key yet; -inf - -inf would be NaN
    p = gl.exp2(s * scale - gl.expand_dims(safe, 1))
    alpha = gl.exp2(state.m - safe)
    parts = gl.sum(gl.sum(p.reshape([64, BLOCK_N // 8, 4, 2]), 3), 1)
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, SUM_LAYOUT), assert_trivial=True)
    l = state.l * gl.expand_dims(factor, 1) + gl.convert_layout(parts, SUM_LAYOUT, assert_trivial=True)  # noqa: E741
    wait_slot(item, bars)
    slot = item % SLOTS
    smem.p.index(slot).store(p.to(smem.p.dtype))
    smem.factors.index(slot).store(alpha)
    smem.records.index(slot).store(record)
    hand_over(item, bars)
    return Softmax(m, l, alpha)


@gluon.jit
def _finish_rows(state, item, work, record, smem, bars, args, var: gl.constexpr):
    """Hand the factors 1 / sum over, and store the log-sum-exp of the rows or of their split."""
    ROWS: gl.constexpr = gl.SliceLayout(1, var.score_layout)
    GROUPS: gl.constexpr = var.split.groups
    SPLIT: gl.constexpr = var.split
    empty = state.m == float("-inf")
    total = gl.convert_layout(gl.sum(state.l, 1), ROWS, assert_trivial=True)
    inverse = gl.where(empty, 0.0, 1.0 / total)
    if args.v_descale is not None:
        inverse = inverse * gl.load(args.v_descale + args.kv_head)
    wait_slot(item, bars)
    smem.factors.index(item % SLOTS).store(inverse)
    smem.records.index(item % SLOTS).store(record)
    hand_over(item, bars)
    lse = gl.where(empty, float("-inf"), (state.m + gl.log2(total)) * LN2)
    offs_m = gl.arange(0, 64, layout=ROWS)
    rows = args.row_first + offs_m
    live = rows < work.q_len * GROUPS
    whole = work.whole
    if args.splits is not None and not whole:
        logs = lse_of_splits(args.splits, args.batch, args.num_splits, args.units, args.unit_rows, SPLIT)
        gl.store(logs + (work.place.to(gl.int64) * args.units + args.unit) * args.unit_rows + offs_m, lse, mask=live)
    if args.lse is not None and whole:
        head = args.kv_head.to(gl.int64) * GROUPS + rows % GROUPS
        gl.store(args.lse + head * args.lse_stride + work.row0 + rows // GROUPS, lse, mask=live)


@gluon.jit
def latent_scores(smem, bars, args, var: gl.constexpr):
    """The warpgroup of scores: S of the next block is issued before the softmax of the current one, and runs during it."""
    ROWS: gl.constexpr = gl.SliceLayout(1, var.score_layout)
    scale = args.scale
    if args.k_descale is not None:
        scale = scale * gl.load(args.k_descale + args.kv_head)
    seq_start = args.seq_start
    count = args.share * 0
    block_count = args.share * 0
    for index in range(args.first, args.stop):
        work, seq_start = latent_work(index, seq_start, args, var)
        if work.live:
            item = block_count + count
            record = record_of(work)
            receive_queries(work, smem, args, var)
            m = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
            l = gl.zeros([64, 4], gl.float32, layout=SUM_LAYOUT)  # noqa: E741
            state = Softmax(m, l, gl.full([64], 1.0, gl.float32, layout=ROWS))
            wait_latent_keys(block_count, bars, var)
            s = warpgroup_mma_wait(0, deps=[issue_latent_scores(block_count, smem, var)])
            for j in range(work.blocks - 1):
                wait_latent_keys(block_count + j + 1, bars, var)
                token = issue_latent_scores(block_count + j + 1, smem, var)
                state = publish_block(s, state, work.begin + j, item + j, work, record, scale, smem, bars, args, var)
                s = warpgroup_mma_wait(0, deps=[token])
            last = work.blocks - 1
            state = publish_block(s, state, work.begin + last, item + last, work, record, scale, smem, bars, args, var)
            _finish_rows(state, item + work.blocks, work, record, smem, bars, args, var)
        block_count += work.blocks
        count += gl.where(work.live, 1, 0)
    last_item = block_count + count
    wait_slot(last_item, bars)
    smem.records.index(last_item % SLOTS).store(gl.zeros([4], gl.int32, layout=RECORD_LAYOUT))
    hand_over(last_item, bars)


@gluon.jit
def _receive_record(item, smem, bars):
    """Wait for an item -> what it says about its sequence, see `types.LatentMemory`."""
    mbarrier.wait(bars.p_full.index(item % SLOTS), (item // SLOTS) & 1)
    return smem.records.index(item % SLOTS).load(RECORD_LAYOUT)


@gluon.jit
def _store_part(acc, record, part: gl.constexpr, args, var: gl.constexpr):
    """Store a part of the columns of a tile's output, or of a split's result in float32."""
    O_LAYOUT: gl.constexpr = var.output_layout
    GROUPS: gl.constexpr = var.split.groups
    row0 = field_of(record, 1, RECORD_LAYOUT, 4)
    q_len = field_of(record, 2, RECORD_LAYOUT, 4)
    place = field_of(record, 3, RECORD_LAYOUT, 4)
    offs_m = gl.arange(0, 64, layout=gl.SliceLayout(1, O_LAYOUT))
    columns = gl.expand_dims(part * var.width + gl.arange(0, var.width, layout=gl.SliceLayout(0, O_LAYOUT)), 0)
    rows = args.row_first + offs_m
    live = gl.expand_dims(rows < q_len * GROUPS, 1)
    if args.splits is not None and place >= 0:
        at = (place.to(gl.int64) * args.units + args.unit) * args.unit_rows + offs_m
        gl.store(args.splits + (gl.expand_dims(at * var.split.dim_v, 1) + columns), acc, mask=live)
    if place < 0:
        token = row0.to(gl.int64) + rows // GROUPS
        head = args.kv_head.to(gl.int64) * GROUPS + rows % GROUPS
        starts = gl.expand_dims(token * args.stride_ot + head * args.stride_oh, 1)
        gl.store(args.out + (starts + columns), acc.to(args.out.dtype.element_ty), mask=live)


@gluon.jit
def latent_values(smem, bars, args, group: gl.constexpr, var: gl.constexpr):
    """A warpgroup of values: O += P C for two parts of the columns, of one sequence after the other.

    All that it knows of a sequence comes with the items, because O leaves few registers for more.
    """
    WIDTH: gl.constexpr = var.width
    PART: gl.constexpr = 2 * group
    O_LAYOUT: gl.constexpr = var.output_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    block_count = args.share * 0
    item = args.share * 0
    blocks = field_of(_receive_record(item, smem, bars), 0, RECORD_LAYOUT, 4)
    while blocks > 0:
        left = gl.zeros([64, WIDTH], gl.float32, layout=O_LAYOUT)
        right = gl.zeros([64, WIDTH], gl.float32, layout=O_LAYOUT)
        for _ in range(blocks):
            stage = block_count % var.tiles.stages
            slot = item % SLOTS
            mbarrier.wait(bars.p_full.index(slot), (item // SLOTS) & 1)
            factors = smem.factors.index(slot).load(ROWS)
            left = rescale_part(left, factors, O_LAYOUT, WIDTH)
            right = rescale_part(right, factors, O_LAYOUT, WIDTH)
            wait_latent_keys(block_count, bars, var)
            left_token = warpgroup_mma(smem.p.index(slot), smem.c.index(stage * PARTS + PART), left, is_async=True)
            right_token = warpgroup_mma(smem.p.index(slot), smem.c.index(stage * PARTS + PART + 1), right, is_async=True)
            left, right = warpgroup_mma_wait(0, deps=[left_token, right_token])
            mbarrier.arrive(bars.p_empty.index(slot), count=1)
            mbarrier.arrive(bars.k_empty.index(stage), count=1)
            block_count += 1
            item += 1
        record = _receive_record(item, smem, bars)
        factors = gl.expand_dims(smem.factors.index(item % SLOTS).load(ROWS), 1)
        mbarrier.arrive(bars.p_empty.index(item % SLOTS), count=1)
        _store_part(left * factors, record, PART, args, var)
        _store_part(right * factors, record, PART + 1, args, var)
        item += 1
        blocks = field_of(_receive_record(item, smem, bars), 0, RECORD_LAYOUT, 4)
