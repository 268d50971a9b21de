"""The consumer warpgroups: S = Q K^T and O += P V on the tensor cores, the online softmax in registers.

Afterwards, `output` writes O and the log-sum-exp.

Each warpgroup owns 64 query rows of the tile. Warpgroups run independently, except with ping-pong, where they take turns at
the tensor cores through named barriers.

In this file `tile_count` and `block_count` count the tiles and the key blocks that the thread block has begun so far: they
select a ring's stage and its barrier's phase. `block` is the number of a key block in its sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.backends.hopper.block_sparse import (
    KeyBlock,
    added_scores,
    first_of_mask,
    keep_by_bits,
    load_bits,
    load_mask,
    read_key_block,
)
from fa_serve.backends.hopper.forward.float8_probabilities import FLOAT8_SHIFT, pack_probabilities, unpack_probabilities
from fa_serve.backends.hopper.forward.float8_scales import as_column, block_scale, change_of_units, tile_factors
from fa_serve.backends.hopper.forward.output import wait_output_copies, write_output
from fa_serve.backends.hopper.forward.pack_gqa import sinks_of
from fa_serve.backends.hopper.forward.producer import unpack_tile
from fa_serve.backends.hopper.forward.tree import block_at, first_groups, fold_group
from fa_serve.backends.hopper.forward.types import Tile
from fa_serve.backends.triton.primitives import LOG2E, SCORE_GROWTH, group_softmax

SUM_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
"""Layout of partial sums [64, 4] that matches wgmma's accumulators: four threads share a row, and each thread has two rows."""
FIRST_NAMED_BARRIER = gl.constexpr(8)
"""Triton's own warp specialisation uses the named barriers below this one."""


def _rescale_assembly(count: int) -> str:
    """Assembly that multiplies `count` of a thread's values by the factors of their rows.

    If no row of the warp has a factor below 1, the values are copied without a multiplication. Operands: products, values,
    factors. A thread's accumulators alternate between its two rows, two values of each.
    """
    rows = f"setp.lt.f32 p, ${2 * count}, 0f3F800000; setp.lt.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    copies = " ".join(f"mov.f32 ${i}, ${count + i};" for i in range(count))
    products = " ".join(f"mul.f32 ${i}, ${count + i}, ${2 * count + i};" for i in range(count))
    vote = "vote.sync.any.pred p, p, -1; @p bra CHANGED;"
    return f"{{ .reg .pred p; {rows} {vote} {copies} bra.uni DONE; CHANGED: {products} DONE: }}"


def _rescale_operands(count: int) -> str:
    return ",".join(["=&f"] * count + ["f"] * count * 2)


# One statement rescales up to 32 values of a thread, which keeps both the branches and the operands of a statement few.
RESCALE_8 = gl.constexpr(_rescale_assembly(8))
RESCALE_8_OPERANDS = gl.constexpr(_rescale_operands(8))
RESCALE_16 = gl.constexpr(_rescale_assembly(16))
RESCALE_16_OPERANDS = gl.constexpr(_rescale_operands(16))
RESCALE_32 = gl.constexpr(_rescale_assembly(32))
RESCALE_32_OPERANDS = gl.constexpr(_rescale_operands(32))


class Softmax(NamedTuple):
    """The online softmax of 64 rows.

    m:     [64], base 2: the maximum that sum and output are relative to
    l:     [64, 4]: the sum in four parts, one for each thread that holds values of the row; they are added up at the end. With
           a tree, the sum is [64]
    alpha: [64]: the factor by which the output, which lags by one block, must still be multiplied
    """

    m: gl.tensor
    l: gl.tensor  # noqa: E741
    alpha: gl.tensor


class Output(NamedTuple):
    """The output of 64 rows: its first part [64, dv0], and its second part [64, dv1] or, if there is none, a placeholder."""

    first: gl.tensor
    second: gl.tensor


class Limits(NamedTuple):
    """Each row sees keys [first, last). Key blocks in [low, high) need no mask for any row of the warpgroup, unless partial.

    row:  the warpgroup's first query row in the sequence; rows: how many rows the sequence has from there on
    mask: where a float mask begins for that row
    """

    first: gl.tensor
    last: gl.tensor
    low: gl.tensor
    high: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    mask: gl.tensor


