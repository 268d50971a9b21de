"""Keys that are split among tiles of the Hopper kernel, where plain tiles would leave most of the GPU idle.

A plain tile visits all keys of its rows. 256 queries of 16 heads over 4096 keys are 32 such tiles for 132 multiprocessors,
and one long sequence among short ones keeps the others waiting. So a tile may have some rows and only one split of their keys.
`split_kv.tile_scheduler` cuts the keys of each sequence on the device, by the lengths there, so that all thread blocks have
about the same number of key blocks (Dao et al. 2023, "Flash-Decoding"). Unlike in `triton.splits`, each sequence is cut by
itself, into splits of about one share. A captured CUDA graph is therefore correct for every length. The order of a row's sums
depends on the lengths and shapes of the call and on the number of multiprocessors, not on which thread block is first.

Rows whose keys are in one split are written to the output directly. Other splits store their partial output and log-sum-exp in
a buffer, and `split_kv.combine` combines them. Rows of padded tiles (see `pack_gqa`) always go through that buffer: a box of O
would overwrite other heads.

In such a call, `Tile.head` encodes three numbers: (splits * SPLIT_BASE + split) * heads + head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.forward.tiles import MAX_SPLITS

SPLIT_BASE = gl.constexpr(MAX_SPLITS)


@gluon.jit
def whole(tile, num_heads):
    """Whether the rows of a tile have all of their keys in it."""
    return tile.head // num_heads // SPLIT_BASE == 1


@gluon.jit
def split_of(tile, num_heads):
    """The number of a tile's split among the splits of its rows."""
    return tile.head // num_heads % SPLIT_BASE


@gluon.jit
def _place_of_rows(tile, group: gl.constexpr, args, layout: gl.constexpr, var: gl.constexpr):
    """-> the index in the buffer of each row of a warpgroup, [64] int64, in the order (split, token, query head); and a mask of
    the rows that exist."""
    rows = gl.arange(0, 64, layout=layout)
    queries = tile.row + 64 * group // var.pack_gqa + rows // var.pack_gqa
    members = rows % var.pack_gqa
    there = queries < tile.q_len
    heads = args.num_heads
    head = tile.head % args.num_heads
    if var.pack_gqa > 1:
        heads = heads * args.heads_per_kv
        head = head * args.heads_per_kv
        there = there & (members < args.heads_per_kv)
    token = split_of(tile, args.num_heads) * args.tokens + tile.origin + queries
    return token.to(gl.int64) * heads + head + members, there


@gluon.jit
def _leave_columns(
    values,
    empty,
    tile,
    group: gl.constexpr,
    column: gl.constexpr,
    width: gl.constexpr,
    args,
    layout: gl.constexpr,
    var: gl.constexpr,
):
    """Store columns [column, column + width) of a split's output. A row without keys is 0, whatever the values are."""
    at, there = _place_of_rows(tile, group, args, gl.SliceLayout(1, layout), var)
    columns = column + gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    keep = gl.expand_dims(there, 1) & gl.expand_dims(columns < var.dim_v, 0)
    cells = gl.expand_dims(at * var.dim_v, 1) + gl.expand_dims(columns, 0)
    nothing = gl.expand_dims(gl.convert_layout(empty, gl.SliceLayout(1, layout)), 1)
    gl.store(args.buffer + cells, gl.where(nothing, 0.0, values), mask=keep)


@gluon.jit
def leave_split(first, second, lse, empty, tile, group: gl.constexpr, args, var: gl.constexpr):
    """Store what `split_kv.combine` needs of a split: both parts of the output, [64, dv0] and [64, dv1] float32, and lse, [64].

    empty: rows that see no key of the split
    """
    O_LAYOUT: gl.constexpr = var.output_layout
    O1_LAYOUT: gl.constexpr = var.second_output_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, var.score_layout)
    _leave_columns(first, empty, tile, group, 0, var.dv0, args, O_LAYOUT, var)
    if var.dv1 > 0:
        _leave_columns(second, empty, tile, group, var.dv0, var.dv1, args, O1_LAYOUT, var)
    at, there = _place_of_rows(tile, group, args, ROWS, var)
    gl.store(args.buffer + args.logs + at, lse, mask=there)
