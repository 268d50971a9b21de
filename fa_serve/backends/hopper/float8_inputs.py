"""Float8 copies of q, k and v for the Hopper kernel, after FlashAttention-3 (Shah et al. 2024, section 3.3), in one launch.

    float8_e4m3fn has 3 bits of mantissa and reaches from 2^-9 to 448

Block quantisation: there is one scale for each row of q and one for each BLOCK_KEYS rows of k and v. Incoherent processing:
q and k are multiplied by the same orthogonal matrix H, a Hadamard matrix whose rows have random signs. (q H)(k H)^T is q k^T,
but an outlier is spread over all columns of its row and no longer takes the range of the others.

V is stored transposed, because the tensor cores take the second operand of a float8 product only with its reduced dimension
contiguous. Of every 16 keys, key 8 h + 2 t + i is stored at position 4 t + 2 h + i. Thread t of four holds P of exactly the
keys at its four positions, so P goes from the first product to the second without an exchange between threads.

The copies of packed keys have gaps: each sequence begins at a multiple of BLOCK_KEYS rows, at

    first(b) = cu_seqlens_k[b] // BLOCK_KEYS + b       in units of BLOCK_KEYS rows

which needs no length on the host. Rows past the end of a sequence are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends.hopper.descriptors import Layout, contiguous, permuted
from fa_serve.backends.hopper.kernel_types import BLOCK_KEYS
from fa_serve.backends.launch import Launch
from fa_serve.spec import Precision

FLOAT8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-60)
"""Scales are at least this, so that products and quotients of scales are normal numbers."""
_CHUNK = tl.constexpr(256)  # sequences that a program reads at a time
_ROWS = BLOCK_KEYS.value
_GROUP = tl.constexpr(_ROWS)


class Strides(NamedTuple):
    """Elements from one sequence of a dense batch to the next (0 if packed), from token to token, and from head to head."""

    batch: int
    token: int
    head: int


@triton.jit
def _sign(row):
    """+1 or -1 for each row of H: a bit of a hash of 16 bits. A fixed choice gives the same result at each call."""
    x = (row + 1) * 40503 & 0xFFFF
    x = (x ^ x >> 7) * 30011 & 0xFFFF
    x = (x ^ x >> 9) * 40503 & 0xFFFF
    return 1 - 2 * (x >> 15)


@triton.jit
def _rotate(x_ptrs, keep, DIM: tl.constexpr, dtype: tl.constexpr):
    """Rows of x times H * sqrt(DIM), float32. Its entries are +1 and -1, so that the product with 16 bits is exact."""
    PART: tl.constexpr = 64
    cols = tl.arange(0, DIM)[None, :]
    y = tl.zeros([_GROUP, DIM], tl.float32)
    for start in tl.static_range(0, DIM, PART):
        rows = start + tl.arange(0, PART)
        x = tl.load(x_ptrs + rows[None, :], mask=keep[:, None], other=0.0)
        bits = rows[:, None] & cols
        bits = bits ^ (bits >> 4)
        bits = bits ^ (bits >> 2)
        bits = bits ^ (bits >> 1)
        hadamard = (1 - 2 * (bits & 1)) * _sign(rows)[:, None]
        y = tl.dot(x, hadamard.to(tl.float32).to(dtype), y)
    return y


@triton.jit
def _scale_of(largest):
    return tl.maximum(largest / LARGEST, SMALLEST_SCALE)


@triton.jit
def _quantize_queries(q_ptr, q8_ptr, scale_ptr, strides, block, head, num_heads, seqlen, total, DIM: tl.constexpr):
    """A block of rows of one head: rows of all sequences, and a scale for each row."""
    row = block * _GROUP + tl.arange(0, _GROUP)
    keep = row < total
    batch = row // seqlen
    token = row % seqlen
    q_ptr += head.to(tl.int64) * strides.head
    q_ptrs = q_ptr + batch.to(tl.int64) * strides.batch + token.to(tl.int64) * strides.token
    y = _rotate(q_ptrs[:, None], keep, DIM, q_ptr.dtype.element_ty)
    scale = _scale_of(tl.max(tl.abs(y), 1))
    # (batch, num_heads, seqlen, dim), where a packed call is one sequence
    at = (batch.to(tl.int64) * num_heads + head) * seqlen + token
    tl.store(scale_ptr + at, scale * DIM**-0.5, mask=keep)
    cols = tl.arange(0, DIM)[None, :]
    tl.store(q8_ptr + (at * DIM)[:, None] + cols, (y / scale[:, None]).to(tl.float8e4nv), mask=keep[:, None])


@triton.jit
def _find_group(group, cu_seqlens_ptr, batch):
    """The rows of a group of a copy with gaps: (the sequence's first row in k, its length, the group's first row in it).

    A group that belongs to no sequence begins past the end of one.
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
def _quantize_keys(k_ptrs, keep, k8_ptr, scale_ptr, at, DIM: tl.constexpr, dtype: tl.constexpr):
    """A group of rows of one head of k, with one scale, to the `at`-th group of the copy."""
    y = _rotate(k_ptrs[:, None], keep, DIM, dtype)
    scale = _scale_of(tl.max(tl.max(tl.abs(y), 1), 0))
    tl.store(scale_ptr + at, scale * DIM**-0.5)
    rows = (at * _GROUP + tl.arange(0, _GROUP)) * DIM
    tl.store(k8_ptr + rows[:, None] + tl.arange(0, DIM)[None, :], (y / scale).to(tl.float8e4nv))


