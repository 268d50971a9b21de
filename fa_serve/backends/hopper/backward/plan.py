"""Attention backward for Hopper (sm90) in Gluon, after FlashAttention-3: dense and packed.

A thread block has one producer warp and two consumer warpgroups of 64 keys each. It computes dK and dV of 128 keys of one KV
head, summed over the query heads of the group, and adds its part of dQ to a sum in float32 (see `dq_accumulator`). Heads wider
than 128 have a separate kernel with 64 keys in a tile (see `wide.kernel`); the kernel for all other heads is in this file. The
launches are the same for both:

    row statistics    lse in base 2, and delta = rowsum(dO * O) - dlse (`triton.row_statistics`, shared with the portable pass)
    main kernel       the producer copies K and V once and streams Q, dO and the statistics; the consumers compute five products
                      for each block of queries (see `consumer`)
    conversion        the sum becomes the gradient of q

The additions to dQ happen in the order in which thread blocks run, so equal calls may differ in the last bits of dQ. Gradients
that have to be reproducible, masks and heads wider than `MAX_HEAD_DIM_OF_GRADIENTS` are left to the portable kernels, see
`HopperBackend.supports`. As in the forward pass, the hardware bounds packed sequences, so a NaN of a neighbouring sequence is
neither read nor overwritten.

    run = plan_hopper_backward(tensors, options)      # once for calls that look alike
    gradients = run(tensors)
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fa_serve.backends.calls import AttentionOptions, BackwardTensors, Gradients
from fa_serve.backends.hopper.backward.consumer import backward_consumer
from fa_serve.backends.hopper.backward.dq_accumulator import convert_launch
from fa_serve.backends.hopper.backward.producer import backward_producer, key_tile
from fa_serve.backends.hopper.backward.tiles import (
    BackwardTileConfig,
    gradient_columns,
    hopper_backward_tiles,
    second_value_columns,
)
from fa_serve.backends.hopper.backward.types import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    BackwardArgs,
    BackwardBarriers,
    BackwardDescriptors,
    BackwardMemory,
    BackwardNumbers,
    HopperBackwardVariant,
)
from fa_serve.backends.hopper.backward.wide.kernel import wide_attention_backward
from fa_serve.backends.hopper.backward.wide.types import WideBackwardVariant
from fa_serve.backends.hopper.descriptors import addressable, copy_engine_strides, dense_view, ragged_view, statistics_view
from fa_serve.backends.hopper.forward.plan import base_2_scales
from fa_serve.backends.triton.row_statistics import RowStatistics
from fa_serve.launching.gluon_names import HAS_REINTERPRET
from fa_serve.launching.launch import Launch, View, with_unit_stride
from fa_serve.launching.plans import Run


@gluon.jit
def _squares(memory, count: gl.constexpr):
    """The same memory as squares of 64 by 64: the 128-byte swizzle stores 64 columns of all rows, then the next 64 columns."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    if HAS_REINTERPRET:
        return memory.reinterpret(memory.dtype, [count, 64, 64], LAYOUT)
    else:  # noqa: RET505
        return memory._reinterpret(memory.dtype, [count, 64, 64], LAYOUT)


@gluon.jit
def _allocate_memory(desc, var: gl.constexpr):
    GROUPS: gl.constexpr = var.groups
    Q_STAGES: gl.constexpr = var.tiles.q_stages
    DO_STAGES: gl.constexpr = var.tiles.do_stages
    DS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = desc.q.dtype
    q = gl.allocate_shared_memory(dtype, [Q_STAGES] + desc.q.block_type.shape, desc.q.layout)  # noqa: RUF005
    dout = gl.allocate_shared_memory(dtype, [DO_STAGES] + desc.dout.block_type.shape, desc.dout.layout)  # noqa: RUF005
    lse = gl.allocate_shared_memory(gl.float32, [Q_STAGES] + desc.lse.block_type.shape, desc.lse.layout)  # noqa: RUF005
    delta = gl.allocate_shared_memory(gl.float32, [DO_STAGES] + desc.delta.block_type.shape, desc.delta.layout)  # noqa: RUF005
    k = gl.allocate_shared_memory(dtype, [GROUPS] + desc.k.block_type.shape, desc.k.layout)  # noqa: RUF005
    v = gl.allocate_shared_memory(dtype, [GROUPS] + desc.v.block_type.shape, desc.v.layout)  # noqa: RUF005
    ds = gl.allocate_shared_memory(dtype, [2 * GROUPS, 64, var.tiles.block_m], DS)
    k_chunks = _squares(k, GROUPS * var.column_chunks)
    ds_chunks = _squares(ds, 2 * GROUPS * var.row_chunks)
    return BackwardMemory(q, dout, lse, delta, k, v, k_chunks, ds, ds_chunks)


