"""Split-KV flash decoding: few queries, many keys, paged or dense (Dao et al. 2023, "Flash-Decoding").

One program holds the queries of one KV head, up to `block_m` packed rows (a row is one query of one query head), and walks over
one split of the keys. The device cuts the splits, by the lengths that it reads from its memory, so one captured CUDA graph is
right for all lengths:

- balanced (`num_splits == 0`): the key blocks of all sequences lie on one line, which is cut into equal shares, as many as
  programs run at once. A share may hold the end of one sequence, several whole sequences and the beginning of another.
- fixed (`num_splits > 0`, or a batch of one): each sequence is cut into `splits` splits by its own length. If the caller gave
  `num_splits`, the tile depends only on heads and dtypes, so the bits of a row do not depend on the rest of the batch.

If a sequence has only one split, its program writes out at once. Otherwise each split leaves its (out, lse) in a buffer, and
`splits._combine` combines them. On Hopper and later both kernels are launched programmatically (griddepcontrol): the next
kernel starts while this one drains, and then waits for its results.

For tiles of up to 32 query rows, the rows of the scores are keys, so 8 query rows fill the other side of a tensor core's tile
(16 by 8). For tiles of 64 query rows, the rows of the scores are queries: they fill a wgmma, and a row's maximum and sum stay
within four threads. A float8 cache is widened to float16 (`float8_conversions`). Sequences with more than `max_seqlen_q`
queries are skipped: in a mixed batch they belong to another kernel. This module leaves out long prompts (`prefill`) and writing
the cache (`store_kv`). `kernel` holds the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa_serve import spec
from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.triton.decode.kernel import DecodeVariant, attn_decode, decode_option_numbers
from fa_serve.backends.triton.key_pages import has_wide_rows
from fa_serve.backends.triton.splits import SplitCounts, SplitVariant, combine_launch
from fa_serve.backends.triton.tiles import DecodeTiles, batch_block, decode_tiles, padded_dim
from fa_serve.backends.unseen_rows import without_keys
from fa_serve.launching.launch import MMA_SYNC, WGMMA_OF_8_COLUMNS, Launch, launch_options, multiprocessors, with_unit_stride
from fa_serve.launching.plans import Run


def plan_decode(tensors: AttentionTensors, options: AttentionOptions, tiles: DecodeTiles | None = None) -> Run:
    """Plan calls that look like this one, for AttentionTensors of the layouts "paged" and "dense" (see `fa_serve.api`).

    A run is one launch, and a second one if any sequence may be cut into splits. Sequences with more than
    `options.max_seqlen_q` queries are left alone: their rows of out and lse stay as they are. A dense mask depends only on the
    key, (1 or batch, 1, 1, seqlen_k) bool, and keys that it hides are not read. `tiles` overrides the choice, for tuning.
    """
    return _DecodePlan(tensors, options, tiles)


class _DecodePlan:
    """The launches of one kind of call, and the shapes of what a run allocates.

    A dense plan for one query per sequence takes the number of keys and their strides from each call, because a cache grows
    (`calls.growing_facts`).
    """

    __slots__ = (
        "_combine",
        "_decode",
        "_is_dense",
        "_late",
        "_lse_shape",
        "_needs_lse",
        "_out_shape",
        "_split_size",
        "_takes_out",
        "_takes_q",
    )

    def __init__(self, tensors: AttentionTensors, options: AttentionOptions, tiles: DecodeTiles | None) -> None:
        self._is_dense = tensors.block_table is None
        q = _rows_of(tensors.q)
        k, v = (with_unit_stride(x) for x in (tensors.k, tensors.v))
        total_q, num_heads, dim = q.shape
        dim_v = v.shape[3]
        batch = v.shape[0] if tensors.block_table is None else tensors.block_table.shape[0]
        self._takes_q = q.data_ptr() == tensors.q.data_ptr() and (tensors.q.dim() == 3 or tensors.q.shape[1] == 1)
        self._out_shape = (*tensors.q.shape[:-1], dim_v)
        out = tensors.out
        self._takes_out = out is not None and (out.is_contiguous() if self._is_dense else out.stride(2) == 1)
        self._needs_lse = options.return_lse
        self._lse_shape = (num_heads, total_q)
        self._late: tuple[int, ...] | None = None
        self._decode: Launch | None = None
        self._combine: Launch | None = None
        self._split_size = 0
        if batch == 0:
            return
        max_seqlen_q = max(options.max_seqlen_q, 1)
        arch = spec.arch_of(q.device)
        if tiles is None:
            tiles = decode_tiles(
                arch,
                multiprocessors(q.device, 8),
                q.element_size(),
                k.element_size(),
                dim,
                dim_v,
                num_heads,
                k.shape[2],
                batch,
                max_seqlen_q,
                options.max_seqlen_k,
                options.num_splits,
            )
        assert tiles.block_n <= MAX_KEYS_PER_TILE
        groups = num_heads // k.shape[2]
        counts = SplitCounts(
            batch=batch,
            heads=k.shape[2],
            rows=groups * max_seqlen_q,
            block_m=tiles.block_m,
            splits=tiles.splits,
            min_blocks=tiles.min_blocks,
            max_q=max_seqlen_q,
            left=options.left,
        )
        variant = _variant(tensors, options, tiles, arch, groups, batch, k, v)
        out_strides = out.stride()[-3:-1] if out is not None and self._takes_out else (num_heads * dim_v, dim_v)
        lse_stride = tensors.lse.stride(0) if tensors.lse is not None else total_q if self._needs_lse else 0
        mask = tensors.mask
        limit = {"maxnreg": tiles.registers} if tiles.registers and arch >= 80 else {}
        passes = MMA_SYNC if tiles.mma_sync and arch == 90 and WGMMA_OF_8_COLUMNS else {}
        programs = tiles.splits if tiles.balanced else batch * tiles.splits
        self._decode = Launch(
            attn_decode,
            programs * counts.units,
            varying=(
                *counts.numbers,
                options.window_size[1],
                total_q,
                lse_stride,
                0 if tensors.block_table is None else tensors.block_table.stride(0),
                0 if mask is None or mask.shape[3] == 1 else mask.stride(3),
                *decode_option_numbers(options),
            ),
            strides=(*out_strides, *q.stride()[:2]),
            fixed=(variant,),
            options={**launch_options(variant.split.pdl, tiles.num_warps), "num_stages": tiles.num_stages, **limit, **passes},
            # one sequence gains nothing by it, and a step of 0.6B took 0.761 ms instead of 0.758
            prefers_shared_memory=batch > 1,
        )
        if not self._is_dense:
            self._late = _late_numbers(k, v, None, options.max_seqlen_k)
        if tiles.balanced or tiles.splits > 1:
            self._split_size = counts.buffer_size(variant.split)
            self._combine = combine_launch(counts, variant.split, lse_stride, out_strides)

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q = tensors.q
        k = tensors.k
        v = tensors.v
        mask = tensors.mask
        lengths = (tensors.keys, tensors.cu_seqlens_q)
        out = tensors.out
        lse = tensors.lse
        if not self._takes_q:
            q = _rows_of(q)
        result = out if self._takes_out and out is not None else q.new_empty(self._out_shape)
        if self._needs_lse and lse is None:
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        if self._decode is not None:
            late = self._late
            if late is None:
                k = with_unit_stride(k)
                v = with_unit_stride(v)
                late = _late_numbers(k, v, mask, k.shape[1])
            splits = None if self._combine is None else q.new_empty(self._split_size, dtype=torch.float32)
            if mask is not None:
                mask = mask.view(torch.uint8)
            pointers = (q, k, v, result, lse, splits, tensors.block_table, *lengths, tensors.sinks, mask)
            self._decode((*pointers, tensors.k_descale, tensors.v_descale, tensors.alibi_slopes), *late)
            if self._combine is not None:
                self._combine((result, lse, splits, *lengths), late[0])
        else:
            without_keys(result, lse, None, None)
        if lse is not None and self._is_dense:
            lse = lse.view(lse.shape[0], *result.shape[:2]).transpose(0, 1)
        if out is not None and result is not out:
            result = out.copy_(result)
        return result, lse


def _rows_of(q: Tensor) -> Tensor:
    """(total_q, heads, dim) with a contiguous last dimension."""
    rows = q if q.dim() == 3 else q.reshape(q.shape[0] * q.shape[1], *q.shape[2:])
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _late_numbers(k: Tensor, v: Tensor, mask: Tensor | None, max_seqlen_k: int) -> tuple[int, ...]:
    """The numbers that a launch takes at each call: the bound of the keys, and the strides that follow from it."""
    mask_stride = 0 if mask is None or mask.shape[0] == 1 else mask.stride(0)
    page_k, token_k, head_k, _ = k.stride()
    page_v, token_v, head_v, _ = v.stride()
    return (max_seqlen_k, mask_stride, page_k, token_k, head_k, page_v, token_v, head_v)


def _variant(
    tensors: AttentionTensors,
    options: AttentionOptions,
    tiles: DecodeTiles,
    arch: int,
    groups: int,
    batch: int,
    k: Tensor,
    v: Tensor,
) -> DecodeVariant:
    """What the kernel is compiled for."""
    dim = k.shape[3]
    dim_v = v.shape[3]
    dtype = tensors.q.dtype
    k_strides = k.stride()[:3]
    v_strides = v.stride()[:3]
    float8 = k.element_size() == 1
    even = dim_v % 2 == 0 and all(s % 2 == 0 for s in v_strides)
    return DecodeVariant(
        split=SplitVariant(
            groups=groups,
            dim_v=dim_v,
            block_dv=padded_dim(dim_v),
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            batch_block=batch_block(batch) if tiles.balanced else 1,
            balanced=tiles.balanced,
            has_left=options.left >= 0,
            pdl=spec.has_programmatic_launch(arch),
            chunked=options.attention_chunk > 0,
        ),
        dim=dim,
        block_d=padded_dim(dim),
        page_size=0 if tensors.block_table is None else k.shape[1],
        same_strides=k_strides == v_strides,
        aligned=all(stride % 16 == 0 for stride in (*k_strides[:2], *v_strides[:2])),
        wide=has_wide_rows(k, v, paged=tensors.block_table is not None),
        precision="ieee" if dtype == torch.float32 else "tf32",
        # pairs of columns need an even number of columns at even addresses
        pairs=arch >= 89 and float8 and even and dtype.itemsize == 2 and not tiles.by_rows,
        by_rows=tiles.by_rows,
        ptx=arch >= 89,
        alibi=tensors.alibi_form,
        **DecodeVariant.switches_of(options),
    )
