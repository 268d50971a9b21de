"""Attention forward for Hopper (sm90) in Gluon, after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

A block has one producer warp and one to three consumer warpgroups of 64 query rows each, and works on one tile at a time:

    producer   deals tiles (see `schedule`), and copies Q, K and V to shared memory with the tensor memory accelerator (TMA)
    consumers  S = Q K^T and O += P V as asynchronous warpgroup MMAs (wgmma), softmax in registers, O out through TMA

K and V go through rings of `stages` blocks, Q (and the record that says which tile it is) through a ring of `q_stages`; each
slot has a "full" and an "empty" mbarrier. Within a warpgroup a step's S is issued before the previous step's P V and both
run under the softmax; across tiles the next tile's first S is issued under this tile's last P V, and the epilogue runs under
it; between warpgroups `pingpong` hands the tensor cores around. Scores are in base 2, the output is scaled once at the end.

Packed sequences are bounded by the hardware: descriptors are ragged (Triton's `tools.ragged_tma`), rows past a sequence's end
read as zero and are not written, so a neighbour's NaN can neither be read nor overwritten, and no tile needs a slow path.

A page of a paged cache is bounded in the same way: it is a packed sequence as long as what its owner uses of it, and a tile of
K or V arrives page by page. Entries of the block table behind the last page, or before a window, are not read.

Left out: explicit masks, float8 caches, the backward pass. `head_dim` 96 runs at the cost of 128.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.runtime.driver import driver

from fa_serve.backends.hopper.consumer import consumer
from fa_serve.backends.hopper.producer import producer
from fa_serve.backends.hopper.schedule import TileCounters, table_launch, tile_slots, tile_table
from fa_serve.backends.hopper.shared import RAGGED, Bars, Descs, Epilogue, Smem, Variant, Work
from fa_serve.backends.hopper.tiles import HEAD_DIMS, Schedule, TileConfig, forward_tiles, head_group
from fa_serve.backends.launch import Launch, View, multiprocessors, on_device_of


@gluon.jit
def _ring(width: gl.constexpr, desc, var: gl.constexpr):
    """A ring of blocks of K or V; and the same memory as the pieces in which a paged cache arrives: the 128-byte swizzle has 64
    columns of all rows, then the next 64, and any 8 rows of these are one pattern."""
    STAGES: gl.constexpr = var.tiles.stages
    if var.page_size > 0:
        KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        PIECES: gl.constexpr = STAGES * (var.tiles.block_n // var.page_rows) * (width // 64)
        ring = gl.allocate_shared_memory(desc.dtype, [STAGES, var.tiles.block_n, width], KEYS)
        return ring, ring._reinterpret(desc.dtype, [PIECES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
    else:  # noqa: RET505
        ring = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
        return ring, ring


@gluon.jit(
    do_not_specialize=[
        "scale",
        "softcap",
        "lse_stride",
        "total",
        "num_m",
        "num_heads",
        "heads_per_kv",
        "head_group",
        "head_tail",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "table_stride",
        "k_pitch",
        "v_pitch",
    ],
    do_not_specialize_on_alignment=["lse_ptr", "sinks_ptr", "counter_ptr", "block_table_ptr"],
)
def _attention_forward(
    q_desc,
    q1_desc,
    k_desc,
    k1_desc,
    v_desc,
    o_desc,
    lse_ptr,
    sinks_ptr,
    table_ptr,
    counter_ptr,
    block_table_ptr,
    scale,
    softcap,
    lse_stride,
    total,
    num_m,
    num_heads,
    heads_per_kv,
    head_group,
    head_tail,
    seqlen_q,
    seqlen_k,
    left,
    right,
    table_stride,
    k_pitch,
    v_pitch,
    var: gl.constexpr,
):
    GROUPS: gl.constexpr = var.tiles.groups
    STAGES: gl.constexpr = var.tiles.stages
    Q_STAGES: gl.constexpr = var.tiles.q_stages
    REGISTERS: gl.constexpr = var.registers
    PRODUCER: gl.constexpr = var.producer_registers
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    RECORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * GROUPS] + q_desc.block_type.shape, q_desc.layout)  # noqa: RUF005
    if q1_desc is None:
        q1_desc = q_desc
    if k1_desc is None:
        k1_desc = k_desc
    k_smem, k_boxes = _ring(var.d0, k_desc, var)
    v_smem, v_boxes = _ring(var.dv, v_desc, var)
    q1_smem = q_smem
    k1_smem = k_smem
    k1_boxes = k_boxes
    if var.d1 > 0:
        q1_shape: gl.constexpr = [Q_STAGES * GROUPS] + q1_desc.block_type.shape  # noqa: RUF005
        q1_smem = gl.allocate_shared_memory(dtype, q1_shape, q1_desc.layout)
        k1_smem, k1_boxes = _ring(var.d1, k1_desc, var)
    o_smem = q_smem
    if var.tiles.o_parts > 0:
        o_smem = gl.allocate_shared_memory(dtype, [GROUPS] + o_desc.block_type.shape, o_desc.layout)  # noqa: RUF005
    record = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 8], RECORD)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=GROUPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    desc = Descs(q_desc, q1_desc, k_desc, k1_desc, v_desc, o_desc)
    smem = Smem(q_smem, q1_smem, k_smem, k1_smem, v_smem, o_smem, record, k_boxes, k1_boxes, v_boxes)
    bars = Bars(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    if var.varlen:
        counter_ptr = table_ptr + total // num_heads * 8
    work = Work(
        table_ptr,
        counter_ptr,
        total,
        num_m,
        num_heads,
        heads_per_kv,
        head_group,
        head_tail,
        seqlen_q,
        seqlen_k,
        left,
        right,
        block_table_ptr,
        table_stride,
        k_pitch,
        v_pitch,
    )
    epilogue = Epilogue(lse_ptr, sinks_ptr, lse_stride, num_heads, scale, softcap, left, right)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (consumer, (desc, smem, bars, epilogue, 0, var)),
                (producer, (desc, smem, bars, work, var)),
            ],
            [1],
            [PRODUCER],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (consumer, (desc, smem, bars, epilogue, 0, var)),
                (consumer, (desc, smem, bars, epilogue, 1, var)),
                (producer, (desc, smem, bars, work, var)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (desc, smem, bars, epilogue, 0, var)),
                (consumer, (desc, smem, bars, epilogue, 1, var)),
                (consumer, (desc, smem, bars, epilogue, 2, var)),
                (producer, (desc, smem, bars, work, var)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER],
        )


_LAYOUTS = {
    (dtype, rank, width): gl.NVMMASharedLayout(min(2 * width, 128), 16, rank=rank)
    for dtype in (torch.float16, torch.bfloat16)
    for rank in (4, 5)
    for width in (64, 128, 256)
}
_COUNTERS = TileCounters()


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_size: tuple[int, int],
    softcap: float,
    sinks: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    skip_q: int = 0,
    lse: Tensor | None = None,
    tiles: TileConfig | None = None,
    memo: dict[str, Any] | None = None,
    mask: None = None,
    k_descale: None = None,
    v_descale: None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Dense q (batch, seqlen_q, heads, head_dim), or packed q (total_q, heads, head_dim) with cu_seqlens_q, and keys packed by
    cu_seqlens_k or in the pages of block_table; see `api`.

    Packed sequences with up to `skip_q` queries are left alone: their rows of out and lse stay as they are. `lse` is written if
    given, `tiles` overrides the choice of `forward_tiles`; `memo` as in `backends.Backend`. Nothing reads mask, descales and
    num_splits, which `supports` refuses. Tensors that the copy engine cannot address (a last dimension that is not contiguous,
    other strides not multiples of 16 bytes) are copied first.
    """
    if return_lse and lse is None:
        lse = q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32)
    memo = {} if memo is None else memo
    plan = memo.get("hopper") or memo.setdefault(
        "hopper",
        _plan(
            q,
            k,
            v,
            out,
            cu_seqlens_q,
            block_table,
            max_seqlen_q,
            max_seqlen_k,
            window_size,
            softmax_scale,
            softcap,
            skip_q,
            tiles,
        ),
    )
    result = q.new_empty(plan.shape) if out is None else out
    if not plan.addressable or (q.data_ptr() | k.data_ptr() | v.data_ptr() | result.data_ptr()) & 15:
        target = result if _is_addressable(result) else torch.empty_like(result, memory_format=torch.contiguous_format)
        launch_forward(
            _addressable(q),
            _addressable(k),
            _addressable(v),
            softmax_scale=softmax_scale,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
            out=target,
            return_lse=return_lse,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            block_table=block_table,
            seqused_k=seqused_k,
            skip_q=skip_q,
            lse=lse,
            tiles=tiles,
        )
        return result if target is result else result.copy_(target), lse
    table = counter = None
    if plan.table is not None:
        table = tile_table(plan.table, plan.slots, cu_seqlens_q, cu_seqlens_k if block_table is None else seqused_k)
    elif plan.counts:
        counter = _counter(q)
    if plan.attention is not None:
        plan.attention((q, q, k, k, v, result, lse, sinks, table, counter, block_table))
    elif plan.empty:
        _fill_without_keys(result, lse, sinks)
    return result, lse


