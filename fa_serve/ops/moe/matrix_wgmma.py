"""The products of experts with bfloat16 matrices on Hopper, in Gluon, for prompts: many pairs for each expert.

A thread block has a producer and two consumer warpgroups, and computes one tile after the other, of 128 pairs of one expert by
BLOCK_N rows of its weights:

    producer   copies 64 columns at a time to a ring in shared memory. The copy engine (TMA) brings weights and, in the second
               product, inputs, whose rows lie in the order of the experts. In the first product four warps gather the rows of
               the tokens (cp.async)
    consumers  multiply 64 pairs each by asynchronous warpgroup MMAs (wgmma), add biases, gate, round and store

Each stage of the ring has a "full" and an "empty" mbarrier. The producer runs on into the next tile while consumers store. The
second consumer begins `lag` blocks after the first one, so that one uses the tensor cores while the other one stores. A
consumer whose 64 pairs do not exist multiplies nothing, so that the last tile of an expert wastes less than 64 rows.

Rows past the end of an expert are computed but not stored. In the second product they are inputs of the next expert, which
affect only their own rows of the output. Rows of weights past the last one belong to the next expert or are zeros, and affect
only columns that are not stored.

Weights have contiguous rows, or contiguous columns (`transposed`, gpt-oss); the kernels differ in the box of a copy and in the
order of an operand. Left out: the other launches (order.py), other dtypes (grouped.py), and quantised weights
(unpack_wgmma.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_serve.backends.triton.primitives import LOG2E, wait_for_previous_kernel
from fa_serve.launching.gluon_names import HAS_REINTERPRET, async_load, copy_to_shared
from fa_serve.launching.launch import Launch, View, launch_options
from fa_serve.ops.moe.order import ExpertProduct, Places, most_tiles
from fa_serve.ops.moe.primitives import gate_numbers, gated_values, rows_of_outputs
from fa_serve.ops.moe.tiles import MATRIX_BLOCK_M as BLOCK_M
from fa_serve.ops.moe.tiles import MatrixTile
from fa_serve.ops.ops_backend import Gate
from fa_serve.ops.products.problem import Product

BLOCK_K = 64
"""Columns of a stage: 128 bytes, the width of a swizzled row."""
_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=2)
_LAUNCH_REGISTERS = 168  # 3 warpgroups, of which the last one need not be full


@dataclass(frozen=True)
class MatrixVariant:
    """Everything that is fixed when the kernel is compiled, passed as one constexpr.

    n, k:       outputs and columns
    gated:      the input has a row for each token, and the output for each place in the order of experts; an output is gated
                from two rows of the weights. Else the input has a row for each place, and the output for each pair
    step, up, kind: see `moe.primitives.rows_of_outputs`; limited: the gate has a limit
    transposed: the columns of weights are contiguous
    invariant:  the gate has the instructions of grouped.py, so that a row has the same bits there
    """

    tile: MatrixTile
    n: int
    k: int
    top_k: int
    gated: bool
    step: int
    up: int
    kind: int
    limited: bool
    transposed: bool
    invariant: bool = False

    @property
    def rows(self) -> int:
        """Rows of an expert's weights."""
        return 2 * self.n if self.gated else self.n

    @property
    def outputs(self) -> int:
        """Columns of the output in a tile."""
        return self.tile.block_n // 2 if self.gated else self.tile.block_n

    @property
    def halves(self) -> bool:
        """Whether half of a tile's rows are gates and half of them up values, from distant rows of the weights."""
        return self.gated and self.up != 1

    @property
    def tiles_n(self) -> int:
        """Tiles of the same pairs."""
        return -(-self.rows // self.tile.block_n)

    @property
    def blocks(self) -> int:
        return self.k // BLOCK_K

    @property
    def lag(self) -> int:
        """The tile's lag; 0 if a tile has fewer blocks than the ring has stages, because the first consumer could then be two
        tiles ahead, which one barrier cannot represent."""
        return self.tile.lag if self.blocks >= self.tile.stages >= self.tile.lag else 0

    @property
    def copied_bytes(self) -> int:
        """The bytes that the copy engine brings to a stage."""
        return 2 * BLOCK_K * (self.tile.block_n + (0 if self.gated else BLOCK_M))

    @property
    def arrivals(self) -> int:
        """Arrivals that make a stage full: one with the copy engine's bytes, and one of each of 128 threads if these gather."""
        return 129 if self.gated else 1

    @property
    def ring_shape(self) -> list[int]:
        """Shape of the ring of weights."""
        box = [BLOCK_K, self.tile.block_n] if self.transposed else [self.tile.block_n, BLOCK_K]
        return [self.tile.stages, *box]

    @property
    def box_shape(self) -> list[int]:
        """Shape of the same memory as boxes, two for each stage. Swizzled rows have 64 columns, and a box is contiguous."""
        half = self.tile.block_n // 2
        box = [BLOCK_K, half] if self.transposed else [half, BLOCK_K]
        return [2 * self.tile.stages, *box]

    @property
    def product_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of a consumer's sums [64, block_n] as wgmma leaves them."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.tile.block_n, 16])


class MatrixArgs(NamedTuple):
    """What the partitions read: the kernel's arguments, the rings of inputs and weights, the weights as boxes, the memory in
    which each consumer rearranges outputs, and barriers.

    w, x:  tensor descriptors; x_ptr: the same tensor as x, for the first product
    total: number of tiles that may exist
    lead:  barrier that says that the first consumer has begun a tile
    """

    w: gl.tensor
    x: gl.tensor
    x_ptr: gl.tensor
    bias: gl.tensor
    order: gl.tensor
    tiles: gl.tensor
    out: gl.tensor
    total: gl.tensor
    stride_be: gl.tensor
    slope: gl.tensor
    limit: gl.tensor
    offset: gl.tensor
    inputs: gl.tensor
    weights: gl.tensor
    boxes: gl.tensor
    staging: gl.tensor
    full: gl.tensor
    empty: gl.tensor
    lead: gl.tensor


class PairTile(NamedTuple):
    """The expert of a tile, the place of its first pair, and the end of that expert's places. If a tile has no pair, no tile
    follows."""

    expert: gl.tensor
    first: gl.tensor
    end: gl.tensor


@gluon.jit
def pair_tile(index, args, var: gl.constexpr):
    """The pairs of the `index`-th tile of the launch. Tiles of the same pairs follow one another: they share the L2 cache."""
    record = args.tiles + 3 * (index // var.tiles_n)
    exists = index < args.total
    expert = gl.load(record, mask=exists, other=0)
    first = gl.load(record + 1, mask=exists, other=0)
    end = gl.load(record + 2, mask=exists, other=0)
    return PairTile(expert, first, end)


@gluon.jit
def weight_rows(tile_n, var: gl.constexpr):
    """The first rows of a tile's two boxes of weights."""
    HALF: gl.constexpr = var.tile.block_n // 2
    if var.halves:
        return tile_n * HALF, tile_n * HALF + var.n
    else:  # noqa: RET505
        return tile_n * (2 * HALF), tile_n * (2 * HALF) + HALF


@gluon.jit
def matrix_producer(args, var: gl.constexpr):
    """Copy tile after tile. `count` counts the blocks of columns so far; it gives stage and phase."""
    STAGES: gl.constexpr = var.tile.stages
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    index = gl.program_id(0)
    tile = pair_tile(index, args, var)
    count = index * 0
    while tile.first < tile.end:
        upcoming = pair_tile(index + gl.num_programs(0), args, var)
        row0, row1 = weight_rows(index % var.tiles_n, var)
        if var.gated:
            # places past the end repeat the last pair
            places = gl.minimum(tile.first + gl.arange(0, 128, layout=gl.SliceLayout(1, COPY)), tile.end - 1)
            tokens = gl.load(args.order + places) // var.top_k
            columns = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, COPY)), 0)
            x_ptrs = args.x_ptr + gl.expand_dims(tokens.to(gl.int64) * var.k, 1) + columns
        for block in range(var.blocks):
            stage = count % STAGES
            mbarrier.wait(args.empty.index(stage), ((count // STAGES) & 1) ^ 1)
            full = args.full.index(stage)
            mbarrier.expect(full, var.copied_bytes)
            k = 64 * block
            if var.transposed:
                async_load(args.w, [tile.expert * var.k + k, row0], full, args.boxes.index(2 * stage))
                async_load(args.w, [tile.expert * var.k + k, row1], full, args.boxes.index(2 * stage + 1))
            else:
                async_load(args.w, [tile.expert * var.rows + row0, k], full, args.boxes.index(2 * stage))
                async_load(args.w, [tile.expert * var.rows + row1, k], full, args.boxes.index(2 * stage + 1))
            if var.gated:
                copy_to_shared(args.inputs.index(stage), x_ptrs + k)
                async_copy.mbarrier_arrive(full, increment_count=False)
            else:
                async_load(args.x, [tile.first, k], full, args.inputs.index(stage))
            count += 1
        index += gl.num_programs(0)
        tile = upcoming


@gluon.jit
def _multiply_blocks(acc, start: gl.constexpr, end: gl.constexpr, count, args, group: gl.constexpr, var: gl.constexpr):
    """Add the products of a tile's blocks [start, end) of columns. The last one still runs: its stage is not released."""
    STAGES: gl.constexpr = var.tile.stages
    for block in range(start, end):
        at = count + block
        stage = at % STAGES
        mbarrier.wait(args.full.index(stage), (at // STAGES) & 1)
        if var.gated:
            fence_async_shared()  # the tensor cores read what threads have copied
        w = args.weights.index(stage)
        if not var.transposed:
            w = w.permute((1, 0))
        acc = warpgroup_mma(args.inputs.index(stage).slice(64 * group, 64, 0), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(args.empty.index((at + STAGES - 1) % STAGES), count=1, pred=block > 0)
    return acc


@gluon.jit
def multiply_tile(count, args, group: gl.constexpr, var: gl.constexpr):
    """The products of 64 pairs with a tile's weights, [64, block_n]. Stages are released one product late."""
    STAGES: gl.constexpr = var.tile.stages
    BLOCK_N: gl.constexpr = var.tile.block_n
    BLOCKS: gl.constexpr = var.blocks
    LAG: gl.constexpr = var.lag
    LAYOUT: gl.constexpr = var.product_layout
    acc = gl.zeros([64, BLOCK_N], gl.float32, layout=LAYOUT)
    if LAG > 0 and group == 0:
        acc = _multiply_blocks(acc, 0, LAG, count, args, group, var)
        mbarrier.arrive(args.lead.index(0), count=1)
        acc = _multiply_blocks(acc, LAG, BLOCKS, count, args, group, var)
    else:
        acc = _multiply_blocks(acc, 0, BLOCKS, count, args, group, var)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(args.empty.index((count + BLOCKS - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _pass_tile(count, args, var: gl.constexpr):
    """Release the stages of a tile without reading them."""
    STAGES: gl.constexpr = var.tile.stages
    for block in range(var.blocks):
        at = count + block
        mbarrier.wait(args.full.index(at % STAGES), (at // STAGES) & 1)
        mbarrier.arrive(args.empty.index(at % STAGES), count=1)


@gluon.jit
def _add_bias(acc, expert, tile_n, args, var: gl.constexpr):
    """The sums with the bias of their rows of weights."""
    BLOCK_N: gl.constexpr = var.tile.block_n
    HALF: gl.constexpr = BLOCK_N // 2
    COLUMNS: gl.constexpr = gl.SliceLayout(0, var.product_layout)
    row0, row1 = weight_rows(tile_n, var)
    columns = gl.arange(0, BLOCK_N, layout=COLUMNS)
    rows = row0 + columns
    if var.halves:
        rows = gl.where(columns < HALF, rows, row1 - HALF + columns)
    bias = gl.load(args.bias + expert.to(gl.int64) * args.stride_be + rows, mask=rows < var.rows, other=0.0)
    return acc + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.jit
def _silu_gate(gate, up, args, var: gl.constexpr):
    """`gated_values` with SiLU in few instructions: gate * up / (1 + exp(-slope * gate)). If the exponential is inf, the output
    is 0. Instructions matter: while a thread gates 64 values, the tensor cores have at most half of their work."""
    if var.limited:
        gate = gl.where(gate > args.limit, args.limit, gate)
        up = gl.where(up > args.limit, args.limit, up)
        up = gl.where(up < -args.limit, -args.limit, up)
    total = 1.0 + gl.exp2(gate * (args.slope * -LOG2E))
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=True, pack=1)
    return gate * (up + args.offset) * inverse


@gluon.jit
def _gate(acc, args, var: gl.constexpr):
    """The outputs [64, outputs] from the sums of gates and up values. One thread has both sums of an output."""
    OUTPUTS: gl.constexpr = var.outputs
    if var.halves:
        gate, up = halves_of_columns(acc, 2 * OUTPUTS)
    else:
        gate, up = gl.split(gl.reshape(acc, [64, OUTPUTS, 2]))
    if var.kind == 0 and not var.invariant:
        return _silu_gate(gate, up, args, var)
    else:  # noqa: RET505
        return gated_values(gate, up, args.slope, args.limit, args.offset, var.kind)


@gluon.jit
def halves_of_columns(x, WIDTH: gl.constexpr):
    """The first and the second half of the columns of x, [64, WIDTH]."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, WIDTH // 2]), (0, 2, 1)))


@gluon.jit
def _store_columns(y, column, rows, keep, args, group: gl.constexpr, WIDTH: gl.constexpr, var: gl.constexpr):
    """Store columns [column, column + WIDTH) of 64 rows, 64 columns at a time. They pass through shared memory, so that 8
    threads write 128 neighbouring bytes of a row."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if WIDTH > 64:
        left, right = halves_of_columns(y, WIDTH)
        _store_columns(left, column, rows, keep, args, group, WIDTH // 2, var)
        _store_columns(right, column + WIDTH // 2, rows, keep, args, group, WIDTH // 2, var)
    else:
        buffer = args.staging.index(group)
        buffer.store(y)
        values = buffer.load(STORED)
        columns = gl.expand_dims(column + gl.arange(0, 64, layout=gl.SliceLayout(0, STORED)), 0)
        gl.store(args.out + gl.expand_dims(rows.to(gl.int64) * var.n, 1) + columns, values, mask=keep & (columns < var.n))


@gluon.jit
def matrix_consumer(args, group: gl.constexpr, var: gl.constexpr):
    """Compute 64 pairs of tile after tile."""
    OUTPUTS: gl.constexpr = var.outputs
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    index = gl.program_id(0)
    tile = pair_tile(index, args, var)
    count = index * 0
    tile_count = index * 0
    while tile.first < tile.end:
        upcoming = pair_tile(index + gl.num_programs(0), args, var)
        first = tile.first + 64 * group
        if var.lag > 0 and group == 1:
            mbarrier.wait(args.lead.index(0), tile_count & 1)
        if first < tile.end:
            places = first + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
            rows = places
            if not var.gated:
                rows = gl.load(args.order + gl.minimum(places, tile.end - 1))
            acc = multiply_tile(count, args, group, var)
            tile_n = index % var.tiles_n
            if args.bias is not None:
                acc = _add_bias(acc, tile.expert, tile_n, args, var)
            y = _gate(acc, args, var) if var.gated else acc
            keep = gl.expand_dims(places < tile.end, 1)
            _store_columns(y.to(args.out.dtype.element_ty), tile_n * OUTPUTS, rows, keep, args, group, OUTPUTS, var)
        else:
            _pass_tile(count, args, var)
        count += var.blocks
        tile_count += 1
        index += gl.num_programs(0)
        tile = upcoming


@gluon.jit(do_not_specialize=["total"])
def experts_matrix(
    w_desc,
    x_desc,
    x_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    total,
    slope,
    limit,
    offset,
    stride_be,
    var: gl.constexpr,
):
    """tiles: (tiles, 3) int32, as `order._list_tiles` writes them; order: as `order._sort_pairs` writes it"""
    STAGES: gl.constexpr = var.tile.stages
    LAYOUT: gl.constexpr = w_desc.layout
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    inputs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 128, 64], LAYOUT)
    weights = gl.allocate_shared_memory(w_desc.dtype, var.ring_shape, LAYOUT)
    if HAS_REINTERPRET:
        boxes = weights.reinterpret(w_desc.dtype, var.box_shape, LAYOUT)
    else:
        boxes = weights._reinterpret(w_desc.dtype, var.box_shape, LAYOUT)
    staging = gl.allocate_shared_memory(w_desc.dtype, [2, 64, 64], LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    lead = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=var.arrivals)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lead.index(0), count=1)
    fence_async_shared()
    if x_desc is None:
        x_desc = w_desc
    args = MatrixArgs(
        w=w_desc,
        x=x_desc,
        x_ptr=x_ptr,
        bias=bias_ptr,
        order=order_ptr,
        tiles=tiles_ptr,
        out=out_ptr,
        total=total,
        stride_be=stride_be,
        slope=slope,
        limit=limit,
        offset=offset,
        inputs=inputs,
        weights=weights,
        boxes=boxes,
        staging=staging,
        full=full,
        empty=empty,
        lead=lead,
    )
    wait_for_previous_kernel(True)
    if var.gated:
        gl.warp_specialize(
            [(matrix_consumer, (args, 0, var)), (matrix_consumer, (args, 1, var)), (matrix_producer, (args, var))],
            [4, 4],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [(matrix_consumer, (args, 0, var)), (matrix_consumer, (args, 1, var)), (matrix_producer, (args, var))],
            [4, 1],
            [240, 24],
        )


def plan_expert_matrices(
    product: Product, tile: MatrixTile, weight: Tensor, bias: Tensor | None, gate: Gate | None
) -> ExpertProduct:
    """One launch. weight, bias: those of a call, for their strides"""
    stride_be = 0 if bias is None else bias.stride(0)
    launch = plan_matrix_tiles(product, tile, gate, most_tiles(product, tile.block_m), stride_be, weight.stride(2) != 1)

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, places: Places, out: Tensor) -> None:
        if x.data_ptr() % 16:
            x = x.clone()  # copies to shared memory are 16 bytes each
        launch((weight, x, x, bias, places.order, places.tiles, out))

    return multiply


def plan_matrix_tiles(
    product: Product, tile: MatrixTile, gate: Gate | None, tiles: int, stride_be: int, transposed: bool
) -> Launch:
    """The launch of a product with the weights of all experts, in `tiles` tiles of pairs, on (weight, x, x, bias, order, list
    of tiles, out).

    gate:       if given, pairs of outputs are gated, and the input has a row for each token; else it has a row for each place
    stride_be:  stride of the biases from one expert to the next
    transposed: the weight, (num_experts, rows, k), is contiguous when its last two dimensions are exchanged
    """
    n = product.outputs
    k = product.k
    num_experts = product.num_experts
    limited = gate is not None and gate.limit != math.inf
    var = MatrixVariant(tile, n, k, product.top_k, *rows_of_outputs(gate, n), limited, transposed, product.invariant)
    shape = (num_experts * k, product.n) if transposed else (num_experts * product.n, k)
    weights = View(shape, (shape[1], 1), var.box_shape[1:], _LAYOUT)
    inputs = None if gate else View((product.pairs, k), (k, 1), (BLOCK_M, BLOCK_K), _LAYOUT)
    total = tiles * var.tiles_n
    return Launch(
        experts_matrix,
        min(product.num_sms, total),
        varying=(total, *gate_numbers(gate)),
        strides=(stride_be,),
        fixed=(var,),
        options={**launch_options(True, 4), "maxnreg": _LAUNCH_REGISTERS},
        views=(weights, inputs),
    )
