"""Token-sparse latent attention on Hopper in Gluon: 64 heads of one query, and the keys in its list of slots.

Its warps have the same tasks as those of latent decoding (`backends.hopper.latent`), and the two warpgroups of values run the
same code. The kernels differ in where keys come from and in which keys count:

    producers  four warps gather blocks of keys into a ring, 16 bytes a thread (cp.async), because chosen keys lie anywhere in
               the pages and the copy engine of Hopper only copies boxes; the slots of a block are read one block ahead
    scores     S = Q C^T + Q_r R^T, the mask of slots that are -1, the online softmax, and P to shared memory
    values     two warpgroups: O += P C, each for half of the columns of values

A program has one query and one part of its slots. 128 heads are two programs that follow one another, so that the second one
finds the keys in the L2 cache. Shared memory and cycles are those of `backends.hopper.latent.plan`: 72 KB for Q, 8 KB for P,
and four blocks of 32 keys of 36 KB. Left out: numbers of heads that are not multiples of 64, values that are not parts of the
keys, several KV heads and float32 (`attention.attn_selected`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from fa_serve.backends.hopper.forward.consumer import SUM_LAYOUT, Softmax
from fa_serve.backends.hopper.latent.tiles import Ring
from fa_serve.backends.hopper.latent.types import (
    PARTS,
    ROPE,
    SLOTS,
    LatentBarriers,
    LatentHopperVariant,
    LatentMemory,
    LatentWork,
)
from fa_serve.backends.hopper.latent.warps import (
    RECORD_LAYOUT,
    hand_over,
    issue_latent_scores,
    latent_values,
    publish_block,
    receive_queries,
    record_of,
    wait_latent_keys,
    wait_slot,
)
from fa_serve.backends.triton.primitives import LN2, LOG2E, wait_for_previous_kernel
from fa_serve.backends.triton.splits import SplitVariant
from fa_serve.launching.gluon_names import HAS_REINTERPRET, copy_to_shared
from fa_serve.launching.launch import Launch, launch_options

GATHER_RING = Ring(block_n=32, stages=4)
"""The blocks of keys in shared memory, as in latent decoding. `bench_sparse --tune` measures others."""
_LAUNCH_REGISTERS = 128  # 4 warpgroups


@dataclass(frozen=True)
class GatherVariant(LatentHopperVariant):
    """Everything that is fixed when the kernel is compiled. flat: pages follow each other, so that a slot is a row number"""

    flat: bool = False

    @property
    def gathers(self) -> bool:
        return True

    @property
    def gather_layout(self) -> gl.BlockedLayout:
        """Layout in which 64 columns of a block of keys are copied to shared memory: 16 bytes a thread."""
        return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


class GatherArgs(NamedTuple):
    """The kernel's arguments, and what all warps of a program know. Fields that `latent.warps` reads are as in `LatentArgs`.

    splits, lse: the results and the lse of parts, or None if a query has one part; place: the program's row in them
    token, part: the program's query and part; begin: its first block of slots; blocks: how many blocks, at least one
    end:         one past the part's last slot
    """

    q: gl.tensor
    k: gl.tensor
    slots: gl.tensor
    sinks: gl.tensor
    out: gl.tensor
    splits: gl.tensor
    lse: gl.tensor
    page_size: gl.tensor
    scale: gl.tensor
    stride_qt: gl.tensor
    stride_qh: gl.tensor
    stride_kp: gl.tensor
    stride_kt: gl.tensor
    stride_ot: gl.tensor
    stride_oh: gl.tensor
    share: gl.tensor
    units: gl.tensor
    unit: gl.tensor
    unit_rows: gl.tensor
    row_first: gl.tensor
    kv_head: gl.tensor
    token: gl.tensor
    part: gl.tensor
    place: gl.tensor
    whole: gl.tensor
    begin: gl.tensor
    blocks: gl.tensor
    end: gl.tensor


@gluon.jit
def _slots_of_block(block, args, layout: gl.constexpr, var: gl.constexpr):
    """The slots of a block of keys, [block_n]; -1 where there is no key."""
    at = block * var.tiles.block_n + gl.arange(0, var.tiles.block_n, layout=layout)
    return gl.load(args.slots + at, mask=at < args.end, other=-1)


@gluon.jit
def gather_keys(smem, bars, args, var: gl.constexpr):
    """The producer warps: copy the keys of one block after the other. Missing keys (slots of -1) arrive as zeros."""
    GATHER: gl.constexpr = var.gather_layout
    ROWS: gl.constexpr = gl.SliceLayout(1, GATHER)
    BOXES: gl.constexpr = var.split.dim_v // 64
    columns = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, GATHER)), 0)
    next_slot = _slots_of_block(args.begin, args, ROWS, var)
    for j in range(args.blocks):
        slot = next_slot
        next_slot = _slots_of_block(args.begin + j + 1, args, ROWS, var)
        live = gl.expand_dims(slot >= 0, 1)
        slot = gl.maximum(slot, 0).to(gl.int64)
        if var.flat:
            starts = slot * args.stride_kt
        else:
            starts = slot // args.page_size * args.stride_kp + slot % args.page_size * args.stride_kt
        keys = args.k + (gl.expand_dims(starts, 1) + columns)
        stage = j % var.tiles.stages
        mbarrier.wait(bars.k_empty.index(stage), ((j // var.tiles.stages) & 1) ^ 1)
        for box in gl.static_range(BOXES):
            copy_to_shared(smem.c_boxes.index(stage * BOXES + box), keys + 64 * box, mask=live)
        rest = live
        if var.rest < ROPE:
            rest = live & (columns < var.rest)
        copy_to_shared(smem.cr.index(stage), keys + 64 * BOXES, mask=rest)
        async_copy.mbarrier_arrive(bars.k_full.index(stage), increment_count=False)


@gluon.jit
def _finish_selected(state, item, record, smem, bars, args, var: gl.constexpr):
    """Hand the factors 1 / sum over to the warpgroups of values, and store the log-sum-exp of a part."""
    ROWS: gl.constexpr = gl.SliceLayout(1, var.score_layout)
    empty = state.m == float("-inf")
    total = gl.convert_layout(gl.sum(state.l, 1), ROWS, assert_trivial=True)
    wait_slot(item, bars)
    smem.factors.index(item % SLOTS).store(gl.where(empty, 0.0, 1.0 / total))
    smem.records.index(item % SLOTS).store(record)
    hand_over(item, bars)
    if args.lse is not None:
        lse = gl.where(empty, float("-inf"), (state.m + gl.log2(total)) * LN2)
        rows = args.row_first + gl.arange(0, 64, layout=ROWS)
        gl.store(args.lse + (args.place.to(gl.int64) * var.split.groups + rows), lse)


@gluon.jit
def _first_softmax(args, var: gl.constexpr):
    """The state of the online softmax before any key. A sink acts as a key that is already seen; only the first part has it."""
    ROWS: gl.constexpr = gl.SliceLayout(1, var.score_layout)
    m = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
    l = gl.zeros([64, 4], gl.float32, layout=SUM_LAYOUT)  # noqa: E741
    if args.sinks is not None:  # noqa: SIM102, only this condition is known when the kernel is compiled
        if args.part == 0:
            m = gl.load(args.sinks + args.row_first + gl.arange(0, 64, layout=ROWS)).to(gl.float32) * LOG2E
            l += 0.25  # noqa: E741, the four numbers of a row are added at the end
    return Softmax(m, l, gl.full([64], 1.0, gl.float32, layout=ROWS))


@gluon.jit
def selected_scores(smem, bars, args, var: gl.constexpr):
    """The warpgroup of scores: S of the next block is issued before the softmax of the current one, and runs during it."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, var.score_layout)
    work = LatentWork(
        live=args.blocks > 0,
        k_origin=args.share,
        row0=args.token,
        q_len=args.share * 0 + 1,
        kv_len=args.blocks,
        begin=args.begin,
        blocks=args.blocks,
        inner_end=args.blocks,
        place=args.place,
        whole=args.whole,
    )
    record = record_of(work)
    receive_queries(work, smem, args, var)
    state = _first_softmax(args, var)
    slot = _slots_of_block(args.begin, args, COLUMNS, var)
    wait_latent_keys(0, bars, var)
    s = warpgroup_mma_wait(0, deps=[issue_latent_scores(0, smem, var)])
    for j in range(args.blocks - 1):
        next_slot = _slots_of_block(args.begin + j + 1, args, COLUMNS, var)
        wait_latent_keys(j + 1, bars, var)
        token = issue_latent_scores(j + 1, smem, var)
        s = gl.where(gl.expand_dims(slot >= 0, 0), s, float("-inf"))
        state = publish_block(s, state, j, j, work, record, args.scale, smem, bars, args, var)
        s = warpgroup_mma_wait(0, deps=[token])
        slot = next_slot
    last = args.blocks - 1
    s = gl.where(gl.expand_dims(slot >= 0, 0), s, float("-inf"))
    state = publish_block(s, state, last, last, work, record, args.scale, smem, bars, args, var)
    _finish_selected(state, args.blocks, record, smem, bars, args, var)
    last_item = args.blocks + 1
    wait_slot(last_item, bars)
    smem.records.index(last_item % SLOTS).store(gl.zeros([4], gl.int32, layout=RECORD_LAYOUT))
    hand_over(last_item, bars)


