"""The sampling kernel: the maximum of each row, or a draw under temperature, top_k, top_p and min_p without sorting.

One program samples one row. A draw is an exponential race (`exponential_race.py`) of the weights
w = exp((x - max) / temperature).

The limits keep the first tokens of one order: larger logits come first, and of equal logits the one with the lower id. Where
the kept tokens end is described by a logit and an id: tokens with larger logits are kept, and those with that logit up to that
id.

- top_p is applied by rejection. A drawn token belongs to the nucleus if less than top_p of the mass comes before it. If it does
  not, no token after it belongs to the nucleus either, and the draw is repeated among the tokens before it. The check of each
  draw costs one pass over the row, which lies in the L2 cache; about 1 - top_p of the rows need a second draw.
- top_k is turned into a logit by a search over the bits of the logits, with three bounds per pass. If more than k tokens reach
  that logit, the ties are counted for each block, and running sums of the counts give the id.

Every row is computed in the same order in any batch, and its random numbers are a hash of its key. This module leaves out
penalties, biases and masks, which change logits before they arrive here (`engine/sampler.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import LOG2E, wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS
from fa_serve.ops.sampling.exponential_race import BLOCK, GOLDEN, MIX1, MIX2

_ROWS = 32  # blocks in one tile: 16 logits for each of 512 threads
_MAX_VOCAB = 1023 * _ROWS * BLOCK
"""The most logits of a row: each place of a tile counts in 10 bits."""
_GOLDEN = tl.constexpr(GOLDEN)
_MIX1 = tl.constexpr(MIX1)
_MIX2 = tl.constexpr(MIX2)


@triton.jit
def _exponentials(key, index):
    """Random number `index` of a 64-bit key, drawn from Exp(1): positive and finite."""
    x = key + (index + 1).to(tl.uint64) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX1
    x = (x ^ (x >> 27)) * _MIX2
    uniform = (((x >> 32) ^ (x >> 63)).to(tl.float32) + 0.5) * (2.0**-32)
    u = tl.minimum(uniform, 1.0 - 2.0**-24)
    # the smallest numbers decide the race, so near 0 the series of log(1 - u) gives them in fine steps
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.015625, series, -tl.log(1.0 - u))


@triton.jit
def _tile(row_ptr, start, vocab, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK]: the logits from index `start` on, -inf beyond the vocabulary."""
    cols = start + tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _order(x):
    """Integers that compare like the floats x; both zeros give the same integer."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return (bits ^ (sign & 0x7FFFFFFF)) - sign


@triton.jit
def _logit_of(order):
    """The inverse of `_order`. Passes over a row compare floats, because the order of a logit takes three instructions."""
    return tl.where(order < 0, 0 - order | -0x80000000, order).to(tl.float32, bitcast=True)


@triton.jit
def _is_kept(x, cols, limit, last):
    """Whether the tokens `cols`, whose logits are x, are kept: those above `limit`, and its equals up to the id `last`."""
    return (x > limit) | ((x == limit) & (cols <= last))


@triton.jit
def _kth_largest(row_ptr, best, k, vocab, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The limit of the first k tokens, as an integer of `_order`, and how many of the logits equal to it belong to the first k.

    All larger logits belong to the first k.
    """
    # the low bits that are always 0 for float16 and bfloat16 are not searched
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    SHIFT: tl.constexpr = 16 if dtype == tl.bfloat16 else 13 if dtype == tl.float16 else 0
    low = (_order(best * 0 - float("inf")) >> SHIFT).to(tl.int64)
    high = (_order(best) >> SHIFT).to(tl.int64)
    above = k * 0
    exact = k < 0
    first = True
    # invariant: at least k logits are >= low, and `above` of them, which are fewer than k, are > high
    while low < high:
        # Each pass counts the logits that reach three bounds, all above low. In the first pass the bounds are close to the
        # maximum, where the threshold of a small k lies; afterwards they are equally spaced.
        step = (high - low + 3) // 4
        b1 = tl.maximum(tl.where(first, high - (16384 << (16 - SHIFT)), low + step), low + 1)
        b2 = tl.maximum(tl.where(first, high - (1024 << (16 - SHIFT)), tl.minimum(low + 2 * step, high)), low + 1)
        b3 = tl.maximum(tl.where(first, high - (64 << (16 - SHIFT)), tl.minimum(low + 3 * step, high)), low + 1)
        first = False
        x1 = _logit_of((b1 << SHIFT).to(tl.int32))
        x2 = _logit_of((b2 << SHIFT).to(tl.int32))
        x3 = _logit_of((b3 << SHIFT).to(tl.int32))
        n = tl.zeros([ROWS, BLOCK], tl.int32)  # three counts of 10 bits; the bounds ascend
        for start in range(0, vocab, ROWS * BLOCK):
            x = _tile(row_ptr, start, vocab, ROWS, BLOCK)
            n += tl.where(x >= x3, 0x100401, tl.where(x >= x2, 0x401, tl.where(x >= x1, 1, 0)))
        c1 = tl.sum(tl.sum(n & 1023, 1), 0)
        c2 = tl.sum(tl.sum(n >> 10 & 1023, 1), 0)
        c3 = tl.sum(tl.sum(n >> 20, 1), 0)
        new_low = tl.where(c3 >= k, b3, tl.where(c2 >= k, b2, tl.where(c1 >= k, b1, low)))
        new_high = tl.where(c1 < k, b1 - 1, tl.where(c2 < k, b2 - 1, tl.where(c3 < k, b3 - 1, high)))
        above = tl.where(c1 < k, c1, tl.where(c2 < k, c2, tl.where(c3 < k, c3, above)))
        exact = tl.where(c3 >= k, c3, tl.where(c2 >= k, c2, c1)) == k
        low = new_low
        high = tl.where(exact, new_low, new_high)
    limit = (low << SHIFT).to(tl.int32)
    # if exactly k logits are >= low, all of them are kept, and ids decide nothing
    return tl.where(exact, limit - 1, limit), tl.where(exact, 0, k - above).to(tl.int32)


