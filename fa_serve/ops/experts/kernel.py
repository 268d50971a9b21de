"""The experts of a mixture: each token takes top_k of them, and their results are weighted and summed.

A *pair* is one token at one of its experts; pair p belongs to token p // top_k. Many tokens take four launches. `_sort_pairs`
puts the pairs in the order of their experts. `_grouped_linear` multiplies the tokens of each expert with its gate and up
weights and gates them; launched again, it multiplies with the down weights. `_sum_experts` adds the pairs of each token. Few
tokens take two launches without a sort (rows.py).

Nothing is read back to the host, and no kernel uses atomics. The grid of a product has room for the most tiles that any routing
may need; a program whose tile does not exist ends at once. Equal calls therefore have equal bits and may be captured in a CUDA
graph. A number that is none of the experts, which expert parallelism uses for those of another process, adds nothing.

Weights are read as models keep them: transposed weights are other strides, and interleaved gates are another step between rows.
Quantised weights have no strides. They become numbers in registers (products/quantised/primitives.py), and a tile is then the
product of weights and inputs instead of inputs and weights. Hopper has another kernel for them (quantised.py), and one for many
pairs of bfloat16 matrices (matrix.py); `_list_tiles` lists the tiles of both. Where the former cannot run, many pairs multiply
matrices of some experts at a time (`choose_experts`). Tiles come from the pure functions below. Those of Hopper for matrices
are measured; the others follow from sizes of shared memory and registers. On Hopper and later GPUs all launches are
programmatic, see `primitives.wait_for_previous_kernel`: each layer of a mixture has several short ones. This module leaves out
the choice of experts, which is the model's router, and experts that every token takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, power_of_2
from fa_serve.launching.plans import PLANS, Run, facts
from fa_serve.ops.experts.primitives import (
    expert_tensors,
    gate_numbers,
    gated_values,
    kernel_constants,
    rows_of_outputs,
    rows_of_weights,
    weight_facts,
    weight_strides,
)
from fa_serve.ops.experts.rows import plan_rows
from fa_serve.ops.ops_backend import ExpertWeights, Gate, Weight
from fa_serve.ops.products.quantised.choice import ExpertsWay, choose_experts, choose_matrices
from fa_serve.ops.products.quantised.primitives import add_products, run_width
from fa_serve.ops.products.quantised.product import dequantize, hopper_arch
from fa_serve.ops.products.quantised.weight import QuantizedWeight

_SORT_BLOCKS = (1024, 8192)
"""Pairs that a program of the sort reads at once, for up to four times as many and for more."""
_SUM_BLOCK = 1024
_MATRIX_BYTES = 512 << 20
"""What the matrices of experts may take that are dequantised at once."""


class GroupedTile(NamedTuple):
    """block_m pairs by block_n columns of a product's weights; block_k elements of the sum at once, num_stages in flight."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["pairs"])
def _sort_pairs(index_ptr, order_ptr, starts_ptr, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program e writes the pairs of expert e in ascending order, behind those of the experts before e.

    order:  (pairs,) int32
    starts: (num_experts + 1,) int32, where each expert begins in `order`, and their end
    """
    wait_for_previous_kernel(PDL)
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
def _list_tiles(
    starts_ptr, tiles_ptr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr
):
    """Program i writes what `_find_tile` finds for tile i: (tiles, 3) int32. A tile that does not exist has no rows."""
    wait_for_previous_kernel(PDL)
    tile = tl.program_id(0)
    expert, first, end = _find_tile(starts_ptr, tile, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    tl.store(tiles_ptr + 3 * tile, expert)
    tl.store(tiles_ptr + 3 * tile + 1, first)
    tl.store(tiles_ptr + 3 * tile + 2, end)


@triton.jit
def _grouped_linear(
    x_ptr,
    w_ptr,
    scales_ptr,
    zeros_ptr,
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
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program computes one tile of the output, for up to BLOCK_M pairs of one expert.

    GATED: x has a row for each token, and the output a row for each place in `order`. Output n is gated from the rows n * STEP
    and n * STEP + UP of the weights, which are neighbours in the tile: the product has the form of any other one.
    Otherwise x has a row for each place in `order`, the output a row for each pair, and output n is row n of the weights.
    Consecutive programs compute the tiles of the same pairs, so that they share their rows of x in the L2 cache.

    GROUP, VALUES and PARTS describe weights that have scales, see products/quantised/primitives.py.
    """
    wait_for_previous_kernel(PDL)
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
    which = rows_of_weights(columns, GATED, STEP, UP)
    if scales_ptr is not None:
        # rows behind those of the expert are another expert's, and are not stored
        all_rows = expert.to(tl.int64) * COLUMNS + which
        sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        sums = add_products(
            sums,
            x_ptr,
            rows,
            places < end,
            w_ptr,
            scales_ptr,
            zeros_ptr,
            None,
            all_rows,
            0,
            K,
            NUM_EXPERTS * COLUMNS,
            K,
            GROUP,
            VALUES,
            PARTS,
            BLOCK_K,
        )
        acc = tl.trans(sums)
    else:
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
        y = gated_values(gate, up, slope, limit, offset, KIND)
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
    PDL: tl.constexpr,
):
    """A program computes BLOCK elements of one token, as the sum of its pairs in the order in which the router gave them."""
    wait_for_previous_kernel(PDL)
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


