"""How the consumer warpgroups write the output of a tile: O through shared memory and the copy engine, and the log-sum-exp.

With split keys, a tile that has only one split of its rows' keys stores both for `split_kv.combine` instead, see
`split_kv.split`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fa_serve.backends.hopper.forward.float8_probabilities import FLOAT8_SHIFT
from fa_serve.backends.hopper.forward.pack_gqa import heads_of, store_lse
from fa_serve.backends.hopper.forward.types import RAGGED
from fa_serve.backends.hopper.split_kv.split import leave_split, whole
from fa_serve.backends.triton.float8_inputs import BLOCK_KEYS
from fa_serve.backends.triton.primitives import LN2
from fa_serve.launching.gluon_names import async_store, sync_threads


@gluon.jit
def wait_output_copies():
    """Wait until the copies to global memory have read their shared memory."""
    tma.store_wait(0)
    sync_threads()


@gluon.jit
def copy_output(
    values, origin, length, row, head, column: gl.constexpr, width: gl.constexpr, buffer, desc, varlen: gl.constexpr
):
    """Start copying `width` columns of 64 rows from `row` on through `buffer`, which no copy reads any more.

    origin, length: batch index, or the sequence's first row in the packed tensor, and its number of rows
    """
    buffer.reshape([64, width]).store(values)
    fence_async_shared()
    if varlen:
        async_store(desc, [RAGGED, origin + length, RAGGED - length + row, head, column], buffer)
    else:
        async_store(desc, [origin, row, head, column], buffer)


@gluon.jit
def _copy_tile(first, second, tile, tile_count, desc, smem, args, group: gl.constexpr, var: gl.constexpr):
    """Start the copies of both parts of O, through the queries' buffer or a separate one."""
    WIDTH: gl.constexpr = var.o_width
    DV0: gl.constexpr = var.dv0
    DV1: gl.constexpr = var.dv1
    dtype: gl.constexpr = desc.o.dtype
    origin = tile.origin
    length = tile.q_len
    head, _ = heads_of(tile, args.num_heads, args.heads_per_kv, var)
    row = tile.row + 64 * group // var.pack_gqa
    if var.tiles.o_parts == 0:
        slot = (tile_count % var.tiles.q_stages) * var.tiles.groups + group
        copy_output(first.to(dtype), origin, length, row, head, 0, WIDTH, smem.q.index(slot), desc.o, var.varlen)
        if DV1 > 0:
            copy_output(second.to(dtype), origin, length, row, head, DV0, DV1, smem.q1.index(slot), desc.o1, var.varlen)
    else:
        left, right = gl.split(first.to(dtype).reshape([64, 2, WIDTH]).permute((0, 2, 1)))
        wait_output_copies()
        copy_output(left, origin, length, row, head, 0, WIDTH, smem.o.index(group), desc.o, var.varlen)
        if DV1 > 0:
            copy_output(second.to(dtype), origin, length, row, head, DV0, DV1, smem.o1.index(group), desc.o1, var.varlen)
        wait_output_copies()
        copy_output(right, origin, length, row, head, WIDTH, WIDTH, smem.o.index(group), desc.o, var.varlen)


@gluon.jit
def write_output(acc, state, tile, tile_count, desc, smem, factors, args, group: gl.constexpr, var: gl.constexpr):
    """Divide O by the sums of its rows, then start its copy and write lse, or store both for `split_kv.combine`."""
    S_LAYOUT: gl.constexpr = var.score_layout
    O_LAYOUT: gl.constexpr = var.output_layout
    O1_LAYOUT: gl.constexpr = var.second_output_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    empty = state.m == float("-inf")
    if var.tree_blocks > 0:
        total = state.l
    else:
        total = gl.convert_layout(gl.sum(state.l, 1), gl.SliceLayout(1, S_LAYOUT), assert_trivial=True)
    inverse = gl.where(empty, 0.0, 1.0 / total)
    logarithm = gl.log2(total)
    if var.float8_values:
        inverse = inverse * gl.load(factors.v + tile.low * var.tiles.block_n // BLOCK_KEYS)
        logarithm = logarithm - FLOAT8_SHIFT
    first = acc.first * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O_LAYOUT)), 1)
    second = acc.second
    if var.dv1 > 0:
        second = second * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, O1_LAYOUT)), 1)
    if var.padded:
        lse = gl.where(empty, float("-inf"), (state.m + logarithm) * LN2)
        leave_split(first, second, lse, empty, tile, group, args, var)
    elif var.split_kv:
        lse = gl.where(empty, float("-inf"), (state.m + logarithm) * LN2)
        if whole(tile, args.num_heads):
            _copy_tile(first, second, tile, tile_count, desc, smem, args, group, var)
            if args.lse is not None:
                store_lse(lse, tile, group, args, ROWS, var)
        else:
            leave_split(first, second, lse, empty, tile, group, args, var)
    else:
        _copy_tile(first, second, tile, tile_count, desc, smem, args, group, var)
        if args.lse is not None:
            lse = gl.where(empty, float("-inf"), (state.m + logarithm) * LN2)
            store_lse(lse, tile, group, args, ROWS, var)
