"""Device functions of the persistent kernel: the share of one program of a product, as a stream of tiles of the weights.

The tiles of all rows follow each other without a gap: each is loaded while the one before it is multiplied, and the first one
of a phase before the program waits for the input of the phase. One token is multiplied without tensor cores, as in
products/row.py. Several tokens are the narrow side of tiles of 16 by 8, of which each warp sums a part of the columns.

A norm multiplies the input by one factor for each token, which the sums of a tile yield as well (see products/row.py). What
other programs write is read from the L2 cache. Sums have an order that no arrival changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fa_serve.ops.elementwise.activation import activate


@triton.jit
def share_of(program, ROWS: tl.constexpr, PROGRAMS: tl.constexpr):
    """First and last row, excluded, of a program, as `layout.row_share`."""
    return program * ROWS // PROGRAMS, (program + 1) * ROWS // PROGRAMS


@triton.jit
def weight_tile(w_ptr, index, begin, end, product: tl.constexpr):
    """[block_rows, block_k]: tile `index` of a program's share. No byte is read of a tile behind the last one."""
    BLOCKS: tl.constexpr = (product.columns + product.block_k - 1) // product.block_k
    OUTPUTS: tl.constexpr = product.block_rows // 2 if product.gated else product.block_rows
    first = begin + index // BLOCKS * OUTPUTS
    column = index % BLOCKS * product.block_k
    tile_ptr = w_ptr + first.to(tl.int64) * product.columns + column
    places = tl.arange(0, product.block_rows)
    k = tl.arange(0, product.block_k)
    rows = places % OUTPUTS + places // OUTPUTS * product.rows
    keep = (first + places % OUTPUTS < end)[:, None]
    if product.columns % product.block_k != 0:
        keep = keep & (column + k < product.columns)[None, :]
    return tl.load(tile_ptr + (rows[:, None] * product.columns + k[None, :]), mask=keep, other=0.0)


@triton.jit
def _input_tile(x_ptr, index, total, product: tl.constexpr, BLOCK_T: tl.constexpr):
    """[BLOCK_T, block_k]: the input of tile `index`."""
    BLOCKS: tl.constexpr = (product.columns + product.block_k - 1) // product.block_k
    tokens = tl.arange(0, BLOCK_T)
    k = index % BLOCKS * product.block_k + tl.arange(0, product.block_k)
    keep = (tokens < total)[:, None] & (k < product.columns)[None, :]
    return tl.load(x_ptr + tokens[:, None] * product.columns + k[None, :], mask=keep, other=0.0, cache_modifier=".cg")


