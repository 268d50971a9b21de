"""The jit helpers that the kernels of linear attention share."""

from __future__ import annotations

import triton
import triton.language as tl

L2NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def time_step(dt, bias, limit_low, limit_high, SOFTPLUS: tl.constexpr):
    """clamp(softplus(dt + bias), limit_low, limit_high), in float32."""
    dt = dt.to(tl.float32) + bias
    if SOFTPLUS:
        e = tl.exp(tl.minimum(dt, 20.0))
        # log(1 + e) loses a small e to rounding
        log1p = tl.where(e < 1e-2, e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * 0.25))), tl.log(1.0 + e))
        dt = tl.where(dt > 20.0, dt, log1p)
    return tl.minimum(tl.maximum(dt, limit_low), limit_high)


@triton.jit
def normalised_rows(x, NORMALISE: tl.constexpr):
    """Rows [.., DIM] in float32, divided by their length if NORMALISE."""
    x = x.to(tl.float32)
    if NORMALISE:
        x *= tl.rsqrt(tl.sum(x * x, 1) + L2NORM_EPS)[:, None]
    return x


@triton.jit
def normalised_row(x, NORMALISE: tl.constexpr):
    """One row [DIM] in float32, divided by its length if NORMALISE."""
    x = x.to(tl.float32)
    if NORMALISE:
        x *= tl.rsqrt(tl.sum(x * x, 0) + L2NORM_EPS)
    return x


@triton.jit
def sequences_of_rows(row, cu_ptr, num_seqs, BLOCK_SEQS: tl.constexpr):
    """The number of the sequence of each row: the last one that begins at it or before it; -1 before the first one."""
    seq = tl.zeros(row.shape, tl.int32) - 1
    for low in range(0, num_seqs, BLOCK_SEQS):
        b = low + tl.arange(0, BLOCK_SEQS)
        begins = tl.load(cu_ptr + b, mask=b < num_seqs, other=0x7FFFFFFF)
        seq += tl.sum((begins[None, :] <= row[:, None]).to(tl.int32), 1)
    return seq


@triton.jit
def clear_padding(cells, keep, begin, stop, end, is_last, total, stride):
    """Write 0 to the outputs of a sequence that pads a CUDA graph, and to the rows past the last sequence, because the rest of
    the model reads them.

    cells, keep:   addresses of the program's numbers in row 0, and which of them exist
    begin, stop: the first row of the sequence, and the row past its last one
    end:           the length of the sequence, 0 for padding
    is_last:       whether it is the last sequence, which also clears the rows up to `total`
    stride:        from row to row
    """
    first = tl.where(end == 0, begin, stop)
    last = tl.where(is_last, total, stop)
    for i in range(last - first):
        tl.store(cells + (first + i).to(tl.int64) * stride, tl.zeros(cells.shape, cells.dtype.element_ty), mask=keep)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def load_old_or_new(old_cells, new_cells, is_old, keep):
    """The numbers of `old_cells` where `is_old`, else those of `new_cells`; 0 where `keep` is False.

    On NVIDIA GPUs this is one load, from an address that is selected for each element. Triton 3.6 does not compile selected
    addresses for AMD GPUs, so there it is two loads.
    """
    if tl.target_info.is_hip():
        x = tl.load(old_cells, mask=keep & is_old, other=0.0) + tl.load(new_cells, mask=keep & (is_old == 0), other=0.0)
    else:
        x = tl.load(tl.where(is_old, old_cells, new_cells), mask=keep, other=0.0)
    return x