@triton.jit
def _transpose_values(v_ptr, token_stride, length, row, v8_ptr, scale_ptr, at, groups, DIM: tl.constexpr):
    """A group of rows of one head of v, from `row` on, with one scale, to columns of the copy (heads, dim, rows)."""
    place = tl.arange(0, _GROUP)
    key = row + place // 16 * 16 + place // 2 % 2 * 8 + place // 4 % 4 * 2 + place % 2
    cols = tl.arange(0, DIM)
    v_ptrs = v_ptr + (key.to(tl.int64) * token_stride)[:, None] + cols[None, :]
    v = tl.load(v_ptrs, mask=(key < length)[:, None], other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.max(tl.abs(v), 1), 0))
    tl.store(scale_ptr + at, scale)
    columns = (at // groups * DIM + cols) * groups * _GROUP
    tl.store(v8_ptr + columns[:, None] + (at % groups * _GROUP + place)[None, :], tl.trans((v / scale).to(tl.float8e4nv)))


@triton.jit
def _copy_values(v_ptr, token_stride, length, row, copy_ptr, at, DIM: tl.constexpr):
    """A group of rows of one head of v, as it is, to the `at`-th group of the copy."""
    rows = tl.arange(0, _GROUP)
    cols = tl.arange(0, DIM)[None, :]
    v_ptrs = v_ptr + ((row + rows).to(tl.int64) * token_stride)[:, None] + cols
    v = tl.load(v_ptrs, mask=(row + rows < length)[:, None], other=0.0)
    tl.store(copy_ptr + ((at * _GROUP + rows) * DIM)[:, None] + cols, v)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads", "seqlen_q", "total_q", "seqlen_k", "groups", "batch", "programs"])
def _quantize_inputs(
    q_ptr,
    k_ptr,
    v_ptr,
    cu_seqlens_k_ptr,
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
    programs,
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
):
    """A program quantises _GROUP rows of one head of q, k or v.

    seqlen_q, seqlen_k: lengths of a dense batch; packed queries are one sequence of total_q rows
    programs: programs of one head
    groups: groups of rows of one sequence of a dense batch or, with cu_seqlens_k, of all sequences together
    v8_ptr: None: v is used as it is. v_scale_ptr: None: v is copied as it is
    """
    index = tl.program_id(0) % programs
    head = tl.program_id(0) // programs
    q_strides = Strides(q_batch_stride, q_token_stride, q_head_stride)
    k_strides = Strides(k_batch_stride, k_token_stride, k_head_stride)
    v_strides = Strides(v_batch_stride, v_token_stride, v_head_stride)
    if head < num_heads:
        if index * _GROUP < total_q:
            _quantize_queries(q_ptr, q8_ptr, q_scale_ptr, q_strides, index, head, num_heads, seqlen_q, total_q, DIM)
    else:
        # the index of the group among those of its head, its sequence in a dense batch, and its rows
        sequence = index // groups
        group = index % groups
        first = 0
        length = seqlen_k
        row = group * _GROUP
        if cu_seqlens_k_ptr is not None:
            first, length, row = _find_group(group, cu_seqlens_k_ptr, batch)
            batch = 1
        # a sequence without keys has a group of zeros, which a tile of its queries visits and masks
        if (sequence < batch) & (row < tl.maximum(length, 1)):
            kv_head = (head - num_heads) % num_kv_heads
            at = (sequence * num_kv_heads + kv_head).to(tl.int64) * groups + group
            if head < num_heads + num_kv_heads:
                k_ptr += sequence.to(tl.int64) * k_strides.batch + kv_head.to(tl.int64) * k_strides.head
                rows = row + tl.arange(0, _GROUP)
                k_ptrs = k_ptr + (first + rows).to(tl.int64) * k_strides.token
                _quantize_keys(k_ptrs, rows < length, k8_ptr, k_scale_ptr, at, DIM, k_ptr.dtype.element_ty)
            elif v8_ptr is not None:
                v_ptr += sequence.to(tl.int64) * v_strides.batch + kv_head.to(tl.int64) * v_strides.head
                v_ptr += tl.cast(first, tl.int64) * v_strides.token
                if v_scale_ptr is not None:
                    _transpose_values(v_ptr, v_strides.token, length, row, v8_ptr, v_scale_ptr, at, groups, DIM_V)
                else:
                    _copy_values(v_ptr, v_strides.token, length, row, v8_ptr, at, DIM_V)


class Quantizer:
    """The launch of `_quantize_inputs` for calls whose tensors lie alike; sequences are packed or a dense batch.

    groups:  groups of BLOCK_KEYS keys of a head: of one sequence, or of all that are packed
    layouts: how the copies of q, k and v lie, with their dimensions in the order that the kernel's views have: (batch, seqlen,
             heads, dim), and without batch for packed queries. Packed keys are one long sequence. Transposed values have dim
             and seqlen exchanged. Values that are not copied lie as they were given
    """

    def __init__(self, given: Sequence[Layout], sequences: int, packed: bool, precision: Precision) -> None:
        """given: the layouts of q, k and v; sequences: how many are packed, or the batch size"""
        q, k, v = given
        batch, seqlen_q, num_heads, dim = (1,) * packed + q.shape
        seqlen_k, num_kv_heads = k.shape[-3:-1]
        self._float8_values = precision == "fp8"
        self._copies_values = packed or self._float8_values
        self.groups = seqlen_k // _ROWS + sequences if packed else -(-seqlen_k // _ROWS)
        rows = self.groups * _ROWS
        dim_v = v.shape[-1]
        self._q = contiguous((batch, num_heads, seqlen_q, dim), FLOAT8)
        self._k = contiguous((batch, num_kv_heads, rows, dim), FLOAT8)
        if self._float8_values:
            self._v = contiguous((batch, num_kv_heads, dim_v, rows), FLOAT8)
        else:
            self._v = contiguous((batch, num_kv_heads, rows, dim_v), v.dtype)
        queries = permuted(self._q, 0, 2, 1, 3)
        self.layouts = [
            Layout(queries.shape[packed:], queries.strides[packed:], FLOAT8),
            permuted(self._k, 0, 2, 1, 3),
            permuted(self._v, 0, 2, 1, 3) if self._copies_values else v,
        ]
        programs = max(-(-batch * seqlen_q // _ROWS), batch * self.groups)
        self._launch = Launch(
            _quantize_inputs,
            programs * (num_heads + (1 + self._copies_values) * num_kv_heads),
            varying=(num_heads, num_kv_heads, seqlen_q, batch * seqlen_q, seqlen_k, self.groups, sequences, programs),
            fixed=(dim, dim_v),
            options={"num_warps": 8},
            strides=[stride for x in (q, k, v) for stride in ((0,) * packed + x.strides)[:3]],
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor | None) -> tuple[Tensor | None, ...]:
        """-> the copies of q, k and v, then their scales: float32, of q in the shape of lse, of k and v (batch, num_kv_heads,
        groups), None for values that are not float8."""
        q8 = q.new_empty(self._q.shape, dtype=FLOAT8)
        k8 = k.new_empty(self._k.shape, dtype=FLOAT8)
        copy = v.new_empty(self._v.shape, dtype=self._v.dtype) if self._copies_values else None
        q_scale = q.new_empty(self._q.shape[:3], dtype=torch.float32)
        k_scale = k.new_empty((*self._k.shape[:2], self.groups), dtype=torch.float32)
        v_scale = torch.empty_like(k_scale) if self._float8_values else None
        self._launch((q, k, v, cu_seqlens_k, q8, k8, copy, q_scale, k_scale, v_scale))
        return q8, k8, v if copy is None else copy, q_scale, k_scale, v_scale
