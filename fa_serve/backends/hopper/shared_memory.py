"""The shared memory of a thread block of the Hopper kernel: its buffers and barriers, whose fields `forward.types` explains."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fa_serve.backends.hopper.forward.types import Barriers, SharedMemory
from fa_serve.launching.gluon_names import HAS_REINTERPRET


@gluon.jit
def ring_of(width: gl.constexpr, desc, var: gl.constexpr, parts: gl.constexpr = 1):
    """-> a ring of blocks of K or V, each in `parts` of `width` columns, and the same memory as the boxes in which a paged
    cache arrives.

    The 128-byte swizzle stores 64 columns of all rows, then the next 64 columns, and its pattern repeats every 8 rows. So 64
    columns of 8 n rows are contiguous. Fewer columns have the swizzle of their width, with the same property.
    """
    STAGES: gl.constexpr = var.tiles.stages * parts
    CHUNK: gl.constexpr = 64 if width > 64 else width
    if var.page_size > 0:
        KEYS: gl.constexpr = gl.NVMMASharedLayout(2 * CHUNK, 16, rank=2)
        BOXES: gl.constexpr = STAGES * (var.tiles.block_n // var.page_rows) * (width // CHUNK)
        ring = gl.allocate_shared_memory(desc.dtype, [STAGES, var.tiles.block_n, width], KEYS)
        if HAS_REINTERPRET:
            boxes = ring.reinterpret(desc.dtype, [BOXES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
        else:
            boxes = ring._reinterpret(desc.dtype, [BOXES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
        return ring, boxes
    else:  # noqa: RET505
        ring = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005
        return ring, ring


@gluon.jit
def allocate_buffers(desc, var: gl.constexpr):
    GROUPS: gl.constexpr = var.tiles.groups
    Q_STAGES: gl.constexpr = var.tiles.q_stages
    RECORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(desc.q.dtype, [Q_STAGES * GROUPS] + desc.q.block_type.shape, desc.q.layout)  # noqa: RUF005
    k, k_boxes = ring_of(var.d0, desc.k, var)
    v, v_boxes = ring_of(var.dv0, desc.v, var)
    q1 = q
    k1 = k
    k1_boxes = k_boxes
    v1 = v
    v1_boxes = v_boxes
    if var.d1 > 0:
        q1 = gl.allocate_shared_memory(desc.q.dtype, [Q_STAGES * GROUPS] + desc.q1.block_type.shape, desc.q1.layout)  # noqa: RUF005
        k1, k1_boxes = ring_of(var.d1, desc.k1, var)
    if var.dv1 > 0:
        v1, v1_boxes = ring_of(var.dv1, desc.v1, var)
    o = q
    o1 = q1
    if var.tiles.o_parts > 0:
        o = gl.allocate_shared_memory(desc.o.dtype, [GROUPS] + desc.o.block_type.shape, desc.o.layout)  # noqa: RUF005
        if var.dv1 > 0:
            o1 = gl.allocate_shared_memory(desc.o.dtype, [GROUPS] + desc.o1.block_type.shape, desc.o1.layout)  # noqa: RUF005
    record = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 8], RECORD)
    key_blocks = record
    if var.block_k > 0:
        key_blocks = gl.allocate_shared_memory(gl.int32, [var.tiles.stages, 2], RECORD)
    return SharedMemory(q, q1, k, k1, v, v1, o, o1, record, k_boxes, k1_boxes, v_boxes, v1_boxes, key_blocks)


@gluon.jit
def allocate_barriers(var: gl.constexpr):
    GROUPS: gl.constexpr = var.tiles.groups
    STAGES: gl.constexpr = var.tiles.stages
    Q_STAGES: gl.constexpr = var.tiles.q_stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
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
    return Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
