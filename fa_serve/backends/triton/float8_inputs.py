"""Float8 copies of q, k and v for prefill kernels, made in one launch, after FlashAttention-3 (Shah et al. 2024, section 3.3).

    float8_e4m3fn has 3 bits of mantissa and reaches from 2^-9 to 448

Block quantisation: there is one scale for each row of q and one for each BLOCK_KEYS rows of k and v. Incoherent processing:
q and k are multiplied by the same orthogonal matrix H, a Hadamard matrix whose rows have random signs. (q H)(k H)^T is q k^T,
but an outlier is spread over all columns of its row and no longer takes the range of the others.

V is stored transposed, because the tensor cores take the second operand of a float8 product only with its reduced dimension
contiguous. Of every 16 keys, key 8 h + 2 t + i is stored at position 4 t + 2 h + i. Thread t of four holds P of exactly the
keys at its four positions, so P goes from the first product to the second without an exchange between threads.

The copies of packed keys have gaps: each sequence begins at a multiple of BLOCK_KEYS rows, at

    first(b) = cu_seqlens_k[b] // BLOCK_KEYS + b       in units of BLOCK_KEYS rows

which needs no length on the host. The copies of paged keys are a dense batch with room for max_seqlen_k keys of each sequence,
because only the device knows how many keys a sequence has. In a copy, rows past the end of a sequence are zero, and so are rows
before the window of its first query. Groups that have only such rows are not written, and neither are the groups of sequences
that another kernel computes (see `backends.mixed`).

A float8 cache already has one scale for each head, the descale, which commutes with H. So the stored keys are multiplied by H,
then by the descale, and are rounded again with the scale of their group. Stored values are copied unchanged, and the descale is
the scale of all their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.layout import TensorLayout, contiguous, permuted
from fa_serve.launching.launch import Launch
from fa_serve.spec import FLOAT8 as FLOAT8

BLOCK_KEYS = tl.constexpr(128)
"""Keys that share a scale of float8 keys and values."""
LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-60)
"""Scales are at least this, so that products and quotients of scales are normal numbers."""
_CHUNK = tl.constexpr(256)  # sequences that a program reads at a time
_ROWS = BLOCK_KEYS.value
_GROUP = tl.constexpr(_ROWS)
_FAR = tl.constexpr(1 << 30)
Form = Literal["dense", "packed", "paged"]
"""How keys lie: in a dense batch, packed end to end, or in pages. With the last two forms, queries are packed."""


class Strides(NamedTuple):
    """Elements from one sequence of a dense batch to the next (0 if packed) or from page to page, from token to token, and from
    head to head."""

    batch: int
    token: int
    head: int


def _make_rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H * sqrt(dim), [dim, dim]: entry (r, c) is -1 to the power of the number of bits of r & c, times a random sign of row r.

    The signs are bits of a 16-bit hash of the row number, so that all calls use the same matrix.
    """
    index = torch.arange(dim, device=device)
    odd = index[:, None] & index
    for shift in (4, 2, 1):
        odd ^= odd >> shift
    signs = (index + 1) * 40503 & 0xFFFF
    signs = (signs ^ signs >> 7) * 30011 & 0xFFFF
    signs = (signs ^ signs >> 9) * 40503 & 0xFFFF
    return (1 - 2 * ((odd ^ signs[:, None] >> 15) & 1)).to(dtype)


_ROTATIONS: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
_MAX_ROTATIONS = 64


