"""Attention forward for Hopper (sm90) in Gluon, after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

A thread block has one producer warp and one to three consumer warpgroups of 64 query rows each. It computes one tile at a time:

    producer   assigns tiles (see `tile_schedule`), and copies Q, K and V to shared memory by the copy engine (tensor memory
               accelerator, TMA)
    consumers  S = Q K^T and O += P V as asynchronous warpgroup MMAs (wgmma), softmax in registers, O out through TMA

K and V pass through rings of `stages` blocks each. Q, and the record that says which tile it is, passes through a ring of
`q_stages`. Each stage of a ring has a "full" and an "empty" mbarrier. Within a warpgroup, S of a block is issued before P V
of the previous block, and both run under the softmax. From tile to tile, the next tile's first S is issued under this tile's
last P V, and the output is written under it. Between warpgroups, `pingpong` passes the tensor cores around. Scores are in base
2, and the output is divided by its sum once at the end.

The hardware bounds packed sequences: descriptors are ragged (see `descriptors.ragged_view`), and rows past the end of a
sequence read as zero and are not written. So a NaN of a neighbouring sequence is neither read nor overwritten, and no tile
needs a slow path. A page of a paged cache is bounded in the same way, as a packed sequence whose length is the number of rows
that are in use; a block of K or V arrives page by page. Entries of the block table after the last page or before a window
are not read. With float8 products, the kernel reads copies instead of pages (see `triton.float8_inputs`).

With lists of key blocks, the producer copies the blocks of the list and no others (see `listed_blocks`).

    run = plan_forward(tensors, options)      # once for calls that look alike
    out, lse = run(tensors)

Left out: explicit masks, 16-bit products with float8 caches, and head sizes that are not a multiple of 8. The module `backward`
has the gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.hopper.consumer import consumer
from fa_serve.backends.hopper.descriptors import addressable, copy_engine_strides, dense_view, ragged_view
from fa_serve.backends.hopper.hopper_tiles import (
    Schedule,
    TileConfig,
    float8_tiles,
    forward_tiles,
    head_group,
    key_columns,
    list_tiles,
    value_columns,
)
from fa_serve.backends.hopper.kernel_types import ConsumerArgs, Descriptors, ProducerArgs, Scales, Variant
from fa_serve.backends.hopper.listed_blocks import Lists
from fa_serve.backends.hopper.producer import producer
from fa_serve.backends.hopper.shared_memory import allocate_barriers, allocate_buffers
from fa_serve.backends.hopper.tile_schedule import max_tile_count, table_launch, take_counter, tile_table
from fa_serve.backends.launch import Launch, View, multiprocessors
from fa_serve.backends.layout import Layout, contiguous
from fa_serve.backends.plan import AttentionOptions, AttentionTensors, Run
from fa_serve.backends.triton.float8_inputs import BLOCK_KEYS, Form, Quantizer
from fa_serve.block_lists import BlockLists


class Numbers(NamedTuple):
    """The kernel's numbers, in the order of its parameters. They stay flat there: Triton 3.6 ignores `do_not_specialize` within
    a tuple, so it would compile the kernel again for each number that is 1 or a multiple of 16.

    scale, softcap:      from `base_2_scales`
    lse_stride:          rows of lse from one head to the next
    total:               tiles of all heads (packed: an upper bound)
    num_m:               tiles of one head and sequence (packed: an upper bound)
    head_group, head_tail: from `hopper_tiles.head_group`
    seqlen_q, seqlen_k:  lengths (packed: upper bounds)
    left, right:         the window
    table_stride:        entries of the block table from one sequence to the next, 0 without one
    k_pitch, v_pitch:    tokens from one page of the cache to the next, 0 without pages
    list_*, *_width:     see `listed_blocks.Lists`; 0 without lists
    scale_stride:        see `kernel_types.Scales`; 0 without float8
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


_NO_LISTS = (None,) * 5
_NO_SCALES = [None] * 3


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
def _attention_forward(
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
    var: gl.constexpr,
):
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
        scale=scale,
        softcap=softcap,
        left=left,
        right=right,
        bits=bits_ptr,
        scales=Scales(q=q_scale_ptr, k=k_scale_ptr, v=v_scale_ptr, stride=scale_stride, heads_per_kv=heads_per_kv),
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


