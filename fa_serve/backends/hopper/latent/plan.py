"""Decoding of latent attention (MLA) on Hopper in Gluon, for tiles of 64 query rows.

A program computes 64 rows, which are query heads of up to 16 queries, and some or all keys of its sequences. `splits` cuts the
keys as it does for the portable kernel. A program has three warpgroups and four producer warps, and each has one task:

    producers  copy keys by the copy engine, page by page, to a ring of blocks: each warp a quarter of the columns of values,
               and the first warp also the remaining columns. A single warp would take too long to issue the copies of a block
    scores     S = Q C^T + Q_r R^T, the online softmax, and P to shared memory; S of the next block runs during the softmax
    values     two warpgroups: O += P C, each for half of the columns of values, 64 x 256 in 128 of 168 registers a thread

P passes through two slots, with the factors by which O must be multiplied before P C is added. S of a block, the softmax of the
block before it, and P C of the one before that run at the same time, and only barriers order them. A block of keys is freed
when both warpgroups of values have multiplied it. After the last block of a sequence, a slot carries only 1 / sum.

Arithmetic for 64 rows by 64 keys of 512 + 64 numbers on one SM, in cycles at 1.75 GHz. At 450 TFLOPS this takes 4,570 cycles.

    tensor cores   2,048 multiplications a cycle: S 1,152, P C 1,024, together                                    2,176
    shared memory  128 bytes a cycle. With blocks of 32 keys, each step of 16 columns of S reads 2 KB of Q and 1 KB
                   of C: 72 steps, 216 KB. P C reads 64 KB of C, and P 16 KB. The copies write 72 KB, P 8 KB: 376 KB 3,010
                   With blocks of 64 keys S reads 144 KB: 304 KB                                                   2,430
    L2 cache       128 heads are two tiles, which read all keys: 72 KB at 5.5 TB/s over 132 SMs                    3,100
    memory         64 heads read each key once: 72 KB at 4.42 TB/s over 132 SMs                                    3,900

Q takes 72 KB and P 8 KB of 227 KB. The rest holds 4 blocks of 32 keys, of 36 KB each. A block of 32 keys is in use for about
2,200 cycles, from the first step of its S to the end of P C. A block is freed every 1,550 to 1,950 cycles, so on average 1 to
1.5 of the 4 blocks are in use, and 90 KB or more are being copied. At 33 bytes a nanosecond and a latency of 1 microsecond,
33 KB are enough. With two blocks of 64 keys, as little as half a block might be in flight, and there would be room for only one
slot of P.

The warpgroup of scores issues 399 instructions for a block of 32 keys, each warpgroup of values about 100 unless a maximum
grows, and a producer warp 133 or 172. The registers of four warpgroups allow 128 a thread at launch, so products have at most
128 columns.

    run = plan_latent_decode(tensors, options)    # once for calls that look alike

One H200 reaches 442 TFLOPS with 128 heads over 64 x 8192 keys (4,660 cycles for 64 keys and rows), and reads at 74% of its
bandwidth with 64 heads. Left out: fewer rows than `tiles.MIN_ROWS`, prompts, float8 caches, and pages whose size is not a
multiple of 16 (`triton.latent`).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve import spec as facts
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.descriptors import addressable, ragged_view
from fa_serve.backends.hopper.latent.tiles import Ring, latent_hopper_tiles
from fa_serve.backends.hopper.latent.types import (
    LatentArgs,
    LatentHopperVariant,
    allocate_latent_barriers,
    allocate_latent_memory,
)
from fa_serve.backends.hopper.latent.warps import latent_keys, latent_scores, latent_values
from fa_serve.backends.triton.latent.plan import LatentKernel, LatentPlan
from fa_serve.backends.triton.primitives import LOG2E, clear_rows, wait_for_previous_kernel
from fa_serve.backends.triton.splits import COUNTS, SplitVariant, sequences_of_share
from fa_serve.backends.triton.tiles import DecodeTiles, batch_block, padded_dim
from fa_serve.launching.launch import launch_options, multiprocessors
from fa_serve.launching.plans import Run

BATCH_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of the numbers of the sequences of a batch, [batch_block]."""
CLEARED_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
"""Layout in which rows of the output that belong to no sequence are cleared: 16 bytes a thread."""


