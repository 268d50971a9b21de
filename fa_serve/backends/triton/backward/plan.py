"""The FlashAttention-2 backward pass in portable Triton: dense and packed.

    delta = rowsum(dO * O) - dlse
    P = exp(S - lse)                dV = P^T dO
    dP = dO V^T                     dS = P * (dP - delta)
    dQ = softmax_scale * dS K       dK = softmax_scale * dS^T Q

The scores are computed again from q, k and lse (FlashAttention-2, Dao 2023, section 3.1.2), so memory stays linear in the
sequence length. One program of `attn_bwd_kv` owns `block_n` keys of one KV head and walks over the queries that see them, for
all query heads of the group, so dK and dV are summed in registers. dQ is computed differently from FlashAttention-2, which adds
each tile's part of dQ atomically: `attn_bwd_q` has a program for each block of queries. It computes S and dP a second time,
needs no float32 copy of dQ, and is as fast or faster (see `backward_tiles`). Equal calls have equal gradients in every bit.
Only tiles that cross the edge of the band are masked. With a mask whose gradient is not wanted, the walk goes from the first to
the last block that is not empty (see `mask_blocks`), and reads all elements between them.

A sink takes part in lse only, so its gradient is -rowsum(exp(sink - lse) * delta). A mask that is added to the scores has the
gradient dS, summed over the dimensions that it broadcasts. Only this sum is atomic, unless `options.deterministic` is set. A
row that sees no key has lse -inf and gets no gradients. A row whose lse is below -1e30, because a mask hides all of its keys
with a large negative number, counts as such a row. `kernels` holds the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_serve import spec
from fa_serve.backends.calls import AttentionOptions, BackwardTensors, Gradients, mask_form
from fa_serve.backends.mask_blocks import MIN_SCANNED_LENGTH, SCANNED_BLOCK
from fa_serve.backends.triton.backward.kernels import BackwardVariant, attn_bwd_kv, attn_bwd_q
from fa_serve.backends.triton.key_pages import has_wide_mask
from fa_serve.backends.triton.mask_blocks import MaskScan, scan_once
from fa_serve.backends.triton.row_statistics import RowStatistics, head_strides
from fa_serve.backends.triton.tiles import BackwardTiles, TileConfig, backward_tiles, padded_dim
from fa_serve.launching.launch import DescriptorLaunch, Launch, broadcast_strides, row_strides, with_unit_stride
from fa_serve.launching.plans import Run


def plan_backward(tensors: BackwardTensors, options: AttentionOptions, tiles: BackwardTiles | None = None) -> Run:
    """Plan calls that look like this one, dense or packed: a run maps `BackwardTensors` to `Gradients`.

    Equal calls have gradients that are equal in every bit. For the gradient of a mask, this takes memory for all scores, and
    holds only with options.deterministic. `tiles` overrides the choice, for tuning.
    """
    return _BackwardPlan(tensors, options, tiles)


class _BackwardPlan:
    """The launches of one kind of call."""

    __slots__ = (
        "_expand_mask",
        "_kv",
        "_options",
        "_q",
        "_scan",
        "_statistics",
        "_tiles",
        "_tma_keys",
        "_tma_queries",
    )

    def __init__(self, tensors: BackwardTensors, options: AttentionOptions, tiles: BackwardTiles | None) -> None:
        tensors = _laid_out(tensors)
        q = tensors.q
        k = tensors.k
        v = tensors.v
        mask = tensors.mask
        varlen = tensors.cu_seqlens_q is not None
        arch = spec.arch_of(q.device)
        if tiles is None:
            tiles = backward_tiles(arch, q.element_size(), q.shape[-1], v.shape[-1])
        self._options = options
        self._tiles = tiles
        self._tma_keys = tiles.keys.tma and not varlen and _tma_strides(q) and _tma_strides(tensors.dout)
        self._tma_queries = tiles.queries.tma and not varlen and _tma_strides(k) and _tma_strides(v)
        self._expand_mask = options.deterministic
        variant = BackwardVariant(
            num_heads=q.shape[-2],
            groups=q.shape[-2] // k.shape[-2],
            dim=q.shape[-1],
            dim_v=v.shape[-1],
            block_d=padded_dim(q.shape[-1]),
            block_dv=padded_dim(v.shape[-1]),
            block_m=tiles.keys.block_m,
            block_n=tiles.keys.block_n,
            varlen=varlen,
            has_left=options.window_size[0] >= 0,
            has_right=options.window_size[1] >= 0,
            has_softcap=options.softcap != 0.0,
            mask=mask_form(mask),
            mask_block=SCANNED_BLOCK,
            mask_grad=tensors.needs_dmask,
            wide_mask=has_wide_mask(mask),
            tma=self._tma_keys,
            precision="ieee" if q.dtype == torch.float32 else "tf32",
            ptx=arch >= 80,
        )
        batch = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        self._statistics = RowStatistics(tensors, options)
        self._scan = None
        # A mask whose gradient is wanted is a bias, which seldom has empty blocks. The kernel for it would spill the bounds.
        shortest = min(options.max_seqlen_q, options.max_seqlen_k)
        if mask is not None and not tensors.needs_dmask and shortest >= MIN_SCANNED_LENGTH:
            self._scan = MaskScan(mask, options.max_seqlen_q, options.max_seqlen_k)
        self._kv = None
        self._q = None
        if q.numel() and k.numel():
            self._kv = self._plan_kv(tensors, options, variant, tiles.keys, batch)
            self._q = self._plan_q(tensors, options, variant, tiles.queries, batch)

    def __call__(self, tensors: BackwardTensors) -> Gradients:
        tensors = _laid_out(tensors)
        q = tensors.q
        k = tensors.k
        v = tensors.v
        mask = tensors.mask
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | tensors.dout.data_ptr()
        if addresses & 15 and (self._tma_keys or self._tma_queries):
            tiles = BackwardTiles(replace(self._tiles.keys, tma=False), replace(self._tiles.queries, tma=False))
            return _BackwardPlan(tensors, self._options, tiles)(tensors)
        # No program writes the gradients of packed rows that belong to no sequence, and without queries or without keys there
        # is no program at all. These gradients are zero.
        written = tensors.cu_seqlens_q is None and self._kv is not None and self._q is not None
        allocate = torch.empty_like if written else torch.zeros_like
        dq, dk, dv = (allocate(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dmask = self._allocate_dmask(tensors)
        lse2, delta, dsinks = self._statistics(tensors)
        spans = None if mask is None or self._scan is None else scan_once(mask, self._scan).spans
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        ends = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        given = (q, k, v, tensors.dout, lse2, delta, mask)
        if self._kv is not None:
            read: tuple[Any, ...] = (None,) * 4
            if self._tma_keys:
                rows = self._tiles.keys.block_m
                statistics = [TensorDescriptor.from_tensor(x.flatten(0, 1), [1, rows]) for x in (lse2, delta)]
                read = (_descriptor(q, rows), _descriptor(tensors.dout, rows), *statistics)
            self._kv((*given, None if spans is None else spans.queries, dk, dv, dmask, *read, *ends))
        if self._q is not None:
            rows = self._tiles.queries.block_n
            read = (_descriptor(k, rows), _descriptor(v, rows)) if self._tma_queries else (None, None)
            self._q((*given, None if spans is None else spans.keys, dq, *read, *ends))
        return Gradients(
            dq,
            dk,
            dv,
            dsinks,
            None if dmask is None or mask is None else dmask.sum_to_size(mask.shape).to(mask.dtype),
        )

    def _allocate_dmask(self, tensors: BackwardTensors) -> Tensor | None:
        """Zeros that the kernel adds to. A deterministic sum needs one element for each addition."""
        mask = tensors.mask
        if mask is None or not tensors.needs_dmask:
            return None
        shape = mask.shape
        if self._expand_mask:
            q = tensors.q
            shape = torch.Size((q.shape[0], q.shape[2], q.shape[1], tensors.k.shape[1]))
        return torch.zeros(shape, dtype=torch.float32, device=mask.device)

    def _span_strides(self, seqlen: int) -> tuple[int, int]:
        """Distances between the spans of sequences and of heads, in elements. seqlen: number of queries or keys with spans"""
        if self._scan is None:
            return 0, 0
        batch, heads, _ = self._scan.rows
        head = 2 * -(-seqlen // SCANNED_BLOCK)
        return 0 if batch == 1 else heads * head, 0 if heads == 1 else head

    def _plan_kv(
        self, tensors: BackwardTensors, options: AttentionOptions, variant: BackwardVariant, tile: TileConfig, batch: int
    ) -> Launch | DescriptorLaunch | None:
        num_n = -(-options.max_seqlen_k // tile.block_n)
        grid = batch * variant.num_heads // variant.groups * num_n
        if grid == 0:
            return None
        dmask_strides: tuple[int, ...] = (0, 0, 0, 0)
        if tensors.mask is not None and variant.mask_grad:
            shape = torch.Size((tensors.q.shape[0], tensors.q.shape[2], tensors.q.shape[1], tensors.k.shape[1]))
            dmask_strides = _contiguous_strides(shape if self._expand_mask else tensors.mask.shape)
        varying = (*_varying(options, num_n), *self._span_strides(options.max_seqlen_k))
        strides = (*_strides(tensors, self._statistics.shape), *dmask_strides)
        if self._tma_keys:
            return DescriptorLaunch(attn_bwd_kv, grid, (*varying, *strides, variant), _launch_options(tile))
        return Launch(attn_bwd_kv, grid, varying, (variant,), _launch_options(tile), strides=strides)

    def _plan_q(
        self, tensors: BackwardTensors, options: AttentionOptions, variant: BackwardVariant, tile: TileConfig, batch: int
    ) -> Launch | DescriptorLaunch | None:
        num_m = -(-options.max_seqlen_q // tile.block_m)
        grid = batch * variant.num_heads * num_m
        if grid == 0:
            return None
        variant = replace(variant, block_m=tile.block_m, block_n=tile.block_n, mask_grad=False, tma=self._tma_queries)
        varying = (*_varying(options, num_m), *self._span_strides(options.max_seqlen_q))
        strides = _strides(tensors, self._statistics.shape)
        if self._tma_queries:
            return DescriptorLaunch(attn_bwd_q, grid, (*varying, *strides, variant), _launch_options(tile))
        return Launch(attn_bwd_q, grid, varying, (variant,), _launch_options(tile), strides=strides)


def _laid_out(tensors: BackwardTensors) -> BackwardTensors:
    """The same numbers in layouts that the kernels read: unit strides along head_dim, and contiguous row statistics."""
    return tensors._replace(
        q=with_unit_stride(tensors.q),
        k=with_unit_stride(tensors.k),
        v=with_unit_stride(tensors.v),
        out=with_unit_stride(tensors.out),
        dout=with_unit_stride(tensors.dout),
        lse=tensors.lse.contiguous(),
        dlse=None if tensors.dlse is None else tensors.dlse.contiguous(),
    )


def _tma_strides(x: Tensor) -> bool:
    """Whether TMA can read a tensor with these strides: positive multiples of 16 bytes. The address must be a multiple, too."""
    return all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """(batch, heads, seqlen, dim), in tiles of whole rows. Rows and columns out of bounds read as zero."""
    x = x.transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, padded_dim(x.shape[-1])])


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor, 0 where a dimension is broadcast."""
    strides = [0, 0, 0, 0]
    step = 1
    for i in (3, 2, 1, 0):
        strides[i] = 0 if shape[i] == 1 else step
        step *= shape[i]
    return tuple(strides)


def _varying(options: AttentionOptions, blocks: int) -> tuple[float, ...]:
    lengths = (options.max_seqlen_q, options.max_seqlen_k)
    return (float(options.softmax_scale), float(options.softcap), *options.window_size, *lengths, blocks)


def _strides(tensors: BackwardTensors, stats_shape: Sequence[int]) -> tuple[int, ...]:
    """In the order of the kernels' parameters."""
    rows = (tensors.q, tensors.k, tensors.v, tensors.dout)
    return (*[n for x in rows for n in row_strides(x)], *head_strides(stats_shape), *broadcast_strides(tensors.mask))


def _launch_options(tile: TileConfig) -> dict[str, Any]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
