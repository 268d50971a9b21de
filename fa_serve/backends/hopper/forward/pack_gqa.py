"""Query heads of a KV head that share a tile of the Hopper kernel, for a few queries, as when drafts are verified, and for
chunks of prompts whose last tiles would be nearly empty.

A plain tile has the queries of one head, so a few queries leave most of its rows empty, and each query head of a KV head copies
the same K and V. With `pack_gqa` (the name is FlashAttention-3's), a power of two, row r of a tile is query r // pack_gqa of
head r % pack_gqa. K and V are copied once for all of these heads, and the kernel is bound by memory, as decoding is.

The copy engine does the packing: a box of Q has 64 / pack_gqa tokens by pack_gqa heads, whose rows lie in shared memory in
just this order, and a box of O has the same form (see `plan`). The head of a tile is then a KV head.

If a KV head has fewer query heads than `pack_gqa` (`padded`), the remaining rows are queries of the next KV head. They are
computed but must not be written. Only `split_kv.split.leave_split` can leave them out; a box of O would overwrite these heads.

`tiles.heads_to_pack` chooses `pack_gqa`. Left out: float8 products and lists of key blocks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.split_kv.split import split_of


@gluon.jit
def heads_of(tile, num_heads, heads_per_kv, var: gl.constexpr):
    """-> the first query head of a tile, and its KV head. num_heads: heads that have separate tiles"""
    head = tile.head % num_heads if var.split_kv else tile.head
    if var.padded:
        return head * heads_per_kv, head
    elif var.pack_gqa > 1:  # noqa: RET505
        return head * var.pack_gqa, head
    else:
        return head, head // heads_per_kv


@gluon.jit
def sinks_of(tile, args, layout: gl.constexpr, var: gl.constexpr):
    """The sink of each row, [64] float32, in the unit of scores before the softmax."""
    head, _ = heads_of(tile, args.num_heads, args.heads_per_kv, var)
    if var.pack_gqa > 1:
        members = gl.arange(0, 64, layout=layout) % var.pack_gqa
        if var.padded:
            members = gl.minimum(members, args.heads_per_kv - 1)
        sinks = gl.load(args.sinks + head + members).to(gl.float32)
    else:
        sinks = gl.full([64], 0.0, gl.float32, layout=layout) + gl.load(args.sinks + head).to(gl.float32)
    if var.split_kv:  # the first split of a row has the sink
        sinks = gl.where(split_of(tile, args.num_heads) == 0, sinks, float("-inf"))
    return sinks


@gluon.jit
def store_lse(lse, tile, group: gl.constexpr, args, layout: gl.constexpr, var: gl.constexpr):
    """Store the log-sum-exp of a warpgroup's rows, [64]."""
    if var.pack_gqa > 1:
        head, _ = heads_of(tile, args.num_heads, args.heads_per_kv, var)
        rows = gl.arange(0, 64, layout=layout)
        queries = tile.row + 64 * group // var.pack_gqa + rows // var.pack_gqa
        heads = (head + rows % var.pack_gqa).to(gl.int64)
        if var.varlen:
            at = heads * args.lse_stride + tile.origin
        else:
            at = (tile.origin * (args.num_heads * var.pack_gqa) + heads) * args.lse_stride
        gl.store(args.lse + at + queries, lse, mask=queries < tile.q_len)
    else:
        rows = tile.row + 64 * group + gl.arange(0, 64, layout=layout)
        head, _ = heads_of(tile, args.num_heads, args.heads_per_kv, var)
        if var.varlen:
            base = args.lse + head.to(gl.int64) * args.lse_stride + tile.origin
        else:
            base = args.lse + (tile.origin.to(gl.int64) * args.num_heads + head) * args.lse_stride
        gl.store(base + rows, lse, mask=rows < tile.q_len)
