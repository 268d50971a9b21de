"""The product of one token with its adapter in one launch: that of products/row.py, with the adapter in it.

    y = launch_row(x, weight, bias, weights, batch, norm, activation, residual, alpha)

The first programs multiply the token by A, each one range of the columns, and wait for nothing but the previous kernel. The
others multiply it by the rows of the weights, as products/row.py does, then wait for the first ones, and add what A gave times
B. GPUs start programs in the order of their numbers, so those that are waited for run.

A call ends when all of its programs have, and the next call of the same product counts after that. So numbers in memory that
only grow are enough, and nothing is reset: each program that waits adds its share of a call to a counter, which tells it the
number of the call, and each program that multiplies by A adds its share to another one. All partial sums are added in the same
order. Source of the count: ops/collectives/primitives.py. Left out: more tokens (product.py).
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
from fa_serve.ops.lora.kernel import MAX_PARTS
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS, PAGE_RANKS, LoraBatch, LoraWeights
from fa_serve.ops.ops_backend import Norm
from fa_serve.ops.products.row import first_weights, multiply_row, store_product
from fa_serve.ops.products.run import problem_of
from fa_serve.ops.products.tiles import matrix_row_tile

_CALL = tl.constexpr(1 << 20)
"""What a call adds to each counter, more than it has programs."""
COUNTERS = tl.constexpr(LORA_COUNTERS - 1)
COUNTER_STRIDE = tl.constexpr(COUNTER_WORDS)


class RowAdapter(NamedTuple):
    """Pointers that the programs read, of LoraWeights and LoraBatch, and the partial sums of A."""

    b: tl.tensor
    pages: tl.tensor
    num_pages: tl.tensor
    scales: tl.tensor
    ones: tl.tensor
    factors: tl.tensor
    shrunk: tl.tensor


@triton.jit
def _slot_of_token(tiles_ptr):
    """-1 for a token without an adapter."""
    return tl.where(tl.load(tiles_ptr + 2) > 0, tl.load(tiles_ptr), -1)


@triton.jit
def _part_of_a(
    a_ptr, given, slot, part, index, begin, num_pages, stride_a,
    K: tl.constexpr, STEPS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, SHRINK_K: tl.constexpr,
):  # fmt: skip
    """[PAGE, SHRINK_K]: a page of A, and the columns of a step; zeros behind the last page. index: page * STEPS + step"""
    page = index // STEPS
    used = page < num_pages
    number = tl.load(given.pages + slot * MAX_PAGES + page, mask=used, other=0).to(tl.int64)
    k = begin + index % STEPS * SHRINK_K + tl.arange(0, SHRINK_K)
    rows = a_ptr + number * stride_a + (part * PAGE + tl.arange(0, PAGE)[:, None]) * K + k[None, :]
    return tl.load(rows, mask=used & (k < K)[None, :], other=0.0)


@triton.jit
def _shrink_row(
    x_ptr, norm_ptr, a_ptr, given, counters_ptr, slot, program, offset, stride_a, stride_slot,
    K: tl.constexpr, PARTS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    SHRINK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """shrunk (SPLITS, PARTS, MAX_PAGES, PAGE): a range of the columns of x with A of one part. Then say that it is there."""
    STEPS: tl.constexpr = (K + SPLITS * SHRINK_K - 1) // (SPLITS * SHRINK_K)
    part = program // SPLITS
    begin = program % SPLITS * STEPS * SHRINK_K
    scale = tl.load(given.scales + slot * stride_slot + part, mask=slot >= 0, other=0.0)
    num_pages = tl.where(scale != 0.0, tl.load(given.num_pages + slot, mask=slot >= 0, other=0), 0)
    a = _part_of_a(a_ptr, given, slot, part, 0, begin, num_pages, stride_a, K, STEPS, MAX_PAGES, PAGE, SHRINK_K)
    wait_for_previous_kernel(PDL)
    acc = tl.zeros([PAGE, SHRINK_K], tl.float32)
    for index in tl.range(0, num_pages * STEPS):
        next_a = _part_of_a(
            a_ptr, given, slot, part, index + 1, begin, num_pages, stride_a, K, STEPS, MAX_PAGES, PAGE, SHRINK_K
        )
        k = begin + index % STEPS * SHRINK_K + tl.arange(0, SHRINK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            x *= tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32) + offset
        acc += a.to(tl.float32) * x[None, :]
        a = next_a
        if index % STEPS == STEPS - 1:
            place = ((program % SPLITS * PARTS + part) * MAX_PAGES + index // STEPS) * PAGE
            tl.store(given.shrunk + place + tl.arange(0, PAGE), tl.sum(acc, 1))
            acc = tl.zeros([PAGE, SHRINK_K], tl.float32)
    tl.debug_barrier()  # one thread speaks for all
    share = tl.where(program == 0, _CALL + 1 - PARTS * SPLITS, 1).to(tl.int64)
    tl.atomic_add(counters_ptr, share, sem="release")


@triton.jit
def count_share(counters_ptr, program, programs, PTX: tl.constexpr):
    """Add the share of a program that waits; each of `programs` programs does so once in a call, after the calls before have
    ended. Returns a tensor whose sum is what was there before. With PTX nothing waits for it until it is used.

    Programs count in COUNTERS groups: thousands that add to one address would take longer than the product.
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
    """Wait until all programs that multiply by A have said so in this call. seen: what `count_share` returned"""
    # calls do not overlap, so the shares of those before add up to a multiple of _CALL
    wanted = (tl.sum(seen, 0) // _CALL + 1) * _CALL
    done = _load_acquired(counters_ptr, PTX)
    while done < wanted:
        done = _load_acquired(counters_ptr, PTX)
    tl.debug_barrier()


@triton.jit
def _rows_of_b(b_ptr, number, rows, keep, stride_b, N: tl.constexpr, PAGE: tl.constexpr):
    """[BLOCK_N, PAGE]: the columns `rows` of a page; zeros where `keep` is not."""
    places = b_ptr + number.to(tl.int64) * stride_b + tl.arange(0, PAGE)[None, :] * N + rows[:, None]
    return tl.load(places, mask=keep[:, None], other=0.0)


@triton.jit
def _numbers_of(given, slot, part, has, stride_slot):
    """Scale, rank of the bias and rank of the factor of each element that has an adapter, for `_add_adapter`."""
    places = slot * stride_slot + part
    scale = tl.load(given.scales + places, mask=has, other=0.0)
    return scale, tl.load(given.ones + places, mask=has, other=-1), tl.load(given.factors + places, mask=has, other=-1)


@triton.jit
def _add_adapter(
    y, b, numbers, num_pages, given, slot, part, rows, keep, root, stride_b,
    N: tl.constexpr, PARTS: tl.constexpr, MAX_PAGES: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y with the adapter, [BLOCK_N]. part: of each element; root: by which what A gave is multiplied; b: the first page of B"""
    scale, one, factor = numbers
    ranks = tl.arange(0, PAGE)
    delta = tl.zeros([BLOCK_N], tl.float32)
    for page in tl.range(0, num_pages, num_stages=1):
        if page > 0:
            b = _rows_of_b(given.b, tl.load(given.pages + slot * MAX_PAGES + page), rows, keep, stride_b, N, PAGE)
        u = tl.zeros([BLOCK_N, PAGE], tl.float32)
        for split in tl.static_range(SPLITS):
            places = ((split * PARTS + part) * MAX_PAGES + page) * PAGE
            # another program has written them since this one began: they are read from the L2 cache
            u += tl.load(
                given.shrunk + places[:, None] + ranks[None, :], mask=(scale != 0.0)[:, None], other=0.0, cache_modifier=".cg"
            )
        u = tl.where(page * PAGE + ranks[None, :] == one[:, None], 1.0, u * root) * scale[:, None]
        # where an adapter leaves a part as it is, memory may hold anything
        delta += tl.sum(tl.where((scale != 0.0)[:, None], u * b.to(tl.float32), 0.0), 1)
    scaled = factor >= 0
    number = tl.load(given.pages + slot * MAX_PAGES + factor // PAGE, mask=scaled, other=0).to(tl.int64)
    places = given.b + number * stride_b + (factor % PAGE) * N + rows
    delta += y * tl.load(places, mask=scaled, other=0.0).to(tl.float32)
    return y + delta


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
    K: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    SHRINK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    PTX: tl.constexpr,
):
    """PARTS * SPLITS programs multiply by A, and each program behind them computes BLOCK_N elements of the output.

    GATED: as in products/row.py; half of the columns of the product are outputs
    """
    N: tl.constexpr = N0 + N1 + N2
    OUT: tl.constexpr = N // 2 if GATED else N
    SHRINKS: tl.constexpr = PARTS * SPLITS
    given = RowAdapter(b_ptr, pages_ptr, num_pages_ptr, scales_ptr, ones_ptr, factors_ptr, shrunk_ptr)
    program = tl.program_id(0)
    if program < SHRINKS:
        slot = _slot_of_token(tiles_ptr)
        _shrink_row(
            x_ptr, norm_ptr, a_ptr, given, counters_ptr, slot, program, offset, stride_a, stride_slot,
            K, PARTS, MAX_PAGES, PAGE, SPLITS, SHRINK_K, PDL,
        )  # fmt: skip
    else:
        program -= SHRINKS
        rows = program * BLOCK_N + tl.arange(0, BLOCK_N)
        keep = rows < OUT
        part = (rows >= N0).to(tl.int32) + (rows >= N0 + N1).to(tl.int32)
        if GATED:
            part = rows * 0
        w, w_up = first_weights(w_ptr, rows, OUT, K, GATED, BLOCK_N, BLOCK_K)
        tl.debug_barrier()  # so that the compiler requests the weights first
        slot = _slot_of_token(tiles_ptr)
        number = tl.load(pages_ptr + slot * MAX_PAGES, mask=slot >= 0, other=0)
        wait_for_previous_kernel(PDL)
        seen = count_share(counters_ptr, program, (OUT + BLOCK_N - 1) // BLOCK_N, PTX)
        y, up, root = multiply_row(x_ptr, w_ptr, norm_ptr, w, w_up, rows, eps, offset, OUT, K, GATED, BLOCK_N, BLOCK_K)
        # what follows is requested before A is waited for
        has = keep & (slot >= 0)
        num_pages = tl.load(num_pages_ptr + slot, mask=slot >= 0, other=0)
        numbers = _numbers_of(given, slot, part, has, stride_slot)
        b = _rows_of_b(b_ptr, number, rows, has, stride_b, N, PAGE)
        numbers_up = numbers
        b_up = b
        if GATED:
            numbers_up = _numbers_of(given, slot, part + PARTS - 1, has, stride_slot)
            b_up = _rows_of_b(b_ptr, number, OUT + rows, has, stride_b, N, PAGE)
        if slot >= 0:
            wait_for_shares(counters_ptr, seen, PTX)
        y = _add_adapter(
            y * root, b, numbers, num_pages, given, slot, part, rows, keep, root, stride_b,
            N, PARTS, MAX_PAGES, PAGE, SPLITS, BLOCK_N,
        )  # fmt: skip
        if bias_ptr is not None:
            y += tl.load(bias_ptr + rows, mask=keep, other=0.0).to(tl.float32)
        if GATED:
            up = _add_adapter(
                up * root, b_up, numbers_up, num_pages, given, slot, part + PARTS - 1, OUT + rows, keep, root, stride_b,
                N, PARTS, MAX_PAGES, PAGE, SPLITS, BLOCK_N,
            )  # fmt: skip
            if bias_ptr is not None:
                up += tl.load(bias_ptr + OUT + rows, mask=keep, other=0.0).to(tl.float32)
            y = activate(y, KIND) * up
        store_product(y, out_ptr, residual_ptr, alpha, rows, keep)


def shrink_splits(k: int) -> int:
    """Ranges of the columns of x that programs multiply by A: of about 512 columns, which are loaded in two steps."""
    return min(16, power_of_2(max(1, k // 512)))


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
    """Arguments and result are those of `fa_serve.ops.linear_lora`, for one token that run.py lets through. One launch."""
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
) -> Run:
    """The launch for calls that look like this one."""
    product = problem_of(x, weight, gated=activation is not None)
    tile = matrix_row_tile(product)
    k = product.k
    parts = len(weights.widths)
    max_pages = batch.pages.shape[1]
    splits = shrink_splits(k)
    outputs = product.outputs
    launch = Launch(
        _adapted_row,
        parts * splits + triton.cdiv(outputs, tile.block_n),
        varying=(0.0 if norm is None else norm.eps, 0.0 if norm is None else float(norm.offset), float(alpha)),
        strides=(weights.a.stride(0), weights.b.stride(0), weights.scales.stride(0)),
        fixed=(
            *(*weights.widths, 0, 0)[:MAX_PARTS],
            k,
            product.gated,
            ACTIVATION_KINDS[activation or "silu"],
            parts,
            max_pages,
            PAGE_RANKS,
            splits,
            min(256, power_of_2(k)),
            *tile,
            product.is_programmatic,
            product.arch > 0,
        ),
        options=launch_options(product.is_programmatic, 4),
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
        base = (x, weight, None if norm is None else norm.weight, bias, residual, out)
        numbers = (weights.scales, weights.ones, weights.factors, weights.counters)
        launch((*base, weights.a, weights.b, batch.tiles, batch.pages, batch.num_pages, *numbers, shrunk))
        return out

    return run
