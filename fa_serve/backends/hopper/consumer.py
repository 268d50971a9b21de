"""The consumer warpgroups: S = Q K^T and O += P V on the tensor cores, the online softmax in registers, O and lse out.

Each warpgroup has 64 query rows of the tile and works alone, apart from ping-pong, where warpgroups take turns at the tensor
cores through named barriers.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.backends.hopper.producer import unpack_tile
from fa_serve.backends.hopper.shared import RAGGED, Tile

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
# of [64, 4]: as wgmma's accumulators are shared by a quad of threads, which has 8 rows of 16 of each warp, twice
SUM_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4])
)
FIRST_NAMED_BARRIER = gl.constexpr(8)  # Triton's own warp specialisation uses the lower ones
GROWTH = gl.constexpr(8.0)  # base 2; P is 256 at most, which float16 holds
RESCALED = gl.constexpr(32)  # values of a thread: few branches, and few enough operands


def _rescale_assembly(count: int) -> str:
    """Multiply `count` of a thread's values by the factors of their rows; if no row of the warp has one below 1, only jump.

    Operands: products, values, factors. A thread's accumulators are of its two rows by turns, two of each.
    """
    rows = f"setp.lt.f32 p, ${2 * count}, 0f3F800000; setp.lt.or.f32 p, ${2 * count + 2}, 0f3F800000, p;"
    copies = " ".join(f"mov.f32 ${i}, ${count + i};" for i in range(count))
    products = " ".join(f"mul.f32 ${i}, ${count + i}, ${2 * count + i};" for i in range(count))
    vote = "vote.sync.any.pred p, p, -1; @p bra CHANGED;"
    return f"{{ .reg .pred p; {rows} {vote} {copies} bra.uni DONE; CHANGED: {products} DONE: }}"


RESCALE = gl.constexpr(_rescale_assembly(int(RESCALED)))
RESCALE_OPERANDS = gl.constexpr(",".join(["=&f"] * int(RESCALED) + ["f"] * int(RESCALED) * 2))


class Softmax(NamedTuple):
    """Of 64 rows: the maximum m [64] (base 2) to which sum and output are relative; the sum in four parts l [64, 4], one for
    each thread that has a share of the row, so that they need not meet before the end; alpha [64], by which the output, a step
    behind, is still to be multiplied."""

    m: gl.tensor
    l: gl.tensor  # noqa: E741
    alpha: gl.tensor


class Limits(NamedTuple):
    """Per row the visible keys [first, last); blocks in [low, high) need no mask for any row of the warpgroup."""

    first: gl.tensor
    last: gl.tensor
    low: gl.tensor
    high: gl.tensor


@gluon.jit
def _named_barrier(kind: gl.constexpr, number: gl.constexpr):
    """One instruction in each of the warpgroup's threads; the move is what inline assembly needs for a result."""
    zero = gl.full([128], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    asm: gl.constexpr = f"bar.{kind} {number}, 256; mov.u32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _take_turn(group: gl.constexpr, var: gl.constexpr):
    """Ping-pong: wait until the warpgroup before this one has issued its products."""
    if var.tiles.pingpong:
        _named_barrier("sync", FIRST_NAMED_BARRIER + group)


@gluon.jit
def _pass_turn(group: gl.constexpr, var: gl.constexpr):
    """Ping-pong: let the next warpgroup issue its products."""
    if var.tiles.pingpong:
        _named_barrier("arrive", FIRST_NAMED_BARRIER + (group + 1) % var.tiles.groups)


@gluon.jit
def _receive(turn, smem, bars, var: gl.constexpr):
    """The record of the block's `turn`-th tile, once its queries are in shared memory."""
    RECORD_LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    slot = turn % var.tiles.q_stages
    mbarrier.wait(bars.q_full.index(slot), (turn // var.tiles.q_stages) & 1)
    return unpack_tile(smem.record.index(slot).load(RECORD_LAYOUT), RECORD_LAYOUT)


@gluon.jit
def _issue_scores(turn, count, smem, group: gl.constexpr, var: gl.constexpr):
    """Start S = Q K^T, [64, block_n]."""
    D0: gl.constexpr = var.d0
    D1: gl.constexpr = var.d1
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    slot = count % var.tiles.stages
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    k = smem.k.index(slot).reshape([BLOCK_N, D0])
    q_slot = (turn % var.tiles.q_stages) * var.tiles.groups + group
    q = smem.q.index(q_slot).reshape([64, D0])
    s = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if var.d1 > 0:
        q1 = smem.q1.index(q_slot).reshape([64, D1])
        k1 = smem.k1.index(slot).reshape([BLOCK_N, D1])
        s = warpgroup_mma(q1, k1.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _rescale(acc, alpha, var: gl.constexpr):
    """O for the new maximum. A volatile instruction stays where it is put, between products: ptxas would do it before them."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, var.dv, 16])
    factors = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT)), 1)
    return gl.inline_asm_elementwise(RESCALE, RESCALE_OPERANDS, [acc, factors], dtype=gl.float32, is_pure=False, pack=RESCALED)


@gluon.jit
def _issue_values(p, acc, alpha, count, smem, bars, var: gl.constexpr):
    """Start O += P V once block `count` of V has arrived, [64, dv]."""
    BLOCK_N: gl.constexpr = var.tiles.block_n
    DV: gl.constexpr = var.dv
    slot = count % var.tiles.stages
    mbarrier.wait(bars.v_full.index(slot), (count // var.tiles.stages) & 1)
    v = smem.v.index(slot).reshape([BLOCK_N, DV])
    if var.tiles.rescale_late:
        acc = _rescale(acc, alpha, var)
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _wait_keys(count, bars, var: gl.constexpr, alive=True):
    mbarrier.wait(bars.k_full.index(count % var.tiles.stages), (count // var.tiles.stages) & 1, pred=alive)


@gluon.jit
def _limits(tile, epilogue, group: gl.constexpr, layout: gl.constexpr, var: gl.constexpr):
    """Which keys each row sees: i + offset - left <= j <= i + offset + right, offset = kv_len - q_len, and j < kv_len."""
    BLOCK_N: gl.constexpr = var.tiles.block_n
    top = tile.row + 64 * group + tile.kv_len - tile.q_len
    rows = top + gl.arange(0, 64, layout=layout)
    last = rows * 0 + tile.kv_len
    high = tile.kv_len // BLOCK_N
    if var.has_right:
        last = gl.minimum(last, rows + epilogue.right + 1)
        high = gl.minimum(high, gl.maximum(top + epilogue.right + 1, 0) // BLOCK_N)
    first = rows * 0
    low = high * 0
    if var.has_left:
        first = rows - epilogue.left
        low = (gl.maximum(top + 63 - epilogue.left, 0) + BLOCK_N - 1) // BLOCK_N
    return Limits(first, last, low, high)


@gluon.jit
def _online_softmax(s, state, block, limits, epilogue, dtype: gl.constexpr, masked: gl.constexpr, var: gl.constexpr):
    """One step of the online softmax (FlashAttention-2, algorithm 1): scores -> P in `dtype`, new state.

    A row's maximum is followed only where it has grown by more than GROWTH (FlashAttention-4): any number near it will do, and
    O seldom has to be rescaled.
    """
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, var.dv, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    scale = epilogue.scale
    if var.softcap:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)) is exact enough where the hardware's tanh.approx (2^-11) is not
        s = (1.0 - 2.0 / (1.0 + gl.exp2(s * epilogue.scale))) * epilogue.softcap
        scale = 1.0
    if masked:  # noqa: SIM102
        # one loop body with a uniform branch: P stays packed in registers
        if (block >= limits.high) | (block < limits.low):
            columns = gl.expand_dims(block * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
            keep = columns < gl.expand_dims(limits.last, 1)
            if var.has_left:
                keep = keep & (columns >= gl.expand_dims(limits.first, 1))
            s = gl.where(keep, s, float("-inf"))
    m = gl.max(s, 1) * scale
    m = gl.where(m - state.m > GROWTH, m, state.m)  # false where both are -inf
    safe = m
    if masked:
        safe = gl.where(m == float("-inf"), 0.0, m)  # -inf - -inf: a row that has seen nothing yet
    p = gl.exp2(s * scale - gl.expand_dims(safe, 1))
    alpha = gl.exp2(state.m - safe)
    parts = gl.sum(gl.sum(p.reshape([64, BLOCK_N // 8, 4, 2]), 3), 1)
    rescale = gl.convert_layout(alpha, gl.SliceLayout(1, SUM_LAYOUT), assert_trivial=True)
    l = state.l * gl.expand_dims(rescale, 1) + gl.convert_layout(parts, SUM_LAYOUT, assert_trivial=True)  # noqa: E741
    return gl.convert_layout(p.to(dtype), P_LAYOUT), Softmax(m, l, alpha)


@gluon.jit
def _step(
    acc,
    p,
    state,
    turn,
    count,
    block,
    more,
    limits,
    smem,
    bars,
    epilogue,
    dtype: gl.constexpr,
    group: gl.constexpr,
    var: gl.constexpr,
):
    """S(count) and P(count - 1) V(count - 1) issued together; the softmax of S runs under the latter.

    With `softmax_first` the wait for the next keys stands between the softmax and the wait for P V, because it ends a basic
    block: without it ptxas is free to schedule exponentials behind the wait for P V.
    """
    MASKED: gl.constexpr = var.has_left or var.has_right
    _take_turn(group, var)
    if var.tiles.overlap:
        s_token = _issue_scores(turn, count, smem, group, var)
        o_token = _issue_values(p, acc, state.alpha, count - 1, smem, bars, var)
        _pass_turn(group, var)
        s = warpgroup_mma_wait(1, deps=[s_token])
    else:
        o_token = _issue_values(p, acc, state.alpha, count - 1, smem, bars, var)
        acc = warpgroup_mma_wait(0, deps=[o_token])
        s_token = _issue_scores(turn, count, smem, group, var)
        _pass_turn(group, var)
        s = warpgroup_mma_wait(0, deps=[s_token])
    mbarrier.arrive(bars.k_empty.index(count % var.tiles.stages), count=1)
    p, state = _online_softmax(s, state, block, limits, epilogue, dtype, MASKED, var)
    if var.tiles.softmax_first:
        _wait_keys(count + 1, bars, var, more)
    if var.tiles.overlap:
        acc = warpgroup_mma_wait(0, deps=[o_token])
    mbarrier.arrive(bars.v_empty.index((count - 1) % var.tiles.stages), count=1)
    if not var.tiles.softmax_first:
        _wait_keys(count + 1, bars, var, more)
    if not var.tiles.rescale_late:
        acc = _rescale(acc, state.alpha, var)
    return acc, p, state


@gluon.jit
def _wait_sent():
    """Until the copies out of shared memory have read it."""
    tma.store_wait(0)
    gl.thread_barrier()


@gluon.jit
def _send(values, tile, row, column: gl.constexpr, buffer, desc, var: gl.constexpr):
    """Start the copy of some columns of O by way of a buffer that nobody reads any more."""
    WIDTH: gl.constexpr = var.o_width
    buffer.reshape([64, WIDTH]).store(values)
    fence_async_shared()
    if var.varlen:
        tma.async_copy_shared_to_global(
            desc.o, [RAGGED, tile.origin + tile.q_len, RAGGED - tile.q_len + row, tile.head, column], buffer
        )
    else:
        tma.async_copy_shared_to_global(desc.o, [tile.origin, row, tile.head, column], buffer)


@gluon.jit
def _write(acc, state, tile, turn, desc, smem, epilogue, dtype: gl.constexpr, group: gl.constexpr, var: gl.constexpr):
    """Scale O, start its copy out of the place where the tile's queries were or of its own, and write lse."""
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, var.dv, 16])
    DV: gl.constexpr = var.dv
    row = tile.row + 64 * group
    empty = state.m == float("-inf")
    total = gl.convert_layout(gl.sum(state.l, 1), gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    inverse = gl.where(empty, 0.0, 1.0 / total)
    acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT)), 1)
    if var.tiles.o_parts == 0:
        buffer = smem.q.index((turn % var.tiles.q_stages) * var.tiles.groups + group)
        _send(acc.to(dtype), tile, row, 0, buffer, desc, var)
    else:
        left, right = gl.split(acc.to(dtype).reshape([64, 2, DV // 2]).permute((0, 2, 1)))
        _wait_sent()
        _send(left, tile, row, 0, smem.o.index(group), desc, var)
        _wait_sent()
        _send(right, tile, row, DV // 2, smem.o.index(group), desc, var)
    if epilogue.lse is not None:
        lse = gl.where(empty, float("-inf"), (state.m + gl.log2(total)) * LN2)
        rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
        if var.varlen:
            base = epilogue.lse + tile.head.to(gl.int64) * epilogue.lse_stride + tile.origin
        else:
            base = epilogue.lse + (tile.origin.to(gl.int64) * epilogue.num_heads + tile.head) * epilogue.lse_stride
        gl.store(base + rows, lse, mask=rows < tile.q_len)


@gluon.jit
def _release_queries(turn, bars, var: gl.constexpr):
    """Hand the slot of the `turn`-th tile back: once O has been read out of it, if that is where it leaves from."""
    if var.tiles.o_parts == 0:
        _wait_sent()
    mbarrier.arrive(bars.q_empty.index(turn % var.tiles.q_stages), count=1)


@gluon.jit
def _first_state(tile, epilogue, layout: gl.constexpr):
    """A sink is a key without a value: it opens the maximum and the sum."""
    m = gl.full([64], float("-inf"), gl.float32, layout=layout)
    l = gl.zeros([64, 4], gl.float32, layout=SUM_LAYOUT)  # noqa: E741
    if epilogue.sinks is not None:
        m = gl.full([64], 0.0, gl.float32, layout=layout) + gl.load(epilogue.sinks + tile.head).to(gl.float32) * LOG2E
        first = gl.arange(0, 4, layout=gl.SliceLayout(0, SUM_LAYOUT)) == 0
        l = l + gl.expand_dims(gl.where(first, 1.0, 0.0), 0)  # noqa: E741
    return Softmax(m, l, gl.full([64], 1.0, gl.float32, layout=layout))


@gluon.jit
def consumer(desc, smem, bars, epilogue, group: gl.constexpr, var: gl.constexpr):
    BLOCK_N: gl.constexpr = var.tiles.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, var.dv, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    RESIDENT: gl.constexpr = var.tiles.schedule != 0
    DV: gl.constexpr = var.dv
    AHEAD: gl.constexpr = RESIDENT and var.tiles.q_stages > 1 and var.tiles.overlap
    SCORE_GROUPS: gl.constexpr = 2 if var.d1 > 0 else 1
    dtype: gl.constexpr = desc.q.dtype
    if group == var.tiles.groups - 1:
        _pass_turn(group, var)
    turn = 0
    count = 0
    tile = _receive(turn, smem, bars, var)
    s = gl.zeros([64, BLOCK_N], gl.float32, layout=S_LAYOUT)
    if AHEAD:
        _wait_keys(count, bars, var, tile.row >= 0)
        _take_turn(group, var)
        s_token = _issue_scores(turn, count, smem, group, var)
        _pass_turn(group, var)
        s = warpgroup_mma_wait(0, deps=[s_token])
    while tile.row >= 0:
        limits = _limits(tile, epilogue, group, ROWS, var)
        if not AHEAD:
            _wait_keys(count, bars, var)
            _take_turn(group, var)
            s_token = _issue_scores(turn, count, smem, group, var)
            _pass_turn(group, var)
            s = warpgroup_mma_wait(0, deps=[s_token])
        mbarrier.arrive(bars.k_empty.index(count % var.tiles.stages), count=1)
        acc = gl.zeros([64, DV], gl.float32, layout=O_LAYOUT)
        p, state = _online_softmax(s, _first_state(tile, epilogue, ROWS), tile.high - 1, limits, epilogue, dtype, True, var)
        if AHEAD:  # noqa: SIM102
            if turn > 0:
                _release_queries(turn - 1, bars, var)
        blocks = tile.high - tile.low
        _wait_keys(count + 1, bars, var, blocks > 1)
        for j in range(1, blocks):
            acc, p, state = _step(
                acc,
                p,
                state,
                turn,
                count + j,
                tile.high - 1 - j,
                j + 1 < blocks,
                limits,
                smem,
                bars,
                epilogue,
                dtype,
                group,
                var,
            )
        count += blocks
        turn += 1
        if AHEAD:
            upcoming = _receive(turn, smem, bars, var)
            _wait_keys(count, bars, var, upcoming.row >= 0)
            _take_turn(group, var)
            o_token = _issue_values(p, acc, state.alpha, count - 1, smem, bars, var)
            s_token = _issue_scores(turn, count, smem, group, var)  # of what lies there, unused, when no tile is left
            _pass_turn(group, var)
            acc = warpgroup_mma_wait(SCORE_GROUPS, deps=[o_token])
            mbarrier.arrive(bars.v_empty.index((count - 1) % var.tiles.stages), count=1)
            _write(acc, state, tile, turn - 1, desc, smem, epilogue, dtype, group, var)
            s = warpgroup_mma_wait(0, deps=[s_token])
            tile = upcoming
        else:
            if RESIDENT and var.tiles.o_parts > 0:
                _release_queries(turn - 1, bars, var)
            o_token = _issue_values(p, acc, state.alpha, count - 1, smem, bars, var)
            acc = warpgroup_mma_wait(0, deps=[o_token])
            mbarrier.arrive(bars.v_empty.index((count - 1) % var.tiles.stages), count=1)
            _write(acc, state, tile, turn - 1, desc, smem, epilogue, dtype, group, var)
            if RESIDENT:
                if var.tiles.o_parts == 0:
                    _release_queries(turn - 1, bars, var)
                tile = _receive(turn, smem, bars, var)
            else:
                end = tile.row * 0 - 1
                tile = Tile(end, tile.head, tile.origin, tile.q_len, tile.k_origin, tile.kv_len, tile.low, tile.high)
    tma.store_wait(0)