def plan_forward(tensors: AttentionTensors, options: AttentionOptions, tiles: TileConfig | None = None) -> Run:
    """Plan attention for calls whose tensors have the shapes, strides, dtypes, device and presence of `tensors`.

    Queries are dense, or packed by cu_seqlens_q with keys packed by cu_seqlens_k or in the pages of block_table, in the shapes
    of `fa_serve.api`. Mask and num_splits are ignored, because `HopperBackend.supports` refuses them.

    tiles: overrides the choice of `forward_tiles`, for tuning and tests

    Returns run(tensors) -> (out, lse or None). Sequences with up to options.skip_q queries are left out: their rows of out and
    lse stay as they are. Tensors that the copy engine cannot address (see `descriptors`) are copied first at each call.
    """
    q, k, v = tensors[:3]
    out_shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if options.return_lse else None
    if 0 in (*q.shape[:2], *k.shape[:2]):
        return _run_without_keys(out_shape, lse_shape)
    form: Form = "dense" if tensors.cu_seqlens_q is None else "packed" if tensors.block_table is None else "paged"
    given = [Layout(x.shape, x.stride(), x.dtype) for x in (q, k, v)]
    given.append(contiguous(out_shape, q.dtype) if tensors.out is None else Layout(out_shape, tensors.out.stride(), q.dtype))
    copied: tuple[bool | None, ...] = tuple([copy_engine_strides(x.shape, x.strides) is None for x in given])
    if form == "paged" and options.precision != "bf16":
        copied = (copied[0], None, None, copied[3])
    sequences = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
    layouts = [contiguous(x.shape, x.dtype) if copy else x for x, copy in zip(given, copied, strict=True)]
    table_stride = 0 if tensors.block_table is None else tensors.block_table.stride(0)
    quantizer = None
    if options.precision != "bf16":
        quantizer = Quantizer(layouts[:3], form, sequences, options, table_stride)
        layouts[:3] = quantizer.layouts
    problem = _Problem(
        q=layouts[0],
        k=layouts[1],
        v=layouts[2],
        out=layouts[3],
        device=q.device,
        form=form,
        batch=sequences,
        table_stride=table_stride,
        options=options,
        blocks=tensors.blocks,
        scale_stride=0 if quantizer is None else quantizer.groups,
    )
    run = _run_launches(_plan_launches(problem, tiles), quantizer, out_shape, lse_shape, copied)
    return (lambda tensors: _run_on_copies(run, tensors, copied)) if any(copied) else run


class _Problem(NamedTuple):
    """What the launches depend on. q, k, v and out are laid out so that the copy engine can address them."""

    q: Layout
    k: Layout
    v: Layout
    out: Layout
    device: torch.device
    form: Form
    batch: int
    table_stride: int
    options: AttentionOptions
    blocks: BlockLists | None
    scale_stride: int

    @property
    def packed(self) -> bool:
        """Whether queries are packed."""
        return self.form != "dense"

    @property
    def paged(self) -> bool:
        """Whether the kernel reads pages. Of float8 keys in pages it reads copies."""
        return self.form == "paged" and self.options.precision == "bf16"

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.k.shape[-2]


class _TileCounts(NamedTuple):
    """How many tiles there are and in which groups of heads they are computed; see `Numbers`.

    per_head: tiles of one head of all sequences (packed: an upper bound)
    """

    num_m: int
    per_head: int
    head_group: int
    head_tail: int


class _Launches(NamedTuple):
    """attention: None if there can be no tile
    table:    None if the batch is dense; its table has room for `max_tiles` tiles
    counted:  the schedule needs a counter that the table does not hold
    """

    attention: Launch | None = None
    table: Launch | None = None
    max_tiles: int = 0
    counted: bool = False


