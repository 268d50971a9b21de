"""The tree of deterministic mode in the Hopper kernel: it folds groups of keys, and has the bits of `triton.tree.plan`.

Key blocks are visited from the first to the last. The consumer computes a group by the online softmax from an empty state, as
it computes a whole tile without a tree, and folds the group into the result when the next group begins. The registers hold two
outputs of each row, that of the folded groups and that of the open group, so a block has only 64 keys.

Every number is computed by the expressions of the portable kernel (`group_softmax`, `fold_rows` and `fold_outputs` of
`primitives`), and products and sums over a row's scores have the same instructions in the same order: blocks of 64 keys, scores
in the layout in which wgmma leaves them. Left out: keys that are split among tiles, heads that share a tile, and softcap.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.forward.pack_gqa import sinks_of
from fa_serve.backends.triton.primitives import LOG2E, fold_outputs, fold_rows


class Folded(NamedTuple):
    """The result of the folded groups for 64 rows; without a tree, placeholders that nothing reads.

    m, l:  [64], the maximum in base 2, and the sum
    first, second: as in `consumer.Output`
    """

    m: gl.tensor
    l: gl.tensor  # noqa: E741
    first: gl.tensor
    second: gl.tensor


@gluon.jit
def first_groups(tile, acc, args, layout: gl.constexpr, var: gl.constexpr):
    """The state into which the first group is folded: empty, or the sink, which counts as a key with a score and no value.

    acc: an output of zeros
    """
    if var.tree_blocks > 0:
        m = gl.full([64], float("-inf"), gl.float32, layout=layout)
        l = gl.zeros([64], gl.float32, layout=layout)  # noqa: E741
        if args.sinks is not None:
            m = sinks_of(tile, args, layout, var) * LOG2E
            l = l + 1.0  # noqa: E741
        return Folded(m, l, acc.first, acc.second)
    else:  # noqa: RET505
        nothing = tile.row * 0
        return Folded(nothing, nothing, nothing, nothing)


@gluon.jit
def fold_group(folded, state, acc, var: gl.constexpr):
    """Fold the group whose softmax is `state` and whose output is `acc`."""
    m, l, before, added = fold_rows(folded.m, folded.l, state.m, state.l)  # noqa: E741
    O_LAYOUT: gl.constexpr = var.output_layout
    first = fold_outputs(folded.first, acc.first, _column(before, O_LAYOUT), _column(added, O_LAYOUT))
    second = folded.second
    if var.dv1 > 0:
        O1_LAYOUT: gl.constexpr = var.second_output_layout
        second = fold_outputs(folded.second, acc.second, _column(before, O1_LAYOUT), _column(added, O1_LAYOUT))
    return Folded(m, l, first, second)


@gluon.jit
def _column(x, layout: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def block_at(tile, j, var: gl.constexpr):
    """The `j`-th key block that a tile visits: from the last block to the first or, with a tree, from the first to the last."""
    if var.tree_blocks > 0:
        return tile.low + j
    else:  # noqa: RET505
        return tile.high - 1 - j
