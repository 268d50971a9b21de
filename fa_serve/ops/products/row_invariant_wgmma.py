"""The row-invariant product of many rows with bfloat16 or float16 matrices on Hopper, in Gluon.

A thread block has a producer and two consumer warpgroups, and computes one tile after the other, of 128 rows by `block_n`
columns of the output. The producer's copies (TMA) fill a ring in shared memory, 64 elements of k at a time, and run on into the
next tile while consumers store. Each consumer multiplies 64 rows by asynchronous warpgroup MMAs (wgmma) of k16, in the order of
k, into one accumulator that starts from zero: the chain that row_invariant.py describes. So a row has the same bits as in that
kernel.

The ring, the barriers and the products are those of the kernel for experts (moe/matrix_wgmma.py). Left out: few rows, weights
that are not contiguous, and quantised weights (row_invariant.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fa_serve.backends.triton.primitives import wait_for_previous_kernel
from fa_serve.launching.gluon_names import async_load
from fa_serve.launching.launch import Launch, View, launch_options
from fa_serve.ops.moe.matrix_wgmma import BLOCK_K, halves_of_columns, multiply_tile
from fa_serve.ops.products.problem import Details, Multiply, Product
from fa_serve.ops.products.row_invariant import plan_invariant
from fa_serve.ops.products.tiles import HOPPER_TILES, InvariantWgmmaTile

_ROWS = 128
_GROUP_M = gl.constexpr(16)
"""How many tiles of one column are computed before the next column begins, so that they share its weights in the L2 cache."""
_LAUNCH_REGISTERS = 168  # 3 warpgroups, of which the last one need not be full


@dataclass(frozen=True)
class DenseVariant:
    """Everything that is fixed when the kernel is compiled, passed as one constexpr. n, k: outputs and columns

    gated, transposed: fields that `multiply_tile` reads; only products of experts set them
    """

    tile: InvariantWgmmaTile
    n: int
    k: int
    layout: gl.NVMMASharedLayout
    gated: bool = False
    transposed: bool = False

    @property
    def tiles_n(self) -> int:
        return -(-self.n // self.tile.block_n)

    @property
    def blocks(self) -> int:
        return -(-self.k // BLOCK_K)

    @property
    def lag(self) -> int:
        """As in `MatrixVariant`."""
        return self.tile.lag if self.blocks >= self.tile.stages >= self.tile.lag else 0

    @property
    def copied_bytes(self) -> int:
        return 2 * BLOCK_K * (self.tile.block_n + _ROWS)

    @property
    def product_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of a consumer's sums [64, block_n] as wgmma leaves them."""
        return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, self.tile.block_n, 16])


class DenseArgs(NamedTuple):
    """What the partitions read: the kernel's arguments, the rings of inputs and weights, the memory in which each consumer
    rearranges outputs, and barriers.

    w, x:  tensor descriptors
    total: number of all tiles; tiles_m: number of tiles of one column
    lead:  barrier that says that the first consumer has begun a tile
    """

    w: gl.tensor
    x: gl.tensor
    bias: gl.tensor
    residual: gl.tensor
    out: gl.tensor
    rows: gl.tensor
    tiles_m: gl.tensor
    total: gl.tensor
    alpha: gl.tensor
    inputs: gl.tensor
    weights: gl.tensor
    staging: gl.tensor
    full: gl.tensor
    empty: gl.tensor
    lead: gl.tensor


@gluon.jit
def place_of_tile(index, args, var: gl.constexpr):
    """Row and column of the `index`-th tile, counted in tiles: some rows of one column, then the same rows of the next one."""
    in_group = _GROUP_M * var.tiles_n
    first = index // in_group * _GROUP_M
    height = gl.minimum(args.tiles_m - first, _GROUP_M)
    return first + index % in_group % height, index % in_group // height


