"""Block-sparse attention in portable Triton (FlashAttention, Dao et al. 2022, section 3.3): a program walks lists of blocks.

One program computes `block_m` packed rows of one sequence and walks over the key blocks that its block of queries has in its
lists, first the partial blocks and then the full ones. Other keys are never read, so the bytes read grow with the blocks that
are kept. If the lists were scanned from a float mask (see `mask_blocks`), the kernel adds the mask in partial blocks. A row is
one query of one query head. Where the query heads of a KV head share their lists, they are packed, so a single query fills a
tile with its heads; where each query head has its own lists, a tile has rows of one head.

The layouts (dense, packed, paged) differ in where keys lie, and the same kernel serves prompts and decoding. With few queries,
lists are cut into splits, which `splits._combine` combines: each sequence has the same number of splits, because only the
device knows how long its lists are, and a split may be empty. Blocks of 64 or 128 keys are walked in tiles of `block_n`. A
tile is masked, in a uniform branch, if it crosses the edge of the band or the end of the sequence, or if its block has bits.
This module leaves out the backward pass. The module `kernel` holds the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve import spec
from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.calls import AttentionOptions, AttentionTensors, mask_form
from fa_serve.backends.triton.block_sparse.kernel import SparseVariant, attn_block_sparse
from fa_serve.backends.triton.key_pages import has_wide_rows
from fa_serve.backends.triton.splits import SplitCounts, SplitVariant, combine_launch
from fa_serve.backends.triton.tiles import SparseTiles, padded_dim, sparse_tiles
from fa_serve.backends.unseen_rows import without_keys
from fa_serve.block_lists import BlockLists
from fa_serve.launching.launch import Launch, broadcast_strides, multiprocessors, row_strides, with_unit_stride
from fa_serve.launching.plans import Run


def plan_block_sparse(tensors: AttentionTensors, options: AttentionOptions, tiles: SparseTiles | None = None) -> Run:
    """Plan calls that look like this one, for AttentionTensors of any layout with `blocks` (see `fa_serve.api`).

    A run is one launch, and a second one if lists are cut into splits. `tiles` overrides the choice, for tuning.
    """
    return _BlockSparsePlan(tensors, options, tiles)


class _BlockSparsePlan:
    """The launches of one kind of call, and the shapes of what a run allocates."""

    __slots__ = (
        "_combine",
        "_has_bits",
        "_launch",
        "_layout",
        "_lse_shape",
        "_needs_lse",
        "_out_shape",
        "_split_size",
        "_takes_out",
    )

    def __init__(self, tensors: AttentionTensors, options: AttentionOptions, tiles: SparseTiles | None) -> None:
        q, k, v = (with_unit_stride(x) for x in (tensors.q, tensors.k, tensors.v))
        blocks = tensors.blocks
        assert blocks is not None
        dense = tensors.cu_seqlens_q is None
        self._layout = "dense" if dense else "varlen" if tensors.block_table is None else "paged"
        batch = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        num_heads = q.shape[-2]
        dim_v = v.shape[-1]
        rows_in_all = q.shape[:-2].numel()
        self._out_shape = (*q.shape[:-1], dim_v)
        self._has_bits = blocks.partial_bits is not None
        self._needs_lse = options.return_lse
        self._lse_shape = (num_heads, rows_in_all)
        out = tensors.out
        self._takes_out = out is not None and (out.is_contiguous() if dense else out.stride(2) == 1)
        self._launch: Launch | None = None
        self._combine: Launch | None = None
        self._split_size = 0
        if q.numel() == 0 or batch * options.max_seqlen_q == 0:
            return
        groups = num_heads // k.shape[-2]
        packed = blocks.kv_num_blocks.shape[1] in (1, k.shape[-2])
        shared = groups if packed else 1
        list_heads = num_heads // shared
        if tiles is None:
            tiles = sparse_tiles(
                spec.arch_of(q.device),
                multiprocessors(q.device, 8),
                q.element_size(),
                q.shape[-1],
                dim_v,
                shared * blocks.block_size[0],
                blocks.block_size[1],
                shared * options.max_seqlen_q,
                batch * list_heads,
                _longest_list(blocks, options.max_seqlen_k) if options.max_seqlen_q <= spec.FEW_QUERIES else 0,
                options.num_splits,
            )
        assert tiles.block_n <= MAX_KEYS_PER_TILE
        counts = SplitCounts(
            batch=batch,
            heads=list_heads,
            rows=shared * options.max_seqlen_q,
            block_m=tiles.block_m,
            splits=tiles.splits,
            min_blocks=1,
            max_q=options.max_seqlen_q,
            left=options.left,
        )
        variant = self._variant(tensors, options, tiles, shared, k, v)
        out_strides = out.stride()[-3:-1] if out is not None and self._takes_out else (num_heads * dim_v, dim_v)
        lse_stride = rows_in_all if self._needs_lse else 0
        programs = batch * counts.units * tiles.splits
        self._launch = Launch(
            attn_block_sparse,
            programs,
            varying=(
                batch,
                counts.units,
                counts.tiles_per_head,
                counts.unit_rows,
                tiles.splits,
                options.max_seqlen_q if dense else rows_in_all,
                options.max_seqlen_k,
                options.left,
                options.window_size[1],
                *_list_numbers(blocks),
                lse_stride,
                0 if tensors.block_table is None else tensors.block_table.stride(0),
                float(options.softmax_scale),
                float(options.softcap),
            ),
            strides=(*row_strides(q), *row_strides(k), *row_strides(v), *out_strides, *broadcast_strides(tensors.mask)),
            fixed=(variant,),
            options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
        )
        if tiles.splits > 1:
            self._split_size = counts.buffer_size(variant.split)
            self._combine = combine_launch(counts, variant.split, lse_stride, out_strides)

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q, k, v = (with_unit_stride(x) for x in (tensors.q, tensors.k, tensors.v))
        out = tensors.out
        result = out if self._takes_out and out is not None else q.new_empty(self._out_shape)
        lse = q.new_empty(self._lse_shape, dtype=torch.float32) if self._needs_lse else None
        if self._launch is not None:
            assert tensors.blocks is not None
            lists = [x if x is None else x.contiguous() for x in tensors.blocks.tensors]
            cu_seqlens_k = tensors.keys if self._layout == "varlen" else None
            seqused_k = tensors.keys if self._layout == "paged" else None
            splits = None if self._combine is None else q.new_empty(self._split_size, dtype=torch.float32)
            where = (tensors.block_table, seqused_k, tensors.cu_seqlens_q, cu_seqlens_k)
            scales = (tensors.k_descale, tensors.v_descale, tensors.alibi_slopes)
            added = None if self._has_bits else tensors.mask
            self._launch((q, k, v, result, lse, splits, *lists, *where, tensors.sinks, *scales, added))
            if self._combine is not None:
                self._combine((result, lse, splits, seqused_k, tensors.cu_seqlens_q), 0)
        else:
            without_keys(result, lse, None, None)
        if lse is not None and self._layout == "dense":
            lse = lse.view(lse.shape[0], *result.shape[:2]).transpose(0, 1)
        if out is not None and result is not out:
            result = out.copy_(result)
        return result, lse

    def _variant(
        self, tensors: AttentionTensors, options: AttentionOptions, tiles: SparseTiles, shared: int, k: Tensor, v: Tensor
    ) -> SparseVariant:
        """`shared`: query heads that share a list, and are packed."""
        blocks = tensors.blocks
        assert blocks is not None
        q = tensors.q
        arch = spec.arch_of(q.device)
        dim_v = v.shape[-1]
        strides = (*row_strides(k)[:2], *row_strides(v)[:2])
        return SparseVariant(
            split=SplitVariant(
                groups=shared,
                dim_v=dim_v,
                block_dv=padded_dim(dim_v),
                block_m=tiles.block_m,
                block_n=tiles.block_n,
                batch_block=1,
                balanced=False,
                has_left=options.left >= 0,
                pdl=False,
                chunked=options.attention_chunk > 0,
                block_sparse=True,
            ),
            lists_per_kv=q.shape[-2] // shared // k.shape[-2],
            block_q=blocks.block_size[0],
            block_k=blocks.block_size[1],
            bits=blocks.partial_bits is not None,
            mask=mask_form(tensors.mask),
            dim=q.shape[-1],
            block_d=padded_dim(q.shape[-1]),
            layout=self._layout,
            page_size=k.shape[1] if self._layout == "paged" else 0,
            has_right=options.window_size[1] >= 0,
            has_softcap=options.softcap != 0.0,
            same_strides=row_strides(k) == row_strides(v),
            aligned=all(stride % 16 == 0 for stride in strides),
            wide=has_wide_rows(k, v, paged=self._layout == "paged"),
            precision="ieee" if q.dtype == torch.float32 else "tf32",
            ptx=arch >= 89,
            alibi=tensors.alibi_form,
        )


def _longest_list(blocks: BlockLists, max_seqlen_k: int) -> int:
    """An upper bound, known on the host, of the number of keys that a block of queries attends to."""
    width = sum(x.shape[3] for x in (blocks.kv_indices, blocks.full_kv_indices) if x is not None)
    return min(width * blocks.block_size[1], max_seqlen_k)


def _list_numbers(blocks: BlockLists) -> tuple[int, ...]:
    """Distances between the lists of sequences and of heads, counted in lists, and the widths of the three tensors."""
    batch, heads, query_blocks = blocks.kv_num_blocks.shape
    full_width = 0 if blocks.full_kv_indices is None else blocks.full_kv_indices.shape[3]
    return (
        0 if batch == 1 else heads * query_blocks,
        0 if heads == 1 else query_blocks,
        blocks.kv_indices.shape[3],
        full_width,
        0 if blocks.partial_bits is None else blocks.partial_bits.shape[3],
    )
