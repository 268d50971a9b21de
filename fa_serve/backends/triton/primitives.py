"""The jit helpers that the portable kernels are built from. Each one is a step of the algorithm.

Scores are in base 2 throughout: exp(x) = exp2(x * log2(e)), and exp2 is one instruction. A row that has seen no key has a
running maximum of -inf. `online_softmax_update` keeps such a row free of NaN, so no caller needs a special case.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SCORE_GROWTH = tl.constexpr(8.0)
"""How far a row's scores may exceed its maximum before the maximum follows, in powers of 2. Exponentials are then at most 256,
which float16 can hold."""


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr, NEXT_READS_AHEAD: tl.constexpr = False):
    """Let the next kernel start, and wait until the previous kernel has completed (programmatic launch).

    At least one program of each launch must call this, even if no program has work to do (`wait_if_needed`): the next kernel
    waits only for this kernel, so the completion of this kernel must imply that the previous kernel has completed as well.

    The next kernel starts once all programs of this one have called this function or ended, so it may request its first weights
    while this one still waits. Before it waits itself, it may therefore read nothing that a kernel of the same step writes.

    NEXT_READS_AHEAD: the next kernel does read, before it waits, what kernels before this one wrote. It then starts only when
                      those have completed.
    """
    if PDL:
        if NEXT_READS_AHEAD:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        else:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()


@triton.jit
def request_into_l2(places, BYTES: tl.constexpr):
    """Request BYTES bytes, a multiple of 16, at each address into the L2 cache, and wait for nothing. Hopper and later only.

    places: addresses as int64, multiples of 16. With as many of them as a program has threads, each thread requests one
    """
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [places, tl.full(places.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def wait_if_needed(needed, PDL: tl.constexpr):
    """`wait_for_previous_kernel` for a program that reads what that kernel writes, and for the first program of a launch.

    Any other program with nothing to do ends at once and leaves its place on the multiprocessor to others. One waiting program
    is enough: this kernel then completes after the previous kernel.
    """
    if needed | (tl.program_id(0) == 0):
        wait_for_previous_kernel(PDL)


@triton.jit
def softcap_scores(s, scale, softcap, EXACT: tl.constexpr, PTX: tl.constexpr):
    """softcap * tanh(s * scale / softcap), in base 2.

    NVIDIA GPUs (PTX) compute tanh in one instruction with a relative error of 2^-11. PyTorch rounds a 16-bit score by as much,
    and more than once. Elsewhere tanh(x) = 1 - 2 / (1 + exp(2x)), which saturates without overflow but cancels near 0: its
    error there, 6e-8 * softcap, is above the rounding of float32 inputs. EXACT, for float32, uses the Taylor series for
    |x| < 1/4, whose error is below 1e-8.
    """
    x = s * (scale / softcap)
    if PTX and not EXACT:
        fast = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return (softcap * LOG2E) * fast
    tanh = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    if EXACT:
        y = x * x
        series = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
        tanh = tl.where(tl.abs(x) < 0.25, series, tanh)
    return (softcap * LOG2E) * tanh


@triton.jit
def find_tile(tile, cu_q_ptr, batch, skip_q, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_BATCH: tl.constexpr):
    """-> the sequence of a tile of BLOCK_M packed rows, and the tile's place in it. Only sequences with more than skip_q
    queries have tiles.

    The last rows of a sequence, which see the most keys, come first. The sequence is `batch` when there are no more tiles.

    GROUPS:      rows per query
    BLOCK_BATCH: width of the prefix sum, at least `batch`
    """
    index = tl.arange(0, BLOCK_BATCH)
    live = index < batch
    q_len = tl.load(cu_q_ptr + index + 1, mask=live, other=0) - tl.load(cu_q_ptr + index, mask=live, other=0)
    tiles = tl.where(q_len > skip_q, (q_len * GROUPS + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(tiles, 0)
    seq = tl.sum((ends <= tile).to(tl.int32), 0)
    return tl.minimum(seq, batch), tl.sum(tl.where(index == seq, ends, 0), 0) - 1 - tile


@triton.jit
def first_visible(position, left, CHUNKED: tl.constexpr):
    """The first key that the query at this position may see: the start of its window, or of its chunk of `left` keys.

    It is negative or meaningless for a window that begins before the first key, and for a negative position.
    """
    if CHUNKED:
        return position // left * left
    return position - left


@triton.jit
def add_alibi(s, factor, slopes, distance):
    """Scores in base 2 with ALiBi's bias. `factor` turns s into base 2, `slopes` are in base 2, `distance` is signed."""
    return s * factor - slopes * tl.abs(distance).to(tl.float32)


@triton.jit
def window_keep(
    rows,
    cols,
    kv_len,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    CHUNKED: tl.constexpr = False,
):
    """Which keys each query sees. `rows` and `cols` broadcast to the shape of the scores, [BLOCK_M, BLOCK_N] or transposed.

    `rows` includes the bottom-right offset: query index + kv_len - q_len.
    """
    keep = cols < kv_len
    if HAS_RIGHT:
        keep = keep & (cols <= rows + window_right)
    if HAS_LEFT:
        keep = keep & (cols >= first_visible(rows, window_left, CHUNKED))
    return keep


