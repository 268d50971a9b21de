"""The FlashAttention-2 forward pass in portable Triton: dense, varlen and paged, in one kernel.

One program computes `block_m` query rows of one head of one sequence and walks over the keys in tiles of `block_n`. The rows of
Q are divided among the warps, which share K and V (FlashAttention-2, Dao 2023, sections 3.2 and 3.3). The N x N scores never
leave the registers, and the output stays unscaled until the last tile (section 3.1). Keys that lie completely outside of the
causal or window band are never visited, and only tiles that cross the edge of the band are masked, in a uniform branch of the
one loop.

The layouts differ only in where row r of sequence b lies: dense and varlen add an offset, paged looks the page up. Lengths are
runtime values that the kernel reads on the device. This module leaves out dividing one sequence's keys among programs
(`decode`) and the backward pass. `kernel` holds the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_serve import spec
from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.calls import AttentionOptions, AttentionTensors, mask_form
from fa_serve.backends.layout import TensorLayout
from fa_serve.backends.triton.float8_inputs import Form, InputQuantizer
from fa_serve.backends.triton.key_pages import has_wide_mask, has_wide_rows
from fa_serve.backends.triton.prefill.kernel import ForwardVariant, attn_fwd, forward_option_numbers
from fa_serve.backends.triton.tiles import TileConfig, batch_block, float8_tiles, forward_tiles, padded_dim
from fa_serve.backends.unseen_rows import without_keys
from fa_serve.launching.launch import DescriptorLaunch, Launch, broadcast_strides, row_strides, with_unit_stride
from fa_serve.launching.plans import Run

_L2_BYTES = 32 << 20  # how much of the L2 cache the keys and values of concurrent programs may fill


def plan_forward(tensors: AttentionTensors, options: AttentionOptions, tiles: TileConfig | None = None) -> Run:
    """Plan calls that look like this one, for AttentionTensors of any layout (see `fa_serve.api`). A run is one launch.

    With options.skip_q > 0, sequences of up to skip_q queries and the rows after the last sequence are left to another kernel:
    their rows of out and lse stay as they are, and the grid holds only the tiles of the other sequences, which a prefix sum on
    the device finds. `tiles` overrides the choice, for tuning. Caches are not quantised here and keys are not split.
    """
    return _ForwardPlan(tensors, options, tiles)


class _ForwardPlan:
    """The launch of one kind of call, and the shapes of what a run allocates."""

    __slots__ = (
        "_block_d",
        "_block_dv",
        "_launch",
        "_layout",
        "_lse_shape",
        "_needs_lse",
        "_options",
        "_out_shape",
        "_quantizer",
        "_tiles",
        "_uses_tma",
    )

    def __init__(self, tensors: AttentionTensors, options: AttentionOptions, tiles: TileConfig | None) -> None:
        q, k, v = (with_unit_stride(x) for x in (tensors.q, tensors.k, tensors.v))
        paged = tensors.block_table is not None
        if tiles is None and options.precision != "bf16":
            tiles = float8_tiles(spec.arch_of(q.device), q.shape[-1], float8_values=options.precision == "fp8")
        elif tiles is None:
            tiles = forward_tiles(
                spec.arch_of(q.device),
                q.element_size(),
                q.shape[-1],
                v.shape[-1],
                options.max_seqlen_q,
                options.max_seqlen_k,
                causal=options.window_size[1] >= 0,
                paged=paged,
                masked=tensors.mask is not None,
            )
        assert not paged or tiles.block_n <= MAX_KEYS_PER_TILE
        self._options = options
        self._tiles = tiles
        self._layout = "paged" if paged else "dense" if tensors.cu_seqlens_q is None else "varlen"
        self._block_d = padded_dim(q.shape[-1])
        # For head_dim 24 and head_dim_v 12 in 16 bits, tiles of K are 32 wide and tiles of V would be 16 wide. The kernel that
        # Triton 3.6 compiles for them computed wrong rows and read invalid addresses on an H200. With tiles of V that are also
        # 32 wide, it is right.
        self._block_dv = max(padded_dim(v.shape[-1]), min(32, self._block_d))
        self._out_shape = (*q.shape[:-1], v.shape[-1])
        self._needs_lse = options.return_lse
        self._lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
        # An empty tensor cannot have a descriptor. The kernel that takes pointers reads nothing of it.
        has_keys = k.numel() > 0 and v.numel() > 0
        self._uses_tma = tiles.tma and not paged and has_keys and _tma_strides(k) and _tma_strides(v)
        out = tensors.out if tensors.out is not None and tensors.out.stride(-1) == 1 else None
        tensors = tensors._replace(q=q, k=k, v=v, out=out)
        self._quantizer = None if options.precision == "bf16" else self._make_quantizer(tensors, options)
        self._launch = self._make_launch(tensors, options)

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q, k, v = (with_unit_stride(x) for x in (tensors.q, tensors.k, tensors.v))
        if self._uses_tma and (k.data_ptr() | v.data_ptr()) & 15:
            return _ForwardPlan(tensors, self._options, replace(self._tiles, tma=False))(tensors)
        out = tensors.out
        result = out if out is not None and out.stride(-1) == 1 else q.new_empty(self._out_shape)
        lse = tensors.lse
        if self._needs_lse and lse is None:
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        if self._launch is not None:
            mask = tensors.mask
            if mask is not None and mask.dtype == torch.bool:
                mask = mask.view(torch.uint8)
            cu_seqlens_k = tensors.keys if self._layout == "varlen" else None
            seqused_k = tensors.keys if self._layout == "paged" else None
            descriptors: tuple[Any, ...] = (None, None)
            if self._uses_tma:
                descriptors = (
                    _descriptor(k, self._tiles.block_n, self._block_d),
                    _descriptor(v, self._tiles.block_n, self._block_dv),
                )
            block_table = tensors.block_table
            scales: tuple[Tensor | None, ...] = (None, None, None)
            operands: Sequence[Tensor | None] = (q, k, v)
            if self._quantizer is not None:
                *operands, q_scale, k_scale, v_scale = self._quantizer(tensors._replace(q=q, k=k, v=v))
                scales = (q_scale, k_scale, v_scale)
                block_table = None
            pointers = (*operands, result, lse, tensors.sinks, mask, tensors.alibi_slopes, *descriptors)
            self._launch((*pointers, tensors.cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, *scales))
        elif not self._options.skip_q:
            without_keys(result, lse, None, None)
        if out is not None and result is not out:
            result = out.copy_(result)
        return result, lse

    def _make_quantizer(self, tensors: AttentionTensors, options: AttentionOptions) -> InputQuantizer:
        given = [TensorLayout(x.shape, x.stride(), x.dtype) for x in (tensors.q, tensors.k, tensors.v)]
        form: Form = "packed" if self._layout == "varlen" else "paged" if self._layout == "paged" else "dense"
        sequences = tensors.q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        table_stride = 0 if tensors.block_table is None else tensors.block_table.stride(0)
        return InputQuantizer(given, form, sequences, options, table_stride)

    def _make_launch(self, tensors: AttentionTensors, options: AttentionOptions) -> Any:
        """The launch for these tensors; None if no sequence has a query."""
        q = tensors.q
        k = tensors.k
        dense = self._layout == "dense"
        batch = q.shape[0] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.shape[0] - 1
        num_heads = q.shape[-2]
        num_m = -(-options.max_seqlen_q // self._tiles.block_m)
        num_tiles = batch * num_m
        if options.skip_q:
            # An upper bound: one partial tile for each sequence with more than skip_q queries, and all full tiles.
            num_tiles = min(batch, q.shape[0] // (options.skip_q + 1)) + q.shape[0] // self._tiles.block_m
        if num_tiles * num_heads == 0:
            return None
        groups = num_heads // k.shape[-2]
        itemsize = k.element_size() if self._quantizer is None else 1
        head_bytes = options.max_seqlen_k * (q.shape[-1] + self._out_shape[-1]) * itemsize
        varying = (
            *forward_option_numbers(options),
            options.max_seqlen_q if dense else q.shape[0],
            options.max_seqlen_k,
            num_m,
            _head_group(batch * num_heads, groups, head_bytes),
            batch,
            options.skip_q,
        )
        launch_options = {"num_warps": self._tiles.num_warps, "num_stages": self._tiles.num_stages}
        variant = self._variant(tensors, options, groups, batch)
        strides = self._strides(tensors, dense)
        grid = num_tiles * num_heads
        if self._uses_tma:
            return DescriptorLaunch(attn_fwd, grid, (*varying, *strides, variant), launch_options)
        return Launch(attn_fwd, grid, varying=varying, strides=strides, fixed=(variant,), options=launch_options)

    def _variant(self, tensors: AttentionTensors, options: AttentionOptions, groups: int, batch: int) -> ForwardVariant:
        return ForwardVariant(
            num_heads=tensors.q.shape[-2],
            groups=groups,
            dim=tensors.q.shape[-1],
            dim_v=tensors.v.shape[-1],
            block_d=self._block_d,
            block_dv=self._block_dv,
            block_m=self._tiles.block_m,
            block_n=self._tiles.block_n,
            page_size=tensors.k.shape[1] if self._layout == "paged" and self._quantizer is None else 0,
            tma=self._uses_tma,
            varlen=self._layout != "dense",
            mask=mask_form(tensors.mask),
            precision="ieee" if tensors.q.dtype == torch.float32 else "tf32",
            ptx=spec.arch_of(tensors.q.device) >= 80,
            batch_block=batch_block(batch) if options.skip_q else 0,
            alibi=tensors.alibi_form,
            masks_all=self._tiles.masks_all,
            wide=self._has_wide_rows(tensors),
            **ForwardVariant.switches_of(options),
        )

    def _has_wide_rows(self, tensors: AttentionTensors) -> bool:
        rows = max(self._tiles.block_m, self._tiles.block_n)
        queries = (tensors.q,) if tensors.out is None else (tensors.q, tensors.out)
        paged = self._layout == "paged"
        if has_wide_mask(tensors.mask) or has_wide_rows(*queries, paged=False, rows=rows):
            return True
        return has_wide_rows(tensors.k, tensors.v, paged=paged, rows=rows)

    def _strides(self, tensors: AttentionTensors, dense: bool) -> tuple[int, ...]:
        """In the order of the kernel's parameters. A packed tensor has no stride between sequences."""
        operands = [row_strides(x) for x in (tensors.q, tensors.k, tensors.v)]
        if self._quantizer is not None:
            operands = [x.strides[:3] if len(x.shape) == 4 else (0, *x.strides[:2]) for x in self._quantizer.layouts]
        out_strides = row_strides(tensors.out) if tensors.out is not None else _contiguous_strides(self._out_shape)
        lse_strides = (0, 0)
        if self._needs_lse:
            lse_head_stride = tensors.lse.stride(-2) if tensors.lse is not None else self._lse_shape[-1]
            lse_strides = (self._lse_shape[1] * self._lse_shape[2] if dense else 0, lse_head_stride)
        table_stride = 0 if tensors.block_table is None else tensors.block_table.stride(0)
        return (
            *operands[0],
            *operands[1],
            *operands[2],
            *out_strides,
            *lse_strides,
            *broadcast_strides(tensors.mask),
            table_stride,
        )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """`row_strides` of a contiguous tensor."""
    head = shape[-1]
    token = shape[-2] * head
    return (shape[1] * token if len(shape) == 4 else 0, token, head)


def _head_group(batch_heads: int, groups: int, head_bytes: int) -> int:
    """How many (batch, head) pairs run side by side, so that their K and V stay in L2 while the row blocks pass over them."""
    group = max(1, min(batch_heads, _L2_BYTES * groups // max(1, head_bytes)))
    while batch_heads % group:
        group -= 1
    return group


def _tma_strides(x: Tensor) -> bool:
    """Whether TMA can read a tensor with these strides: they must be multiples of 16 bytes. The address must be, too."""
    return all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _descriptor(x: Tensor, block_n: int, block_d: int) -> TensorDescriptor:
    """(batch, heads, seqlen, dim). Rows past the end of a sequence and columns past head_dim are filled with zeros."""
    x = (x if x.dim() == 4 else x[None]).transpose(1, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block_n, block_d])
