"""How the Hopper kernel for one token (gemv.py) turns words of weights into operands of `mma.sync`.

    found = words_of_runs(words, VALUES)                         # of a block of each warp, in registers
    w = weights_of_run(found, opaque, run, VALUES, HALF)         # [warps, BLOCK_N, 32], a run of positions
    token.store(by_position(x, VALUES))                          # the input in the same order

A thread multiplies the columns whose words it has loaded, 16 bytes at a time, so no weight moves between threads. The columns
are therefore multiplied in another order than in memory; a place in this order is called a position. VALUES is that of
`primitives.kernel_values`, and HALF says whether numbers are float16. Left out: weights that are multiplied with several tokens
(pairs.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.ops.products.quantised.pairs import both_numbers, pairs_of_float8


@gluon.jit
def by_position(x, VALUES: gl.constexpr):
    """[warps, WIDTH] inputs in the order of columns -> in the order in which they are multiplied.

    A thread reads words 4t to 4t + 3 of 16 neighbouring ones, where t is its number among four. Its share of 32 positions is 8t
    to 8t + 7. So columns change places within each 32 columns for 4-bit values, and within each 64 columns for float8.
    """
    WARPS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = x.shape[1]
    if VALUES == 0:
        y = gl.permute(gl.reshape(x, [WARPS, WIDTH // 64, 4, 2, 8]), (0, 1, 3, 2, 4))
    else:
        y = gl.permute(gl.reshape(x, [WARPS, WIDTH // 32, 2, 4, 4]), (0, 1, 3, 2, 4))
    return gl.reshape(y, [WARPS, WIDTH])


@gluon.jit
def raised_pairs_of_int4(words, opaque, RUN: gl.constexpr, HALF: gl.constexpr):
    """int32: two numbers 16 + value, of the bits 4 * RUN to 4 * RUN + 3 of each half of words. HALF: whether in float16.

    opaque: 1, but the compiler does not know that. So it keeps `(t & mask) | exponent` in one instruction.
    """
    if HALF:
        t = words << (6 - 4 * RUN) if RUN < 2 else words >> (4 * RUN - 6)
        t = (t & 0x03C003C0) | (0x4C004C00 * opaque)
    else:
        t = words << 3 if RUN == 0 else words >> (4 * RUN - 3)
        t = (t & 0x00780078) | (0x41804180 * opaque)
    return t


@gluon.jit
def words_of_runs(words, VALUES: gl.constexpr):
    """[warps, 2, BLOCK_N, 16] words -> the tuple of words that `weights_of_run` takes.

    For 4-bit values: two tensors [warps, BLOCK_N, 16] of 128 columns each; the halves of a word are neighbouring columns.
    For float8: four tensors [warps, BLOCK_N, 4, 2] of 32 columns each.
    """
    A: gl.constexpr = words.shape[0]
    B: gl.constexpr = words.shape[2]
    split = gl.reshape(words, [A, 2, B, 4, 2, 2])
    if VALUES == 0:
        split = gl.permute(split, (0, 2, 3, 5, 4, 1))
        first, second = gl.split(split)
        first_even, first_odd = gl.split(first)
        second_even, second_odd = gl.split(second)
        found = (first_even, first_odd, second_even, second_odd)
    else:
        even, odd = gl.split(split)
        found = ()
        for part in gl.static_range(2):
            if part == 0:
                t = gl.inline_asm_elementwise(
                    "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
                )
            else:
                t = gl.inline_asm_elementwise(
                    "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
                )
            found += (gl.reshape(gl.permute(t, (0, 2, 1, 4, 3)), [A, B, 16]),)
    return found


@gluon.jit
def weights_of_run(found, opaque, RUN: gl.constexpr, VALUES: gl.constexpr, HALF: gl.constexpr):
    """[warps, BLOCK_N, 32]: the numbers at positions 32 * RUN to 32 * RUN + 31 of a block."""
    if VALUES == 0:
        words = found[RUN]
        pairs = gl.join(pairs_of_float8(words, False, HALF), pairs_of_float8(words, True, HALF))
        numbers = gl.permute(both_numbers(pairs, HALF), (0, 1, 3, 4, 2, 5))
    else:
        words = found[RUN // 4]
        numbers = both_numbers(raised_pairs_of_int4(words, opaque, RUN % 4, HALF), HALF)
    return gl.reshape(numbers, [words.shape[0], words.shape[1], 32])


@gluon.jit
def along(x, DIM: gl.constexpr):
    """A vector as dimension DIM of three."""
    if DIM == 0:
        y = gl.expand_dims(gl.expand_dims(x, 1), 2)
    elif DIM == 1:
        y = gl.expand_dims(gl.expand_dims(x, 0), 2)
    else:
        y = gl.expand_dims(gl.expand_dims(x, 0), 1)
    return y


@gluon.jit
def load_groups_of_block(ptr, offsets, start, K: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr):
    """PARTS tensors of [warps, BLOCK_N, 1]: scales or zero points of the equal parts of the blocks from columns `start` on.

    offsets: [1, BLOCK_N, 1], the offset of each row's first group
    start:   [warps, 1, 1], the first column of each warp's block
    """
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    found = ()
    for part in gl.static_range(PARTS):
        group = gl.minimum((start + part * (BLOCK // PARTS)) // GROUP, GROUPS - 1)
        found += (gl.load(ptr + offsets + group),)
    return found


@gluon.jit
def row_of(row, tile, N: gl.constexpr, STORED: gl.constexpr):
    """The row of weights that a row of a tile stands for. Rows past the end repeat the last row, and are not stored."""
    return gl.minimum(tile * STORED + row % STORED, N - 1) + row // STORED * N


@gluon.jit
def load_block(
    data_ptr,
    scales_ptr,
    zeros_ptr,
    words,
    groups,
    tile,
    step,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    STORED: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Load what the warps multiply in a step of a tile -> words [warps, 2, BLOCK_N, 16], scales, zero points.

    words:  for each word its row of the tile, its warp, and its offset in a block
    groups: for scales and zero points, the row of the tile [1, BLOCK_N, 1] and the warp [warps, 1, 1]
    """
    BLOCKS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    GROUPS: gl.constexpr = (K + GROUP - 1) // GROUP
    WARPS: gl.constexpr = gl.num_warps()
    row, warp, offset = words
    # past the last block and the last tile, any weights will do: the token is zero there, or the sums are not stored
    block = gl.minimum(warp + step * WARPS, BLOCKS - 1)
    data = gl.load(data_ptr + (row_of(row, tile, N, STORED) * (BLOCKS * 32) + block * 32 + offset))
    row, warp = groups
    scales = ()
    zeros = ()
    rows = row_of(row, tile, N, STORED) * GROUPS
    start = (warp + step * WARPS) * WIDTH
    if GROUP < K:
        scales = load_groups_of_block(scales_ptr, rows, start, K, GROUP, WIDTH, PARTS)
    if zeros_ptr is not None:
        zeros = load_groups_of_block(zeros_ptr, rows, start, K, GROUP, WIDTH, PARTS)
    return data, scales, zeros
