"""Attention on a paged cache over a fixed tree of keys: the bits of a query's result depend on its keys and on nothing else.

The keys of a sequence are cut at absolute positions, from its first key on: into blocks, and into groups of blocks. For a row,
a query of one query head,

1. a group is computed by the online softmax over its blocks, in their order, from an empty state: (maximum, sum, values). The
   maximum follows a row's scores only when they exceed it by far (`primitives.group_softmax`);
2. groups are folded from the left into the result (`primitives.fold_rows`), after the sink if there is one.

A block or a group in which a row sees no key changes nothing, so it does not matter whether a program visits it. Therefore rows
may be computed in tiles with any other rows: a token has the same bits in a prompt, in a chunk, after a cached prefix, in a
step that verifies drafts, and alone. The groups may be computed by one program, which folds them in registers, or each by its
own program (`apart`), and then a second kernel folds them.

Each tile has 64 packed rows, even for a single query, or 128 (`MANY_TREE_ROWS`). There is one warp for 16 rows (8 warps for
wide heads), so the products always use the same instruction, and the sums over a row's scores always have the same order.
Sequences with more than `max_seqlen_q` queries are left to another kernel, which follows the same tree
(`backends.hopper.FOLLOWS_TREE`). Left out: explicit masks, ALiBi, and latent keys. Source of the idea: fixed split sizes in He
et al., "Defeating Nondeterminism in LLM Inference" (2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve import spec
from fa_serve.backends import GROUP_KEYS, TREE_KEYS
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.triton.key_pages import has_wide_rows
from fa_serve.backends.triton.primitives import LOG2E
from fa_serve.backends.triton.tiles import batch_block, padded_dim
from fa_serve.backends.triton.tree.kernel import TreeVariant, attn_tree, fold_groups
from fa_serve.backends.unseen_rows import without_keys
from fa_serve.launching.launch import Launch, launch_options, multiprocessors, with_unit_stride
from fa_serve.launching.plans import Run

TREE_ROWS = 64
"""Packed rows of a tile."""
MANY_TREE_ROWS = 128
"""Packed rows of a tile with twice as many warps, for steps with many rows. The instructions and the sums over a row's scores
are the same."""
CHOOSES_ROWS = True
"""The switch: whether steps with many rows use such tiles on Hopper. On an H200, tests/gpu/test_tree_gpu.py has found that both
tiles give rows that are equal in every bit."""
_FOLDED_ROWS = 4
_MOST_BUFFER = 16 << 20
"""The most numbers that the buffer may hold where groups are computed apart."""


def plan_tree(
    tensors: AttentionTensors, options: AttentionOptions, *, apart: bool | None = None, block_m: int | None = None
) -> Run:
    """Plan calls of the layout "paged" that look like this one. apart, block_m: override the choice, for tests"""
    q = tensors.q
    k, v = (with_unit_stride(x) for x in (tensors.k, tensors.v))
    assert tensors.block_table is not None
    total_q, num_heads, dim = q.shape
    heads = k.shape[2]
    dim_v = v.shape[3]
    batch = tensors.block_table.shape[0]
    out_shape = (total_q, num_heads, dim_v)
    groups = num_heads // heads
    width = max(padded_dim(dim), padded_dim(dim_v))
    rows = groups * max(options.max_seqlen_q, 1)
    arch = spec.arch_of(q.device)
    block_m = block_m or _choose_rows(arch, width, q.element_size(), rows)
    tiles_per_seq = -(-rows // block_m)
    # sequences with fewer queries than the longest one have fewer tiles
    tiles = min(batch * tiles_per_seq, batch + total_q * groups // block_m)
    most_groups = max(1, -(-options.max_seqlen_k // GROUP_KEYS))
    unit_rows = min(block_m, rows)
    buffer_size = tiles * heads * most_groups * unit_rows * (dim_v + 2)
    if apart is None:
        few = tiles * heads < 2 * multiprocessors(q.device, 8)
        apart = few and most_groups > 1 and buffer_size <= _MOST_BUFFER
    searches = tiles < batch * tiles_per_seq
    variant = _variant(tensors, options, k, v, block_m, batch_block(batch) if searches else 0, apart)
    out = tensors.out
    takes_out = out is not None and out.stride(2) == 1
    out_strides = out.stride()[:2] if out is not None and takes_out else (num_heads * dim_v, dim_v)
    needs_lse = options.return_lse
    lse_stride = tensors.lse.stride(0) if tensors.lse is not None else total_q if needs_lse else 0
    q_strides = q.stride()[:2] if q.stride(2) == 1 else (num_heads * dim, dim)
    limits = (options.max_seqlen_q, total_q, options.left, options.window_size[1])
    numbers = (batch, heads, tiles, tiles_per_seq, most_groups, unit_rows, *limits)
    scale = float(options.softmax_scale) * (1.0 if options.softcap else LOG2E.value)
    attend = Launch(
        attn_tree,
        tiles * heads * (most_groups if apart else 1),
        varying=(*numbers, tensors.block_table.stride(0), lse_stride, scale, float(options.softcap)),
        strides=(*q_strides, *k.stride()[:3], *v.stride()[:3], *out_strides),
        fixed=(variant,),
        options={**launch_options(variant.pdl, block_m // 16 if width <= 128 else 8), "num_stages": _num_stages(arch, width)},
    )
    blocks_per_tile = -(-unit_rows // _FOLDED_ROWS)
    finish = Launch(
        fold_groups,
        tiles * heads * blocks_per_tile,
        varying=(batch, heads, tiles_per_seq, most_groups, unit_rows, options.max_seqlen_q, blocks_per_tile, lse_stride),
        strides=out_strides,
        fixed=(variant, _FOLDED_ROWS),
        options=launch_options(variant.pdl, 4),
    )

    def run(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q = tensors.q if tensors.q.stride(2) == 1 else tensors.q.contiguous()
        given = tensors.out
        result = given if takes_out and given is not None else q.new_empty(out_shape)
        lse = tensors.lse
        if needs_lse and lse is None:
            lse = q.new_empty(num_heads, total_q, dtype=torch.float32)
        if tiles == 0:
            without_keys(result, lse, None, None)
            return result, lse
        lengths = (tensors.keys, tensors.cu_seqlens_q, tensors.sinks)
        buffer = q.new_empty(buffer_size, dtype=torch.float32) if apart else None
        k, v = (with_unit_stride(x) for x in (tensors.k, tensors.v))
        attend((q, k, v, result, lse, buffer, tensors.block_table, *lengths, tensors.k_descale, tensors.v_descale))
        if apart:
            finish((result, lse, buffer, *lengths, tensors.v_descale))
        if given is not None and result is not given:
            result = given.copy_(result)
        return result, lse

    return run


def _choose_rows(arch: int, width: int, itemsize: int, rows: int) -> int:
    """Packed rows of a tile, for sequences with up to `rows` packed rows."""
    has_many = CHOOSES_ROWS and arch == 90 and width <= 128 and itemsize == 2
    return MANY_TREE_ROWS if has_many and rows >= 4 * MANY_TREE_ROWS else TREE_ROWS


def _num_stages(arch: int, width: int) -> int:
    """Blocks of K and V in flight. Their number changes no sum."""
    has_much_memory = arch in (80, 90, 100)
    if width <= 128:
        return 3 if has_much_memory else 2
    return 2 if has_much_memory and width <= 256 else 1


def _variant(
    tensors: AttentionTensors, options: AttentionOptions, k: Tensor, v: Tensor, block_m: int, batch_block: int, apart: bool
) -> TreeVariant:
    """What the kernels are compiled for. Blocks, groups and warps depend only on head sizes and dtypes."""
    q = tensors.q
    dim = q.shape[2]
    dim_v = v.shape[3]
    arch = spec.arch_of(q.device)
    width = max(padded_dim(dim), padded_dim(dim_v))
    k_strides = k.stride()[:3]
    v_strides = v.stride()[:3]
    return TreeVariant(
        groups=q.shape[1] // tensors.k.shape[2],
        dim=dim,
        dim_v=dim_v,
        block_d=padded_dim(dim),
        block_dv=padded_dim(dim_v),
        block_m=block_m,
        block_n=TREE_KEYS if width <= 256 and q.element_size() == 2 else TREE_KEYS // 2,
        group=GROUP_KEYS,
        page_size=tensors.k.shape[1],
        same_strides=k_strides == v_strides,
        aligned=all(stride % 16 == 0 for stride in (*k_strides[:2], *v_strides[:2])),
        wide=has_wide_rows(k, v, paged=True),
        has_left=options.left >= 0,
        has_right=options.window_size[1] >= 0,
        has_softcap=options.softcap != 0.0,
        chunked=options.attention_chunk > 0,
        batch_block=batch_block,
        apart=apart,
        precision="ieee" if q.dtype == torch.float32 else "tf32",
        ptx=arch >= 89,
        pdl=spec.has_programmatic_launch(arch),
    )