def _plan_launches(problem: _Problem, tiles: TileConfig | None) -> _Launches:
    options = problem.options
    left, right = options.window_size
    head_dims = (problem.q.shape[-1], problem.out.shape[-1])
    blocks = problem.blocks
    if tiles is None and blocks is not None:
        tiles = list_tiles(*head_dims, blocks.block_size)
    elif tiles is None and options.precision != "bf16":
        tiles = float8_tiles(*head_dims)
    elif tiles is None:
        lengths = (options.max_seqlen_q, options.max_seqlen_k)
        tiles = forward_tiles(*head_dims, options.window_size, *lengths, problem.packed, problem.paged)
    assert not problem.paged or tiles.block_n <= MAX_KEYS_PER_TILE
    var = Variant(
        tiles,
        *key_columns(head_dims[0]),
        *value_columns(head_dims[1]),
        varlen=problem.packed,
        has_left=left >= 0,
        has_right=right >= 0,
        softcap=options.softcap != 0.0,
        page_size=problem.k.shape[1] if problem.paged else 0,
        block_q=0 if blocks is None else blocks.block_size[0],
        block_k=0 if blocks is None else blocks.block_size[1],
        bits=blocks is not None and blocks.partial_bits is not None,
        precision=options.precision,
        gaps=problem.form == "packed" and options.precision != "bf16",
    )
    assert blocks is None or (var.block_q % tiles.block_m == 0 and var.block_k % tiles.block_n == 0)
    counts = _count_tiles(problem, tiles)
    if counts.per_head == 0:
        return _Launches()
    thread_blocks = counts.per_head * problem.num_heads
    if tiles.schedule == Schedule.DYNAMIC:
        thread_blocks = min(thread_blocks, multiprocessors(problem.device, 132) * tiles.blocks_per_sm)
    attention = Launch(
        _attention_forward,
        thread_blocks,
        _numbers(problem, counts),
        (var,),
        {"num_warps": 4, "maxnreg": tiles.registers[0]},
        views=_views(problem, var),
    )
    if not problem.packed:
        return _Launches(attention, counted=tiles.schedule == Schedule.DYNAMIC)
    group = BLOCK_KEYS.value if var.gaps else 1
    in_pages = problem.form == "paged"
    table = table_launch(
        counts.per_head, problem.batch, options.window_size, tiles.block_m, tiles.block_n, options.skip_q, in_pages, group
    )
    return _Launches(attention, table, counts.per_head)