def launch_experts(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, experts: ExpertWeights, invariant: bool) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.experts`. Two launches for few tokens, else four."""
    x = x.contiguous()
    index = top_k_index.contiguous()
    weights = top_k_weights.contiguous()
    out = torch.empty_like(x)
    tensors = (x, index, weights, experts.gate_up_bias, experts.down_bias)
    known = (weight_facts(experts.gate_up), weight_facts(experts.down))
    key = ("experts", *facts(*tensors), *known, experts.gate, invariant)
    run = PLANS.get(key)
    if run is None:
        if out.shape[0] == 0:
            return out
        by_rows = not invariant and reads_by_rows(index.numel(), x.shape[0], experts)
        run = PLANS.add(key, plan_rows(x, index, experts) if by_rows else _plan_grouped(x, index, experts, invariant))
    run((x, index, weights, experts, out))
    return out


def _plan_grouped(x: Tensor, index: Tensor, experts: ExpertWeights, invariant: bool) -> Run:
    tokens, top_k = index.shape
    num_experts, hidden, width = experts.sizes
    pairs = tokens * top_k
    call = _Call(x, pairs, top_k, num_experts, 0 if invariant else pairs / num_experts)
    pdl = call.pdl
    few, many = _SORT_BLOCKS
    fixed = (few if pairs <= 4 * few else many, pdl)
    sort = Launch(_sort_pairs, num_experts, varying=(pairs,), fixed=fixed, options=launch_options(pdl, 8))
    ways = [call.way(w) for w in (experts.gate_up, experts.down)]
    gated = call.plan(ways[0], experts.gate_up, experts.gate_up_bias, experts.gate)
    product = call.plan(ways[1], experts.down, experts.down_bias, None)
    list_tiles = call.plan_tiles(ways)
    block = min(_SUM_BLOCK, power_of_2(hidden))
    total = Launch(
        _sum_experts,
        tokens * triton.cdiv(hidden, block),
        varying=(),
        fixed=(num_experts, hidden, top_k, block, pdl),
        options=launch_options(pdl, 4),
    )

    def run(tensors: tuple[Tensor, Tensor, Tensor, ExpertWeights, Tensor]) -> None:
        x, index, weights, experts, out = tensors
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
        h = x.new_empty(pairs, width)
        parts = x.new_empty(pairs, hidden)
        sort((index, order, starts))
        places = _Places(order, starts, None if list_tiles is None else list_tiles(starts))
        gated(x, experts.gate_up, experts.gate_up_bias, places, h)
        product(h, experts.down, experts.down_bias, places, parts)
        total((parts, index, weights, out))

    return run


class _Places(NamedTuple):
    """Where the pairs of each expert are: what `_sort_pairs` and `_list_tiles` write."""

    order: Tensor
    starts: Tensor
    tiles: Tensor | None


_Product = Callable[[Tensor, Any, Tensor | None, _Places, Tensor], None]
"""Computes a product from x, weights, their biases and the places of pairs, into a tensor."""


class _Call(NamedTuple):
    """What the products of a call have in common. pairs_per_expert is 0 in deterministic mode."""

    x: Tensor
    pairs: int
    top_k: int
    num_experts: int
    pairs_per_expert: float

    @property
    def pdl(self) -> bool:
        """Whether launches are programmatic."""
        return spec.has_programmatic_launch(spec.arch_of(self.x.device))

    def way(self, weight: Weight) -> ExpertsWay:
        """How a product with the weights of all experts is computed."""
        arch = hopper_arch(self.x, weight)
        if not isinstance(weight, QuantizedWeight):
            same = weight.dtype == self.x.dtype
            return choose_matrices(weight.shape, weight.stride(), self.pairs_per_expert, weight.dtype, arch if same else 0)
        shape = (weight.shape[0] // self.num_experts, weight.width)
        return choose_experts(weight.values, shape, weight.group_size, self.pairs_per_expert, self.x.dtype, arch)

    def plan(self, way: ExpertsWay, weight: Weight, bias: Tensor | None, gate: Gate | None) -> _Product:
        """A product with the weights of all experts. With `gate` its input has a row for each token, and outputs are gated."""
        if isinstance(weight, QuantizedWeight) and way == "wgmma":
            return self._plan_wgmma(weight, bias, gate)
        if isinstance(weight, QuantizedWeight) and way == "dequantized":
            return self._plan_dequantized(weight, bias, gate)
        if isinstance(weight, Tensor) and way == "matrix":
            return self._plan_matrix(weight, bias, gate)
        return self._plan_portable(weight, bias, gate, self.num_experts)

    def tiles(self, block_m: int) -> int:
        """The most tiles of pairs that any routing may need: each expert that is met wastes less than one tile."""
        return (self.pairs + (block_m - 1) * min(self.num_experts, self.pairs)) // block_m

    def _plan_portable(self, weight: Weight, bias: Tensor | None, gate: Gate | None, num_experts: int) -> _Product:
        """The product with the weights of so many experts, which may be some of all."""
        rows, k = (weight.shape[0] // num_experts, weight.width) if isinstance(weight, QuantizedWeight) else weight.shape[1:]
        n = rows // 2 if gate else rows
        tile = _tile(weight, self.pairs_per_expert, self.x)
        launch = Launch(
            _grouped_linear,
            self.tiles(tile.block_m) * triton.cdiv(rows, tile.block_n),
            varying=gate_numbers(gate),
            strides=weight_strides(weight, bias),
            fixed=(
                num_experts,
                n,
                k,
                self.top_k,
                *rows_of_outputs(gate, n),
                "ieee",
                power_of_2(num_experts),
                *kernel_constants(weight),
                *tile[:3],
                self.pdl,
            ),
            options={**launch_options(self.pdl, tile.num_warps), "num_stages": tile.num_stages},
        )

        def run(x: Tensor, weight: Weight, bias: Tensor | None, places: _Places, out: Tensor) -> None:
            launch((x, *expert_tensors(weight), bias, places.order, places.starts, out))

        return run

    def plan_tiles(self, ways: list[ExpertsWay]) -> Callable[[Tensor], Tensor] | None:
        """Lists the tiles of a kernel for Hopper from where each expert begins. One launch; None if no product needs them."""
        if "wgmma" in ways:
            from fa_serve.ops.experts.quantised import grouped_wgmma_tile

            block_m = grouped_wgmma_tile(self.pairs_per_expert).block_m
        elif "matrix" in ways:
            from fa_serve.ops.experts.matrix_types import BLOCK_M as block_m
        else:
            return None
        count = self.tiles(block_m)
        fixed = (self.num_experts, power_of_2(self.num_experts), block_m, self.pdl)
        launch = Launch(_list_tiles, count, varying=(), fixed=fixed, options=launch_options(self.pdl, 1))

        def run(starts: Tensor) -> Tensor:
            tiles = torch.empty(count, 3, dtype=torch.int32, device=starts.device)
            launch((starts, tiles))
            return tiles

        return run

    def _plan_matrix(self, weight: Tensor, bias: Tensor | None, gate: Gate | None) -> _Product:
        """One launch, in a kernel for Hopper."""
        from fa_serve.ops.experts.matrix import plan_experts_matrix
        from fa_serve.ops.experts.matrix_types import BLOCK_M

        stride_be = 0 if bias is None else bias.stride(0)
        launch = plan_experts_matrix(weight, self.pairs, self.top_k, gate, self.tiles(BLOCK_M), stride_be)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, places: _Places, out: Tensor) -> None:
            if x.data_ptr() % 16:
                x = x.clone()  # copies to shared memory are 16 bytes each
            launch((weight, x, x, bias, places.order, places.tiles, out))

        return run

    def _plan_wgmma(self, weight: QuantizedWeight, bias: Tensor | None, gate: Gate | None) -> _Product:
        """One launch, in a kernel for Hopper."""
        # Gluon's names change with each release of Triton, so modules that use them are imported where the release is known
        from fa_serve.ops.experts.quantised import grouped_wgmma_tile, plan_grouped_wgmma
        from fa_serve.ops.products.quantised.pairs import product_tensors

        tile = grouped_wgmma_tile(self.pairs_per_expert)
        stride_be = 0 if bias is None else bias.stride(0)
        launch = plan_grouped_wgmma(weight, self.num_experts, self.top_k, gate, self.tiles(tile.block_m), tile, stride_be)

        def run(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, places: _Places, out: Tensor) -> None:
            if x.data_ptr() % 16:
                x = x.clone()  # copies to shared memory are 16 bytes each
            launch((x, *product_tensors(weight), bias, places.order, places.tiles, out))

        return run

    def _plan_dequantized(self, weight: QuantizedWeight, bias: Tensor | None, gate: Gate | None) -> _Product:
        """Two launches for some experts at a time, whose matrices take at most _MATRIX_BYTES."""
        rows = weight.shape[0] // self.num_experts
        at_once = experts_at_once(self.num_experts, rows * weight.width * self.x.element_size())
        products = dict[int, _Product]()
        for count in {min(at_once, self.num_experts - first) for first in range(0, self.num_experts, at_once)}:
            matrices = torch.empty(count, rows, weight.width, dtype=self.x.dtype, device="meta")
            products[count] = self._plan_portable(matrices, bias, gate, count)

        def run(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, places: _Places, out: Tensor) -> None:
            for first in range(0, self.num_experts, at_once):
                last = min(first + at_once, self.num_experts)
                matrices = dequantize(weight.rows(first * rows, last * rows), x.dtype).view(last - first, rows, -1)
                biases = None if bias is None else bias[first:last]
                products[last - first](x, matrices, biases, places._replace(starts=places.starts[first:]), out)

        return run


def _tile(weight: Weight, pairs_per_expert: float, x: Tensor) -> GroupedTile:
    if isinstance(weight, QuantizedWeight):
        return quantized_tile(pairs_per_expert, x.element_size())._replace(block_k=run_width(weight))
    return grouped_tile(pairs_per_expert, x.element_size(), spec.arch_of(x.device))


def experts_at_once(num_experts: int, matrix_bytes: int) -> int:
    """How many experts are dequantised at once: as many as _MATRIX_BYTES hold, in equal parts.

    The number is a multiple of 4, by which the addresses of the parts' first elements are multiples of 16 bytes.
    """
    most = max(_MATRIX_BYTES // matrix_bytes // 4 * 4, 4)
    parts = -(-num_experts // most)
    return 4 * -(-num_experts // (4 * parts))


def reads_by_rows(pairs: int, tokens: int, experts: ExpertWeights) -> bool:
    """Whether each pair reads its expert's weights by itself, row by row.

    Two tokens that meet one expert then read it twice. In us on one H200, where tokens take 8 of 128 experts, 16 pairs take
    45.5 by rows and 51.1 grouped, 32 pairs 84.1 and 78.2. Weights whose columns are contiguous have no rows to read: alone, a
    token of gpt-oss takes 69 by rows and 78 grouped, but in a step of the whole model 3.8 and 2.7 ms.
    """
    weights = [w for w in (experts.gate_up, experts.down) if isinstance(w, Tensor)]
    if any(w.stride(2) != 1 for w in weights):
        return False
    return tokens == 1 or 8 * pairs <= experts.sizes.num_experts


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


def quantized_tile(pairs_per_expert: float, element_size: int) -> GroupedTile:
    """The tile of a product with quantised weights; 0 asks for the tile of deterministic mode. It leaves block_k to the format.

    Weights go to tensor cores from registers, so a tile has 64 rows of weights, and up to 64 pairs: that of a dense product
    (`quantized_kernel.linear_tile`), which is the fastest of five there. A second tile of an expert unpacks its weights again,
    which costs more than tensor cores that multiply with nothing. So a tile has room for the average and 2.5 of its roots, as
    random routing needs for 99% of the experts. This is derived and has not been measured.
    """
    if element_size == 4:
        return GroupedTile(16, 32, 32, 4, 2)
    if pairs_per_expert <= 0:
        return GroupedTile(32, 64, 32, 4, 2)
    block_m = 16 if pairs_per_expert <= 8 else 32 if pairs_per_expert <= 20 else 64
    return GroupedTile(block_m, 64, 32, 4, 3 if block_m == 16 else 2)
