"""The loop of products of quantised weights with 2 to 128 tokens on Hopper, in Gluon.

    acc = products_overlapped(acc, words, tokens, weights, inputs, groups, scales, zeros, first, count, ...)

Words of weights and the input's columns are in stages of shared memory, into which they are copied asynchronously. A block is
128 bytes of each row of weights (256 columns of 4-bit weights, or 128 of float8) and the input's columns. Weights go from
registers to `wgmma`. Left out: tiles and launches (wgmma.py), and unpacking (pairs.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.launching.gluon_names import copy_to_shared, sync_threads
from fa_serve.ops.products.quantised.pairs import load_scales, load_zeros, weights_of_half


@gluon.jit
def copy_words(words, stage, weights, block, inside, VALUES: gl.constexpr, K: gl.constexpr):
    """Begin to copy the 128 bytes of weights that each row has in a block. Bytes from K on are 0.

    weights: their pointer, the offsets of the first block's elements, and the columns of these
    """
    data_ptr, offsets, columns = weights
    WIDTH: gl.constexpr = 64 if VALUES == 0 else 32
    if VALUES == 0 and K % 128 > 0:
        inside = inside & (columns + block * 64 < K // 2)
    copy_to_shared(words.index(stage), data_ptr + block * WIDTH + offsets, mask=inside)


@gluon.jit
def copy_tokens(tokens, stage, inputs, block, inside, K: gl.constexpr):
    """Begin to copy the input's columns of a block, and commit everything that was begun. Columns from K on are 0.

    tokens: shared memory for each 128 columns of a block. With one for all of them, Triton would put a barrier between them.
    inputs: their pointer, the offsets of the first 128 columns, the columns, and which tokens exist
    """
    x_ptr, offsets, columns, is_token = inputs
    for half in gl.static_range(len(tokens)):
        start = (block * len(tokens) + half) * 128
        mask = is_token & inside
        if K % (128 * len(tokens)) > 0:
            mask = mask & (columns + start < K)
        copy_to_shared(tokens[half].index(stage), x_ptr + start + offsets, mask=mask)
    async_copy.commit_group()


@gluon.jit
def wrapped(block, BLOCKS: gl.constexpr):
    """The number of a block. Programs begin with different ones, and the first follows the last."""
    return gl.where(block >= BLOCKS, block - BLOCKS, block)


@gluon.jit
def blocks_of_program(BLOCKS: gl.constexpr, SPLITS: gl.constexpr):
    """(range of columns, tile of rows, first block, number of blocks) of this program, of SPLITS ranges for each tile."""
    SPAN: gl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    split = gl.program_id(0) % SPLITS
    tile = gl.program_id(0) // SPLITS
    if SPLITS == 1:
        # if all programs began with the same columns, they would read the same few lines of the input at the same time
        return split, tile, tile % BLOCKS, BLOCKS
    else:  # noqa: RET505
        first = split * SPAN
        return split, tile, first, gl.minimum(SPAN, BLOCKS - first)


@gluon.jit
def load_groups(
    groups,
    block,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALVES: gl.constexpr,
    HALF: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Scales and zero points of a block, each for each 128 columns. Float8 weights with a scale for each row get none.

    groups: pointers to scales and zero points, and offsets of the rows' first ones
    """
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    scales_ptr, zeros_ptr, rows = groups
    scales = ()
    zeros = ()
    for half in gl.static_range(HALVES):
        start = (block * HALVES + half) * 128
        if VALUES == 0 and GROUP >= K:
            scales += ((),)
        else:
            scales += (load_scales(scales_ptr, rows, start, GROUPS, GROUP, VALUES, HALF),)
        zeros += (load_zeros(zeros_ptr, rows, start, GROUPS, GROUP, VALUES, HALF, LAYOUT),)
    return scales, zeros


