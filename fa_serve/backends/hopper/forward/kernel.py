"""The kernel of the Hopper forward: the arguments of a launch, and the warps that run it.

The module `plan` describes the algorithm and launches the kernel. The warps' code is in `producer` and `consumer`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.backends.hopper.block_sparse import AddedMask, Lists
from fa_serve.backends.hopper.forward.consumer import consumer
from fa_serve.backends.hopper.forward.producer import producer
from fa_serve.backends.hopper.forward.types import ConsumerArgs, Descriptors, ProducerArgs, Scales
from fa_serve.backends.hopper.shared_memory import allocate_barriers, allocate_buffers


class Numbers(NamedTuple):
    """The kernel's numbers, in the order of its parameters. The kernel takes them one by one: Triton 3.6 ignores
    `do_not_specialize` within a tuple, so it would compile the kernel again for each number that is 1 or a multiple of 16.

    scale, softcap:      from `base_2_scales`
    lse_stride:          rows of lse from one head to the next
    total:               tiles of all heads (packed: an upper bound)
    num_m:               tiles of one head and sequence (packed: an upper bound)
    num_heads:           heads that have separate tiles, see `pack_gqa`
    heads_per_kv:        query heads of a KV head
    head_group, head_tail: from `tiles.head_group`
    seqlen_q, seqlen_k:  lengths (packed: upper bounds)
    left, right:         the window
    table_stride:        entries of the block table from one sequence to the next, 0 without a block table
    k_pitch, v_pitch:    tokens from one page of the cache to the next, 0 without pages
    list_*, *_width:     see `block_sparse.Lists`; 0 without lists
    scale_stride:        see `types.Scales`; 0 without float8
    logs, tokens:        see `split_kv.combine`; 0 if keys are whole
    """

    scale: float
    softcap: float
    lse_stride: int
    total: int
    num_m: int
    num_heads: int
    heads_per_kv: int
    head_group: int
    head_tail: int
    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    table_stride: int
    k_pitch: int
    v_pitch: int
    list_batch: int = 0
    list_head: int = 0
    heads_per_list: int = 0
    list_width: int = 0
    full_width: int = 0
    bits_width: int = 0
    scale_stride: int = 0
    logs: int = 0
    tokens: int = 0


@gluon.jit(
    do_not_specialize=[*Numbers._fields],
    do_not_specialize_on_alignment=[
        "lse_ptr",
        "sinks_ptr",
        "counter_ptr",
        "block_table_ptr",
        "list_num_ptr",
        "list_index_ptr",
        "full_num_ptr",
        "full_index_ptr",
        "bits_ptr",
        "q_scale_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
    ],
)
def attn_fwd_hopper(
    q_desc,
    q1_desc,
    k_desc,
    k1_desc,
    v_desc,
    v1_desc,
    o_desc,
    o1_desc,
    lse_ptr,
    sinks_ptr,
    table_ptr,
    counter_ptr,
    block_table_ptr,
    list_num_ptr,
    list_index_ptr,
    full_num_ptr,
    full_index_ptr,
    bits_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    splits_ptr,
    mask_ptr,
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
    list_batch,
    list_head,
    heads_per_list,
    list_width,
    full_width,
    bits_width,
    scale_stride,
    logs,
    tokens,
    mask_batch,
    mask_head,
    mask_row,
    mask_key,
    var: gl.constexpr,
):
    """One thread block: one producer warp and `groups` consumer warpgroups compute tile after tile.

    The descriptors are those of `types.Descriptors`; q1, k1, v1 and o1 are None without second parts. `Numbers` explains the
    numbers. `types.ProducerArgs` and `types.ConsumerArgs` explain the other arguments, which are None if their option is off.

    table_ptr:   the records of `tile_scheduler.tile_table`, then the counter and the number of tiles; None if dense
    counter_ptr: (dense, with the schedule DYNAMIC) int32, 0 at launch: the tiles that thread blocks took after their first
    mask_batch, mask_head, mask_row, mask_key: strides of a float mask in units of what is loaded, 0 where it is broadcast
    """
    REGISTERS: gl.constexpr = var.registers
    PRODUCER: gl.constexpr = var.producer_registers
    if q1_desc is None:
        q1_desc = q_desc
    if k1_desc is None:
        k1_desc = k_desc
    if v1_desc is None:
        v1_desc = v_desc
    if o1_desc is None:
        o1_desc = o_desc
    desc = Descriptors(q_desc, q1_desc, k_desc, k1_desc, v_desc, v1_desc, o_desc, o1_desc)
    smem = allocate_buffers(desc, var)
    bars = allocate_barriers(var)
    if var.varlen:
        counter_ptr = table_ptr + total // num_heads * 8
    producer_args = ProducerArgs(
        table=table_ptr,
        counter=counter_ptr,
        total=total,
        num_m=num_m,
        num_heads=num_heads,
        heads_per_kv=heads_per_kv,
        head_group=head_group,
        head_tail=head_tail,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        left=left,
        right=right,
        block_table=block_table_ptr,
        table_stride=table_stride,
        k_pitch=k_pitch,
        v_pitch=v_pitch,
        lists=Lists(
            num=list_num_ptr,
            index=list_index_ptr,
            full_num=full_num_ptr,
            full_index=full_index_ptr,
            batch=list_batch,
            head=list_head,
            heads_per_list=heads_per_list,
            width=list_width,
            full_width=full_width,
            bits_width=bits_width,
        ),
    )
    args = ConsumerArgs(
        lse=lse_ptr,
        sinks=sinks_ptr,
        lse_stride=lse_stride,
        num_heads=num_heads,
        heads_per_kv=heads_per_kv,
        scale=scale,
        softcap=softcap,
        left=left,
        right=right,
        bits=bits_ptr,
        added=AddedMask(mask=mask_ptr, batch=mask_batch, head=mask_head, row=mask_row, key=mask_key, keys=seqlen_k),
        scales=Scales(q=q_scale_ptr, k=k_scale_ptr, v=v_scale_ptr, stride=scale_stride, heads_per_kv=heads_per_kv),
        buffer=splits_ptr,
        logs=logs,
        tokens=tokens,
    )
    if var.tiles.groups == 1:
        gl.warp_specialize(
            [
                (consumer, (desc, smem, bars, args, 0, var)),
                (producer, (desc, smem, bars, producer_args, var)),
            ],
            [1],
            [PRODUCER],
        )
    elif var.tiles.groups == 2:
        gl.warp_specialize(
            [
                (consumer, (desc, smem, bars, args, 0, var)),
                (consumer, (desc, smem, bars, args, 1, var)),
                (producer, (desc, smem, bars, producer_args, var)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (desc, smem, bars, args, 0, var)),
                (consumer, (desc, smem, bars, args, 1, var)),
                (consumer, (desc, smem, bars, args, 2, var)),
                (producer, (desc, smem, bars, producer_args, var)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER],
        )