@gluon.jit
def _allocate_gather_memory(dtype: gl.constexpr, var: gl.constexpr):
    STAGES: gl.constexpr = var.tiles.stages
    BLOCK_N: gl.constexpr = var.tiles.block_n
    BOXES: gl.constexpr = STAGES * (var.split.dim_v // 64)
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(dtype, [PARTS, 64, var.width], SWIZZLED)
    qr = gl.allocate_shared_memory(dtype, [64, ROPE], SWIZZLED)
    c = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK_N, var.width], SWIZZLED)
    cr = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, ROPE], SWIZZLED)
    if HAS_REINTERPRET:
        boxes = c.reinterpret(dtype, [BOXES, BLOCK_N, 64], SWIZZLED)
    else:
        boxes = c._reinterpret(dtype, [BOXES, BLOCK_N, 64], SWIZZLED)
    p = gl.allocate_shared_memory(dtype, [SLOTS, 64, BLOCK_N], var.probability_memory)
    factors = gl.allocate_shared_memory(gl.float32, [SLOTS, 64], PLAIN)
    records = gl.allocate_shared_memory(gl.int32, [SLOTS, 4], PLAIN)
    return LatentMemory(q, qr, c, cr, boxes, cr, p, factors, records)


@gluon.jit
def _allocate_gather_barriers(var: gl.constexpr):
    """As in latent decoding, but each of the 128 threads that copy a block arrives at `k_full`."""
    STAGES: gl.constexpr = var.tiles.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    p_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=128)
        mbarrier.init(k_empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=2)
    fence_async_shared()
    return LatentBarriers(k_full, k_empty, p_full, p_empty)


