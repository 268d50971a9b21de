"""The product of one token with its adapter: the kernel of products/row.py, with the adapter in it.

    y = launch_row(x, weight, bias, weights, batch, norm, activation, residual, alpha)

**One launch**, for a product without a gate. The first programs multiply the token by A, each over one range of the columns,
and wait only for the previous kernel. The others multiply it by the rows of the weights, then wait for the first programs, and
add their result times B. GPUs start programs in the order of their numbers, so the programs that are waited for already run.
The next call of the same product counts only after all programs of this call have ended. So counters that only grow suffice,
and nothing is reset: each program that waits adds its share of a call to one counter, whose value tells it the number of the
call, and each program that multiplies by A adds its share to another. Source of this scheme: ops/collectives/primitives.py.

**Ahead**, two launches, for a gated product. `_shrink_token` multiplies the token by A: a program has a page of one part, and a
range of the columns. The product then loads that result and its rows of B before its loop over the weights, so that no program
waits for an adapter when its sums are done. An SM holds three programs of 8 rows at a time, and a gated product has nine such
waves of programs, each of which would wait. Other products have one or two waves, and waiting in these costs less than a
launch. Microseconds on one H200 for an 8B model, in one launch and ahead: gated 79.6 and 68.7, qkv 17.4 and 19.1, output 12.9
and 14.0, down 33.5 and 34.2. Left out: copying more weights to the L2 cache while the first launch runs, which took longer.

An adapter of more than 16 ranks has several pages. Up to PAGES_TOGETHER of them are read at once: by as many programs of A, and
in one load of B. If read one after the other, each page would wait for its number, then for B, then for the result of A.
"Ahead", only the first ones can be read before the loop over the weights, and the others are read together behind it.

Partial sums are always added in the same order. Left out: more tokens (product.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS, Run
from fa_serve.ops.elementwise.activation import ACTIVATION_KINDS, activate
from fa_serve.ops.lora.kernel import num_blocks, part_of_block, part_widths
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS, PAGE_RANKS, LoraBatch, LoraWeights
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.products.row import first_weights, multiply_row, store_product
from fa_serve.ops.products.run import problem_of
from fa_serve.ops.products.tiles import matrix_row_tile

PAGES_TOGETHER = 8
"""Pages of an adapter that are read at once: 128 ranks."""
PAGES_TOGETHER_AHEAD = 2
"""The same for "ahead", where registers hold B in the loop over the weights. With 4 pages, an SM has 2 programs, not 3."""
_CALL = tl.constexpr(1 << 20)
"""What all programs of a call together add to each counter: more than there are programs."""
COUNTERS = tl.constexpr(LORA_COUNTERS - 1)
COUNTER_STRIDE = tl.constexpr(COUNTER_WORDS)


class RowAdapter(NamedTuple):
    """The pointers that the programs read: fields of LoraWeights and LoraBatch, and the partial sums of A."""

    b: tl.tensor
    pages: tl.tensor
    num_pages: tl.tensor
    scales: tl.tensor
    ones: tl.tensor
    factors: tl.tensor
    shrunk: tl.tensor


@triton.jit
def _slot_of_token(tiles_ptr):
    """The slot of the token; -1 if it has no adapter."""
    return tl.where(tl.load(tiles_ptr + 2) > 0, tl.load(tiles_ptr), -1)


@triton.jit
def _part_of_a(
    a_ptr, given, slot, part, first, index, begin, num_pages, stride_a,
    K: tl.constexpr, STEPS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr,
    SHRINK_K: tl.constexpr,
):  # fmt: skip
    """[PAGE, SHRINK_K]: the columns of one step of a page of A; zeros past the last page.

    first: first page of a program, which has every TOGETHER-th page from there on. index: the step, counted over its pages
    """
    page = first + index // STEPS * TOGETHER
    used = page < num_pages
    number = tl.load(given.pages + slot * MAX_PAGES + page, mask=used, other=0).to(tl.int64)
    k = begin + index % STEPS * SHRINK_K + tl.arange(0, SHRINK_K)
    rows = a_ptr + number * stride_a + (part * PAGE + tl.arange(0, PAGE)[:, None]) * K + k[None, :]
    return tl.load(rows, mask=used & (k < K)[None, :], other=0.0)


@triton.jit
def _shrink_row(
    x_ptr, norm_ptr, a_ptr, given, counters_ptr, slot, program, offset, stride_a, stride_slot,
    K: tl.constexpr, PARTS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr, SHRINK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write shrunk (SPLITS, PARTS, MAX_PAGES, PAGE): a range of the columns of x times the pages of A of one part. Then signal
    that it is written."""
    STEPS: tl.constexpr = (K + SPLITS * SHRINK_K - 1) // (SPLITS * SHRINK_K)
    part = program // SPLITS % PARTS
    first = program // (SPLITS * PARTS)
    begin = program % SPLITS * STEPS * SHRINK_K
    scale = tl.load(given.scales + slot * stride_slot + part, mask=slot >= 0, other=0.0)
    num_pages = tl.where(scale != 0.0, tl.load(given.num_pages + slot, mask=slot >= 0, other=0), 0)
    a = _part_of_a(
        a_ptr, given, slot, part, first, 0, begin, num_pages, stride_a, K, STEPS, MAX_PAGES, PAGE, TOGETHER, SHRINK_K
    )
    wait_for_previous_kernel(PDL)
    acc = tl.zeros([PAGE, SHRINK_K], tl.float32)
    for index in tl.range(0, (num_pages - first + TOGETHER - 1) // TOGETHER * STEPS):
        next_a = _part_of_a(
            a_ptr, given, slot, part, first, index + 1, begin, num_pages, stride_a,
            K, STEPS, MAX_PAGES, PAGE, TOGETHER, SHRINK_K,
        )  # fmt: skip
        k = begin + index % STEPS * SHRINK_K + tl.arange(0, SHRINK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32) + offset
        acc += a.to(tl.float32) * x[None, :]
        a = next_a
        if index % STEPS == STEPS - 1:
            place = ((program % SPLITS * PARTS + part) * MAX_PAGES + first + index // STEPS * TOGETHER) * PAGE
            tl.store(given.shrunk + place + tl.arange(0, PAGE), tl.sum(acc, 1))
            acc = tl.zeros([PAGE, SHRINK_K], tl.float32)
    tl.debug_barrier()  # one thread signals for all
    share = tl.where(program == 0, _CALL + 1 - PARTS * SPLITS * TOGETHER, 1).to(tl.int64)
    tl.atomic_add(counters_ptr, share, sem="release")


@triton.jit
def count_share(counters_ptr, program, programs, PTX: tl.constexpr):
    """Add the share of a program that waits. Each of `programs` programs does so once in a call, after earlier calls have
    ended. Returns a tensor whose sum is the previous value of the counter. With PTX, nothing waits for it until it is used.

    The programs are divided among COUNTERS counters: thousands of additions to one address would take longer than the product.
    """
    group = program % COUNTERS
    members = (programs - group + COUNTERS - 1) // COUNTERS
    share = tl.where(program < COUNTERS, _CALL + 1 - members, 1).to(tl.int64)
    counter_ptr = counters_ptr + (group + 1) * COUNTER_STRIDE
    # one element for each thread of 4 warps, of which the first one adds
    first = tl.arange(0, 128) == 0
    if PTX:
        seen = tl.inline_asm_elementwise(
            """{
                .reg .pred %adds;
                setp.ne.s64 %adds, $2, 0;
                mov.u64 $0, 0;
                @%adds atom.relaxed.gpu.global.add.u64 $0, [$1], $2;
            }""",
            "=&l,l,l",
            [counter_ptr.to(tl.int64), tl.where(first, share, 0)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        seen = tl.atomic_add(counter_ptr + tl.arange(0, 128), share, mask=first, sem="relaxed")
        seen = tl.where(first, seen, 0)
    return seen


@triton.jit
def _load_acquired(counter_ptr, PTX: tl.constexpr):
    if PTX:
        value = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.u64 $0, [$1];", "=l,l", [counter_ptr.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        # an atomic that adds nothing is a load with acquire semantics
        value = tl.atomic_add(counter_ptr, 0, sem="acquire")
    return value


@triton.jit
def wait_for_shares(counters_ptr, seen, PTX: tl.constexpr):
    """Wait until all programs of this call that multiply by A have added their shares. seen: what `count_share` returned"""
    # calls do not overlap, so the shares of all earlier calls add up to a multiple of _CALL
    wanted = (tl.sum(seen, 0) // _CALL + 1) * _CALL
    done = _load_acquired(counters_ptr, PTX)
    while done < wanted:
        done = _load_acquired(counters_ptr, PTX)
    tl.debug_barrier()


@triton.jit
def _pages_from(given, slot, first, num_pages, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr):
    """The number of the page of each rank, and whether the adapter has that page: [TOGETHER * PAGE] for TOGETHER pages from
    `first` on, or a scalar for a single page."""
    pages = first
    if TOGETHER > 1:
        pages = first + tl.arange(0, TOGETHER * PAGE) // PAGE
    used = pages < num_pages
    return tl.load(given.pages + slot * MAX_PAGES + pages, mask=used, other=0), used


@triton.jit
def _rows_of_b(given, numbers, used, rows, keep, stride_b, N: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr):
    """[BLOCK_N, TOGETHER * PAGE]: columns `rows` of pages of B; zeros where not `keep` or, for several pages, not `used`."""
    ranks = tl.arange(0, TOGETHER * PAGE) % PAGE
    if TOGETHER == 1:
        places = given.b + numbers.to(tl.int64) * stride_b + ranks[None, :] * N + rows[:, None]
        b = tl.load(places, mask=keep[:, None], other=0.0)
    else:
        places = given.b + (numbers.to(tl.int64) * stride_b + ranks * N)[None, :] + rows[:, None]
        b = tl.load(places, mask=keep[:, None] & used[None, :], other=0.0)
    return b


@triton.jit
def _numbers_of(given, slot, part, stride_slot):
    """Scale, rank of the bias and rank of the factor of a part, for `_add_adapter`."""
    has = slot >= 0
    place = slot * stride_slot + part
    scale = tl.load(given.scales + place, mask=has, other=0.0)
    return scale, tl.load(given.ones + place, mask=has, other=-1), tl.load(given.factors + place, mask=has, other=-1)


@triton.jit
def _sums_of_a(
    given,
    part,
    first,
    used,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """[SPLITS, TOGETHER * PAGE]: partial sums of pages of A, by range of columns; arbitrary for a part without an adapter."""
    ranks = tl.arange(0, TOGETHER * PAGE)
    places = ((tl.arange(0, SPLITS)[:, None] * PARTS + part) * MAX_PAGES + first) * PAGE + ranks[None, :]
    # in one launch, other programs write them after this one has begun, so they are read from the L2 cache, not from L1
    CACHE: tl.constexpr = "" if AHEAD else ".cg"
    if TOGETHER == 1:
        u = tl.load(given.shrunk + places, cache_modifier=CACHE)
    else:  # no program writes the sums of a page that the adapter lacks
        u = tl.load(given.shrunk + places, mask=used[None, :], other=0.0, cache_modifier=CACHE)
    return u


@triton.jit
def _product_of_pages(u, b, first, scale, one, root, PAGE: tl.constexpr, TOGETHER: tl.constexpr):
    """[BLOCK_N]: what pages from `first` on add to the product. u, b: their sums of A, and B"""
    ranks = first * PAGE + tl.arange(0, TOGETHER * PAGE)
    of_pages = tl.where(ranks == one, 1.0, tl.sum(u, 0) * root) * scale
    # for a part that the adapter does not change, memory may hold anything
    return tl.sum(tl.where(scale != 0.0, of_pages[None, :] * b.to(tl.float32), 0.0), 1)


@triton.jit
def _add_adapter(
    y, u, b, num_pages, given, slot, part, rows, keep, root, stride_b, stride_slot,
    N: tl.constexpr, PARTS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr,
    REST: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y plus the adapter, [BLOCK_N]. root: the norm's factor, for the sums of A; u, b: sums of A and B of the first pages

    TOGETHER: pages in u and b; REST: of the pages behind them, as many are read at once
    """
    scale, one, factor = _numbers_of(given, slot, part, stride_slot)
    delta = tl.zeros([BLOCK_N], tl.float32)
    # a loop instead of an `if`, with which the compiler takes 240 registers for one page of a gated product
    for first in tl.range(0, tl.minimum(num_pages, TOGETHER), TOGETHER, num_stages=1):
        delta += _product_of_pages(u, b, first, scale, one, root, PAGE, TOGETHER)
    if MAX_PAGES > TOGETHER:  # most adapters have one page
        for first in tl.range(TOGETHER, num_pages, REST, num_stages=1):
            numbers, used = _pages_from(given, slot, first, num_pages, MAX_PAGES, PAGE, REST)
            more_b = _rows_of_b(given, numbers, used, rows, keep, stride_b, N, PAGE, REST)
            more_u = _sums_of_a(given, part, first, used, PARTS, MAX_PAGES, PAGE, REST, SPLITS, AHEAD)
            delta += _product_of_pages(more_u, more_b, first, scale, one, root, PAGE, REST)
    if factor >= 0:
        number = tl.load(given.pages + slot * MAX_PAGES + factor // PAGE).to(tl.int64)
        places = given.b + number * stride_b + (factor % PAGE) * N + rows
        delta += y * tl.load(places, mask=keep, other=0.0).to(tl.float32)
    return y + delta


@triton.jit
def _shrink_token(
    x_ptr,
    norm_ptr,
    a_ptr,
    tiles_ptr,
    pages_ptr,
    num_pages_ptr,
    scales_ptr,
    shrunk_ptr,
    offset,
    stride_a,
    stride_slot,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHRINK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write shrunk (SPLITS, PARTS, MAX_PAGES, PAGE): token times A. A program has a page of one part and a range of columns."""
    STEPS: tl.constexpr = (K + SPLITS * SHRINK_K - 1) // (SPLITS * SHRINK_K)
    program = tl.program_id(0)
    split = program % SPLITS
    part = program // SPLITS % PARTS
    page = program // (SPLITS * PARTS)
    slot = _slot_of_token(tiles_ptr)
    has = slot >= 0
    number = tl.load(pages_ptr + slot * MAX_PAGES + page, mask=has, other=0).to(tl.int64)
    used = page < tl.load(num_pages_ptr + slot, mask=has, other=0)
    used = used & (tl.load(scales_ptr + slot * stride_slot + part, mask=has, other=0.0) != 0.0)
    ranks = tl.arange(0, PAGE)
    rows = a_ptr + number * stride_a + (part * PAGE + ranks[:, None]) * K
    k = split * STEPS * SHRINK_K + tl.arange(0, SHRINK_K)
    # no kernel of a step writes adapters, so they are loaded before the previous kernel ends
    a = tl.load(rows + k[None, :], mask=used & (k < K)[None, :], other=0.0)
    wait_for_previous_kernel(PDL)
    acc = tl.zeros([PAGE, SHRINK_K], tl.float32)
    for step in tl.static_range(STEPS):
        if step > 0:
            k += SHRINK_K
            a = tl.load(rows + k[None, :], mask=used & (k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + k, mask=used & (k < K), other=0.0).to(tl.float32)
        if norm_ptr is not None:
            x *= tl.load(norm_ptr + k, mask=used & (k < K), other=0.0).to(tl.float32) + offset
        acc += a.to(tl.float32) * x[None, :]
    place = ((split * PARTS + part) * MAX_PAGES + page) * PAGE
    tl.store(shrunk_ptr + place + ranks, tl.sum(acc, 1), mask=used & (ranks >= 0))


@triton.jit
def _adapted_row(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    a_ptr,
    b_ptr,
    tiles_ptr,
    pages_ptr,
    num_pages_ptr,
    scales_ptr,
    ones_ptr,
    factors_ptr,
    counters_ptr,
    shrunk_ptr,
    eps,
    offset,
    alpha,
    stride_a,
    stride_b,
    stride_slot,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    N3: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    TOGETHER: tl.constexpr,
    REST: tl.constexpr,
    SPLITS: tl.constexpr,
    SHRINK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    PTX: tl.constexpr,
):
    """A program computes BLOCK_N elements of the output, within one part; the parts have N0, N1, N2 and N3 columns. Unless
    AHEAD, PARTS * SPLITS * TOGETHER other programs come first, which multiply by A.

    GATED: as in products/row.py; half of the columns of the product are outputs
    """
    N: tl.constexpr = N0 + N1 + N2 + N3
    OUT: tl.constexpr = N // 2 if GATED else N
    BLOCKS: tl.constexpr = num_blocks(OUT, 0, 0, 0, BLOCK_N) if GATED else num_blocks(N0, N1, N2, N3, BLOCK_N)
    SHRINKS: tl.constexpr = 0 if AHEAD else PARTS * SPLITS * TOGETHER
    given = RowAdapter(b_ptr, pages_ptr, num_pages_ptr, scales_ptr, ones_ptr, factors_ptr, shrunk_ptr)
    program = tl.program_id(0)
    if program < SHRINKS:
        slot = _slot_of_token(tiles_ptr)
        _shrink_row(
            x_ptr, norm_ptr, a_ptr, given, counters_ptr, slot, program, offset, stride_a, stride_slot,
            K, PARTS, MAX_PAGES, PAGE, TOGETHER, SPLITS, SHRINK_K, PDL,
        )  # fmt: skip
    else:
        program -= SHRINKS
        part = 0
        begin = program * BLOCK_N
        end = OUT
        if not GATED:
            part, begin, end = part_of_block(program, N0, N1, N2, N3, BLOCK_N)
        rows = begin + tl.arange(0, BLOCK_N)
        keep = rows < end
        w, w_up = first_weights(w_ptr, rows, OUT, K, GATED, BLOCK_N, BLOCK_K)
        tl.debug_barrier()  # so that the compiler requests the weights first
        slot = _slot_of_token(tiles_ptr)
        first_count = 1
        if TOGETHER > 1:
            first_count = tl.load(num_pages_ptr + slot, mask=slot >= 0, other=0)
        numbers, used = _pages_from(given, slot, 0, tl.where(slot >= 0, first_count, 0), MAX_PAGES, PAGE, TOGETHER)
        has = keep & (slot >= 0)
        if not AHEAD:
            wait_for_previous_kernel(PDL)
            seen = count_share(counters_ptr, program, BLOCKS, PTX)
            y, up, root = multiply_row(x_ptr, w_ptr, norm_ptr, w, w_up, rows, eps, offset, OUT, K, GATED, BLOCK_N, BLOCK_K)
        # B is requested before the program waits for A
        b = _rows_of_b(given, numbers, used, rows, has, stride_b, N, PAGE, TOGETHER)
        b_up = b
        if GATED:
            b_up = _rows_of_b(given, numbers, used, OUT + rows, has, stride_b, N, PAGE, TOGETHER)
        if AHEAD:
            wait_for_previous_kernel(PDL)
        elif slot >= 0:
            wait_for_shares(counters_ptr, seen, PTX)
        u = _sums_of_a(given, part, 0, used, PARTS, MAX_PAGES, PAGE, TOGETHER, SPLITS, AHEAD)
        u_up = u
        if GATED:
            u_up = _sums_of_a(given, PARTS - 1, 0, used, PARTS, MAX_PAGES, PAGE, TOGETHER, SPLITS, AHEAD)
        if AHEAD:
            y, up, root = multiply_row(x_ptr, w_ptr, norm_ptr, w, w_up, rows, eps, offset, OUT, K, GATED, BLOCK_N, BLOCK_K)
            slot = _slot_of_token(tiles_ptr)  # loaded again: that saves a register in the loop
            has = keep & (slot >= 0)
        num_pages = tl.load(num_pages_ptr + slot, mask=slot >= 0, other=0)
        y = _add_adapter(
            y * root, u, b, num_pages, given, slot, part, rows, has, root, stride_b, stride_slot,
            N, PARTS, MAX_PAGES, PAGE, TOGETHER, REST, SPLITS, BLOCK_N, AHEAD,
        )  # fmt: skip
        if bias_ptr is not None:
            y += tl.load(bias_ptr + rows, mask=keep, other=0.0).to(tl.float32)
        if GATED:
            up = _add_adapter(
                up * root, u_up, b_up, num_pages, given, slot, PARTS - 1, OUT + rows, has, root, stride_b, stride_slot,
                N, PARTS, MAX_PAGES, PAGE, TOGETHER, REST, SPLITS, BLOCK_N, AHEAD,
            )  # fmt: skip
            if bias_ptr is not None:
                up += tl.load(bias_ptr + OUT + rows, mask=keep, other=0.0).to(tl.float32)
            y = activate(y, KIND) * up
        store_product(y, out_ptr, residual_ptr, alpha, rows, keep)


def shrink_splits(k: int) -> int:
    """The number of ranges of about 512 columns into which the product of x with A is split: at most 32."""
    return min(32, power_of_2(max(1, k // 512)))


def launch_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weights: LoraWeights,
    batch: LoraBatch,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.linear_lora`, for one token that run.py lets through. Two launches with a
    gate, one launch without."""
    key = (
        "lora_row",
        x.dtype,
        weight.shape,
        weights.a.stride(0),
        weights.b.stride(0),
        weights.scales.stride(0),
        weights.widths,
        batch.pages.shape,
        None if norm is None else (norm.weight.dtype, norm.eps, norm.offset),
        activation,
        alpha,
        None if bias is None else bias.dtype,
        residual is None,
        x.get_device(),
    )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, plan_lora_row(x, weight, weights, batch, norm, activation, alpha))
    y: Tensor = run(x, weight, bias, weights, batch, norm, residual)
    return y


def plan_lora_row(
    x: Tensor,
    weight: Tensor,
    weights: LoraWeights,
    batch: LoraBatch,
    norm: Norm | None,
    activation: str | None,
    alpha: float,
    ahead: bool | None = None,
) -> Run:
    """The launches for calls that look like this one. ahead: overrides the choice, for tuning and tests"""
    product = problem_of(x, weight, gated=activation is not None)
    tile = matrix_row_tile(product)
    k = product.k
    parts = len(weights.widths)
    max_pages = batch.pages.shape[1]
    splits = shrink_splits(k)
    outputs = product.outputs
    if ahead is None:
        ahead = activation is not None
    widths = part_widths(weights)
    together = min(PAGES_TOGETHER_AHEAD if ahead else PAGES_TOGETHER, power_of_2(max_pages))
    rest = min(PAGES_TOGETHER, power_of_2(max(1, max_pages - together)))
    columns = min(512 if ahead else 256, power_of_2(k))
    offset = 0.0 if norm is None else float(norm.offset)
    pdl = product.is_programmatic
    strides = (weights.a.stride(0), weights.b.stride(0), weights.scales.stride(0))
    multiply = Launch(
        _adapted_row,
        (0 if ahead else parts * splits * together)
        + (triton.cdiv(outputs, tile.block_n) if activation else num_blocks(*widths, tile.block_n)),
        varying=(0.0 if norm is None else norm.eps, offset, float(alpha)),
        strides=strides,
        fixed=(
            *widths,
            k,
            product.gated,
            ACTIVATION_KINDS[activation or "silu"],
            *(parts, max_pages, PAGE_RANKS, together, rest, splits, columns),
            *tile,
            ahead,
            pdl,
            product.arch > 0,
        ),
        options=launch_options(pdl, 4),
    )
    shrink = Launch(
        _shrink_token,
        parts * splits * max_pages,
        varying=(offset,),
        strides=(strides[0], strides[2]),
        fixed=(k, parts, max_pages, PAGE_RANKS, splits, columns, pdl),
        options=launch_options(pdl, 8),
    )

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: LoraWeights,
        batch: LoraBatch,
        norm: Norm | None,
        residual: Tensor | None,
    ) -> Tensor:
        shrunk = x.new_empty(splits * parts * max_pages * PAGE_RANKS, dtype=torch.float32)
        out = x.new_empty(1, outputs) if residual is None else residual
        norm_weight = None if norm is None else norm.weight
        places = (batch.tiles, batch.pages, batch.num_pages, weights.scales)
        if ahead:
            shrink((x, norm_weight, weights.a, *places, shrunk))
        numbers = (weights.ones, weights.factors, weights.counters)
        multiply((x, weight, norm_weight, bias, residual, out, weights.a, weights.b, *places, *numbers, shrunk))
        return out

    return run