@gluon.jit
def products_in_turn(
    acc,
    words,
    tokens,
    weights,
    inputs,
    groups,
    scales,
    zeros,
    first,
    count,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALF: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    LAYOUT: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """The sums of `count` blocks. A block is unpacked after the products of the one before it. At least 2 stages."""
    STAGES: gl.constexpr = words.shape[0]
    HALVES: gl.constexpr = len(tokens)
    BLOCKS: gl.constexpr = (K + 128 * HALVES - 1) // (128 * HALVES)
    stage = 0
    into = STAGES - 1
    for step in range(0, count):
        async_copy.wait_group(STAGES - 2)
        # the products of the stage that the next copies overwrite have ended
        acc = warpgroup_mma_wait(0, deps=[acc])
        fence_async_shared()
        sync_threads()
        ahead = step + STAGES - 1
        block = wrapped(first + ahead, BLOCKS)
        copy_words(words, into, weights, block, ahead < count, VALUES, K)
        copy_tokens(tokens, into, inputs, block, ahead < count, K)
        block = wrapped(first + step + 1, BLOCKS)
        next_scales, next_zeros = load_groups(groups, block, K, GROUP, VALUES, HALVES, HALF, LAYOUT)
        found = words.index(stage).load(W_LAYOUT)
        for half in gl.static_range(HALVES):
            w = weights_of_half(found, zeros[half], scales[half], LAYOUT, half == 1, VALUES, HALF)
            w = gl.convert_layout(w, A_LAYOUT)
            if half > 0:
                acc = warpgroup_mma_wait(0, deps=[acc])
            # ptxas keeps w in its registers until the next wait; tests check that it does not serialise the products for that
            acc = warpgroup_mma(w, tokens[half].index(stage).permute((1, 0)), acc, is_async=True)
        scales = next_scales
        zeros = next_zeros
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        into = gl.where(into == STAGES - 1, 0, into + 1)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def products_overlapped(
    acc,
    words,
    tokens,
    weights,
    inputs,
    groups,
    scales,
    zeros,
    first,
    count,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALF: gl.constexpr,
    W_LAYOUT: gl.constexpr,
    LAYOUT: gl.constexpr,
    A_LAYOUT: gl.constexpr,
):
    """The sums of `count` blocks. The tensor cores multiply 128 columns while the next are unpacked. At least 3 stages.

    The group of copies that is waited for is a block ahead of the products, because its first 128 columns are unpacked. Each
    loop has one point at which Triton puts barriers between copies and products.
    """
    STAGES: gl.constexpr = words.shape[0]
    HALVES: gl.constexpr = len(tokens)
    BLOCKS: gl.constexpr = (K + 128 * HALVES - 1) // (128 * HALVES)
    # with two sets of registers for unpacked weights, none is written while products read it
    PARTS: gl.constexpr = 2 // HALVES
    stage = 0
    into = STAGES - 1
    async_copy.wait_group(2 * STAGES - 3)
    sync_threads()
    found = words.index(0).load(W_LAYOUT)
    w = weights_of_half(found, zeros[0], scales[0], LAYOUT, False, VALUES, HALF)
    w = gl.convert_layout(w, A_LAYOUT)
    for pair in range(0, count, PARTS):
        for part in gl.static_range(PARTS):
            # the products of the stage that the next copies overwrite have ended
            acc = warpgroup_mma_wait(0, deps=[acc])
            async_copy.wait_group(STAGES - 3)
            fence_async_shared()
            sync_threads()
            ahead = pair + part + STAGES - 1
            block = wrapped(first + ahead, BLOCKS)
            copy_words(words, into, weights, block, ahead < count, VALUES, K)
            copy_tokens(tokens, into, inputs, block, ahead < count, K)
            x = tokens[0].index(stage).permute((1, 0))
            acc = warpgroup_mma(w, x, acc, is_async=True)
            block = wrapped(first + pair + part + 1, BLOCKS)
            next_scales, next_zeros = load_groups(groups, block, K, GROUP, VALUES, HALVES, HALF, LAYOUT)
            if HALVES == 2:
                found = words.index(stage).load(W_LAYOUT)
                w = weights_of_half(found, zeros[1], scales[1], LAYOUT, True, VALUES, HALF)
                w = gl.convert_layout(w, A_LAYOUT)
                acc = warpgroup_mma_wait(0, deps=[acc])
                x = tokens[1].index(stage).permute((1, 0))
                acc = warpgroup_mma(w, x, acc, is_async=True)
            scales = next_scales
            zeros = next_zeros
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            into = gl.where(into == STAGES - 1, 0, into + 1)
            # at the end of the loop, because the machine code then unpacks before it waits
            found = words.index(stage).load(W_LAYOUT)
            w = weights_of_half(found, zeros[0], scales[0], LAYOUT, False, VALUES, HALF)
            w = gl.convert_layout(w, A_LAYOUT)
    return warpgroup_mma_wait(0, deps=[acc])
