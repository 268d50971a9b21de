"""The kernel of token-sparse attention: each query attends to the keys in a list of slots.

The heads of one query that share a KV head are the rows of a tile, so that each key that a program gathers serves up to 64
rows. Latent attention (MLA) has 64 to 128 such heads. Its keys have 512 + 64 numbers, and the first 512 are also the value.
They are loaded once, in slices of columns, and serve both products, as in `fa_serve.backends.triton.latent`.

Few queries do not fill a GPU. Their slots are then divided among several programs, and a second kernel combines the results.
Latent keys of 64 or 128 heads have a kernel for Hopper (`gather_wgmma`). Left out: windows, softcap and float8 caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve import spec
from fa_serve.backends.hopper.latent.tiles import Ring
from fa_serve.backends.triton.primitives import finish_softmax, online_softmax_update, wait_for_previous_kernel
from fa_serve.launching.launch import Launch, launch_options, multiprocessors, power_of_2, with_unit_stride
from fa_serve.launching.plans import PLANS
from fa_serve.ops.products.problem import compiles_gluon

_LOG2E = tl.constexpr(1.4426950408889634)
MAX_SLOT_PARTS = 16
"""The slots of a query are divided into at most this many parts."""


@dataclass(frozen=True, slots=True)
class SelectedTiles:
    """Tiles of the kernel.

    block_m: query heads of a program; block_n: keys that are gathered at once
    width:   columns of a slice of keys and values
    """

    block_m: int
    block_n: int
    width: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class SelectedVariant:
    """What the kernels are compiled for.

    groups:      query heads of a KV head
    dim:         numbers of a key that are loaded in slices: the value if it is a part of the key, else the whole key
    rest:        numbers of a key after its value; 0 if values are not parts of keys; block_rest: the same, padded to a tile
    dim_v:       numbers of a value
    flat:        pages follow each other without a gap, so that a slot is the number of a row
    splits:      a power of two, at least the number of parts of the slots
    precision:   input precision of the products
    """

    groups: int
    dim: int
    rest: int
    block_rest: int
    dim_v: int
    block_m: int
    block_n: int
    width: int
    flat: bool
    splits: int
    precision: str
    pdl: bool


class KeyStrides(NamedTuple):
    """Strides of a paged cache, without the last one, which is 1."""

    page: int
    token: int
    head: int


class RowStrides(NamedTuple):
    """Strides of rows (total, heads, dim), without the last one, which is 1."""

    token: int
    head: int


@triton.jit
def _row_offsets(slot, page_size, strides, FLAT: tl.constexpr):
    """The offsets of the rows of slots in a cache, in 64 bits."""
    slot = slot.to(tl.int64)
    if FLAT:
        return slot * strides.token
    return slot // page_size * strides.page + slot % page_size * strides.token


@triton.jit(do_not_specialize=["topk", "page_size", "units", "head_tiles", "parts", "part_blocks", "scale"])
def attn_selected(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    sinks_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    topk,
    page_size,
    units,
    head_tiles,
    parts,
    part_blocks,
    scale,
    stride_slots,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    VAR: tl.constexpr,
):
    """One program: up to BLOCK_M heads of one query, and one part of its slots. v_ptr: None if values are parts of the keys"""
    wait_for_previous_kernel(VAR.pdl)
    BLOCK_M: tl.constexpr = VAR.block_m
    BLOCK_N: tl.constexpr = VAR.block_n
    WIDTH: tl.constexpr = VAR.width
    SLICES: tl.constexpr = (VAR.dim + WIDTH - 1) // WIDTH
    SLICES_V: tl.constexpr = (VAR.dim_v + WIDTH - 1) // WIDTH
    unit = tl.program_id(0) % units
    rest_of_id = tl.program_id(0) // units
    part = rest_of_id % parts
    token = (rest_of_id // parts).to(tl.int64)
    head_kv = unit // head_tiles
    group = unit % head_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    live = group < VAR.groups
    heads = (head_kv * VAR.groups + group).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    offs_w = tl.arange(0, WIDTH)
    offs_r = tl.arange(0, VAR.block_rest)
    k_ptr += head_kv.to(tl.int64) * k_strides.head
    if v_ptr is not None:
        v_ptr += head_kv.to(tl.int64) * v_strides.head
    q_ptrs = q_ptr + (token * q_strides.token + heads * q_strides.head)[:, None]
    q_parts = ()
    for i in tl.static_range(SLICES):
        columns = i * WIDTH + offs_w
        q_parts += (tl.load(q_ptrs + columns[None, :], mask=live[:, None] & (columns < VAR.dim)[None, :], other=0.0),)
    q_rest = tl.load(q_ptrs + (VAR.dim + offs_r)[None, :], mask=live[:, None] & (offs_r < VAR.rest)[None, :], other=0.0)
    acc = ()
    for _ in tl.static_range(SLICES_V):
        acc += (tl.zeros([BLOCK_M, WIDTH], tl.float32),)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102, only this condition is known when the kernel is compiled
        # a sink acts as a key with the value 0 that has been seen before all others; only the first part counts it
        if part == 0:
            row_max = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32) * _LOG2E
            row_sum += 1.0
    slots_ptr += token * stride_slots
    begin = part * part_blocks
    end = tl.minimum(begin + part_blocks, (topk + BLOCK_N - 1) // BLOCK_N)
    # the slots of a block are read one block ahead, so that the loads of keys need not wait for them
    next_slot = tl.load(slots_ptr + begin * BLOCK_N + offs_n, mask=begin * BLOCK_N + offs_n < topk, other=-1)
    for block in tl.range(begin, end):
        slot = next_slot
        ahead = (block + 1) * BLOCK_N + offs_n
        next_slot = tl.load(slots_ptr + ahead, mask=ahead < topk, other=-1)
        chosen = slot >= 0
        slot = tl.where(chosen, slot, 0)
        k_ptrs = k_ptr + _row_offsets(slot, page_size, k_strides, VAR.flat)[:, None]
        s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if VAR.rest > 0:
            r = tl.load(k_ptrs + (VAR.dim + offs_r)[None, :], mask=chosen[:, None] & (offs_r < VAR.rest)[None, :], other=0.0)
            s = tl.dot(q_rest, tl.trans(r), s, input_precision=VAR.precision)
        values = ()
        for i in tl.static_range(SLICES):
            columns = i * WIDTH + offs_w
            k = tl.load(k_ptrs + columns[None, :], mask=chosen[:, None] & (columns < VAR.dim)[None, :], other=0.0)
            s = tl.dot(q_parts[i], tl.trans(k), s, input_precision=VAR.precision)
            values += (k,)
        if v_ptr is not None:
            v_ptrs = v_ptr + _row_offsets(slot, page_size, v_strides, VAR.flat)[:, None]
            values = ()
            for i in tl.static_range(SLICES_V):
                columns = i * WIDTH + offs_w
                v = tl.load(v_ptrs + columns[None, :], mask=chosen[:, None] & (columns < VAR.dim_v)[None, :], other=0.0)
                values += (v,)
        s = tl.where(chosen[None, :], s, float("-inf"))
        p, row_max, row_sum, alpha = online_softmax_update(s, scale * _LOG2E, row_max, row_sum)
        sums = ()
        for i in tl.static_range(SLICES_V):
            sums += (tl.dot(p.to(q_rest.dtype), values[i], acc[i] * alpha[:, None], input_precision=VAR.precision),)
        acc = sums
    inverse, lse = finish_softmax(row_max, row_sum)
    if part_ptr is not None:
        # the lse of each part and head, then the results of the parts, (total, parts, heads, dim_v)
        num_heads = units // head_tiles * VAR.groups
        row = (token * parts + part) * num_heads + heads
        tl.store(lse_ptr + row, lse, mask=live)
        for i in tl.static_range(SLICES_V):
            columns = i * WIDTH + offs_w
            keep = live[:, None] & (columns < VAR.dim_v)[None, :]
            tl.store(part_ptr + (row * VAR.dim_v)[:, None] + columns[None, :], acc[i] * inverse[:, None], mask=keep)
    else:
        out_ptrs = out_ptr + (token * out_strides.token + heads * out_strides.head)[:, None]
        for i in tl.static_range(SLICES_V):
            columns = i * WIDTH + offs_w
            keep = live[:, None] & (columns < VAR.dim_v)[None, :]
            tl.store(out_ptrs + columns[None, :], (acc[i] * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["num_heads", "parts"])
def _combine_parts(out_ptr, part_ptr, lse_ptr, num_heads, parts, out_strides, BLOCK: tl.constexpr, VAR: tl.constexpr):
    """One program: one head of one query, whose parts are weighted by exp(lse)."""
    wait_for_previous_kernel(VAR.pdl)
    token = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    index = tl.arange(0, VAR.splits)
    row = (token * parts + index) * num_heads + head
    lse = tl.load(lse_ptr + row, mask=index < parts, other=float("-inf"))
    largest = tl.max(lse, 0)
    # a query without keys has parts of -inf only, and its result is 0
    weight = tl.where(lse == float("-inf"), 0.0, tl.exp(lse - tl.where(largest == float("-inf"), 0.0, largest)))
    total = tl.sum(weight, 0)
    weight = weight / tl.where(total == 0.0, 1.0, total)
    columns = tl.arange(0, BLOCK)
    keep = (index < parts)[:, None] & (columns < VAR.dim_v)[None, :]
    parts_of_row = tl.load(part_ptr + (row * VAR.dim_v)[:, None] + columns[None, :], mask=keep, other=0.0)
    out = tl.sum(parts_of_row * weight[:, None], 0)
    out_ptrs = out_ptr + token * out_strides.token + head * out_strides.head + columns
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=columns < VAR.dim_v)


def selected_tiles(arch: int, itemsize: int, groups: int, dim: int, dim_v: int) -> SelectedTiles:
    """The tiles for a problem. dim: as in `SelectedVariant`"""
    block_m = min(64, max(16, power_of_2(groups)))
    if itemsize == 4 or arch == 0:
        # float32 and AMD: the tiles of one stage fit in 64 KiB of shared memory
        return SelectedTiles(min(block_m, 32), 16, min(64, max(16, power_of_2(min(dim, dim_v)))), num_warps=4, num_stages=1)
    hopper = 90 <= arch < 120
    if dim_v <= 256:
        return SelectedTiles(block_m, 64 if hopper else 32, width=64, num_warps=4, num_stages=2)
    if hopper:
        # On one H200, 4,096 queries of 128 heads with 2,048 keys each: 8.4 ms, and 11.2 ms with 32 keys in three stages
        return SelectedTiles(block_m, 64, width=128, num_warps=8, num_stages=2)
    # sm86, sm89 and sm120 have 99 KiB of shared memory for a program, sm80 has 163 KiB
    return SelectedTiles(min(block_m, 32), 32, width=128, num_warps=8, num_stages=2 if arch == 80 else 1)


def split_slots(programs: int, blocks: int, num_sms: int) -> int:
    """Into how many parts the slots of each query are divided to fill the GPU. programs: their number without division"""
    return max(1, min(MAX_SLOT_PARTS, num_sms // max(programs, 1), blocks // 2))


class _Plan:
    """The launches of one kind of call."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        softmax_scale: float,
        num_splits: int,
        tiles: SelectedTiles | Ring | None,
    ) -> None:
        total, num_heads, head_dim = q.shape
        num_kv_heads, dim_v = v.shape[2:]
        groups = num_heads // num_kv_heads
        arch = spec.arch_of(q.device)
        self.shared = values_in_keys(k, v)
        dim = dim_v if self.shared else head_dim
        ring = tiles if isinstance(tiles, Ring) else _ring_of(q, k, v, arch) if tiles is None else None
        if tiles is None or isinstance(tiles, Ring):
            tiles = selected_tiles(arch, q.element_size(), groups, dim, dim_v)
            if ring is not None:
                tiles = replace(tiles, block_m=64, block_n=ring.block_n)
        head_tiles = triton.cdiv(groups, tiles.block_m)
        units = num_kv_heads * head_tiles
        blocks = triton.cdiv(slots.shape[1], tiles.block_n)
        parts = num_splits or split_slots(total * units, blocks, multiprocessors(q.device, 8))
        part_blocks = triton.cdiv(blocks, parts)
        pdl = spec.has_programmatic_launch(arch)
        page_size = k.shape[1]
        flat = all(x.stride(0) == page_size * x.stride(1) or x.shape[0] == 1 for x in (k, v))
        variant = SelectedVariant(
            groups=groups,
            dim=dim,
            rest=head_dim - dim,
            block_rest=max(16, power_of_2(head_dim - dim)) if head_dim > dim else 16,
            dim_v=dim_v,
            block_m=tiles.block_m,
            block_n=tiles.block_n,
            width=tiles.width,
            flat=flat,
            splits=power_of_2(parts),
            precision="ieee" if q.dtype == torch.float32 else "tf32",
            pdl=pdl,
        )
        self.out_shape = (total, num_heads, dim_v)
        self.parts_shape = (total, parts, num_heads, dim_v)
        out_strides = RowStrides(num_heads * dim_v, dim_v)
        v_strides = KeyStrides(*v.stride()[:3])
        self.attend = Launch(
            attn_selected,
            total * units * parts,
            varying=(slots.shape[1], page_size, units, head_tiles, parts, part_blocks, float(softmax_scale)),
            strides=(slots.stride(0),),
            fixed=(RowStrides(*q.stride()[:2]), KeyStrides(*k.stride()[:3]), v_strides, out_strides, variant),
            options={**launch_options(pdl, tiles.num_warps), "num_stages": tiles.num_stages},
        )
        if ring is not None:
            from fa_serve.ops.selected_keys.gather_wgmma import gather_launch

            self.attend = gather_launch((q, k, v, slots), (num_heads * dim_v, dim_v), parts, float(softmax_scale), pdl, ring)
        self.combine: Launch | None = None
        if parts > 1:
            self.combine = Launch(
                _combine_parts,
                total * num_heads,
                varying=(num_heads, parts),
                fixed=(out_strides, power_of_2(dim_v), variant),
                options=launch_options(pdl, 4),
            )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, sinks: Tensor | None) -> Tensor:
        out = q.new_empty(self.out_shape)
        parts: Tensor | None = None
        lse: Tensor | None = None
        if self.combine is not None:
            parts = q.new_empty(self.parts_shape, dtype=torch.float32)
            lse = q.new_empty(self.parts_shape[:3], dtype=torch.float32)
        self.attend((q, k, None if self.shared else v, slots, sinks, out, parts, lse))
        if self.combine is not None:
            self.combine((out, parts, lse))
        return out


