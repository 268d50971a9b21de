"""Attention forward for Hopper (sm90) in Gluon, after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

A thread block has one producer warp and one to three consumer warpgroups of 64 query rows each. It computes one tile at a time:

    producer   assigns tiles (see `tile_scheduler`), and copies Q, K and V to shared memory by the copy engine (tensor memory
               accelerator, TMA)
    consumers  S = Q K^T and O += P V as asynchronous warpgroup MMAs (wgmma), softmax in registers, O out through TMA

K and V pass through rings of `stages` blocks each. Q passes through a ring of `q_stages`, together with the record that
identifies the tile. Each stage of a ring has a "full" and an "empty" mbarrier. Within a warpgroup, S of a block is issued
before P V of the previous block, and both run while the softmax is computed. Across tiles, the next tile's first S is issued
while this tile's last P V runs, and the output is written while that S runs. With `pingpong`, the warpgroups take turns at the
tensor cores. Scores are in base 2, and the output is divided by the sum of its row once at the end.

The hardware bounds packed sequences: descriptors are ragged (see `descriptors.ragged_view`), and rows past the end of a
sequence read as zero and are not written. So a NaN of a neighbouring sequence is neither read nor overwritten, and no tile
needs a slow path. A page of a paged cache is bounded in the same way, as a packed sequence whose length is the number of rows
that are in use; a block of K or V arrives page by page. Entries of the block table after the last page or before a window
are not read. With float8 products, the kernel reads copies instead of pages (see `triton.float8_inputs`).

With lists of key blocks, the producer copies only the blocks of the list (see `block_sparse`). A mask comes with the lists of
its blocks (see `mask_blocks`).

    run = plan_hopper_forward(tensors, options)      # once for calls that look alike
    out, lse = run(tensors)

Left out: the scan of masks, 16-bit products with float8 caches, and head sizes that are not a multiple of 8. The module
`backward` has the gradients.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fa_serve.backends import GROUP_KEYS, MAX_KEYS_PER_TILE, TREE_KEYS
from fa_serve.backends.calls import AttentionOptions, AttentionTensors, mask_form
from fa_serve.backends.hopper.descriptors import copy_engine_strides, dense_view, ragged_view
from fa_serve.backends.hopper.forward.kernel import Numbers, attn_fwd_hopper
from fa_serve.backends.hopper.forward.launches import Launches, run_launches, run_on_copies, run_without_keys
from fa_serve.backends.hopper.forward.tile_scheduler import PackedOutput, max_tile_count, table_launch
from fa_serve.backends.hopper.forward.tiles import (
    MIN_BLOCKS_OF_A_SPLIT,
    HopperTiles,
    Schedule,
    head_group,
    heads_to_pack,
    hopper_float8_tiles,
    hopper_forward_tiles,
    key_columns,
    key_splits,
    list_tiles,
    tree_tiles,
    value_columns,
)
from fa_serve.backends.hopper.forward.types import Variant
from fa_serve.backends.hopper.split_kv.combine import Combine, plan_combine
from fa_serve.backends.hopper.split_kv.tile_scheduler import split_table_launch, table_capacity
from fa_serve.backends.layout import TensorLayout, contiguous
from fa_serve.backends.triton.float8_inputs import BLOCK_KEYS, Form, InputQuantizer
from fa_serve.block_lists import BlockLists
from fa_serve.launching.launch import Launch, View, broadcast_strides, multiprocessors
from fa_serve.launching.plans import Run
from fa_serve.spec import FEW_QUERIES, TREE_SPLITS

SHARE_BIAS = False
"""Whether the tiles of one head and the same rows of all sequences are computed one after the other, if all sequences add the
same bias. The bias is then read from memory once, and from the L2 cache for the other sequences. Not timed yet, so it is
off."""
_MAX_PADDED = 1 << 27
"""The largest output, in numbers, for which tiles may be padded. Their results pass through a buffer that holds the output once
for each of up to 16 splits, and positions in this buffer have 32 bits."""


def plan_hopper_forward(
    tensors: AttentionTensors, options: AttentionOptions, tiles: HopperTiles | None = None, max_splits: int | None = None
) -> Run:
    """Plan attention for calls whose tensors have the shapes, strides, dtypes and device of `tensors`, None included.

    Queries are dense, or packed by cu_seqlens_q with keys packed by cu_seqlens_k or in the pages of block_table, in the shapes
    of `fa_serve.api`. A mask comes with the `blocks` that were scanned from it. num_splits is ignored, because
    `HopperBackend.supports` refuses it. The exception is TREE_SPLITS, with which the kernel follows the tree (`forward.tree`).

    tiles, max_splits: override the choices of `hopper_forward_tiles` and `key_splits`, for tuning and tests

    Returns run(tensors) -> (out, lse or None). Sequences with up to options.skip_q queries are left out: their rows of out and
    lse are not written, and with skip_q > 0 neither are the rows past the last sequence. Each call first copies tensors that
    the copy engine cannot address (see `descriptors`).
    """
    q = tensors.q
    k = tensors.k
    v = tensors.v
    out_shape = (*q.shape[:-1], v.shape[-1])
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if options.return_lse else None
    if 0 in (*q.shape[:2], *k.shape[:2]):
        return run_without_keys(out_shape, lse_shape)
    form: Form = "dense" if tensors.cu_seqlens_q is None else "packed" if tensors.block_table is None else "paged"
    given = [TensorLayout(x.shape, x.stride(), x.dtype) for x in (q, k, v)]
    given.append(
        contiguous(out_shape, q.dtype) if tensors.out is None else TensorLayout(out_shape, tensors.out.stride(), q.dtype)
    )
    copied: tuple[bool | None, ...] = tuple([copy_engine_strides(x.shape, x.strides) is None for x in given])
    if form == "paged" and options.precision != "bf16":
        copied = (copied[0], None, None, copied[3])
    sequences = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
    layouts = [contiguous(x.shape, x.dtype) if copy else x for x, copy in zip(given, copied, strict=True)]
    table_stride = 0 if tensors.block_table is None else tensors.block_table.stride(0)
    plain = options.precision == "bf16" and tensors.blocks is None and options.num_splits != TREE_SPLITS
    quantizer = None
    if options.precision != "bf16":
        quantizer = InputQuantizer(layouts[:3], form, sequences, options, table_stride)
        layouts[:3] = quantizer.layouts
    may_pad = form != "dense" and math.prod(out_shape) < _MAX_PADDED
    lengths = (options.max_seqlen_q, options.max_seqlen_k)
    forms = (form != "dense", form == "paged")
    plain_tiles = hopper_forward_tiles(q.shape[-1], v.shape[-1], options.window_size, *lengths, *forms)
    keys = _visible_keys(options) if form == "paged" else 0
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
        mask=tensors.mask,
        scale_stride=0 if quantizer is None else quantizer.groups,
        pack_gqa=heads_to_pack(
            q.shape[-2] // k.shape[-2], options.max_seqlen_q, keys, rows=plain_tiles.block_m, may_pad=may_pad
        )
        if plain
        else 1,
    )
    launches = _plan_launches(problem, tiles, max_splits)
    if launches.attention is None and not options.skip_q:
        return run_without_keys(out_shape, lse_shape)
    run = run_launches(launches, quantizer, out_shape, lse_shape, copied)
    return (lambda tensors: run_on_copies(run, tensors, copied)) if any(copied) else run


class _Problem(NamedTuple):
    """What the launches depend on. q, k, v and out are laid out so that the copy engine can address them."""

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    out: TensorLayout
    device: torch.device
    form: Form
    batch: int
    table_stride: int
    options: AttentionOptions
    blocks: BlockLists | None
    mask: Tensor | None
    scale_stride: int
    pack_gqa: int

    @property
    def packed(self) -> bool:
        """Whether queries are packed."""
        return self.form != "dense"

    @property
    def paged(self) -> bool:
        """Whether the kernel reads pages. For float8 products it reads copies instead."""
        return self.form == "paged" and self.options.precision == "bf16"

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.k.shape[-2]

    @property
    def equal(self) -> bool:
        """Whether all sequences have max_seqlen_q queries."""
        return not self.packed or self.q.shape[0] == self.batch * self.options.max_seqlen_q

    @property
    def packs_chunks(self) -> bool:
        """Whether heads share the tiles of chunks, of which the device decides whether keys are split."""
        return self.pack_gqa > 1 and self.options.max_seqlen_q > FEW_QUERIES

    @property
    def tile_heads(self) -> int:
        """Heads that have separate tiles."""
        return self.num_heads if self.pack_gqa == 1 else self.k.shape[-2]


class _TileCounts(NamedTuple):
    """How many tiles there are and in which groups of heads they are computed; see `Numbers`.

    per_head: tiles of one head of all sequences (packed: an upper bound)
    """

    num_m: int
    per_head: int
    head_group: int
    head_tail: int


def _plan_launches(problem: _Problem, tiles: HopperTiles | None, max_splits: int | None) -> Launches:
    options = problem.options
    left, right = options.window_size
    head_dims = (problem.q.shape[-1], problem.out.shape[-1])
    blocks = problem.blocks
    follows_tree = options.num_splits == TREE_SPLITS
    if tiles is None and follows_tree:
        tiles = tree_tiles(*head_dims, problem.batch * problem.num_heads * -(-options.max_seqlen_q // 128))
    elif tiles is None and blocks is not None:
        tiles = list_tiles(*head_dims, blocks.block_size)
    elif tiles is None and options.precision != "bf16":
        tiles = hopper_float8_tiles(*head_dims)
    elif tiles is None:
        rows = options.max_seqlen_q * (1 if problem.packs_chunks else problem.pack_gqa)
        lengths = (rows, options.max_seqlen_k)
        tiles = hopper_forward_tiles(*head_dims, options.window_size, *lengths, problem.packed, problem.paged)
    if max_splits is None:
        max_splits = 1 if follows_tree else _split_limit(problem, tiles)
    padded = problem.pack_gqa > problem.heads_per_kv
    splits_keys = padded or max_splits > 1 or problem.packs_chunks
    assert not problem.paged or tiles.block_n <= MAX_KEYS_PER_TILE
    assert not follows_tree or tiles.block_n == TREE_KEYS
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
        mask=mask_form(problem.mask),
        mask_words=problem.mask is not None and max(head_dims) <= 192 and has_mask_words(problem.mask, problem.q.dtype),
        sequences_first=SHARE_BIAS and problem.batch > 1 and _shares_bias(problem.mask),
        precision=options.precision,
        gaps=problem.form == "packed" and options.precision != "bf16",
        pack_gqa=problem.pack_gqa,
        padded=padded,
        split_kv=splits_keys,
        dim_v=head_dims[1] if splits_keys else 0,
        tree_blocks=GROUP_KEYS // TREE_KEYS if follows_tree else 0,
    )
    assert blocks is None or (var.block_q % tiles.block_m == 0 and var.block_k % tiles.block_n == 0)
    resident = multiprocessors(problem.device, 132) * tiles.blocks_per_sm
    counts = _count_tiles(problem, var, resident, max_splits)
    if counts.per_head == 0:
        return Launches()
    combine = _plan_combine(problem, var, counts, max_splits) if var.split_kv else None
    thread_blocks = counts.per_head * problem.tile_heads
    if tiles.schedule == Schedule.DYNAMIC:
        thread_blocks = min(thread_blocks, resident)
    attention = Launch(
        attn_fwd_hopper,
        thread_blocks,
        _numbers(problem, counts, combine),
        (var,),
        {"num_warps": 4, "maxnreg": tiles.registers[0]},
        strides=_mask_strides(problem.mask, var),
        views=_views(problem, var),
    )
    if not problem.packed:
        return Launches(attention, counted=tiles.schedule == Schedule.DYNAMIC, mask_words=var.mask_words)
    table = _plan_table(problem, var, counts, resident, max_splits)
    return Launches(attention, table, counts.per_head, combine=combine)


def _shares_bias(mask: Tensor | None) -> bool:
    """Whether all sequences add the same numbers."""
    return mask_form(mask) == "float" and broadcast_strides(mask)[0] == 0


def has_mask_words(mask: Tensor, dtype: torch.dtype) -> bool:
    """Whether a float mask can be loaded in words of two numbers, four words at a time: it has the 16-bit `dtype` of q, and its
    rows begin and end at multiples of 16 bytes. `plan_over_blocks` makes its address a multiple of 16, too. Threads exchange
    words through 4 kB of shared memory, for which heads of more than 192 numbers leave no room."""
    *outer, key = mask.stride()
    return mask.dtype == dtype and key == 1 and mask.shape[3] % 8 == 0 and all(stride % 8 == 0 for stride in outer)


def _mask_strides(mask: Tensor | None, var: Variant) -> tuple[int, ...]:
    """The strides of a mask in units of what the kernel loads: words if `mask_words`, else numbers."""
    strides = broadcast_strides(mask)
    return (*[stride // 2 for stride in strides[:3]], strides[3]) if var.mask_words else strides


def _plan_table(problem: _Problem, var: Variant, counts: _TileCounts, resident: int, max_splits: int) -> Launch:
    """The launch that makes the table of tiles of packed queries, and clears the rows that have no tile."""
    options = problem.options
    total_q, num_heads, dim_v = problem.out.shape
    unused = 0 if options.skip_q else total_q - problem.batch * options.max_seqlen_q
    stride_token, stride_head = problem.out.strides[:2]
    tiling = (
        counts.per_head,
        problem.batch,
        options.window_size,
        var.queries,
        var.tiles.block_n,
        options.skip_q,
        problem.form == "paged",
        PackedOutput(total_q, num_heads, total_q, stride_token, stride_head, dim_v, tail=unused),
    )
    if not var.split_kv:
        return table_launch(*tiling, BLOCK_KEYS.value if var.gaps else 1)
    return split_table_launch(
        *tiling,
        tile_heads=problem.tile_heads,
        processors=multiprocessors(problem.device, 132),
        resident=resident,
        max_splits=max_splits,
        min_blocks=MIN_BLOCKS_OF_A_SPLIT,
        by_waves=options.max_seqlen_q > FEW_QUERIES,
    )


def _split_limit(problem: _Problem, tiles: HopperTiles) -> int:
    """Into how many splits the keys of a row may be cut. The host knows only the sum and the maximum of the lengths."""
    options = problem.options
    if not problem.packed or options.precision != "bf16" or problem.blocks is not None:
        return 1
    queries = tiles.block_m // problem.pack_gqa
    longest = -(-options.max_seqlen_q // queries)
    # with equal lengths, each sequence has as many tiles as the longest; else all queries fill at least this number of tiles
    count = problem.batch * longest if problem.equal else max(longest, problem.q.shape[0] // queries)
    resident = multiprocessors(problem.device, 132) * tiles.blocks_per_sm
    given = (count * problem.tile_heads, resident, options.max_seqlen_q, _visible_keys(options))
    return key_splits(*given, packed_heads=problem.packs_chunks)


def _visible_keys(options: AttentionOptions) -> int:
    """How many keys a row of the longest sequence sees."""
    left, _ = options.window_size
    return options.max_seqlen_k if left < 0 else min(options.max_seqlen_k, left + options.max_seqlen_q)


def _plan_combine(problem: _Problem, var: Variant, counts: _TileCounts, max_splits: int) -> Combine:
    stride_token, stride_head = problem.out.strides[-3:-1]
    return plan_combine(
        capacity=counts.per_head,
        queries=var.queries,
        tokens=problem.q.shape[0],
        num_heads=problem.num_heads,
        splits=max_splits,
        head_dim_v=problem.out.shape[-1],
        out_strides=(stride_token, stride_head),
        padded=var.padded,
    )


def _count_tiles(problem: _Problem, var: Variant, resident: int, max_splits: int) -> _TileCounts:
    options = problem.options
    batch = problem.batch
    num_m = -(-options.max_seqlen_q // var.queries)
    kv_bytes = 2 * (problem.k.shape[-1] + problem.out.shape[-1]) * options.max_seqlen_k
    if problem.packed:
        per_head = max_tile_count(problem.q.shape[0], batch, options.max_seqlen_q, var.queries, options.skip_q)
        # Tiles of the same length follow one another. They belong to all sequences if these are equally long, else usually to
        # a few sequences. All tiles of a sequence should find its keys in the L2 cache.
        causal = options.window_size[1] >= 0 and options.window_size[0] < 0
        together = batch if problem.equal and causal else min(4, batch)
        group, tail = head_group(problem.num_heads, problem.heads_per_kv, kv_bytes * together, per_head)
    else:
        per_head = num_m * batch
        equal = options.window_size[0] < 0 and options.window_size[1] < 0
        # a head of all sequences is computed together, or each sequence by itself
        sequences = batch if var.sequences_first else 1
        group, tail = head_group(
            batch * problem.num_heads, problem.heads_per_kv * sequences, kv_bytes * sequences, num_m, equal
        )
    if var.pack_gqa > 1 or var.split_kv:  # few tiles, which run at once
        group = tail = problem.tile_heads if problem.packed else batch * problem.tile_heads
    if var.split_kv:
        by_waves = options.max_seqlen_q > FEW_QUERIES
        per_head = table_capacity(per_head, problem.tile_heads, resident, max_splits, by_waves=by_waves)
    return _TileCounts(num_m, per_head, group, tail)


def _numbers(problem: _Problem, counts: _TileCounts, combine: Combine | None) -> Numbers:
    options = problem.options
    scale, softcap = base_2_scales(options.softmax_scale, options.softcap)
    return Numbers(
        scale=scale,
        softcap=softcap,
        lse_stride=problem.q.shape[0] if problem.packed else options.max_seqlen_q,
        total=counts.per_head * problem.tile_heads,
        num_m=counts.num_m,
        num_heads=problem.tile_heads,
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
        logs=0 if combine is None else combine.logs,
        tokens=problem.q.shape[0],
        **_list_numbers(problem),
    )


def _list_numbers(problem: _Problem) -> dict[str, int]:
    """The fields of `Numbers` about lists, which are contiguous."""
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
    """How the kernel sees both parts of q, k, v and out. A second part begins at column d0 or dv0 of the same tensor."""

    def parts(
        x: TensorLayout, rows: int, *widths: int, heads: int = 1, packed: bool = problem.packed
    ) -> tuple[View | None, ...]:
        view = ragged_view if packed else dense_view
        return tuple([view(*x, rows, width, heads) if width else None for width in widths])

    def page_parts(x: TensorLayout, *widths: int) -> tuple[View | None, ...]:
        """The views of the rows of a page; a box has at most 64 columns."""
        return parts(TensorLayout(x.shape[1:], x.strides[1:], x.dtype), var.page_rows, *[min(width, 64) for width in widths])

    block_n = var.tiles.block_n
    if problem.paged:
        keys = (*page_parts(problem.k, var.d0, var.d1), *page_parts(problem.v, var.dv0, var.dv1))
    elif var.float8_keys:
        # transposed values have head_dim rows of keys
        values = dense_view(*problem.v, var.dv0, block_n) if var.float8_values else dense_view(*problem.v, block_n, var.dv0)
        keys = (*parts(problem.k, block_n, var.d0, var.d1, packed=False), values, None)
    else:
        keys = (*parts(problem.k, block_n, var.d0, var.d1), *parts(problem.v, block_n, var.dv0, var.dv1))
    rows = 64 // var.pack_gqa
    queries = parts(problem.q, rows, var.d0, var.d1, heads=var.pack_gqa)
    return (*queries, *keys, *parts(problem.out, rows, var.o_width, var.dv1, heads=var.pack_gqa))