@triton.jit
def online_softmax_update(s, factor, row_max, row_sum):
    """One step of the online softmax (FlashAttention, algorithm 1).

    -> p, the new maximum, the new sum, and the factor that rescales the output so far.

    s [BLOCK_M, BLOCK_N]: scores, -inf where hidden; `factor` > 0 turns them into base 2. row_max (base 2) and row_sum
    [BLOCK_M]. The factor is applied inside the exponent, where it is part of one fused multiply-add. The output stays unscaled
    until the end (FlashAttention-2, section 3.1.1).
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * factor - safe_max[:, None])
    alpha = tl.exp2(row_max - safe_max)
    return p, new_max, row_sum * alpha + tl.sum(p, 1), alpha


@triton.jit
def group_softmax(s, factor, row_max, row_sum):
    """`online_softmax_update` within a group of the tree (see `tree.plan`). The explicit fma make all kernels round alike.

    The maximum of a row follows its scores only when they exceed it by more than SCORE_GROWTH, as in FlashAttention-4, so that
    the output seldom has to be rescaled. Any number near the true maximum keeps the result exact.
    """
    new_max = tl.max(s, 1) * factor
    new_max = tl.where(new_max > row_max + SCORE_GROWTH, new_max, row_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(tl.fma(s, factor, -tl.expand_dims(safe_max, 1)))
    alpha = tl.exp2(row_max - safe_max)
    return p, new_max, tl.fma(row_sum, alpha, tl.sum(p, 1)), alpha


@triton.jit
def fold_rows(row_max, row_sum, group_max, group_sum):
    """Fold a group of the tree into the groups before it -> the new maximum and sum, and the factors of both outputs.

    A group in which a row sees no key, with a maximum of -inf and zeros, changes nothing.
    """
    new_max = tl.maximum(row_max, group_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    before = tl.exp2(row_max - safe_max)
    added = tl.exp2(group_max - safe_max)
    return new_max, tl.fma(group_sum, added, row_sum * before), before, added


@triton.jit
def fold_outputs(out, group_out, before, added):
    """Add the output of one more group to the output of the groups before it. before, added: see `fold_rows`, as columns."""
    return tl.fma(group_out, added, out * before)


@triton.jit
def softmax_update_by_columns(s, factor, row_max, row_sum):
    """`online_softmax_update` with keys as rows: s [BLOCK_N, BLOCK_M], row_max and row_sum [BLOCK_M]."""
    new_max = tl.maximum(row_max, tl.max(s, 0) * factor)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * factor - safe_max[None, :])
    alpha = tl.exp2(row_max - safe_max)
    return p, new_max, row_sum * alpha + tl.sum(p, 0), alpha


@triton.jit
def finish_softmax(row_max, row_sum):
    """-> 1 / row_sum and lse in natural units; a row that has seen no key gets 0 and -inf.

    The maximum identifies such a row, because a sum of emulated exponentials is not exactly 0 on every device.
    """
    live = row_max > float("-inf")
    row_sum = tl.where(live, row_sum, 1.0)
    inverse = tl.where(live, 1.0 / row_sum, 0.0)
    lse = tl.where(live, (row_max + tl.log2(row_sum)) * LN2, float("-inf"))
    return inverse, lse


@triton.jit
def clear_rows(out_ptr, lse_ptr, first, end, program, programs, num_heads, strides, rows, columns, DIM_V: tl.constexpr):
    """Clear the packed rows from `first` to `end`, which belong to no sequence: out becomes 0 and lse -inf.

    `programs` programs divide the rows of all heads among them. In most calls there is no such row, so a call pays for one
    comparison.

    strides:       of out by token and head, of lse by head
    rows, columns: indices of the rows and columns of the tile that is stored at a time. The caller passes them, so that a
                   kernel in Gluon can choose their layouts
    """
    stride_ot, stride_oh, stride_lh = strides
    total = (end - first) * num_heads
    for begin in range(program * rows.shape[0], total, programs * rows.shape[0]):
        slots = begin + rows
        live = slots < total
        token = (first + slots // num_heads).to(tl.int64)
        head = (slots % num_heads).to(tl.int64)
        cells = out_ptr + (token * stride_ot + head * stride_oh)[:, None] + columns[None, :]
        tl.store(cells, 0.0, mask=live[:, None] & (columns < DIM_V)[None, :])
        if lse_ptr is not None:
            tl.store(lse_ptr + head * stride_lh + token, float("-inf"), mask=live)


@triton.jit
def clear_rows_past_end(
    out_ptr, lse_ptr, first, end, program, programs, num_heads, strides, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """`clear_rows` in tiles of 2048 numbers, which need few registers."""
    rows = tl.arange(0, 2048 // BLOCK_DV)
    columns = tl.arange(0, BLOCK_DV)
    clear_rows(out_ptr, lse_ptr, first, end, program, programs, num_heads, strides, rows, columns, DIM_V)