def _ring_of(q: Tensor, k: Tensor, v: Tensor, arch: int) -> Ring | None:
    """The ring of key blocks of the Hopper kernel if that kernel computes the call, else None."""
    if arch != 90 or not compiles_gluon():
        return None
    from fa_serve.ops.selected_keys.gather_wgmma import GATHER_RING, cannot_gather

    return GATHER_RING if cannot_gather(q, k, v, values_in_keys(k, v)) is None else None


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether the values are the first numbers of the keys, in the same memory."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and v.shape[3] <= k.shape[3]


def launch_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, sinks: Tensor | None, softmax_scale: float, num_splits: int
) -> Tensor:
    """Arguments and result are those of `fa_serve.ops.sparse_attention`."""
    return run_sparse_attention(q, k, v, slots, sinks, softmax_scale, num_splits)


def run_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    sinks: Tensor | None,
    softmax_scale: float,
    num_splits: int,
    tiles: SelectedTiles | Ring | None = None,
) -> Tensor:
    """`launch_sparse_attention` with tiles that override the choice, for tuning; a `Ring` chooses the kernel for Hopper."""
    q, k, v, slots = (with_unit_stride(x) for x in (q, k, v, slots))
    sinks = None if sinks is None else sinks.contiguous()
    if 0 in (*q.shape, *slots.shape):
        return q.new_zeros(*q.shape[:2], v.shape[3])
    tensors = (q, k, v, slots)
    key = (
        "sparse_attention",
        *[(x.shape, x.stride(), x.dtype) for x in tensors],
        None if sinks is None else sinks.dtype,
        values_in_keys(k, v),
        softmax_scale,
        num_splits,
        q.get_device(),
        (q.data_ptr() | k.data_ptr()) % 16 == 0,  # the kernel for Hopper copies 16 bytes at a time
        tiles,
    )
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _Plan(*tensors, softmax_scale, num_splits, tiles))
    result: Tensor = run(*tensors, sinks)
    return result