@triton.jit(do_not_specialize=["vocab", "blocks"])
def _sample_rows(
    logits_ptr,
    key_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    sums_ptr,
    slot_ptr,
    last_ptr,
    token_ptr,
    vocab,
    blocks,
    stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """sums: float32, scratch memory for the weight of each block: (n, blocks). With top_k it is (n, 2, blocks), and the second
    row is for the number of tokens in each block that tie with the k-th. ALL_BLOCKS: a power of two, at least `blocks`
    """
    wait_for_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    inside = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    largest = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    at = inside
    for start in tl.range(0, vocab, ROWS * BLOCK, loop_unroll_factor=2):
        x = _tile(row_ptr, start, vocab, ROWS, BLOCK)
        at = tl.where(x > largest, start + inside, at)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    best = tl.max(tl.max(largest, 1), 0)
    token = tl.min(tl.min(tl.where(largest == best, at, 0x7FFFFFFF), 1), 0)
    broken = tl.max(tl.max((largest != largest).to(tl.int32), 1), 0)
    finite = (broken == 0) & (tl.abs(best) < float("inf"))

    temperature = 0.0
    if key_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    if key_ptr is not None and finite & (temperature > 0):
        key = tl.load(key_ptr + row).to(tl.uint64, bitcast=True)
        factor = LOG2E / temperature
        sums_ptr += row * blocks * (1 if top_k_ptr is None else 2)
        b = tl.arange(0, ALL_BLOCKS)
        j = tl.arange(0, BLOCK)
        lowest = _order(best * 0 - float("inf"))  # the limit of top_k
        num_tied = 0
        last = -1
        if top_k_ptr is not None:
            k = tl.load(top_k_ptr + row)
            if k < vocab:
                lowest, num_tied = _kth_largest(row_ptr, best, k, vocab, ROWS, BLOCK)
        limit = lowest  # of top_k and min_p
        if min_p_ptr is not None:
            min_p = tl.load(min_p_ptr + row)
            if min_p > 0:
                # the score log(min_p) on the scale of the logits; the maximum is always kept
                limit = tl.maximum(lowest, _order(tl.minimum(best + temperature * tl.log(min_p), best)) - 1)
        ends_at_ties = limit == lowest
        lowest = _logit_of(lowest)
        limit = _logit_of(limit)
        partial = tl.zeros([ROWS], tl.float32)
        for start in range(0, vocab, ROWS * BLOCK):
            x = _tile(row_ptr, start, vocab, ROWS, BLOCK)
            w = tl.where(x > lowest, tl.exp2((x - best) * factor), 0.0)
            partial += tl.sum(w, 1)
            part = tl.sum(tl.where(x > limit, w, 0.0), 1)
            block = start // BLOCK + tl.arange(0, ROWS)
            tl.store(sums_ptr + block, part, mask=block < blocks)
            if top_k_ptr is not None:
                tl.store(sums_ptr + blocks + block, tl.sum((x == lowest).to(tl.float32), 1), mask=block < blocks)
        mass = tl.sum(partial, 0)
        if top_k_ptr is not None and num_tied > 0:
            tl.debug_barrier()
            ties = tl.load(sums_ptr + blocks + b, mask=b < blocks, other=0.0)
            before = tl.cumsum(ties, 0) - ties
            # the block with the last tie that is kept
            last_block = tl.max(tl.where((before < num_tied) & (ties > 0), b, 0), 0)
            ids = last_block * BLOCK + j
            z = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            is_tie = (z == lowest) & (ids < vocab)
            weight = tl.max(tl.where(is_tie, tl.exp2((z - best) * factor), 0.0), 0)
            mass += num_tied * weight
            if ends_at_ties:
                places = tl.sum(tl.where(b == last_block, before, 0.0), 0) + tl.cumsum(is_tie.to(tl.int32), 0)
                last = tl.max(tl.where(is_tie & (places <= num_tied), ids, -1), 0)
                larger = tl.load(sums_ptr + b, mask=b < blocks, other=0.0)
                kept = tl.minimum(tl.maximum(num_tied - before, 0.0), ties)
                tl.debug_barrier()
                tl.store(sums_ptr + b, larger + kept * weight, mask=b < blocks)
        enough = float("inf")
        if top_p_ptr is not None:
            top_p = tl.load(top_p_ptr + row)
            enough = tl.where(top_p < 1.0, top_p * mass, enough)

        drawn = 0
        searching = True
        while searching:
            tl.debug_barrier()  # makes the stores of the other threads visible
            sums = tl.load(sums_ptr + b, mask=b < blocks, other=0.0)
            race = tl.where(b < blocks, sums / _exponentials(key, drawn + b), -1.0)
            drawn_block = tl.argmax(race, 0)
            cols = drawn_block * BLOCK + j
            y = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
            weights = tl.where(_is_kept(y, cols, limit, last), tl.exp2((y - best) * factor), 0.0)
            winner = tl.argmax(tl.where(cols < vocab, weights / _exponentials(key, drawn + blocks + j), -1.0), 0)
            token = drawn_block * BLOCK + winner
            drawn += blocks + BLOCK
            searching = False
            if enough < float("inf"):
                # the next draw is among the tokens before this one
                limit = tl.max(tl.where(j == winner, y, float("-inf")), 0)
                last = token - 1
                # Logits equal to the limit are kept in all blocks before the drawn one and in none after it, so the pass
                # compares the logits of a block with one bound. Ids decide only in the drawn block.
                lower = _logit_of(_order(limit) - 1)
                ties = tl.sum(tl.where((y == limit) & (cols <= last), weights, 0.0), 0)
                above = tl.zeros([ROWS], tl.float32)
                tl.debug_barrier()
                for start in range(0, vocab, ROWS * BLOCK):
                    x = _tile(row_ptr, start, vocab, ROWS, BLOCK)
                    w = tl.exp2((x - best) * factor)
                    block = start // BLOCK + tl.arange(0, ROWS)
                    bound = tl.where(block < drawn_block, lower, limit)
                    part = tl.sum(tl.where(x > bound[:, None], w, 0.0), 1) + tl.where(block == drawn_block, ties, 0.0)
                    above += part
                    tl.store(sums_ptr + block, part, mask=block < blocks)
                total = tl.sum(above, 0)
                searching = (total >= enough) & (total > 0)
    token = tl.where(finite, token, -1)
    tl.store(token_ptr + row, token.to(tl.int64))
    if last_ptr is not None:
        tl.store(last_ptr + tl.load(slot_ptr + row), tl.maximum(token, 0).to(tl.int64))


def launch_sample_rows(
    logits: Tensor,
    keys: Tensor | None,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    slots: Tensor | None,
    last_tokens: Tensor | None,
    largest_top_k: int | None,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.sample_rows`. One launch. `largest_top_k` is not needed."""
    n, vocab = logits.shape
    assert vocab <= _MAX_VOCAB
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    sums = None
    if keys is not None:
        rows = 1 if top_k is None else 2
        sums = torch.empty(n, rows, -(-vocab // BLOCK), dtype=torch.float32, device=logits.device)
    tensors = (logits, keys, temperature, top_k, top_p, min_p, sums, slots, last_tokens, tokens)
    key = (
        "sample_rows",
        logits.shape,
        logits.stride(0),
        logits.get_device(),
        *[None if x is None else x.dtype for x in tensors],
    )
    run = PLANS.get(key)
    if run is None:
        if n == 0:
            return tokens
        run = PLANS.add(key, _plan(logits))
    run(tensors)
    return tokens


def _plan(logits: Tensor) -> Launch:
    n, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    pdl = spec.has_programmatic_launch(spec.arch_of(logits.device))
    return Launch(
        _sample_rows,
        n,
        varying=(vocab, blocks),
        fixed=(logits.stride(0), _ROWS, BLOCK, power_of_2(blocks), pdl),
        options=launch_options(pdl, 16),
    )
