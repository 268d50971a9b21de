"""Attention over pages whose values are the first numbers of their keys: latent attention (MLA) with absorbed products.

In DeepSeek's models a key has 512 + 64 numbers. The first 512 are its value, and all query heads share one KV head. So the 16
to 128 query heads are rows of the same products, and a key that a program has loaded serves both products. The head size is no
power of two, so the two parts of keys and queries have separate tiles: S = Q_c C^T + Q_r R^T and O = P C. Queries are the rows
of all tiles, because 64 rows fill a wgmma, and both products then read C from shared memory.

C is loaded in slices of columns. A thread then holds numbers of fewer keys, and computes fewer addresses: with 16 heads, 8
slices of 64 columns take 389 instructions for a block of 64 keys, and one slice of 512 columns takes 724.

One kernel serves all calls. Its programs are of one of two kinds:

- Decoding, with up to 16 queries per sequence: keys are cut into splits as in `decode`, and `splits._combine` combines them.
- Prompts with a cached beginning: there is a program for each tile of rows, which a prefix sum on the device finds.

A float8 cache is widened to the dtype of the queries. `decode` widens it to float16 and divides bfloat16 queries by powers of
two, which needs fewer instructions; here it would spill registers in the inner loop. Left out: windows, softcap and sinks
(`unsupported`), and keys whose values lie elsewhere (`decode`, `prefill`). `kernel` holds the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fa_serve import spec as facts
from fa_serve.backends import MAX_KEYS_PER_TILE
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.triton.key_pages import has_wide_rows
from fa_serve.backends.triton.latent.kernel import LatentVariant, attn_latent
from fa_serve.backends.triton.splits import SplitCounts, SplitVariant, combine_launch
from fa_serve.backends.triton.tiles import DecodeTiles, batch_block, padded_dim
from fa_serve.backends.unseen_rows import without_keys
from fa_serve.launching.launch import Launch, View, launch_options, multiprocessors, with_unit_stride
from fa_serve.launching.plans import Run
from fa_serve.spec import OPTIONS, AttentionSpec


@dataclass(frozen=True, slots=True)
class LatentTiles(DecodeTiles):
    """Tiles of the kernel: the fields of decoding's tiles, and two more. Queries are always the rows.

    width:     columns of values in a slice; each slice is loaded and multiplied separately
    prefetch:  the next block of keys is fetched to the L2 cache while a block is computed, only for keys of 16 bits
    """

    width: int = 512
    prefetch: bool = False


def unsupported(spec: AttentionSpec) -> str | None:
    """Why this kernel does not serve a call, or None."""
    if not spec.values_in_keys:
        return "reads only caches whose values are the first numbers of their keys"
    found = spec.options
    if spec.window_size[0] >= 0:
        found.append("a window")
    if found:
        return f"reads values in keys only without {', '.join(OPTIONS)} or windows, got {', '.join(found)}"
    rest = spec.head_dim - spec.head_dim_v
    if spec.head_dim_v > 512 or rest > 128:
        return f"supports values of up to 512 numbers in keys with up to 128 more, got {spec.head_dim_v} and {rest}"
    return None


@lru_cache(maxsize=4096)
def latent_tiles(
    arch: int,
    num_sms: int,
    itemsize: int,
    head_dim_v: int,
    groups: int,
    num_kv_heads: int,
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_splits: int,
    *,
    float8: bool = False,
) -> LatentTiles:
    """The tile of one call of latent attention, with arguments as in `decode_tiles`. Queries are the rows of every tile.

    Each tile has the most rows, then the most keys, with which the compiled inner loop spills no registers and fits into shared
    memory. The accumulator spills with 64 rows on sm100 and with 128 on sm90. With 128 heads, the second 64 heads read the keys
    from the L2 cache. With 64 rows, shared memory holds two blocks of 64 keys, and Triton copies a block only when the previous
    block has been multiplied. Meanwhile a prefetch brings the block to the L2 cache, so that the copy takes less time.

    Measured on one H200 in bfloat16: us for 64 x 8192 keys, for 1 x 131072 keys, and for 16 x 1024 keys (of 16 heads) or
    128 x 1024 keys (of 128 heads). At the read bandwidth of 4.36 TB/s, these take at least 139, 35, and 4 or 35 us; in float8,
    half of that.
    16 heads: 64 keys, 3 stages, 8 slices 162, 55, 16; 4 slices 184, 60, 17; 1 slice 188, 62, 18
              1 slice of 32 keys, 5 stages 254, 82, 20; 2 stages 355, 120, 21
              in float8: 64 keys, 4 stages, 1 slice 371, 108, 22; 32 keys 462, 135, 25
    128 heads: 64 keys, 2 stages, 2 slices with prefetches 541, 148, 166; 4 slices 550, 148, 163; 1 slice 589, 131, 168
               without prefetches, 1 slice 596, 160, 183; 2 slices 606, 161, 183; 8 slices 602, 165, 180
               1 slice of 32 keys, 3 stages 600, 159, 192; 2 stages 752, 193, 234
               in float8: 32 keys, 4 stages, 1 slice 803, 206, 243; 2 stages 930, 238, 277
    Tiles of other GPUs, and float8 in slices, are not measured.

    float8: the cache is float8_e4m3fn. Without wgmma, 32 keys are then converted one by one and spill
    """
    rows = groups if num_splits else groups * max_seqlen_q
    most = 16 if itemsize == 4 or arch == 0 else 64 if arch == 90 else 32
    block_m = min(most, max(16, 1 << (rows - 1).bit_length()))
    small = arch not in (80, 90, 100, 103) and padded_dim(head_dim_v) > 256  # at most 99 KiB of shared memory
    block_n = 16 if itemsize == 4 or small or (float8 and arch != 90) else 32
    in_registers = itemsize == 4 and arch == 0
    num_stages = 1 if itemsize == 4 or arch == 0 else 2
    plain = itemsize == 2 and not float8
    prefetch = arch == 90 and block_m == 64 and plain
    if arch == 90 and itemsize == 2:
        block_n = 32 if block_m == 64 and float8 else 64
        num_stages = 4 if float8 else 2 if prefetch else 3
    width = 512
    if plain:
        width = 256 if prefetch else 64 if arch else 128  # 64 spill on gfx942
    tiles = LatentTiles(
        block_m,
        block_n,
        num_warps=4 if in_registers else 8,
        num_stages=num_stages,
        splits=num_splits,
        balanced=False,
        width=width,
        prefetch=prefetch,
    )
    if num_splits:
        return tiles
    units = num_kv_heads * triton.cdiv(groups * max_seqlen_q, block_m)
    max_blocks = triton.cdiv(max_seqlen_k, block_n)
    if max_blocks <= 1:
        return tiles.without_splits()
    wave = max(1, num_sms // units)  # one program of this size fits on an SM
    if batch == 1:
        return replace(tiles, splits=min(wave, max_blocks))
    return replace(tiles, splits=wave, balanced=True, min_blocks=2)


def plan_latent(
    tensors: AttentionTensors, options: AttentionOptions, *, decodes: bool, tiles: LatentTiles | None = None
) -> Run:
    """Plan paged calls that look like this one, whose v_cache is a part of their k_cache.

    decodes: whether keys are cut into splits. If so, sequences with more than `options.max_seqlen_q` queries are left alone;
             otherwise, sequences with up to `options.skip_q` queries. Their rows of out and lse stay as they are, and so do
             the rows after the last sequence if `options.skip_q` is not 0
    tiles:   overrides the choice, for tuning
    """
    assert tensors.block_table is not None
    q = tensors.q
    k = tensors.k
    arch = facts.arch_of(q.device)
    batch = tensors.block_table.shape[0]
    if tiles is None:
        tiles = latent_tiles(
            arch,
            multiprocessors(q.device, 8),
            q.element_size(),
            tensors.v.shape[3],
            q.shape[1] // k.shape[2],
            k.shape[2],
            batch,
            max(options.max_seqlen_q, 1),
            options.max_seqlen_k,
            options.num_splits,
            float8=k.element_size() == 1,
        )
    if not decodes:
        tiles = tiles.without_splits()
    variant = _variant(tensors, options, tiles, arch, 0 if decodes else batch_block(batch))
    launch = {**launch_options(variant.split.pdl, tiles.num_warps), "num_stages": tiles.num_stages}
    return LatentPlan(tensors, options, tiles, LatentKernel(attn_latent, variant, launch), decodes=decodes)


class LatentKernel(NamedTuple):
    """The kernel that computes splits. It has the parameters of `attn_latent`.

    variant: the kernel's last argument, whose `split` is a `SplitVariant`; options: of the kernel's launch
    views:   views of the keys for the copy engine, if the kernel reads keys through it
    """

    kernel: Any
    variant: Any
    options: dict[str, Any]
    views: tuple[View, ...] = ()


class LatentPlan:
    """The launches of one kind of call, and the shapes of what a run allocates, for the portable kernel or the Hopper kernel.

    decodes: as in `plan_latent`
    """

    __slots__ = ("_combine", "_latent", "_lse_shape", "_max_k", "_needs_lse", "_out_shape", "_split_size")

    def __init__(
        self,
        tensors: AttentionTensors,
        options: AttentionOptions,
        tiles: DecodeTiles,
        kernel: LatentKernel,
        *,
        decodes: bool = True,
    ) -> None:
        q = with_unit_stride(tensors.q)
        k = tensors.k
        assert tensors.block_table is not None
        total_q, num_heads, _ = q.shape
        dim_v = tensors.v.shape[3]
        batch = tensors.block_table.shape[0]
        groups = num_heads // k.shape[2]
        self._out_shape = (total_q, num_heads, dim_v)
        self._needs_lse = options.return_lse
        self._lse_shape = (num_heads, total_q)
        self._max_k = options.max_seqlen_k
        self._latent: Launch | None = None
        self._combine: Launch | None = None
        self._split_size = 0
        if batch == 0 or total_q == 0:
            return
        max_q = max(options.max_seqlen_q, 1)
        rows = groups * max_q
        assert tiles.block_n <= MAX_KEYS_PER_TILE
        counts = SplitCounts(
            batch=batch,
            heads=k.shape[2],
            rows=rows if decodes else min(rows, tiles.block_m),  # a prompt's program finds its tile by itself
            block_m=tiles.block_m,
            splits=tiles.splits,
            min_blocks=tiles.min_blocks,
            max_q=max_q,
            left=-1,
        )
        split = kernel.variant.split
        out = tensors.out if _takes(tensors.out) else None
        out_strides = (num_heads * dim_v, dim_v) if out is None else out.stride()[:2]
        lse_stride = tensors.lse.stride(0) if tensors.lse is not None else total_q if self._needs_lse else 0
        programs = tiles.splits if tiles.balanced else batch * tiles.splits
        if not decodes:
            programs = total_q * groups // tiles.block_m + batch  # each sequence may have one tile that is not full
        self._latent = Launch(
            kernel.kernel,
            programs * counts.units,
            varying=(
                *counts.numbers,
                options.window_size[1],
                options.skip_q,
                total_q,
                lse_stride,
                tensors.block_table.stride(0),
                float(options.softmax_scale),
            ),
            strides=(*k.stride()[:3], *out_strides, *q.stride()[:2]),
            fixed=(kernel.variant,),
            options=kernel.options,
            views=kernel.views,
        )
        if tiles.balanced or tiles.splits > 1:
            self._split_size = counts.buffer_size(split)
            self._combine = combine_launch(counts, split, lse_stride, out_strides)

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        q = with_unit_stride(tensors.q)
        result = tensors.out if tensors.out is not None and _takes(tensors.out) else q.new_empty(self._out_shape)
        lse = tensors.lse
        if self._needs_lse and lse is None:
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
        if self._latent is not None:
            splits = None if self._combine is None else q.new_empty(self._split_size, dtype=torch.float32)
            lengths = (tensors.block_table, tensors.keys, tensors.cu_seqlens_q)
            descales = (tensors.k_descale, tensors.v_descale)
            self._latent((tensors.k, q, result, lse, splits, *lengths, *descales), self._max_k)
            if self._combine is not None:
                self._combine((result, lse, splits, *lengths[1:]), self._max_k)
        else:
            without_keys(result, lse, None, None)
        if tensors.out is not None and result is not tensors.out:
            result = tensors.out.copy_(result)
        return result, lse


def _takes(out: Tensor | None) -> bool:
    """Whether the kernel can write to this tensor."""
    return out is not None and out.stride(2) == 1


def _variant(
    tensors: AttentionTensors, options: AttentionOptions, tiles: LatentTiles, arch: int, tile_block: int
) -> LatentVariant:
    """What the kernel is compiled for."""
    k = tensors.k
    assert tensors.block_table is not None
    dim_v = tensors.v.shape[3]
    rest = k.shape[3] - dim_v
    width = min(tiles.width, padded_dim(dim_v))
    return LatentVariant(
        split=SplitVariant(
            groups=tensors.q.shape[1] // k.shape[2],
            dim_v=dim_v,
            block_dv=padded_dim(dim_v),
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            batch_block=batch_block(tensors.block_table.shape[0]) if tiles.balanced else 1,
            balanced=tiles.balanced,
            has_left=False,
            pdl=facts.has_programmatic_launch(arch),
        ),
        rest=rest,
        block_rest=padded_dim(rest),
        width=width,
        slices=triton.cdiv(dim_v, width),
        prefetch=tiles.prefetch,
        page_size=k.shape[1],
        has_right=options.window_size[1] >= 0 and max(options.max_seqlen_q, 1) > 1,
        aligned=all(stride % 16 == 0 for stride in k.stride()[:2]),
        wide=has_wide_rows(k, paged=True),
        precision="ieee" if tensors.q.dtype == torch.float32 else "tf32",
        ptx=arch >= 89,
        converts=arch >= 90,
        tile_block=tile_block,
    )
