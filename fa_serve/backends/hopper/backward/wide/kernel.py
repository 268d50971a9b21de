"""The backward kernel for wide heads (136 to 256 columns), after FlashAttention-3 with other roles for its warps.

A thread block owns 64 keys of one KV head. dK and dV of 64 keys and 256 columns are 32768 numbers in float32, which take 128
registers of each thread of two warpgroups; for 128 keys they would take all registers of an SM. The warpgroups divide neither
the keys nor the columns of the gradients. Each keeps one whole gradient: the warpgroup that computes P keeps dV, and the
warpgroup that computes dS keeps dK. P^T and dS^T are then left operands in registers, and only P and dS cross from one
warpgroup to the other, see `warps`. Registers of a thread with 256 columns and blocks of 64 queries:

    scores      dV 128, S 32, or dV 128, P 16 and half of dQ 64: 208 of 240
    gradients   dK 128, dP 32 and P 32, or dK 128, dS 16 and half of dQ 64: 208 of 240

Bytes of shared memory, of 232,448 at most, with two stages each of Q and dO; barriers take 768 more:

    256 columns   Q 65,536  dO 65,536  K 32,768  V 32,768  P 16,384  dS 16,384  statistics 1,024: 230,400
    192 columns   Q 49,152  dO 49,152  K 24,576  V 24,576  P 16,384  dS 16,384  statistics 1,024: 181,248

`backward.plan` launches the row statistics before this kernel and the conversion of dQ after it, as for narrower heads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fa_serve.backends.hopper.backward.producer import key_tile
from fa_serve.backends.hopper.backward.types import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    BackwardArgs,
    BackwardNumbers,
)
from fa_serve.backends.hopper.backward.wide.types import (
    SLOTS_OF_SCORES,
    WideBackwardBarriers,
    WideBackwardDescriptors,
    WideBackwardMemory,
)
from fa_serve.backends.hopper.backward.wide.warps import wide_backward_producer, wide_gradients, wide_scores


@gluon.jit
def _buffers_of(desc, count: gl.constexpr):
    """`count` buffers for boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [count] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def _allocate_wide_memory(desc, var: gl.constexpr):
    Q_STAGES: gl.constexpr = var.tiles.q_stages
    DO_STAGES: gl.constexpr = var.tiles.do_stages
    SCORES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    dtype: gl.constexpr = desc.q.dtype
    q = _buffers_of(desc.q, Q_STAGES)
    q1 = _buffers_of(desc.q1, Q_STAGES)
    k = _buffers_of(desc.k, 1)
    k1 = _buffers_of(desc.k1, 1)
    dout = _buffers_of(desc.dout, DO_STAGES)
    v = _buffers_of(desc.v, 1)
    dout1 = dout
    v1 = v
    if var.dv1 > 0:
        dout1 = _buffers_of(desc.dout1, DO_STAGES)
        v1 = _buffers_of(desc.v1, 1)
    lse = _buffers_of(desc.lse, Q_STAGES)
    delta = _buffers_of(desc.delta, DO_STAGES)
    weights = gl.allocate_shared_memory(dtype, [SLOTS_OF_SCORES, 64, 64], SCORES)
    ds = gl.allocate_shared_memory(dtype, [SLOTS_OF_SCORES, 64, 64], SCORES)
    return WideBackwardMemory(q, q1, dout, dout1, lse, delta, k, k1, v, v1, weights, ds)


@gluon.jit
def _allocate_wide_barriers(var: gl.constexpr):
    Q_STAGES: gl.constexpr = var.tiles.q_stages
    DO_STAGES: gl.constexpr = var.tiles.do_stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [DO_STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    weights_full = gl.allocate_shared_memory(gl.int64, [SLOTS_OF_SCORES, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [SLOTS_OF_SCORES, 1], BARRIER)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(DO_STAGES):
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=2)
    for i in gl.static_range(SLOTS_OF_SCORES):
        mbarrier.init(weights_full.index(i), count=1)
        mbarrier.init(ds_full.index(i), count=1)
    mbarrier.init(k_full.index(0), count=1)
    mbarrier.init(v_full.index(0), count=1)
    fence_async_shared()
    return WideBackwardBarriers(q_full, q_empty, do_full, do_empty, k_full, v_full, weights_full, ds_full)


@gluon.jit(do_not_specialize=[*BackwardNumbers._fields])
def wide_attention_backward(
    q_desc,
    q1_desc,
    k_desc,
    k1_desc,
    v_desc,
    v1_desc,
    dout_desc,
    dout1_desc,
    lse_desc,
    delta_desc,
    dk_desc,
    dk1_desc,
    dv_desc,
    dv1_desc,
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
    desc = WideBackwardDescriptors(
        q=q_desc,
        q1=q1_desc,
        k=k_desc,
        k1=k1_desc,
        v=v_desc,
        v1=v1_desc,
        dout=dout_desc,
        dout1=dout1_desc,
        lse=lse_desc,
        delta=delta_desc,
        dk=dk_desc,
        dk1=dk1_desc,
        dv=dv_desc,
        dv1=dv1_desc,
    )
    smem = _allocate_wide_memory(desc, var)
    bars = _allocate_wide_barriers(var)
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
            (wide_scores, (desc, smem, bars, args, tile, var)),
            (wide_gradients, (desc, smem, bars, args, tile, var)),
            (wide_backward_producer, (desc, smem, bars, args, tile, var)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
