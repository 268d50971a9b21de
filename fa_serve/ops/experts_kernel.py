"""The experts of a mixture: each token takes top_k of them, and their results are weighted and summed.

A *pair* is one token at one of its experts; pair p belongs to token p // top_k. Many tokens take four launches. `_sort_pairs`
puts the pairs in the order of their experts. `_grouped_linear` multiplies the tokens of each expert with its gate and up
weights and gates them; launched again, it multiplies with the down weights. `_sum_experts` adds the pairs of each token. Few
tokens take two launches without a sort, `_gated_rows` and `_mixed_rows`, in the manner of `linear_kernel.py`: there the time is
that of reading the weights.

Nothing is read back to the host, and no kernel uses atomics. The grid of a product has room for the most tiles that any routing
may need; a program whose tile does not exist ends at once. Equal calls therefore have equal bits and may be captured in a CUDA
graph. A number that is none of the experts, which expert parallelism uses for those of another process, adds nothing.

Weights are read as models keep them: transposed weights are other strides, and interleaved gates are another step between rows.
Tiles come from the pure functions below. They follow from sizes of shared memory and registers; their speed has not been
measured yet. This module leaves out the choice of experts, which is the model's router, and experts that every token takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.launch import Launch, power_of_2
from fa_serve.backends.plan import PLANS, Run, facts
from fa_serve.ops.activation_kernel import ACTIVATION_KINDS, activate
from fa_serve.ops.ops_backend import ExpertWeights, Gate

_SORT_BLOCK = 1024
_SUM_BLOCK = 1024


class GroupedTile(NamedTuple):
    """block_m pairs by block_n columns of a product's weights; block_k elements of the sum at once, num_stages in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class RowTile(NamedTuple):
    """block_n rows of the weights by block_k elements of each."""

    block_n: int
    block_k: int


@triton.jit
def _gated(gate, up, slope, limit, offset, KIND: tl.constexpr):
    """`ops.Gate` of float32 values. Comparisons, unlike minimum and maximum, keep NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    return activate(gate * slope, KIND) / slope * (up + offset)


@triton.jit
def _rows_of_weights(columns, GATED: tl.constexpr, STEP: tl.constexpr, UP: tl.constexpr):
    """The rows of the weights in the columns of a tile. Gated, two columns that are neighbours give one output."""
    rows = columns
    if GATED and UP != 1:  # interleaved rows are neighbours already, and contiguous where the weights are transposed
        rows = columns // 2 * STEP + columns % 2 * UP
    return rows


@triton.jit(do_not_specialize=["pairs"])
def _sort_pairs(index_ptr, order_ptr, starts_ptr, pairs, BLOCK: tl.constexpr):
    """Program e writes the pairs of expert e in ascending order, behind those of the experts before e.

    order:  (pairs,) int32
    starts: (num_experts + 1,) int32, where each expert begins in `order`, and their end
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, pairs, BLOCK):
        ids = tl.load(index_ptr + start + lanes, mask=start + lanes < pairs, other=-1)
        before += ((ids >= 0) & (ids < expert)).to(tl.int32)
    position = tl.sum(before, 0)
    tl.store(starts_ptr + expert, position)
    for start in tl.range(0, pairs, BLOCK):
        ids = tl.load(index_ptr + start + lanes, mask=start + lanes < pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + position + tl.cumsum(mine, 0) - 1, start + lanes, mask=mine > 0)
        position += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, position)