def _count_tiles(problem: _Problem, tiles: TileConfig) -> _TileCounts:
    options = problem.options
    batch = problem.batch
    num_m = -(-options.max_seqlen_q // tiles.block_m)
    kv_bytes = 2 * (problem.k.shape[-1] + problem.out.shape[-1]) * options.max_seqlen_k
    if problem.packed:
        per_head = max_tile_count(problem.q.shape[0], batch, options.max_seqlen_q, tiles.block_m, options.skip_q)
        # tiles of several sequences run at a time: tiles of the same length usually belong to a few sequences
        group, tail = head_group(problem.num_heads, problem.heads_per_kv, kv_bytes * min(4, batch), per_head)
    else:
        per_head = num_m * batch
        equal = options.window_size[0] < 0 and options.window_size[1] < 0
        group, tail = head_group(batch * problem.num_heads, problem.heads_per_kv, kv_bytes, num_m, equal)
    return _TileCounts(num_m, per_head, group, tail)


def _numbers(problem: _Problem, counts: _TileCounts) -> Numbers:
    options = problem.options
    scale, softcap = base_2_scales(options.softmax_scale, options.softcap)
    return Numbers(
        scale=scale,
        softcap=softcap,
        lse_stride=problem.q.shape[0] if problem.packed else options.max_seqlen_q,
        total=counts.per_head * problem.num_heads,
        num_m=counts.num_m,
        num_heads=problem.num_heads,
        heads_per_kv=problem.heads_per_kv,
        head_group=counts.head_group,
        head_tail=counts.head_tail,
        seqlen_q=options.max_seqlen_q,
        seqlen_k=options.max_seqlen_k,
        left=options.window_size[0],
        right=options.window_size[1],
        table_stride=problem.table_stride,
        k_pitch=problem.k.strides[0] // problem.k.strides[1] if problem.paged else 0,
        v_pitch=problem.v.strides[0] // problem.v.strides[1] if problem.paged else 0,
        scale_stride=problem.scale_stride,
        **_list_numbers(problem),
    )


def _list_numbers(problem: _Problem) -> dict[str, int]:
    """What `Numbers` says about lists, of lists that are contiguous."""
    blocks = problem.blocks
    if blocks is None:
        return {}
    batch, heads, query_blocks = blocks.kv_num_blocks.shape
    return {
        "list_batch": 0 if batch == 1 else heads * query_blocks,
        "list_head": query_blocks,
        "heads_per_list": problem.num_heads // heads,
        "list_width": blocks.kv_indices.shape[3],
        "full_width": 0 if blocks.full_kv_indices is None else blocks.full_kv_indices.shape[3],
        "bits_width": 0 if blocks.partial_bits is None else blocks.partial_bits.shape[3],
    }


def base_2_scales(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """-> the kernel's (scale, softcap), which turn a product s into an exponent of 2.

    Without a softcap the exponent is scale * s. With one it is softcap * tanh(scale * s).
    """
    log2e = math.log2(math.e)
    return (softmax_scale / softcap, softcap * log2e) if softcap else (softmax_scale * log2e, 0.0)


def _views(problem: _Problem, var: Variant) -> tuple[View | None, ...]:
    """How the kernel sees both parts of q, k, v and out. The second parts are columns d0 or dv0 and on of the same tensors."""

    def parts(x: Layout, rows: int, *widths: int, packed: bool = problem.packed) -> tuple[View | None, ...]:
        view = ragged_view if packed else dense_view
        return tuple([view(*x, rows, width) if width else None for width in widths])

    def page_parts(x: Layout, *widths: int) -> tuple[View | None, ...]:
        """The rows of a page; a box has at most 64 columns."""
        return parts(Layout(x.shape[1:], x.strides[1:], x.dtype), var.page_rows, *[min(width, 64) for width in widths])

    block_n = var.tiles.block_n
    if problem.paged:
        keys = (*page_parts(problem.k, var.d0, var.d1), *page_parts(problem.v, var.dv0, var.dv1))
    elif var.float8_keys:
        # transposed values have head_dim rows of keys
        values = dense_view(*problem.v, var.dv0, block_n) if var.float8_values else dense_view(*problem.v, block_n, var.dv0)
        keys = (*parts(problem.k, block_n, var.d0, var.d1, packed=False), values, None)
    else:
        keys = (*parts(problem.k, block_n, var.d0, var.d1), *parts(problem.v, block_n, var.dv0, var.dv1))
    return (*parts(problem.q, 64, var.d0, var.d1), *keys, *parts(problem.out, 64, var.o_width, var.dv1))


def _run_launches(
    launches: _Launches,
    quantizer: Quantizer | None,
    out_shape: tuple[int, ...],
    lse_shape: tuple[int, ...] | None,
    copied: tuple[bool | None, ...],
) -> Run:
    """The plan of a call whose strides the copy engine can address.

    lse_shape: None if lse is not wanted
    copied:    as in `_run_on_copies`
    """
    attention, table_of, max_tiles, counted = launches
    any_address = copied[1] is None
    unmarked = tuple([None if copy is None else False for copy in copied])

    def run(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q, k, v, sinks, _, cu_seqlens_q, keys, block_table, _, _, out, lse, _, blocks = tensors
        addresses = q.data_ptr() if any_address else q.data_ptr() | k.data_ptr() | v.data_ptr()
        if addresses & 15 or (out is not None and out.data_ptr() & 15):
            return _run_on_copies(run, tensors, unmarked)
        if out is None:
            out = q.new_empty(out_shape)
        if lse is None and lse_shape is not None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        if attention is not None:
            table = counter = None
            if table_of is not None:
                table = tile_table(table_of, max_tiles, cu_seqlens_q, keys)
            elif counted:
                counter = take_counter(q)
            lists = _NO_LISTS if blocks is None else [x if x is None else x.contiguous() for x in blocks.tensors]
            scales = _NO_SCALES
            if quantizer is not None:
                q, k, v, *scales = quantizer(tensors)
            attention((q, q, k, k, v, v, out, out, lse, sinks, table, counter, block_table, *lists, *scales))
        return out, lse

    return run


def _run_on_copies(run: Run, tensors: AttentionTensors, copied: tuple[bool | None, ...]) -> tuple[Tensor, Tensor | None]:
    """Run on copies of those of q, k, v and out that are marked or have an unaligned address, and copy the output back.

    copied: None marks caches that only the quantizer reads, which takes any strides and addresses
    """
    given = (tensors.q, tensors.k, tensors.v, tensors.out)
    q, k, v, out = (x if x is None or copy is None else addressable(x, copy) for x, copy in zip(given, copied, strict=True))
    result, lse = run(tensors._replace(q=q, k=k, v=v, out=out))
    return (result if out is tensors.out else tensors.out.copy_(result)), lse


def _run_without_keys(out_shape: tuple[int, ...], lse_shape: tuple[int, ...] | None) -> Run:
    """The plan of a call without queries or without keys: out is 0, and lse is the sink, or -inf without sinks."""

    def run(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q = tensors.q
        out = q.new_empty(out_shape) if tensors.out is None else tensors.out
        lse = tensors.lse
        if lse is None and lse_shape is not None:
            lse = q.new_empty(lse_shape, dtype=torch.float32)
        out.zero_()
        if lse is not None and tensors.sinks is None:
            lse.fill_(float("-inf"))
        elif lse is not None:
            lse.copy_(tensors.sinks.to(torch.float32)[:, None].expand_as(lse))
        return out, lse

    return run