def _rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H * sqrt(dim), kept for later calls: computing it took two thirds of the instructions of a program.

    A tensor that is allocated while a CUDA graph is captured is filled only by a replay, so it is not kept.
    """
    key = (dim, dtype, device)
    rotation = _ROTATIONS.get(key)
    if rotation is not None:
        return rotation
    rotation = _make_rotation(dim, dtype, device)
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return rotation
        torch.cuda.current_stream(device).synchronize()  # once, because other streams will read it too
    if type(rotation) is Tensor:  # and not one of torch.compile's tensors, which have no values
        if len(_ROTATIONS) >= _MAX_ROTATIONS:
            _ROTATIONS.clear()
        _ROTATIONS[key] = rotation
    return rotation


@triton.jit
def _rotate(x_ptr, offsets, keep, rotation_ptr, DIM: tl.constexpr):
    """Rows of x times H * sqrt(DIM), float32. The entries of this matrix are +1 and -1, so its products with 16-bit numbers are
    exact. The scales of the rows are divided by sqrt(DIM) instead."""
    PART: tl.constexpr = min(DIM, 128)
    cols = tl.arange(0, DIM)[None, :]
    y = tl.zeros([_GROUP, DIM], tl.float32)
    for start in tl.static_range(0, DIM, PART):
        rows = start + tl.arange(0, PART)
        x = tl.load(x_ptr + offsets[:, None] + rows[None, :], mask=keep[:, None], other=0.0)
        x = x.to(rotation_ptr.dtype.element_ty)
        y = tl.dot(x, tl.load(rotation_ptr + rows[:, None] * DIM + cols), y)
    return y


@triton.jit
def _scale_of(largest):
    return tl.maximum(largest / LARGEST, SMALLEST_SCALE)


@triton.jit
def _quantize_queries(
    q_ptr, rotation_ptr, q8_ptr, scale_ptr, strides, block, head, num_heads, seqlen, total, DIM: tl.constexpr
):
    """Quantise a block of rows of one head, with a scale for each row. A block may have rows of several sequences."""
    row = block * _GROUP + tl.arange(0, _GROUP)
    keep = row < total
    batch = row // seqlen
    token = row % seqlen
    q_ptr += head.to(tl.int64) * strides.head
    offsets = batch.to(tl.int64) * strides.batch + token.to(tl.int64) * strides.token
    y = _rotate(q_ptr, offsets, keep, rotation_ptr, DIM)
    scale = _scale_of(tl.max(tl.abs(y), 1))
    # (batch, num_heads, seqlen, dim), where a packed call is one sequence
    at = (batch.to(tl.int64) * num_heads + head) * seqlen + token
    tl.store(scale_ptr + at, scale * DIM**-0.5, mask=keep)
    cols = tl.arange(0, DIM)[None, :]
    tl.store(q8_ptr + (at * DIM)[:, None] + cols, (y * (1 / scale)[:, None]).to(tl.float8e4nv), mask=keep[:, None])


@triton.jit
def _find_group(group, cu_seqlens_ptr, batch):
    """The rows of a group of a copy with gaps: (first row of its sequence in k, length of the sequence, first row of the group
    in the sequence).

    If the group belongs to no sequence, its first row is past the end of the sequence before it.
    """
    sequence = 0
    for start in range(0, batch, _CHUNK):
        b = start + tl.arange(0, _CHUNK)
        begins = tl.load(cu_seqlens_ptr + b, mask=b < batch, other=0) // _GROUP + b
        sequence += tl.sum(((b < batch) & (begins <= group)).to(tl.int32), 0)
    sequence -= 1
    first = tl.load(cu_seqlens_ptr + sequence)
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    return first, length, (group - (first // _GROUP + sequence)) * _GROUP


@triton.jit
def _visible_rows(sequence, seqused_k_ptr, cu_seqlens_q_ptr, skip_q, left):
    """The keys [low, length) that queries of a paged sequence see; low is _FAR if another kernel computes the sequence."""
    length = tl.load(seqused_k_ptr + sequence)
    queries = tl.load(cu_seqlens_q_ptr + sequence + 1) - tl.load(cu_seqlens_q_ptr + sequence)
    low = tl.where(left >= 0, tl.maximum(length - queries - left, 0), 0)
    return tl.where(queries > skip_q, low, _FAR), length


@triton.jit
def _row_offsets(rows, keep, sequence, first, strides, block_table_ptr, table_stride, PAGE_SIZE: tl.constexpr):
    """Elements from the beginning of a head of k or v to each of these rows of a sequence, int64. Pages of rows that are not
    kept are not looked up."""
    if block_table_ptr is not None:
        entries = block_table_ptr + sequence.to(tl.int64) * table_stride + rows // PAGE_SIZE
        page = tl.load(entries, mask=keep, other=0)
        return page.to(tl.int64) * strides.batch + (rows % PAGE_SIZE).to(tl.int64) * strides.token
    return sequence.to(tl.int64) * strides.batch + (first + rows).to(tl.int64) * strides.token


@triton.jit
def _quantize_keys(k_ptr, offsets, keep, rotation_ptr, descale, k8_ptr, scale_ptr, at, DIM: tl.constexpr):
    """Quantise a group of rows of one head of k, with one scale, into group number `at` of the copy."""
    y = _rotate(k_ptr, offsets, keep, rotation_ptr, DIM) * descale
    scale = _scale_of(tl.max(tl.max(tl.abs(y), 1, keep_dims=True), 0, keep_dims=True))
    tl.store(scale_ptr + at + tl.zeros([1, 1], tl.int32), scale * DIM**-0.5)
    rows = (at * _GROUP + tl.arange(0, _GROUP)) * DIM
    tl.store(k8_ptr + rows[:, None] + tl.arange(0, DIM)[None, :], (y * (1 / scale)).to(tl.float8e4nv))


@triton.jit
def _transpose_values(v, descale, IS_FLOAT8: tl.constexpr, v8_ptr, scale_ptr, at, groups, DIM: tl.constexpr):
    """Quantise a group of rows of one head of v, with one scale, into columns of the copy (heads, dim, rows)."""
    if IS_FLOAT8:
        scale = tl.maximum(descale, SMALLEST_SCALE)
    else:
        v = v.to(tl.float32)
        scale = _scale_of(tl.max(tl.max(tl.abs(v), 1), 0))
        v = (v * (1 / scale)).to(tl.float8e4nv)
    tl.store(scale_ptr + at, scale)
    columns = (at // groups * DIM + tl.arange(0, DIM)) * groups * _GROUP
    tl.store(v8_ptr + columns[:, None] + (at % groups * _GROUP + tl.arange(0, _GROUP))[None, :], tl.trans(v))


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "num_kv_heads",
        "seqlen_q",
        "total_q",
        "seqlen_k",
        "groups",
        "batch",
        "query_blocks",
        "key_groups",
        "skip_q",
        "left",
        "table_stride",
    ]
)
def _quantize_inputs(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    cu_seqlens_q_ptr,
    block_table_ptr,
    k_descale_ptr,
    v_descale_ptr,
    rotation_ptr,
    q8_ptr,
    k8_ptr,
    v8_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_heads,
    num_kv_heads,
    seqlen_q,
    total_q,
    seqlen_k,
    groups,
    batch,
    query_blocks,
    key_groups,
    skip_q,
    left,
    table_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """A program quantises _GROUP rows of one head of q, k or v.

    keys_ptr: cu_seqlens_k of packed keys, seqused_k of keys in pages, None for a dense batch
    rotation_ptr: H * sqrt(DIM) in q's dtype
    cu_seqlens_q_ptr, block_table_ptr: None unless keys are in pages. k_descale_ptr, v_descale_ptr: None unless k and v are
              float8
    v8_ptr:   None if v is used without a copy. v_scale_ptr: None if v is copied in 16 bits
    seqlen_q, seqlen_k: lengths of a dense batch; packed queries are one sequence of total_q rows
    groups:   number of groups of rows per sequence (dense batch, pages), or of all packed sequences together
    query_blocks, key_groups: programs of one head of q, and of one head of k or v
    skip_q, left: as in `_visible_rows`
    """
    program = tl.program_id(0)
    q_strides = Strides(q_batch_stride, q_token_stride, q_head_stride)
    k_strides = Strides(k_batch_stride, k_token_stride, k_head_stride)
    v_strides = Strides(v_batch_stride, v_token_stride, v_head_stride)
    if program < num_heads * query_blocks:
        head = program // query_blocks
        block = program % query_blocks
        _quantize_queries(q_ptr, rotation_ptr, q8_ptr, q_scale_ptr, q_strides, block, head, num_heads, seqlen_q, total_q, DIM)
    else:
        # the index of the group among the groups of its head, its sequence, its first row, and the rows [low, length) to copy
        program -= num_heads * query_blocks
        index = program % key_groups
        number = program // key_groups
        sequence = index // groups
        group = index % groups
        first = 0
        low = 0
        length = seqlen_k
        row = group * _GROUP
        if block_table_ptr is not None:
            low, length = _visible_rows(sequence, keys_ptr, cu_seqlens_q_ptr, skip_q, left)
        elif keys_ptr is not None:
            first, length, row = _find_group(group, keys_ptr, batch)
        # a sequence without keys has a group of zeros, which a tile of its queries visits and masks
        if (row < tl.maximum(length, 1)) & (row + _GROUP > low):
            kv_head = number % num_kv_heads
            at = (sequence * num_kv_heads + kv_head).to(tl.int64) * groups + group
            place = tl.arange(0, _GROUP)
            if number < num_kv_heads:
                rows = row + place
                keep = (rows >= low) & (rows < length)
                offsets = _row_offsets(rows, keep, sequence, first, k_strides, block_table_ptr, table_stride, PAGE_SIZE)
                k_ptr += kv_head.to(tl.int64) * k_strides.head
                descale = 1.0
                if k_descale_ptr is not None:
                    descale = tl.load(k_descale_ptr + kv_head)
                _quantize_keys(k_ptr, offsets, keep, rotation_ptr, descale, k8_ptr, k_scale_ptr, at, DIM)
            elif v8_ptr is not None:
                rows = row + place
                if v_scale_ptr is not None:
                    rows = row + place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
                keep = (rows >= low) & (rows < length)
                offsets = _row_offsets(rows, keep, sequence, first, v_strides, block_table_ptr, table_stride, PAGE_SIZE)
                cols = tl.arange(0, DIM_V)[None, :]
                v_ptr += kv_head.to(tl.int64) * v_strides.head
                v = tl.load(v_ptr + offsets[:, None] + cols, mask=keep[:, None], other=0.0)
                descale = 1.0
                if v_descale_ptr is not None:
                    descale = tl.load(v_descale_ptr + kv_head)
                if v_scale_ptr is not None:
                    IS_FLOAT8: tl.constexpr = v_descale_ptr is not None
                    _transpose_values(v, descale, IS_FLOAT8, v8_ptr, v_scale_ptr, at, groups, DIM_V)
                else:
                    if v_descale_ptr is not None:
                        v = v.to(tl.float32) * descale
                    tl.store(v8_ptr + ((at * _GROUP + place) * DIM_V)[:, None] + cols, v)


class InputQuantizer:
    """The launch of `_quantize_inputs` for calls whose tensors have equal layouts.

    groups:  number of groups of BLOCK_KEYS keys of a head, for one sequence or for all packed sequences together
    layouts: layouts of the copies of q, k and v, with their dimensions in the order of the kernel's views: (batch, seqlen,
             heads, dim), and without batch for packed queries. Packed keys are one long sequence. Transposed values have dim
             and seqlen exchanged. Values that are not copied have the layout of v
    """

    def __init__(
        self, given: Sequence[TensorLayout], form: Form, sequences: int, options: AttentionOptions, table_stride: int = 0
    ) -> None:
        """given: the layouts of q, k and v; sequences: how many are packed, or the batch size"""
        q, k, v = given
        one = form != "dense"  # packed queries are one sequence
        batch, seqlen_q, num_heads, dim = (1,) * one + q.shape
        num_kv_heads = k.shape[-2]
        dim_v = v.shape[-1]
        self._float8_values = options.precision == "fp8"
        self._copies_values = form != "dense" or self._float8_values
        copies = 1 if form == "packed" else sequences
        seqlen_k = options.max_seqlen_k if form == "paged" else k.shape[-3]
        self.groups = seqlen_k // _ROWS + sequences if form == "packed" else max(-(-seqlen_k // _ROWS), 1)
        rows = self.groups * _ROWS
        self._q = contiguous((batch, num_heads, seqlen_q, dim), FLOAT8)
        self._k = contiguous((copies, num_kv_heads, rows, dim), FLOAT8)
        if self._float8_values:
            self._v = contiguous((copies, num_kv_heads, dim_v, rows), FLOAT8)
        else:
            self._v = contiguous((copies, num_kv_heads, rows, dim_v), q.dtype)
        queries = permuted(self._q, 0, 2, 1, 3)
        self.layouts = [
            TensorLayout(queries.shape[one:], queries.strides[one:], FLOAT8),
            permuted(self._k, 0, 2, 1, 3),
            permuted(self._v, 0, 2, 1, 3) if self._copies_values else v,
        ]
        query_blocks = -(-batch * seqlen_q // _ROWS)
        key_groups = copies * self.groups
        self._launch = Launch(
            _quantize_inputs,
            num_heads * query_blocks + (1 + self._copies_values) * num_kv_heads * key_groups,
            varying=(
                num_heads,
                num_kv_heads,
                seqlen_q,
                batch * seqlen_q,
                seqlen_k,
                self.groups,
                sequences,
                query_blocks,
                key_groups,
                options.skip_q,
                options.window_size[0],
                table_stride,
            ),
            fixed=(dim, dim_v, k.shape[1] if form == "paged" else 0),
            options={"num_warps": 8},
            strides=[stride for x in (q, k, v) for stride in ((0,) * (4 - len(x.shape)) + x.strides)[:3]],
        )

    def __call__(self, tensors: AttentionTensors) -> tuple[Tensor | None, ...]:
        """-> the copies of q, k and v, then their scales: float32, of q in the shape of lse, of k and v (batch, num_kv_heads,
        groups), None for values that are not float8."""
        q = tensors.q
        k = tensors.k
        v = tensors.v
        q8 = q.new_empty(self._q.shape, dtype=FLOAT8)
        k8 = k.new_empty(self._k.shape, dtype=FLOAT8)
        copy = v.new_empty(self._v.shape, dtype=self._v.dtype) if self._copies_values else None
        q_scale = q.new_empty(self._q.shape[:3], dtype=torch.float32)
        k_scale = k.new_empty((*self._k.shape[:2], self.groups), dtype=torch.float32)
        v_scale = torch.empty_like(k_scale) if self._float8_values else None
        table = tensors.block_table
        rotation = _rotation(q.shape[-1], q.dtype, q.device)
        pages = (None if table is None else tensors.cu_seqlens_q, table, tensors.k_descale, tensors.v_descale)
        self._launch((q, k, v, tensors.keys, *pages, rotation, q8, k8, copy, q_scale, k_scale, v_scale))
        return q8, k8, v if copy is None else copy, q_scale, k_scale, v_scale