@gluon.jit
def named_barrier(kind: gl.constexpr, number: gl.constexpr):
    """One `bar` instruction in each thread of the warpgroup. Inline assembly must have a result, hence the `mov`."""
    zero = gl.full([128], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    asm: gl.constexpr = f"bar.{kind} {number}, 256; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _take_turn(group: gl.constexpr, var: gl.constexpr):
    """Ping-pong: wait until the previous warpgroup has issued its products."""
    if var.tiles.pingpong:
        named_barrier("sync", FIRST_NAMED_BARRIER + group)


@gluon.jit
def _pass_turn(group: gl.constexpr, var: gl.constexpr):
    """Ping-pong: let the next warpgroup issue its products."""
    if var.tiles.pingpong:
        named_barrier("arrive", FIRST_NAMED_BARRIER + (group + 1) % var.tiles.groups)


@gluon.jit
def _receive_tile(tile_count, smem, bars, var: gl.constexpr):
    """Wait for the queries of a tile, then read its record."""
    stage = tile_count % var.tiles.q_stages
    mbarrier.wait(bars.q_full.index(stage), (tile_count // var.tiles.q_stages) & 1)
    return _read_tile(tile_count, smem, var)


@gluon.jit
def _read_tile(tile_count, smem, var: gl.constexpr):
    """Read the record of a tile whose queries have arrived and are not released yet.

    With split keys, the record is read again before the output is written, so that it takes no registers in the loop over keys.
    At D128 the loops of the two warpgroups have 643 and 650 instructions with this, and 683 and 686 without.
    """
    RECORD_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    return unpack_tile(smem.record.index(tile_count % var.tiles.q_stages).load(RECORD_LAYOUT), RECORD_LAYOUT)


@gluon.jit
def _issue_scores(tile_count, block_count, smem, group: gl.constexpr, var: gl.constexpr):
    """Start S = Q K^T, [64, block_n]."""
    D0: gl.constexpr = var.d0
    D1: gl.constexpr = var.d1
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = var.score_layout
    stage = block_count % var.tiles.stages
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    k = smem.k.index(stage).reshape([BLOCK_N, D0])
    q_buffer = (tile_count % var.tiles.q_stages) * var.tiles.groups + group
    q = smem.q.index(q_buffer).reshape([64, D0])
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if var.d1 > 0:
        q1 = smem.q1.index(q_buffer).reshape([64, D1])
        k1 = smem.k1.index(stage).reshape([BLOCK_N, D1])
        s = warpgroup_mma(q1, k1.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def rescale_part(x, alpha, layout: gl.constexpr, width: gl.constexpr):
    """Multiply a part of O by `alpha`, [64]. The assembly is volatile; otherwise ptxas would move it ahead of the products."""
    factors = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, layout)), 1)
    NARROW: gl.constexpr = RESCALE_8 if width == 16 else RESCALE_16
    NARROW_OPERANDS: gl.constexpr = RESCALE_8_OPERANDS if width == 16 else RESCALE_16_OPERANDS
    ASSEMBLY: gl.constexpr = RESCALE_32 if width > 32 else NARROW
    OPERANDS: gl.constexpr = RESCALE_32_OPERANDS if width > 32 else NARROW_OPERANDS
    PACK: gl.constexpr = 32 if width > 64 else width // 2
    return gl.inline_asm_elementwise(ASSEMBLY, OPERANDS, [x, factors], dtype=gl.float32, is_pure=False, pack=PACK)


@gluon.jit
def _rescale(acc, alpha, var: gl.constexpr):
    """Multiply O by `alpha`, [64]."""
    O_LAYOUT: gl.constexpr = var.output_layout
    O1_LAYOUT: gl.constexpr = var.second_output_layout
    first = rescale_part(acc.first, alpha, O_LAYOUT, var.dv0)
    second = acc.second
    if var.dv1 > 0:
        second = rescale_part(second, alpha, O1_LAYOUT, var.dv1)
    return Output(first, second)


@gluon.jit
def _issue_float8_values(p, v, var: gl.constexpr):
    """Start P V of a block in a separate accumulator; `_wait_values` adds it to O in float32.

    The tensor cores add float8 products in about 14 bits, which is not enough for the sum over many blocks.
    """
    DV0: gl.constexpr = var.dv0
    O_LAYOUT: gl.constexpr = var.output_layout
    zeros = gl.zeros([64, DV0], gl.float32, layout=O_LAYOUT)
    return warpgroup_mma(p, v.reshape([DV0, var.tiles.block_n]).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(p, acc, alpha, block_count, smem, bars, var: gl.constexpr):
    """Start O += P V once the block of V has arrived: one product for each part of V."""
    BLOCK_N: gl.constexpr = var.tiles.block_n
    DV0: gl.constexpr = var.dv0
    DV1: gl.constexpr = var.dv1
    SECOND: gl.constexpr = var.second_probability_layout
    stage = block_count % var.tiles.stages
    mbarrier.wait(bars.v_full.index(stage), (block_count // var.tiles.stages) & 1)
    if var.float8_values:
        return Output(_issue_float8_values(p, smem.v.index(stage), var), acc.second)
    else:  # noqa: RET505
        v = smem.v.index(stage).reshape([BLOCK_N, DV0])
        if var.tiles.rescale_late:
            acc = _rescale(acc, alpha, var)
        first = warpgroup_mma(p, v, acc.first, is_async=True)
        second = acc.second
        if var.dv1 > 0:
            v1 = smem.v1.index(stage).reshape([BLOCK_N, DV1])
            second = warpgroup_mma(gl.convert_layout(p, SECOND, assert_trivial=True), v1, second, is_async=True)
        return Output(first, second)


@gluon.jit
def _wait_values(pending: gl.constexpr, token, acc, alpha, var: gl.constexpr):
    """Wait for O += P V; up to `pending` products that were issued after it may still run.

    acc, alpha: O before the product, and the factor by which it must still be multiplied; only used with float8 values
    """
    O_LAYOUT: gl.constexpr = var.output_layout
    first = token.first
    second = token.second
    if var.float8_values:
        factors = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT)), 1)
        first = acc.first * factors + warpgroup_mma_wait(pending, deps=[first])
    elif var.dv1 > 0:
        first, second = warpgroup_mma_wait(pending, deps=[first, second])
    else:
        first = warpgroup_mma_wait(pending, deps=[first])
    return Output(first, second)


@gluon.jit
def _wait_keys(block_count, bars, var: gl.constexpr, alive=True):
    """Wait for a block of K, unless `alive` is false."""
    mbarrier.wait(bars.k_full.index(block_count % var.tiles.stages), (block_count // var.tiles.stages) & 1, pred=alive)


@gluon.jit
def _key_block(number, block_count, smem, var: gl.constexpr):
    """The key block that has arrived: the one that the producer has announced or, without lists, block `number`."""
    if var.block_k > 0:
        return read_key_block(smem.key_blocks.index(block_count % var.tiles.stages), gl.BlockedLayout([2], [32], [4], [0]))
    else:  # noqa: RET505
        return KeyBlock(number, 0)


@gluon.jit
def _limits(tile, args, group: gl.constexpr, layout: gl.constexpr, var: gl.constexpr):
    """Row i sees key j if i + offset - left <= j <= i + offset + right and j < kv_len, where offset = kv_len - q_len."""
    BLOCK_N: gl.constexpr = var.tiles.block_n
    top = tile.row + 64 * group // var.pack_gqa + tile.kv_len - tile.q_len
    rows = top + gl.arange(0, 64, layout=layout) // var.pack_gqa
    last = rows * 0 + tile.kv_len
    high = tile.kv_len // BLOCK_N
    if var.has_right:
        last = gl.minimum(last, rows + args.right + 1)
        high = gl.minimum(high, gl.maximum(top + args.right + 1, 0) // BLOCK_N)
    first = rows * 0
    low = high * 0
    if var.has_left:
        first = rows - args.left
        low = (gl.maximum(top + 63 // var.pack_gqa - args.left, 0) + BLOCK_N - 1) // BLOCK_N
    row = tile.row + 64 * group
    return Limits(first, last, low, high, row, tile.q_len - row, first_of_mask(tile, row, args.added))


@gluon.jit
def _row_maximum(s, var: gl.constexpr):
    """The maximum of each row of scores, [64].

    Triton compares the 32 scores that a thread has of one row one after the other, then those of its second row. With 16-bit
    products and head sizes of 64 and 128 that is best, because ptxas computes exponentials of the first row during the
    comparisons of the second; comparing in rounds loses 2 to 12% there. Float8 products take half the time, so the latency of
    the comparisons shows. In rounds, each chain of dependent comparisons has at most 9.
    """
    if var.float8_values:
        rounds = s.reshape([64, var.tiles.block_n // 32, 4, 4, 2])
        m = gl.max(gl.max(gl.max(gl.max(rounds, 4), 1), 1), 1)
        return gl.convert_layout(m, gl.SliceLayout(1, var.score_layout), assert_trivial=True)
    else:  # noqa: RET505
        return gl.max(s, 1)


@gluon.jit
def _online_softmax(
    s, state, key_block, words, added, limits, scale, args, dtype: gl.constexpr, masked: gl.constexpr, var: gl.constexpr
):
    """Update the online softmax by a block of scores (FlashAttention-2, algorithm 1) -> P in `dtype`, the new state.

    words, added: from `load_bits` and `load_mask`
    scale: the factor that turns products into exponents of 2, a number or [64]

    The maximum of a row is raised only when scores exceed it by more than SCORE_GROWTH (FlashAttention-4). Any number near the
    true maximum keeps the result exact, and O seldom has to be rescaled.
    """
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = var.score_layout
    P_LAYOUT: gl.constexpr = var.probability_layout
    GROWS: gl.constexpr = 0.0 if var.float8_values else SCORE_GROWTH
    block = key_block.number
    if var.softcap:
        # one instruction with a relative error of 2^-11; PyTorch rounds the product, the quotient and the tanh to 16 bits
        x = s * as_column(scale, var)
        s = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
        scale = args.softcap
    if masked:
        # one loop body with a uniform branch: two loops would have to unpack and pack P between them
        crosses = (block >= limits.high) | (block < limits.low)
        if var.bits or var.mask == "float":
            crosses = crosses | (key_block.bits >= 0)
        if crosses:
            if var.mask == "float":
                s = s + added_scores(added, dtype, var) * (LOG2E / scale)
            columns = gl.expand_dims(block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
            keep = columns < gl.expand_dims(limits.last, 1)
            if var.has_left:
                keep = keep & (columns >= gl.expand_dims(limits.first, 1))
            if var.bits:
                keep = keep & keep_by_bits(words, var)
            s = gl.where(keep, s, float("-inf"))
    if var.tree_blocks > 0:
        p, m, l, alpha = group_softmax(s, scale, state.m, state.l)  # noqa: E741
        p = gl.convert_layout(p.to(dtype), P_LAYOUT)
    else:
        m = _row_maximum(s, var) * scale
        m = gl.where(m - state.m > GROWS, m, state.m)  # the comparison is false where both are -inf
        safe = m
        if masked:
            safe = gl.where(m == float("-inf"), 0.0, m)  # a row that has seen no key yet; -inf - -inf would be NaN
        shift = safe
        if var.float8_values:
            shift = safe - FLOAT8_SHIFT
        p = gl.exp2(s * (scale if var.softcap else as_column(scale, var)) - gl.expand_dims(shift, 1))
        alpha = gl.exp2(state.m - safe)
        parts = gl.sum(gl.sum(p.reshape([64, BLOCK_N // 8, 4, 2]), 3), 1)
        rescale = gl.convert_layout(alpha, gl.SliceLayout(1, SUM_LAYOUT), assert_trivial=True)
        l = state.l * gl.expand_dims(rescale, 1) + gl.convert_layout(parts, SUM_LAYOUT, assert_trivial=True)  # noqa: E741
        p = pack_probabilities(p, var) if var.float8_values else gl.convert_layout(p.to(dtype), P_LAYOUT)
    return p, Softmax(m, l, alpha)


@gluon.jit
def _process_block(
    acc,
    p,
    state,
    folded,
    tile_count,
    block_count,
    block,
    more,
    limits,
    factors,
    smem,
    bars,
    args,
    dtype: gl.constexpr,
    group: gl.constexpr,
    var: gl.constexpr,
):
    """Issue S of this block and P V of the previous one together, then compute the softmax of S while P V runs.

    With `softmax_first` the wait for the next keys comes between the softmax and the wait for P V, because it ends a basic
    block: otherwise ptxas may schedule exponentials after the wait for P V.

    The first block of a group of the tree starts from an empty softmax, and folds the previous group once its P V is done.
    """
    MASKED: gl.constexpr = var.masked
    VALUE_GROUPS: gl.constexpr = 2 if var.dv1 > 0 else 1
    key_block = _key_block(block, block_count, smem, var)
    words = load_bits(args.bits, key_block, limits.row, var)
    added = load_mask(key_block, limits, args.added, var)
    scale = block_scale(block, factors, var)
    alpha = state.alpha
    if var.float8_values:
        units = change_of_units(block, factors, var)
        p = unpack_probabilities(p, var)
    _take_turn(group, var)
    if var.tiles.overlap:
        s_token = _issue_scores(tile_count, block_count, smem, group, var)
        o_token = _issue_values(p, acc, state.alpha, block_count - 1, smem, bars, var)
        _pass_turn(group, var)
        s = warpgroup_mma_wait(VALUE_GROUPS, deps=[s_token])
    else:
        o_token = _issue_values(p, acc, state.alpha, block_count - 1, smem, bars, var)
        acc = _wait_values(0, o_token, acc, alpha, var)
        s_token = _issue_scores(tile_count, block_count, smem, group, var)
        _pass_turn(group, var)
        s = warpgroup_mma_wait(0, deps=[s_token])
    last = state
    if var.tree_blocks > 0:
        begins = block % var.tree_blocks == 0
        state = Softmax(gl.where(begins, float("-inf"), state.m), gl.where(begins, 0.0, state.l), state.alpha)
    mbarrier.arrive(bars.k_empty.index(block_count % var.tiles.stages), count=1)
    p, state = _online_softmax(s, state, key_block, words, added, limits, scale, args, dtype, MASKED, var)
    if var.float8_values:
        state = Softmax(state.m, state.l, state.alpha * units)
    if var.tiles.softmax_first:
        _wait_keys(block_count + 1, bars, var, more)
    if var.tiles.overlap:
        acc = _wait_values(0, o_token, acc, alpha, var)
    mbarrier.arrive(bars.v_empty.index((block_count - 1) % var.tiles.stages), count=1)
    if not var.tiles.softmax_first:
        _wait_keys(block_count + 1, bars, var, more)
    if var.tree_blocks > 0:  # noqa: SIM102
        if begins:
            folded = fold_group(folded, last, acc, var)
            acc = _no_output(block, var)
    if not var.tiles.rescale_late and not var.float8_values:
        acc = _rescale(acc, state.alpha, var)
    return acc, p, state, folded


@gluon.jit
def _release_queries(tile_count, bars, var: gl.constexpr):
    """Tell the producer that a tile's queries may be overwritten. If O leaves through their buffer, wait for its copy first."""
    if var.tiles.o_parts == 0:
        wait_output_copies()
    mbarrier.arrive(bars.q_empty.index(tile_count % var.tiles.q_stages), count=1)


@gluon.jit
def _first_state(tile, args, layout: gl.constexpr, var: gl.constexpr):
    """The softmax before any key. A sink is a key without a value, so maximum and sum start with it. With a tree, the sink is
    not part of the first group; `first_groups` puts it before that group."""
    m = gl.full([64], float("-inf"), gl.float32, layout=layout)
    in_tree: gl.constexpr = var.tree_blocks > 0
    l = gl.zeros([64], gl.float32, layout=layout) if in_tree else gl.zeros([64, 4], gl.float32, layout=SUM_LAYOUT)  # noqa: E741
    if args.sinks is not None and not in_tree:
        m = sinks_of(tile, args, layout, var) * LOG2E
        first = gl.arange(0, 4, layout=gl.SliceLayout(0, SUM_LAYOUT)) == 0
        ONE: gl.constexpr = 2.0**FLOAT8_SHIFT if var.float8_values else 1.0
        l = l + gl.expand_dims(gl.where(first, ONE, 0.0), 0)  # noqa: E741
    return Softmax(m, l, gl.full([64], 1.0, gl.float32, layout=layout))


@gluon.jit
def _no_output(number, var: gl.constexpr):
    """The output before any key. number: any integer of the kernel, from which the placeholder of a second part is made"""
    O_LAYOUT: gl.constexpr = var.output_layout
    O1_LAYOUT: gl.constexpr = var.second_output_layout
    DV0: gl.constexpr = var.dv0
    DV1: gl.constexpr = var.dv1
    second = gl.zeros([64, DV1], gl.float32, layout=O1_LAYOUT) if DV1 > 0 else number * 0
    return Output(gl.zeros([64, DV0], gl.float32, layout=O_LAYOUT), second)


@gluon.jit
def _finish_tile(acc, state, folded, tile, tile_count, desc, smem, factors, args, group: gl.constexpr, var: gl.constexpr):
    """Write the output of a tile. With a tree, fold its last group first."""
    if var.tree_blocks > 0:
        folded = fold_group(folded, state, acc, var)
        write_output(folded, folded, tile, tile_count, desc, smem, factors, args, group, var)
    else:
        write_output(acc, state, tile, tile_count, desc, smem, factors, args, group, var)


@gluon.jit
def consumer(desc, smem, bars, args, group: gl.constexpr, var: gl.constexpr):
    """Compute tile after tile, as warpgroup `group` of the thread block.

    Where the next tile's queries arrive early (AHEAD), the next tile's first S is issued right after this tile's last P V, so
    that the tensor cores work while O is written.
    """
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = var.score_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    RESIDENT: gl.constexpr = var.tiles.schedule != 0
    AHEAD: gl.constexpr = RESIDENT and var.tiles.q_stages > 1 and var.tiles.overlap
    SCORE_GROUPS: gl.constexpr = 2 if var.d1 > 0 else 1
    dtype: gl.constexpr = desc.v.dtype
    if group == var.tiles.groups - 1:
        _pass_turn(group, var)
    tile_count = 0
    block_count = 0
    tile = _receive_tile(tile_count, smem, bars, var)
    s = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    if AHEAD:
        _wait_keys(block_count, bars, var, tile.row >= 0)
        _take_turn(group, var)
        s_token = _issue_scores(tile_count, block_count, smem, group, var)
        _pass_turn(group, var)
        s = warpgroup_mma_wait(0, deps=[s_token])
    while tile.row >= 0:
        limits = _limits(tile, args, group, ROWS, var)
        factors = tile_factors(tile, args, group, ROWS, var)
        if not AHEAD:
            _wait_keys(block_count, bars, var)
        key_block = _key_block(block_at(tile, 0, var), block_count, smem, var)
        words = load_bits(args.bits, key_block, limits.row, var)
        added = load_mask(key_block, limits, args.added, var)
        scale = block_scale(block_at(tile, 0, var), factors, var)
        if not AHEAD:
            _take_turn(group, var)
            s_token = _issue_scores(tile_count, block_count, smem, group, var)
            _pass_turn(group, var)
            s = warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(bars.k_empty.index(block_count % var.tiles.stages), count=1)
        acc = _no_output(tile.row, var)
        folded = first_groups(tile, acc, args, ROWS, var)
        first = _first_state(tile, args, ROWS, var)
        p, state = _online_softmax(s, first, key_block, words, added, limits, scale, args, dtype, True, var)
        if AHEAD:  # noqa: SIM102
            if tile_count > 0:
                _release_queries(tile_count - 1, bars, var)
        blocks = tile.high - tile.low
        _wait_keys(block_count + 1, bars, var, blocks > 1)
        for j in range(1, blocks):
            acc, p, state, folded = _process_block(
                acc,
                p,
                state,
                folded,
                tile_count,
                block_count + j,
                block_at(tile, j, var),
                j + 1 < blocks,
                limits,
                factors,
                smem,
                bars,
                args,
                dtype,
                group,
                var,
            )
        block_count += blocks
        tile_count += 1
        if var.float8_values:
            p = unpack_probabilities(p, var)
        if AHEAD:
            upcoming = _receive_tile(tile_count, smem, bars, var)
            _wait_keys(block_count, bars, var, upcoming.row >= 0)
            _take_turn(group, var)
            o_token = _issue_values(p, acc, state.alpha, block_count - 1, smem, bars, var)
            # if no tile is left, this multiplies what the buffers hold, and nothing uses the product
            s_token = _issue_scores(tile_count, block_count, smem, group, var)
            _pass_turn(group, var)
            acc = _wait_values(SCORE_GROUPS, o_token, acc, state.alpha, var)
            mbarrier.arrive(bars.v_empty.index((block_count - 1) % var.tiles.stages), count=1)
            if var.split_kv:
                tile = _read_tile(tile_count - 1, smem, var)
            _finish_tile(acc, state, folded, tile, tile_count - 1, desc, smem, factors, args, group, var)
            s = warpgroup_mma_wait(0, deps=[s_token])
            tile = upcoming
        else:
            if RESIDENT and var.tiles.o_parts > 0:
                _release_queries(tile_count - 1, bars, var)
            o_token = _issue_values(p, acc, state.alpha, block_count - 1, smem, bars, var)
            acc = _wait_values(0, o_token, acc, state.alpha, var)
            mbarrier.arrive(bars.v_empty.index((block_count - 1) % var.tiles.stages), count=1)
            _finish_tile(acc, state, folded, tile, tile_count - 1, desc, smem, factors, args, group, var)
            if RESIDENT:
                if var.tiles.o_parts == 0:
                    _release_queries(tile_count - 1, bars, var)
                tile = _receive_tile(tile_count, smem, bars, var)
            else:
                end = tile.row * 0 - 1
                tile = Tile(end, tile.head, tile.origin, tile.q_len, tile.k_origin, tile.kv_len, tile.low, tile.high)
    tma.store_wait(0)