@triton.jit
def _find_tile(starts_ptr, tile, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, the first of its rows, and the end of that expert's rows. The expert is NUM_EXPERTS if there is no
    such tile."""
    experts = tl.arange(0, BLOCK_E)
    known = experts < NUM_EXPERTS
    begins = tl.load(starts_ptr + experts, mask=known, other=0)
    ends = tl.load(starts_ptr + experts + 1, mask=known, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    expert = tl.sum((known & (last <= tile)).to(tl.int32), 0)
    mine = experts == expert
    row = tl.sum(tl.where(mine, begins + (tile - last + tiles) * BLOCK_M, 0), 0)
    return expert, row, tl.sum(tl.where(mine, ends, 0), 0)


@triton.jit
def _grouped_linear(
    x_ptr,
    w_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    out_ptr,
    slope,
    limit,
    offset,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program computes one tile of the output, for up to BLOCK_M pairs of one expert.

    GATED: x has a row for each token, and the output a row for each place in `order`. Output n is gated from the rows n * STEP
    and n * STEP + UP of the weights, which are neighbours in the tile: the product has the form of any other one.
    Otherwise x has a row for each place in `order`, the output a row for each pair, and output n is row n of the weights.
    Consecutive programs compute the tiles of the same pairs, so that they share their rows of x in the L2 cache.
    """
    COLUMNS: tl.constexpr = N * (2 if GATED else 1)
    tiles_n = tl.cdiv(COLUMNS, BLOCK_N)
    expert, first, end = _find_tile(starts_ptr, tl.program_id(0) // tiles_n, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= NUM_EXPERTS:
        return
    places = first + tl.arange(0, BLOCK_M)
    # rows behind the end are computed from another row of the expert, and are not stored
    pairs = tl.load(order_ptr + tl.minimum(places, end - 1)).to(tl.int64)
    columns = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = pairs // TOP_K if GATED else tl.minimum(places, end - 1).to(tl.int64)
    which = _rows_of_weights(columns, GATED, STEP, UP)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows[:, None] * K + k[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * stride_we + which.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if K % BLOCK_K == 0 and COLUMNS % BLOCK_N == 0:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(k < K - start)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=(k < K - start)[:, None] & (columns < COLUMNS)[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * stride_be + which, mask=columns < COLUMNS, other=0.0).to(tl.float32)[None, :]
    keep = (places < end)[:, None]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        y = _gated(gate, up, slope, limit, offset, KIND)
        n = tl.program_id(0) % tiles_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_ptrs = out_ptr + places.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=keep & (n < N)[None, :])
    else:
        out_ptrs = out_ptr + pairs[:, None] * N + columns[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=keep & (columns < N)[None, :])


@triton.jit
def _sum_experts(
    parts_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program computes BLOCK elements of one token, as the sum of its pairs in the order in which the router gave them."""
    blocks = tl.cdiv(N, BLOCK)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(index_ptr + pair)
        known = (expert >= 0) & (expert < NUM_EXPERTS)
        part = tl.load(parts_ptr + pair * N + columns, mask=(columns < N) & known, other=0.0).to(tl.float32)
        acc += tl.where(known, tl.load(weights_ptr + pair).to(tl.float32), 0.0) * part
    tl.store(out_ptr + token * N + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def _dot_rows(
    x_ptr, w_ptr, bias_ptr, rows, known, stride_wn, stride_wk, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """[BLOCK_N] float32: the products of x (K,) with those rows of an expert's weights that are known, and their biases."""
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * stride_wn + k[None, :] * stride_wk
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        keep = k < K - start
        x = tl.load(x_ptr + start + k, mask=keep, other=0.0).to(tl.float32)
        acc += tl.load(w_ptrs, mask=known[:, None] & keep[None, :], other=0.0).to(tl.float32) * x[None, :]
        w_ptrs += BLOCK_K * stride_wk
    y = tl.sum(acc, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=known, other=0.0).to(tl.float32)
    return y


@triton.jit
def _gated_rows(
    x_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    slope,
    limit,
    offset,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    STEP: tl.constexpr,
    UP: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program computes BLOCK_N / 2 gated elements of one pair, from BLOCK_N rows of the weights."""
    blocks = tl.cdiv(2 * N, BLOCK_N)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    expert = tl.load(index_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= NUM_EXPERTS):
        return
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = _rows_of_weights(columns, True, STEP, UP)
    if bias_ptr is not None:
        bias_ptr += expert * stride_be
    x_ptr += pair // TOP_K * K
    w_ptr += expert * stride_we
    both = _dot_rows(x_ptr, w_ptr, bias_ptr, rows, columns < 2 * N, stride_wn, stride_wk, K, BLOCK_N, BLOCK_K)
    gate, up = tl.split(tl.reshape(both, [BLOCK_N // 2, 2]))
    y = _gated(gate, up, slope, limit, offset, KIND)
    n = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    tl.store(out_ptr + pair * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _mixed_rows(
    x_ptr,
    w_ptr,
    bias_ptr,
    index_ptr,
    weights_ptr,
    out_ptr,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    NUM_EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program computes BLOCK_N elements of one token: the weighted sum over its experts. x has a row for each pair."""
    blocks = tl.cdiv(N, BLOCK_N)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i in range(TOP_K):
        pair = token * TOP_K + i
        expert = tl.load(index_ptr + pair).to(tl.int64)
        if (expert >= 0) & (expert < NUM_EXPERTS):
            bias = bias_ptr
            if bias_ptr is not None:
                bias = bias_ptr + expert * stride_be
            w = w_ptr + expert * stride_we
            y = _dot_rows(x_ptr + pair * K, w, bias, n, n < N, stride_wn, stride_wk, K, BLOCK_N, BLOCK_K)
            acc += tl.load(weights_ptr + pair).to(tl.float32) * y
    tl.store(out_ptr + token * N + n, acc.to(out_ptr.dtype.element_ty), mask=n < N)


def launch_experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights, invariant: bool) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.experts`. Two launches for few tokens, else four."""
    x = x.contiguous()
    index = top_k_index.contiguous()
    weights = top_k_weights.contiguous()
    out = x.new_empty(x.shape[0], experts.down.shape[1])
    key = ("experts", *facts(x, index, weights, *experts[:-1]), experts.gate, invariant)
    run = PLANS.get(key)
    if run is None:
        if out.shape[0] == 0:
            return out
        by_rows = not invariant and reads_by_rows(index.numel(), x.shape[0], experts)
        plan = _plan_rows if by_rows else _plan_grouped
        run = PLANS.add(key, plan(x, index, experts, invariant))
    run((x, index, weights, experts, out))
    return out


def _plan_rows(x: Tensor, index: Tensor, experts: ExpertWeights, invariant: bool) -> Run:
    tokens, top_k = index.shape
    num_experts, hidden, width = experts.down.shape
    first = row_tile(experts.gate_up)
    second = row_tile(experts.down)
    options = {"num_warps": 4}
    gated = Launch(
        _gated_rows,
        tokens * top_k * triton.cdiv(2 * width, first.block_n),
        varying=_numbers(experts.gate),
        strides=_strides(experts.gate_up, experts.gate_up_bias),
        fixed=(num_experts, width, x.shape[1], top_k, *_rows_of(experts.gate, width), *first),
        options=options,
    )
    mixed = Launch(
        _mixed_rows,
        tokens * triton.cdiv(hidden, second.block_n),
        varying=(),
        strides=_strides(experts.down, experts.down_bias),
        fixed=(num_experts, hidden, width, top_k, *second),
        options=options,
    )

    def run(tensors: tuple[Tensor, Tensor, Tensor, ExpertWeights, Tensor]) -> None:
        x, index, weights, experts, out = tensors
        h = x.new_empty(tokens * top_k, width)
        gated((x, experts.gate_up, experts.gate_up_bias, index, h))
        mixed((h, experts.down, experts.down_bias, index, weights, out))

    return run


def _plan_grouped(x: Tensor, index: Tensor, experts: ExpertWeights, invariant: bool) -> Run:
    tokens, top_k = index.shape
    pairs = tokens * top_k
    num_experts, hidden, width = experts.down.shape
    tile = grouped_tile(0 if invariant else pairs / num_experts, x.element_size(), spec.arch_of(x.device))
    block_m, block_n, block_k, num_warps, num_stages = tile
    # each expert that is met wastes less than one tile
    tiles_m = (pairs + (block_m - 1) * min(num_experts, pairs)) // block_m
    options = {"num_warps": num_warps, "num_stages": num_stages}
    common = ("ieee", power_of_2(num_experts), block_m, block_n, block_k)
    sort = Launch(_sort_pairs, num_experts, varying=(pairs,), fixed=(_SORT_BLOCK,), options={"num_warps": 8})
    gated = Launch(
        _grouped_linear,
        tiles_m * triton.cdiv(2 * width, block_n),
        varying=_numbers(experts.gate),
        strides=_strides(experts.gate_up, experts.gate_up_bias),
        fixed=(num_experts, width, x.shape[1], top_k, True, *_rows_of(experts.gate, width), *common),
        options=options,
    )
    product = Launch(
        _grouped_linear,
        tiles_m * triton.cdiv(hidden, block_n),
        varying=(1.0, math.inf, 0.0),
        strides=_strides(experts.down, experts.down_bias),
        fixed=(num_experts, hidden, width, top_k, False, 1, 0, 0, *common),
        options=options,
    )
    block = min(_SUM_BLOCK, power_of_2(hidden))
    total = Launch(
        _sum_experts,
        tokens * triton.cdiv(hidden, block),
        varying=(),
        fixed=(num_experts, hidden, top_k, block),
        options={"num_warps": 4},
    )

    def run(tensors: tuple[Tensor, Tensor, Tensor, ExpertWeights, Tensor]) -> None:
        x, index, weights, experts, out = tensors
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
        h = x.new_empty(pairs, width)
        parts = x.new_empty(pairs, hidden)
        sort((index, order, starts))
        gated((x, experts.gate_up, experts.gate_up_bias, order, starts, h))
        product((h, experts.down, experts.down_bias, order, starts, parts))
        total((parts, index, weights, out))

    return run


def _numbers(gate: Gate) -> tuple[float, float, float]:
    return (gate.slope, gate.limit, gate.offset)


def _rows_of(gate: Gate, width: int) -> tuple[int, int, int]:
    """STEP, UP and KIND of the kernels: the rows of the weights that an output is gated from, and the activation."""
    step, up = (2, 1) if gate.interleaved else (1, width)
    return (step, up, ACTIVATION_KINDS[gate.activation])


def _strides(weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    return (*weight.stride(), 0 if bias is None else bias.stride(0))


def reads_by_rows(pairs: int, tokens: int, experts: ExpertWeights) -> bool:
    """Whether each pair reads its expert's weights by itself, row by row.

    Two tokens that meet one expert then read it twice. In us on one H200, where tokens take 8 of 128 experts, 16 pairs take
    45.5 by rows and 51.1 grouped, 32 pairs 84.1 and 78.2. Weights whose columns are contiguous have no rows to read: a token
    takes 240 by rows in the experts of gpt-oss, and 65 grouped.
    """
    if experts.gate_up.stride(2) != 1 or experts.down.stride(2) != 1:
        return False
    return tokens == 1 or 8 * pairs <= experts.down.shape[0]


def row_tile(weight: Tensor) -> RowTile:
    """The tile of a program for few tokens. 8 rows of 512 columns reach 1.08 of the time of reading the weights on one H200."""
    return RowTile(8, min(512, power_of_2(weight.shape[2])))


def grouped_tile(pairs_per_expert: float, element_size: int, arch: int) -> GroupedTile:
    """The tile of a product, by the average of pairs for each expert; 0 asks for the tile of deterministic mode.

    A tile of 16 pairs wastes least where experts have few, and one of 128 uses tensor cores best. Stages fit in the shared
    memory of each architecture (arch 0 is ROCm, with 64 KiB). float32 is multiplied without tensor cores. Those of Hopper are
    the fastest of eight on one H200, at the sizes of Qwen3-30B-A3B and gpt-oss-20b with 1 to 8192 tokens. The others are not
    measured.
    """
    if element_size == 4:
        return GroupedTile(32, 32, 32, 4, 2)
    if arch == 90 and pairs_per_expert > 0:
        if pairs_per_expert <= 8:
            return GroupedTile(16, 128, 128, 4, 4)
        if pairs_per_expert <= 24:
            return GroupedTile(32, 128, 64, 4, 4)
        return GroupedTile(64, 128, 64, 4, 3) if pairs_per_expert <= 96 else GroupedTile(128, 256, 64, 8, 3)
    stages = 3 if arch else 2
    if 0 < pairs_per_expert <= 16:
        return GroupedTile(16, 128, 64, 4, stages)
    if pairs_per_expert <= 96:
        return GroupedTile(64, 128, 64, 4, stages)
    return GroupedTile(128, 128, 64, 8, stages)