@gluon.jit
def _allocate_barriers(var: gl.constexpr):
    GROUPS: gl.constexpr = var.groups
    Q_STAGES: gl.constexpr = var.tiles.q_stages
    DO_STAGES: gl.constexpr = var.tiles.do_stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=GROUPS)
    for i in gl.static_range(DO_STAGES):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=GROUPS)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    fence_async_shared()
    return BackwardBarriers(q_full, q_empty, do_full, do_empty, k_full, v_full)


@gluon.jit(do_not_specialize=[*BackwardNumbers._fields])
def _attention_backward(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dk_desc,
    dv_desc,
    dq_accum_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    scale,
    softcap,
    softmax_scale,
    num_n,
    num_heads,
    heads_per_kv,
    seqlen_q,
    seqlen_k,
    left,
    right,
    stats_width,
    var: gl.constexpr,
):
    desc = BackwardDescriptors(q_desc, k_desc, v_desc, dout_desc, lse_desc, delta_desc, dk_desc, dv_desc)
    smem = _allocate_memory(desc, var)
    bars = _allocate_barriers(var)
    args = BackwardArgs(
        dq_accum=dq_accum_ptr,
        cu_seqlens_q=cu_seqlens_q_ptr,
        cu_seqlens_k=cu_seqlens_k_ptr,
        scale=scale,
        softcap=softcap,
        softmax_scale=softmax_scale,
        num_n=num_n,
        num_heads=num_heads,
        heads_per_kv=heads_per_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        left=left,
        right=right,
        stats_width=stats_width,
    )
    tile = key_tile(gl.program_id(0), args, var)
    gl.warp_specialize(
        [
            (backward_consumer, (desc, smem, bars, args, tile, 0, var)),
            (backward_consumer, (desc, smem, bars, args, tile, 1, var)),
            (backward_producer, (desc, smem, bars, args, tile, var)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def plan_hopper_backward(tensors: BackwardTensors, options: AttentionOptions, tiles: BackwardTileConfig | None = None) -> Run:
    """Plan calls that look like this one, dense or packed: a run maps `BackwardTensors` to `Gradients`.

    mask and alibi_slopes are ignored, because `HopperBackend.supports` refuses them. `tiles` overrides the choice of
    `hopper_backward_tiles`, for tuning and tests. Tensors that the copy engine cannot address are copied first at each call.
    """
    return _BackwardPlan(tensors, options, tiles)


class _BackwardPlan:
    """The launches of one kind of call."""

    __slots__ = ("_convert", "_copied", "_main", "_statistics", "_width")

    def __init__(self, tensors: BackwardTensors, options: AttentionOptions, tiles: BackwardTileConfig | None) -> None:
        read = (tensors.q, tensors.k, tensors.v, tensors.dout)
        self._copied = tuple([copy_engine_strides(x.shape, x.stride()) is None for x in read])
        tensors = self._laid_out(tensors)
        q = tensors.q
        k = tensors.k
        v = tensors.v
        varlen = tensors.cu_seqlens_q is not None
        batch = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        heads = q.shape[-2]
        self._width = gradient_columns(q.shape[-1], v.shape[-1])
        self._statistics = RowStatistics(tensors, options)
        tiles = hopper_backward_tiles(self._width) if tiles is None else tiles
        seen = {"has_left": options.window_size[0] >= 0, "has_right": options.window_size[1] >= 0}
        kinds = {"varlen": varlen, **seen, "softcap": options.softcap != 0.0}
        var: HopperBackwardVariant | WideBackwardVariant
        if self._width > 128:
            var = WideBackwardVariant(tiles, self._width - 128, second_value_columns(v.shape[-1], self._width), **kinds)
        else:
            var = HopperBackwardVariant(tiles, self._width, **kinds)
        num_n = -(-options.max_seqlen_k // var.block_n)
        grid = batch * k.shape[-2] * num_n
        stats_width = self._statistics.shape[-1]
        scale, softcap = base_2_scales(options.softmax_scale, options.softcap)
        numbers = BackwardNumbers(
            scale=scale,
            softcap=softcap,
            softmax_scale=float(options.softmax_scale),
            num_n=num_n,
            num_heads=heads,
            heads_per_kv=heads // k.shape[-2],
            seqlen_q=options.max_seqlen_q,
            seqlen_k=options.max_seqlen_k,
            left=options.window_size[0],
            right=options.window_size[1],
            stats_width=stats_width,
        )
        self._main = None
        if grid and q.shape[0] and q.shape[-3]:
            launch_options = {"num_warps": 4, "maxnreg": LAUNCH_REGISTERS}
            if isinstance(var, WideBackwardVariant):
                kernel = wide_attention_backward
                views = self._wide_views(tensors, var)
            else:
                kernel = _attention_backward
                views = self._views(tensors, var)
            self._main = Launch(kernel, grid, numbers, (var,), launch_options, views=views)
        self._convert = convert_launch(
            (batch, heads, q.shape[-1]), self._width, options.max_seqlen_q, stats_width, varlen, float(options.softmax_scale)
        )

    def __call__(self, tensors: BackwardTensors) -> Gradients:
        tensors = self._laid_out(tensors)
        q = tensors.q
        k = tensors.k
        v = tensors.v
        # Rows of a packed tensor that belong to no sequence have no gradient, and no thread block writes them.
        packed = tensors.cu_seqlens_q is not None
        allocate = torch.zeros_like if packed or self._main is None else torch.empty_like
        dq, dk, dv = (allocate(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        lse2, delta, dsinks = self._statistics(tensors)
        if self._main is not None and self._convert is not None:
            dq_accum = lse2.new_zeros(*self._statistics.shape, self._width)
            ends = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
            if self._width > 128:  # descriptors of both parts of each tensor
                given = (q, q, k, k, v, v, tensors.dout, tensors.dout, lse2, delta, dk, dk, dv, dv)
            else:
                given = (q, k, v, tensors.dout, lse2, delta, dk, dv)
            self._main((*given, dq_accum, *ends))
            self._convert((dq_accum, dq, tensors.cu_seqlens_q))
        return Gradients(dq, dk, dv, dsinks)

    def _laid_out(self, tensors: BackwardTensors) -> BackwardTensors:
        """The same tensors, in layouts and at addresses that the kernels can read."""
        read = (tensors.q, tensors.k, tensors.v, tensors.dout)
        q, k, v, dout = (addressable(x, copied) for x, copied in zip(read, self._copied, strict=True))
        return tensors._replace(
            q=q,
            k=k,
            v=v,
            dout=dout,
            out=with_unit_stride(tensors.out),
            lse=tensors.lse.contiguous(),
            dlse=None if tensors.dlse is None else tensors.dlse.contiguous(),
        )

    def _views(self, tensors: BackwardTensors, var: HopperBackwardVariant) -> tuple[View, ...]:
        """How the kernel sees q, k, v, dout, lse, delta, dk and dv. dk and dv are contiguous."""
        block_m = var.tiles.block_m
        statistics = statistics_view(self._statistics.shape, block_m)
        return (
            _rows_of(tensors.q, block_m, var.width, var.varlen),
            _rows_of(tensors.k, 64, var.width, var.varlen),
            _rows_of(tensors.v, 64, var.width, var.varlen),
            _rows_of(tensors.dout, block_m, var.width, var.varlen),
            statistics,
            statistics,
            _rows_of(tensors.k, 64, var.width, var.varlen, contiguous=True),
            _rows_of(tensors.v, 64, var.width, var.varlen, contiguous=True),
        )

    def _wide_views(self, tensors: BackwardTensors, var: WideBackwardVariant) -> tuple[View, ...]:
        """How the kernel for wide heads sees both parts of q, k, v and dout, lse, delta, and both parts of dk and dv."""

        def parts(x: Tensor, rows: int, second: int, contiguous: bool = False) -> tuple[View, View]:
            first_part, second_part = (_rows_of(x, rows, width, var.varlen, contiguous) for width in (128, second or 128))
            return first_part, second_part

        block_m = var.tiles.block_m
        statistics = statistics_view(self._statistics.shape, block_m)
        return (
            *parts(tensors.q, block_m, var.d1),
            *parts(tensors.k, 64, var.d1),
            *parts(tensors.v, 64, var.dv1),
            *parts(tensors.dout, block_m, var.dv1),
            statistics,
            statistics,
            *parts(tensors.k, 64, var.d1, contiguous=True),
            *parts(tensors.v, 64, var.dv1, contiguous=True),
        )


def _rows_of(x: Tensor, rows: int, width: int, varlen: bool, contiguous: bool = False) -> View:
    """The view of x in boxes of `rows` rows and `width` columns; `contiguous`: of a contiguous tensor with the shape of x."""
    view = ragged_view if varlen else dense_view
    strides = torch.empty(x.shape, device="meta").stride() if contiguous else x.stride()
    return view(tuple(x.shape), strides, x.dtype, rows, width)