@triton.jit
def _sums_of_lanes(products, rows: tl.constexpr, block_k: tl.constexpr):
    """[rows, block_k] -> [rows, block_k / 8]: eight neighbours are numbers of one thread."""
    return tl.sum(tl.reshape(products, [rows, block_k // 8, 8]), 2)


@triton.jit
def _zeros(product: tl.constexpr, BLOCK_T: tl.constexpr):
    """The sums of a tile, before any column."""
    ROWS: tl.constexpr = product.block_rows
    LANES: tl.constexpr = product.block_k // 8
    GROUPS: tl.constexpr = product.k_groups
    return tl.zeros([ROWS, LANES], tl.float32) if BLOCK_T == 1 else tl.zeros([GROUPS, ROWS, BLOCK_T], tl.float32)


@triton.jit
def _add_columns(acc, x, w, PRECISION: tl.constexpr, product: tl.constexpr, BLOCK_T: tl.constexpr):
    """Add the columns of one tile to its sums. x: float32 if BLOCK_T is 1, else the dtype of w"""
    ROWS: tl.constexpr = product.block_rows
    COLUMNS: tl.constexpr = product.block_k
    GROUPS: tl.constexpr = product.k_groups
    PART: tl.constexpr = product.block_k // product.k_groups
    if BLOCK_T == 1:
        acc += _sums_of_lanes(w.to(tl.float32) * x, ROWS, COLUMNS)
    else:
        x3 = tl.permute(tl.reshape(x, [BLOCK_T, GROUPS, PART]), [1, 2, 0])
        w3 = tl.permute(tl.reshape(w, [ROWS, GROUPS, PART]), [1, 0, 2])
        acc = tl.dot(w3, x3, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _finish(acc, squares, product: tl.constexpr, BLOCK_T: tl.constexpr, eps):
    """The outputs of a tile of rows [BLOCK_T, block_rows]: all columns are added, and the norm's factor is applied."""
    y = tl.expand_dims(tl.sum(acc, 1), 0) if BLOCK_T == 1 else tl.trans(tl.sum(acc, 0))
    if product.normed:
        y *= tl.rsqrt(tl.sum(squares, 1) / product.columns + eps)[:, None]
    return y


@triton.jit
def _store_outputs(
    y, out_ptr, bias_ptr, first, end, total, alpha, product: tl.constexpr, BLOCK_T: tl.constexpr, KIND: tl.constexpr
):
    """Gate the outputs, or add the bias, or add them to what is there, and store them, rounded once."""
    OUTPUTS: tl.constexpr = product.block_rows // 2 if product.gated else product.block_rows
    if product.gated:
        pair = tl.permute(tl.reshape(y, [BLOCK_T, 2, OUTPUTS]), [0, 2, 1])
        gate, up = tl.split(pair)
        y = activate(gate, KIND) * up
    columns = first + tl.arange(0, OUTPUTS)
    tokens = tl.arange(0, BLOCK_T)
    if product.biased:
        y += tl.load(bias_ptr + columns, mask=columns < end, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + tokens[:, None] * product.rows + columns[None, :]
    keep = (tokens < total)[:, None] & (columns < end)[None, :]
    if product.added:
        # this program wrote these numbers in the phase before that adds, or a kernel before this one did
        y = tl.load(places, mask=keep, other=0.0, cache_modifier=".cg").to(tl.float32) + alpha * y
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit
def multiply_share(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    out_ptr,
    w,
    program,
    total,
    eps,
    offset,
    alpha,
    product: tl.constexpr,
    var: tl.constexpr,
):
    """The rows of a program. w: its first tile, which was loaded before. x (total, columns), out (total, rows)."""
    BLOCK_T: tl.constexpr = var.block_t
    BLOCKS: tl.constexpr = (product.columns + product.block_k - 1) // product.block_k
    OUTPUTS: tl.constexpr = product.block_rows // 2 if product.gated else product.block_rows
    COLUMNS: tl.constexpr = product.block_k
    LANES: tl.constexpr = product.block_k // 8
    PRECISION: tl.constexpr = var.precision
    KIND: tl.constexpr = var.kind
    ROWS: tl.constexpr = product.rows
    PROGRAMS: tl.constexpr = var.programs
    begin, end = share_of(program, ROWS, PROGRAMS)
    tiles = (end - begin + OUTPUTS - 1) // OUTPUTS * BLOCKS
    acc = _zeros(product, BLOCK_T)
    squares = tl.zeros([BLOCK_T, LANES], tl.float32)
    x = _input_tile(x_ptr, 0, total, product, BLOCK_T)
    for index in tl.range(0, tiles, num_stages=1, disable_licm=True):
        next_w = weight_tile(w_ptr, index + 1, begin, end, product)
        wide = x.to(tl.float32)
        if product.normed:
            k = index % BLOCKS * product.block_k + tl.arange(0, product.block_k)
            scale = tl.load(norm_ptr + k, mask=k < product.columns, other=0.0).to(tl.float32) + offset
            squares += _sums_of_lanes(wide * wide, BLOCK_T, COLUMNS)
            wide *= scale[None, :]
        if BLOCK_T == 1:
            acc = _add_columns(acc, wide, w, PRECISION, product, BLOCK_T)
        else:
            acc = _add_columns(acc, wide.to(w.dtype), w, PRECISION, product, BLOCK_T)
        if BLOCKS > 1:
            x = _input_tile(x_ptr, index + 1, total, product, BLOCK_T)
        if index % BLOCKS == BLOCKS - 1:
            y = _finish(acc, squares, product, BLOCK_T, eps)
            first = begin + index // BLOCKS * OUTPUTS
            _store_outputs(y, out_ptr, bias_ptr, first, end, total, alpha, product, BLOCK_T, KIND)
            acc = _zeros(product, BLOCK_T)
            squares = tl.zeros([BLOCK_T, LANES], tl.float32)
        w = next_w