def make_step(q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> Callable[..., Tensor | None]:
    """`launch_forward` of dense tensors for calls that differ from this one in addresses alone, without sinks and lse.

    What is made takes tensors and None for the mask as models hold them, heads before tokens, which addresses do not show.
    -> out (batch, seqlen_q, heads, head_dim_v), or None, and nothing done, if a call has to go the long way.
    """
    window = options["window_size"]
    scale = options["softmax_scale"]
    softcap = options["softcap"]
    plan = _plan(q, k, v, None, None, None, 0, 0, window, scale, softcap, 0, None)

    def step(q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor | None:
        if plan.attention is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return None
        out = q.new_empty(plan.shape)
        plan.attention((q, q, k, k, v, out, None, None, None, _counter(q) if plan.counts else None, None))
        return out

    return step


class _Plan(NamedTuple):
    """What follows from shapes, strides and options alone: the shape of a contiguous output, and the launches.

    addressable: the copy engine can read and write all tensors; empty: there are no queries or no keys
    """

    shape: tuple[int, ...]
    attention: Launch | None = None
    table: Launch | None = None
    slots: int = 0
    counts: bool = False
    addressable: bool = True
    empty: bool = False


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    cu_seqlens_q: Tensor | None,
    block_table: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window: tuple[int, int],
    scale: float,
    softcap: float,
    skip_q: int,
    tiles: TileConfig | None,
) -> _Plan:
    """`out` is None for one that is contiguous."""
    packed = cu_seqlens_q is not None
    paged = block_table is not None
    dtype = q.dtype
    q_shape = q.shape
    k_shape = k.shape
    v_shape = v.shape
    q_stride = q.stride()
    k_stride = k.stride()
    v_stride = v.stride()
    out_shape = (*q_shape[:-1], v_shape[-1])
    if 0 in (*q_shape[:2], *k_shape[:2]):
        return _Plan(out_shape, empty=True)
    if not packed:
        max_seqlen_q = q_shape[1]
        max_seqlen_k = k_shape[1]
    left, right = window
    (num_heads, head_dim), (num_kv_heads, head_dim_v) = q_shape[-2:], v_shape[-2:]
    if tiles is None:
        tiles = forward_tiles(head_dim, head_dim_v, window, max_seqlen_q, max_seqlen_k, packed, paged)
    out_stride = tuple(math.prod(out_shape[i:]) for i in range(1, len(out_shape) + 1)) if out is None else out.stride()
    every = ((q_shape, q_stride), (k_shape, k_stride), (v_shape, v_stride), (out_shape, out_stride))
    if None in [_addressable_strides(shape, stride) for shape, stride in every]:
        return _Plan(out_shape, addressable=False)
    d0, d1, dv = HEAD_DIMS[head_dim, head_dim_v]
    var = Variant(tiles, d0, d1, dv, packed, left >= 0, right >= 0, softcap != 0.0, k_shape[1] if paged else 0)
    num_m = -(-max_seqlen_q // tiles.block_m)
    batch = q_shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    slots = tile_slots(q_shape[0], batch, max_seqlen_q, tiles.block_m, skip_q) if packed else num_m * batch
    total = slots * num_heads
    heads_per_kv = num_heads // num_kv_heads
    kv_bytes = 2 * (head_dim + head_dim_v)
    if packed:
        # tiles of some sequences run side by side; those of one length are a few sequences' as a rule
        group, tail = head_group(num_heads, heads_per_kv, kv_bytes * min(4, batch) * max_seqlen_k, slots)
    else:
        group, tail = head_group(batch * num_heads, heads_per_kv, kv_bytes * max_seqlen_k, num_m, left < 0 and right < 0)
    blocks = total if tiles.schedule == Schedule.GRID else min(total, multiprocessors(q.device, 132) * tiles.blocks_per_sm)
    describe = _ragged if packed else _dense
    of_keys: tuple[View | None, ...]
    if paged:
        # rows of pages, in pieces that fill 64 columns of a block
        k, v = (
            _ragged(shape[1:], stride[1:], var.page_rows, 64, dtype)
            for shape, stride in ((k_shape, k_stride), (v_shape, v_stride))
        )
        of_keys = (k, None, v)
    else:
        of_keys = (
            describe(k_shape, k_stride, tiles.block_n, d0, dtype),
            describe(k_shape, k_stride, tiles.block_n, d1, dtype) if d1 else None,
            describe(v_shape, v_stride, tiles.block_n, dv, dtype),
        )
    views = (
        describe(q_shape, q_stride, 64, d0, dtype),
        describe(q_shape, q_stride, 64, d1, dtype) if d1 else None,
        *of_keys,
        describe(out_shape, out_stride, 64, var.o_width, dtype),
    )
    integers = (
        q_shape[0] if packed else max_seqlen_q,
        total,
        num_m,
        num_heads,
        heads_per_kv,
        group,
        tail,
        max_seqlen_q,
        max_seqlen_k,
        left,
        right,
        0 if block_table is None else block_table.stride(0),
        *(stride[0] // stride[1] if paged else 0 for stride in (k_stride, v_stride)),
    )
    if blocks == 0:
        return _Plan(out_shape)
    options = {"num_warps": 4, "maxnreg": tiles.registers[0]}
    return _Plan(
        out_shape,
        Launch(_attention_forward, blocks, (*_base_2(scale, softcap), *integers), (var,), options, views=views),
        table_launch(slots, batch, window, tiles.block_m, tiles.block_n, skip_q, paged) if packed else None,
        slots,
        not packed and tiles.schedule == Schedule.DYNAMIC,
    )


def _base_2(scale: float, softcap: float) -> tuple[float, float]:
    """What turns a product into the exponent of 2 that the kernel takes: (factor, 0), or with a softcap the factor inside of
    tanh, as exp2(factor * s) = exp(2 * scale * s / softcap), and the one outside."""
    log2e = math.log2(math.e)
    return (scale * 2.0 * log2e / softcap, softcap * log2e) if softcap else (scale * log2e, 0.0)


@lru_cache(maxsize=512)
def _dense(shape: tuple[int, ...], strides: tuple[int, ...], rows: int, width: int, dtype: torch.dtype) -> View:
    """(batch, seqlen, heads, dim): what lies past seqlen or dim reads as zero and is not written."""
    addressable = _addressable_strides(shape, strides)
    assert addressable is not None
    return View(shape, addressable, (1, rows, 1, width), _LAYOUTS[dtype, 4, width])


@lru_cache(maxsize=512)
def _ragged(shape: tuple[int, ...], strides: tuple[int, ...], rows: int, width: int, dtype: torch.dtype) -> View:
    """(total, heads, dim) with the end of each sequence as the hardware's bound.

    Row r of the sequence [start, start + length) is addressed as (2^30, start + length, 2^30 - length + r): the bound 2^30
    of the third coordinate stops at the sequence's end, and 2^30 times the first stride, 2^34 - stride, cancels the rest
    modulo 2^64 bytes. After Triton's tools/ragged_tma.py.
    """
    addressable = _addressable_strides(shape, strides)
    assert addressable is not None
    row, head, last = addressable
    bounds = (0x7FFF0000, 0x7FFF0000, RAGGED.value, *shape[1:])
    steps = ((1 << 34) - row, row, row, head, last)
    return View(bounds, steps, (1, 1, rows, 1, width), _LAYOUTS[dtype, 5, width])


@lru_cache(maxsize=4096)
def _addressable_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides for the copy engine, or None: the last dimension must be contiguous, everything else at multiples of 16 bytes,
    and no dimension expanded. The stride of a dimension of one means nothing, and is made one that is accepted."""
    outer = tuple(8 if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True))
    return None if strides[-1] != 1 or any(stride & 7 or not stride for stride in outer) else (*outer, 1)


def _is_addressable(x: Tensor) -> bool:
    return not x.data_ptr() & 15 and _addressable_strides(x.shape, x.stride()) is not None


def _addressable(x: Tensor) -> Tensor:
    return x if _is_addressable(x) else x.clone(memory_format=torch.contiguous_format)


def _fill_without_keys(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> None:
    """Nothing to attend to: 0, and the softmax's denominator is the sink alone or empty."""
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
        if sinks is not None:
            lse.copy_(sinks.to(torch.float32)[:, None].expand_as(lse))


def _counter(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return torch.zeros(1, dtype=torch.int32)
    with on_device_of(x):
        capturing = torch.cuda.is_current_stream_capturing()
    return _COUNTERS.take(x.device, driver.active.get_current_stream(x.get_device()), capturing)