@gluon.jit
def dense_producer(args, var: gl.constexpr):
    """Copy tile after tile. `count` counts the blocks of k so far; it gives stage and phase."""
    STAGES: gl.constexpr = var.tile.stages
    index = gl.program_id(0)
    count = index * 0
    while index < args.total:
        tile_m, tile_n = place_of_tile(index, args, var)
        for block in range(var.blocks):
            stage = count % STAGES
            mbarrier.wait(args.empty.index(stage), ((count // STAGES) & 1) ^ 1)
            full = args.full.index(stage)
            mbarrier.expect(full, var.copied_bytes)
            async_load(args.w, [tile_n * var.tile.block_n, 64 * block], full, args.weights.index(stage))
            async_load(args.x, [tile_m * 128, 64 * block], full, args.inputs.index(stage))
            count += 1
        index += gl.num_programs(0)


@gluon.jit
def _store_dense(y, column, first, args, group: gl.constexpr, WIDTH: gl.constexpr, var: gl.constexpr):
    """Store columns [column, column + WIDTH) of 64 rows from `first` on, 64 columns at a time, as `store_product` does. They
    pass through shared memory, so that 8 threads write 128 neighbouring bytes of a row."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if WIDTH > 64:
        left, right = halves_of_columns(y, WIDTH)
        _store_dense(left, column, first, args, group, WIDTH // 2, var)
        _store_dense(right, column + WIDTH // 2, first, args, group, WIDTH // 2, var)
    else:
        buffer = args.staging.index(group)
        buffer.store(y)
        values = buffer.load(STORED)
        rows = first + gl.arange(0, 64, layout=gl.SliceLayout(1, STORED))
        columns = gl.expand_dims(column + gl.arange(0, 64, layout=gl.SliceLayout(0, STORED)), 0)
        keep = gl.expand_dims(rows < args.rows, 1) & (columns < var.n)
        offsets = gl.expand_dims(rows.to(gl.int64) * var.n, 1) + columns
        if args.residual is not None:
            values = gl.load(args.residual + offsets, mask=keep, other=0.0).to(gl.float32) + args.alpha * values
        gl.store(args.out + offsets, values.to(args.out.dtype.element_ty), mask=keep)


@gluon.jit
def dense_consumer(args, group: gl.constexpr, var: gl.constexpr):
    """Compute 64 rows of tile after tile."""
    BLOCK_N: gl.constexpr = var.tile.block_n
    COLUMNS: gl.constexpr = gl.SliceLayout(0, var.product_layout)
    index = gl.program_id(0)
    count = index * 0
    tile_count = index * 0
    while index < args.total:
        tile_m, tile_n = place_of_tile(index, args, var)
        if var.lag > 0 and group == 1:
            mbarrier.wait(args.lead.index(0), tile_count & 1)
        acc = multiply_tile(count, args, group, var)
        if args.bias is not None:
            columns = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, layout=COLUMNS)
            bias = gl.load(args.bias + columns, mask=columns < var.n, other=0.0)
            acc = acc + gl.expand_dims(bias.to(gl.float32), 0)
        _store_dense(acc, tile_n * BLOCK_N, tile_m * 128 + 64 * group, args, group, BLOCK_N, var)
        count += var.blocks
        tile_count += 1
        index += gl.num_programs(0)


@gluon.jit(do_not_specialize=["rows", "tiles_m", "total"])
def invariant_matrix(
    w_desc,
    x_desc,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    tiles_m,
    total,
    alpha,
    var: gl.constexpr,
):
    """out = x @ w.T + bias, or residual + alpha * that, rounded once."""
    STAGES: gl.constexpr = var.tile.stages
    LAYOUT: gl.constexpr = var.layout
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    inputs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 128, 64], LAYOUT)
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES, var.tile.block_n, 64], LAYOUT)
    # neighbouring rows lie in different banks
    staging = gl.allocate_shared_memory(gl.float32, [2, 64, 64], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    lead = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(lead.index(0), count=1)
    fence_async_shared()
    args = DenseArgs(
        w=w_desc,
        x=x_desc,
        bias=bias_ptr,
        residual=residual_ptr,
        out=out_ptr,
        rows=rows,
        tiles_m=tiles_m,
        total=total,
        alpha=alpha,
        inputs=inputs,
        weights=weights,
        staging=staging,
        full=full,
        empty=empty,
        lead=lead,
    )
    wait_for_previous_kernel(True)
    gl.warp_specialize(
        [(dense_consumer, (args, 0, var)), (dense_consumer, (args, 1, var)), (dense_producer, (args, var))],
        [4, 1],
        [240, 24],
    )


def plan_invariant_wgmma(product: Product, tile: InvariantWgmmaTile, details: Details) -> Multiply:
    """One launch of a persistent kernel. If the copy engine cannot read the strides, a tile of `invariant` computes the same
    chain."""
    m = product.tokens
    n = product.n
    k = product.k
    stride_x, *others = details.strides
    if others != [1, k, 1] or stride_x % 8:
        return plan_invariant(product, HOPPER_TILES[0], details)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    var = DenseVariant(tile, n, k, layout)
    tiles_m = triton.cdiv(m, _ROWS)
    total = tiles_m * var.tiles_n
    launch = Launch(
        invariant_matrix,
        min(product.num_sms, total),
        varying=(m, tiles_m, total, details.alpha),
        fixed=(var,),
        options={**launch_options(True, 4), "maxnreg": _LAUNCH_REGISTERS},
        views=(
            View((n, k), (k, 1), (tile.block_n, BLOCK_K), layout),
            View((m, k), (stride_x, 1), (_ROWS, BLOCK_K), layout),
        ),
    )

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, residual: Tensor | None) -> Tensor:
        if x.data_ptr() % 16:
            x = x.clone()  # copies to shared memory are 16 bytes each
        out = x.new_empty(m, n) if residual is None else residual
        launch((weight, x, bias, residual, out))
        return out

    return multiply
