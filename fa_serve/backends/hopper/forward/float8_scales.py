"""The scales of float8 inputs in the consumers of the Hopper kernel; `triton.float8_inputs` computes them.

A score is q_scale[row] * k_scale[group of keys] times the product of float8 numbers. Both scales are part of the factor that
turns products into exponents of 2, so they cost nothing per score. The scale of values is the unit of O: the factor that a new
maximum needs also changes the unit.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.backends.triton.float8_inputs import BLOCK_KEYS


class Factors(NamedTuple):
    """The factors of a tile's scores before the softmax, without the scale of a block of float8 keys.

    rows: `ConsumerArgs.scale` or, for float8 queries, this number times the scale of each row, [64]
    k, v: pointers to the scales of the first block of keys of the sequence, or 0
    """

    rows: gl.tensor
    k: gl.tensor
    v: gl.tensor


@gluon.jit
def as_column(x, var: gl.constexpr):
    """One number per row as a column; a single number for all rows unchanged."""
    if var.float8_keys:
        return gl.expand_dims(x, 1)
    else:  # noqa: RET505
        return x


@gluon.jit
def tile_factors(tile, args, group: gl.constexpr, layout: gl.constexpr, var: gl.constexpr):
    """The factors of a tile. Rows past the end of the sequence have a scale of 1, because their factors must be finite."""
    if var.float8_keys:
        row = tile.row + 64 * group
        rows = row + gl.arange(0, 64, layout=layout)
        kv_head = tile.head // args.scales.heads_per_kv
        if var.varlen:
            q = args.scales.q + tile.head.to(gl.int64) * args.lse_stride + tile.origin
        else:
            q = args.scales.q + (tile.origin.to(gl.int64) * args.num_heads + tile.head) * args.lse_stride
        if var.gaps:
            first = kv_head * args.scales.stride + tile.k_origin // BLOCK_KEYS
        else:
            first = (tile.k_origin * (args.num_heads // args.scales.heads_per_kv) + kv_head) * args.scales.stride
        scales = args.scale * gl.load(q + rows, mask=rows < tile.q_len, other=1.0)
        return Factors(scales, args.scales.k + first, args.scales.v + first if var.float8_values else first)
    else:  # noqa: RET505
        return Factors(args.scale, tile.row * 0, tile.row * 0)


@gluon.jit
def block_scale(block, factors, var: gl.constexpr):
    """The factor that turns the products of a block of keys into exponents of 2: a number or, for float8 queries, [64]."""
    if var.float8_keys:
        return factors.rows * gl.load(factors.k + block * var.tiles.block_n // BLOCK_KEYS)
    else:  # noqa: RET505
        return factors.rows


@gluon.jit
def change_of_units(block, factors, var: gl.constexpr):
    """The unit of O before the values of `block` are added, divided by its unit afterwards: a factor for O.

    The unit of O is the scale of the float8 values that were added last. Blocks are visited from the last to the first, so
    block + 1 comes before `block`.
    """
    before = gl.load(factors.v + (block + 1) * var.tiles.block_n // BLOCK_KEYS)
    after = gl.load(factors.v + block * var.tiles.block_n // BLOCK_KEYS)
    return before / after