@gluon.jit(do_not_specialize=["max_k", *COUNTS, "window_right", "skip_q", "total_q", "stride_lh", "stride_table"])
def attn_latent_hopper(
    k_desc,
    q_ptr,
    out_ptr,
    lse_ptr,
    splits_ptr,
    table_ptr,
    used_k_ptr,
    cu_q_ptr,
    k_descale_ptr,
    v_descale_ptr,
    max_k,
    batch,
    units,
    tiles_per_head,
    unit_rows,
    splits,
    min_blocks,
    max_q,
    window_left,
    window_right,
    skip_q,
    total_q,
    stride_lh,
    stride_table,
    scale,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    var: gl.constexpr,
):
    """One program: one tile of 64 packed rows, and one split or one share of the batch's key blocks, as in `attn_latent`."""
    wait_for_previous_kernel(var.split.pdl, True)  # `_combine` reads lengths before it waits
    VALUES: gl.constexpr = var.registers[0]
    KEYS: gl.constexpr = var.registers[1]
    SPLIT: gl.constexpr = var.split
    share = gl.program_id(0) // units
    unit = gl.program_id(0) % units
    end_of_rows = gl.load(cu_q_ptr + batch)
    of_batch = gl.arange(0, SPLIT.batch_block, layout=BATCH_LAYOUT)
    sequences = (cu_q_ptr, used_k_ptr, batch, max_q, max_k, window_left)
    first, stop, seq_start, line = sequences_of_share(share, of_batch, sequences, splits, min_blocks, SPLIT)
    line_begin, line_end, line_size = line
    clear_rows(
        out_ptr,
        lse_ptr,
        end_of_rows,
        total_q,
        gl.program_id(0),
        gl.num_programs(0),
        units // tiles_per_head * SPLIT.groups,
        (stride_ot, stride_oh, stride_lh),
        gl.arange(0, 4, layout=gl.SliceLayout(1, CLEARED_LAYOUT)),
        gl.arange(0, SPLIT.block_dv, layout=gl.SliceLayout(0, CLEARED_LAYOUT)),
        SPLIT.dim_v,
    )
    args = LatentArgs(
        q=q_ptr,
        out=out_ptr,
        lse=lse_ptr,
        splits=splits_ptr,
        block_table=table_ptr,
        used_k=used_k_ptr,
        cu_q=cu_q_ptr,
        k_descale=k_descale_ptr,
        v_descale=v_descale_ptr,
        max_k=max_k,
        batch=batch,
        units=units,
        unit_rows=unit_rows,
        num_splits=splits,
        min_blocks=min_blocks,
        max_q=max_q,
        window_right=window_right,
        lse_stride=stride_lh,
        table_stride=stride_table,
        scale=scale * LOG2E,
        k_pitch=gl.cast(stride_kp // stride_kt, gl.int32),  # a page of 2^31 elements has a stride of 64 bits
        stride_ot=stride_ot,
        stride_oh=stride_oh,
        stride_qt=stride_qt,
        stride_qh=stride_qh,
        first=first,
        stop=stop,
        seq_start=seq_start + share * 0,
        line_begin=line_begin,
        line_end=line_end,
        line_size=line_size,
        share=share,
        unit=unit,
        row_first=unit % tiles_per_head * 64,
        kv_head=unit // tiles_per_head,
    )
    smem = allocate_latent_memory(k_desc, var)
    bars = allocate_latent_barriers(var)
    gl.warp_specialize(
        [
            (latent_scores, (smem, bars, args, var)),
            (latent_values, (smem, bars, args, 0, var)),
            (latent_values, (smem, bars, args, 1, var)),
            (latent_keys, (k_desc, smem, bars, args, 0, var)),
            (latent_keys, (k_desc, smem, bars, args, 1, var)),
            (latent_keys, (k_desc, smem, bars, args, 2, var)),
            (latent_keys, (k_desc, smem, bars, args, 3, var)),
        ],
        [4, 4, 1, 1, 1, 1],
        [VALUES, VALUES, KEYS, KEYS, KEYS, KEYS],
    )


def plan_latent_decode(tensors: AttentionTensors, options: AttentionOptions, tiles: DecodeTiles | None = None) -> Run:
    """Plan paged calls that look like this one and for which `cannot_decode_latent` is None, as `plan_latent` does.

    Threads copy 16 bytes of a query at a time, which Triton compiles only if it knows that they begin at multiples of 16 bytes.
    Each call first copies queries with other strides or addresses, and keys whose address is not a multiple of 16.

    tiles: overrides the choice, for tuning and tests; block_m is 64, and num_stages counts blocks of keys
    """
    q = tensors.q
    k = tensors.k
    assert tensors.block_table is not None
    batch = tensors.block_table.shape[0]
    groups = q.shape[1] // k.shape[2]
    if tiles is None:
        max_q = max(options.max_seqlen_q, 1)
        sms = multiprocessors(q.device, 8)
        tiles = latent_hopper_tiles(sms, groups, k.shape[2], batch, max_q, options.max_seqlen_k, options.num_splits)
    dim_v = tensors.v.shape[3]
    variant = LatentHopperVariant(
        split=SplitVariant(
            groups=groups,
            dim_v=dim_v,
            block_dv=padded_dim(dim_v),
            block_m=64,
            block_n=tiles.block_n,
            batch_block=batch_block(batch) if tiles.balanced else 1,
            balanced=tiles.balanced,
            has_left=False,
            pdl=facts.has_programmatic_launch(facts.arch_of(q.device)),
        ),
        tiles=Ring(tiles.block_n, tiles.num_stages),
        rest=k.shape[3] - dim_v,
        page_size=k.shape[1],
        has_right=options.window_size[1] >= 0 and max(options.max_seqlen_q, 1) > 1,
    )
    views = (ragged_view(k.shape[1:], k.stride()[1:], k.dtype, variant.page_rows, 64),)
    launch = {**launch_options(variant.split.pdl, tiles.num_warps), "maxnreg": tiles.registers}
    copied = any(stride % 16 or not stride for stride in q.stride()[:2])
    planned = tensors._replace(q=q.new_empty(q.shape)) if copied else tensors
    run = LatentPlan(planned, options, tiles, LatentKernel(attn_latent_hopper, variant, launch, views))

    def run_aligned(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q = tensors.q
        k = tensors.k
        if copied or (q.data_ptr() | k.data_ptr()) & 15:
            tensors = tensors._replace(q=addressable(q, copied), k=addressable(k, False))
        return run(tensors)

    return run_aligned