@gluon.jit(do_not_specialize=["topk", "page_size", "units", "parts", "part_blocks", "scale", "stride_slots"])
def attn_selected_hopper(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    sinks_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    topk,
    page_size,
    units,
    parts,
    part_blocks,
    scale,
    stride_slots,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_ot,
    stride_oh,
    var: gl.constexpr,
):
    """One program: 64 heads of one query, and one part of its slots. v_ptr: None, because values are parts of the keys"""
    wait_for_previous_kernel(var.split.pdl)
    VALUES: gl.constexpr = var.registers[0]
    PRODUCERS: gl.constexpr = var.registers[1]
    BLOCK_N: gl.constexpr = var.tiles.block_n
    unit = gl.program_id(0) % units
    part = gl.program_id(0) // units % parts
    token = gl.program_id(0) // units // parts
    begin = part * part_blocks
    blocks = gl.minimum(part_blocks, (topk + BLOCK_N - 1) // BLOCK_N - begin)
    args = GatherArgs(
        q=q_ptr,
        k=k_ptr,
        slots=slots_ptr + token.to(gl.int64) * stride_slots,
        sinks=sinks_ptr,
        out=out_ptr,
        splits=part_ptr,
        lse=lse_ptr,
        page_size=page_size,
        scale=scale * LOG2E,
        stride_qt=stride_qt,
        stride_qh=stride_qh,
        stride_kp=stride_kp,
        stride_kt=stride_kt,
        stride_ot=stride_ot,
        stride_oh=stride_oh,
        share=unit,
        units=units,
        unit=unit,
        unit_rows=unit * 0 + 64,
        row_first=unit * 64,
        kv_head=unit * 0,
        token=token,
        part=part,
        place=token * parts + part,
        whole=parts == 1,
        begin=begin,
        blocks=gl.maximum(blocks, 1),
        end=gl.minimum(topk, (begin + part_blocks) * BLOCK_N),
    )
    smem = _allocate_gather_memory(q_ptr.dtype.element_ty, var)
    bars = _allocate_gather_barriers(var)
    gl.warp_specialize(
        [
            (selected_scores, (smem, bars, args, var)),
            (latent_values, (smem, bars, args, 0, var)),
            (latent_values, (smem, bars, args, 1, var)),
            (gather_keys, (smem, bars, args, var)),
        ],
        [4, 4, 4],
        [VALUES, VALUES, PRODUCERS],
    )


def cannot_gather(q: Tensor, k: Tensor, v: Tensor, shared: bool) -> str | None:
    """Why the kernel does not compute a call of `ops.sparse_attention`, or None.

    shared: the values are the first numbers of the keys, in the same memory
    """
    heads = q.shape[1]
    rest = k.shape[3] - v.shape[3]
    if not shared or k.shape[2] != 1 or v.shape[3] not in (256, 512) or rest not in range(16, ROPE.value + 1, 16):
        return (
            "needs latent keys: one KV head, values that are the first 256 or 512 numbers of the keys, and 16, 32, 48 or 64 "
            "numbers after them"
        )
    if heads % 64:
        return f"needs a multiple of 64 query heads, got {heads}"
    if q.element_size() != 2:
        return "needs 16-bit inputs"
    if any(x.data_ptr() % 16 or any(stride % 16 for stride in x.stride()[:-1]) for x in (q, k)):
        return "needs addresses that are multiples of 16 bytes and strides that are multiples of 16 elements"
    return None


def gather_launch(
    shapes: tuple[Tensor, Tensor, Tensor, Tensor], out_strides: tuple[int, int], parts: int, scale: float, pdl: bool, ring: Ring
) -> Launch:
    """The launch on (q, k, None, slots, sinks, out, parts of out or None, lse of parts or None), like that of `attn_selected`.

    shapes: q, k, v and slots of a call that looks like the planned ones; parts: into how many the slots of a query are divided
    """
    q, k, v, slots = shapes
    heads = q.shape[1]
    blocks = -(-slots.shape[1] // ring.block_n)
    variant = GatherVariant(
        split=SplitVariant(
            groups=heads,
            dim_v=v.shape[3],
            block_dv=v.shape[3],
            block_m=64,
            block_n=ring.block_n,
            batch_block=1,
            balanced=False,
            has_left=False,
            pdl=pdl,
        ),
        tiles=ring,
        rest=k.shape[3] - v.shape[3],
        page_size=1,
        has_right=False,
        flat=k.stride(0) == k.shape[1] * k.stride(1) or k.shape[0] == 1,
    )
    units = heads // 64
    return Launch(
        attn_selected_hopper,
        q.shape[0] * units * parts,
        varying=(slots.shape[1], k.shape[1], units, parts, -(-blocks // parts), scale, slots.stride(0)),
        strides=(*q.stride()[:2], *k.stride()[:2], *out_strides),
        fixed=(variant,),
        options={**launch_options(pdl, 4), "maxnreg": _LAUNCH_REGISTERS},
    )
