"""How kernels turn quantised weights into numbers, in registers: shared by dense products and by those of experts.

Weights are read once and become numbers of the input's dtype. A block of 256 columns of 4-bit weights has 8 runs of 32, see
weight.py. `add_products` multiplies tiles of weights with several tokens; `load_units` and `add_row_sums` multiply rows with
one token. VALUES says what the weights are, see `kernel_values`; N is the number of their rows, K that of their columns, and
GROUP the columns that share a scale. The number of equal parts of a block that lie in one group each, and other numbers that
depend only on a product, are in tiles.py. This module leaves out kernels and launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.ops.products.problem import Product
from fa_serve.ops.products.quantised.weight import QuantizedWeight

_VALUES = {"float8": 0, "int4": 1, "float4": 2}


def kernel_values(product: Product) -> int:
    """The constant VALUES of kernels: 0 for float8 numbers, 1 for integers of 4 bits, 2 for e2m1 numbers."""
    return _VALUES[product.values]


def kernel_tensors(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What kernels read of a weight: data, scales, zeros and columns."""
    return weight.data, weight.scales, weight.zeros, weight.columns


@triton.jit
def load_words(data_ptr, rows, block, N: tl.constexpr, K: tl.constexpr, VALUES: tl.constexpr):
    """[BLOCK_N, 32]: the words of a block of 256 columns; nothing is loaded for float8 weights."""
    words = tl.zeros([rows.shape[0], 32], tl.int32)
    if VALUES != 0:
        ROW: tl.constexpr = (K + 255) // 256 * 32
        offsets = rows.to(tl.int64)[:, None] * ROW + block // 8 + tl.arange(0, 32)[None, :]
        words = tl.load(data_ptr + offsets, mask=(rows < N)[:, None] & (block < K), other=0)
    return words


@triton.jit
def scaled_values(words, zero, RUN: tl.constexpr, VALUES: tl.constexpr):
    """The values in the bits 4 * RUN to 4 * RUN + 3 of words, float32 and exact: of integers, (value - zero) * 16^(RUN % 4).

    An integer that is put into the lowest bits of the float32 number 2^23 is thereby added to it. So nothing is converted,
    which would be slow, and the 8 values of a word take one shift. The three lower bits of e2m1, as the lowest bits of
    float32's exponent and the highest of its mantissa, are the number times 2^-126, subnormal or not.
    """
    PLACE: tl.constexpr = RUN % 4
    if VALUES == 2:
        magnitude = words << (22 - 4 * RUN) if RUN < 6 else words >> (4 * RUN - 22)
        bits = (magnitude & 0x01C00000) | ((words << (28 - 4 * RUN)) & -0x80000000)
        values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        word = words if RUN < 4 else words >> 16
        number = ((word & (15 << 4 * PLACE)) | 0x4B000000).to(tl.float32, bitcast=True)
        values = number - (8388608.0 + zero * (1 << 4 * PLACE))
    return values


@triton.jit
def wide_scales(scales):
    """Scales in float32. An integer e stands for 2^(e - 127): it is the exponent of a float32, except that 0 is subnormal."""
    if scales.dtype == tl.uint8:
        wide = tl.where(scales == 0, 0x00400000, scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        wide = scales.to(tl.float32)
    return wide


@triton.jit
def wide_float8(numbers):
    """Float8 numbers in float32. Bytes are read as float8_e4m3fn, for GPUs on which Triton lacks this dtype."""
    if numbers.dtype == tl.uint8:
        byte = numbers.to(tl.int32)
        magnitude = byte & 127
        # exponent and mantissa in float32's places are the number times 2^-120, subnormal or not
        wide = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        wide = tl.where(magnitude == 127, float("nan"), wide)
        wide = tl.where(byte > 127, -wide, wide)
    else:
        wide = numbers.to(tl.float32)
    return wide


@triton.jit
def load_scale(scales_ptr, zeros_ptr, rows, start, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr):
    """[BLOCK_N, 1] float32: the scale and the zero point of the group of column `start`. Without zero points: 8.0."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    group = rows.to(tl.int64) * GROUPS + tl.minimum(start // GROUP, GROUPS - 1)
    scale = wide_scales(tl.load(scales_ptr + group, mask=rows < N, other=0))[:, None]
    zero = 8.0
    if zeros_ptr is not None:
        zero = tl.load(zeros_ptr + group, mask=rows < N, other=0).to(tl.float32)[:, None]
    return scale, zero


@triton.jit
def unpacked_run(
    words,
    data_ptr,
    scale,
    zero,
    rows,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    VALUES: tl.constexpr,
    RUN: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[BLOCK_N, WIDTH] float32: run RUN of a block, the weights in columns start, start + 1, ..., all in one group."""
    if VALUES != 0:
        w = scaled_values(words, zero, RUN, VALUES) * (scale * (1.0 / (1 << 4 * (RUN % 4 if VALUES == 1 else 0))))
    else:
        cols = start + tl.arange(0, WIDTH)
        offsets = rows.to(tl.int64)[:, None] * K + cols[None, :]
        w = wide_float8(tl.load(data_ptr + offsets, mask=(rows < N)[:, None] & (cols < K)[None, :], other=0.0)) * scale
    return w


@triton.jit
def source_columns(columns_ptr, start, K: tl.constexpr, WIDTH: tl.constexpr):
    """[WIDTH]: which elements of the input the columns start, start + 1, ... multiply."""
    cols = start + tl.arange(0, WIDTH)
    if columns_ptr is not None:
        cols = tl.load(columns_ptr + cols, mask=cols < K, other=0)
    return cols


@triton.jit
def add_products(
    acc,
    x_ptr,
    tokens,
    inside,
    data_ptr,
    scales_ptr,
    zeros_ptr,
    columns_ptr,
    rows,
    first,
    last,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """acc [BLOCK_N, BLOCK_M] plus the products of rows of weights with rows of x, over the columns from first to last.

    tokens:  [BLOCK_M] int64, rows of x (any number, K); only those that are `inside` are computed
    rows:    [BLOCK_N], row numbers among the N rows of the weights
    first:   a multiple of 256
    """
    RUNS: tl.constexpr = 256 // WIDTH // PARTS
    for block in tl.range(first, last, 256):
        words = load_words(data_ptr, rows, block, N, K, VALUES)
        for part in tl.static_range(PARTS):
            scale, zero = load_scale(scales_ptr, zeros_ptr, rows, block + part * (256 // PARTS), N, K, GROUP)
            for run in tl.static_range(part * RUNS, part * RUNS + RUNS):
                start = block + WIDTH * run
                keep = (start + tl.arange(0, WIDTH) < K)[:, None] & inside[None, :]
                source = source_columns(columns_ptr, start, K, WIDTH)
                x = tl.load(x_ptr + tokens[None, :] * K + source[:, None], mask=keep, other=0.0)
                w = unpacked_run(words, data_ptr, scale, zero, rows, start, N, K, VALUES, run, WIDTH)
                acc = tl.dot(w.to(x.dtype), x, acc, input_precision="ieee")
    return acc


@triton.jit
def _of_groups(
    ptr, rows, units, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr
):
    """PARTS tensors of [BLOCK_N, UNITS, 1]: the scales or the zero points, (N, groups), of the parts of each unit."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    found = ()
    for part in tl.static_range(PARTS):
        group = tl.minimum((units * UNIT + part * (UNIT // PARTS)) // GROUP, GROUPS - 1)
        offsets = rows.to(tl.int64)[:, None, None] * GROUPS + group[None, :, None]
        found += (tl.load(ptr + offsets, mask=(rows < N)[:, None, None], other=0),)
    return found


@triton.jit
def load_units(
    data_ptr,
    scales_ptr,
    zeros_ptr,
    rows,
    first,
    units,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Everything that is loaded for the units first + units of rows: data, scales and zero points.

    data:   [BLOCK_N, UNITS, 32]: the words of units of 256 columns, or float8 numbers of units of 32 columns
    scales: as `_of_groups` loads them; () if a row has one scale. Zero points have the same form; () if there are none
    """
    UNIT: tl.constexpr = 256 if VALUES != 0 else 32
    ROW: tl.constexpr = (K + 255) // 256 * 32 if VALUES != 0 else K
    UNITS: tl.constexpr = units.shape[0]
    # loaded as a matrix, so that neighbouring threads load neighbouring columns
    cols = first * 32 + tl.arange(0, UNITS * 32)
    keep = (rows < N)[:, None] & (cols < ROW)[None, :]
    data = tl.load(data_ptr + rows.to(tl.int64)[:, None] * ROW + cols[None, :], mask=keep, other=0 if VALUES != 0 else 0.0)
    data = tl.reshape(data, [rows.shape[0], UNITS, 32])
    units += first
    scales = ()
    zeros = ()
    # a row's only scale multiplies its sum
    if GROUP < K:
        scales = _of_groups(scales_ptr, rows, units, N, K, GROUP, UNIT, PARTS)
    if zeros_ptr is not None:
        zeros = _of_groups(zeros_ptr, rows, units, N, K, GROUP, UNIT, PARTS)
    return data, scales, zeros


@triton.jit
def add_row_sums(acc, loaded, xs, VALUES: tl.constexpr, PARTS: tl.constexpr):
    """acc plus the products of loaded weights with xs, a tuple of [UNITS, 32] for each run of 32 columns of a unit.

    acc: [BLOCK_N, UNITS, 32] for 4-bit weights. Sums of float8 weights are [BLOCK_N, UNITS], which takes fewer registers.
    """
    data, scales, zeros = loaded
    if VALUES != 0:
        for part in tl.static_range(PARTS):
            zero = 8.0
            if len(zeros) > 0:
                zero = zeros[part].to(tl.float32)
            total = tl.zeros(acc.shape, tl.float32)
            for run in tl.static_range(part * 8 // PARTS, (part + 1) * 8 // PARTS):
                x = xs[run] * (1.0 / (1 << 4 * (run % 4 if VALUES == 1 else 0)))
                total += scaled_values(data, zero, run, VALUES) * x[None, :, :]
            if len(scales) > 0:
                total *= wide_scales(scales[part])
            acc += total
    else:
        total = tl.sum(wide_float8(data) * xs[0][None, :, :], 2)
        if len(scales) > 0:
            total *= wide_scales(tl.reshape(scales[0], acc.shape))
        acc += total
    return acc


@triton.jit
def row_result(
    acc, scales_ptr, bias_ptr, rows, factor, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, VALUES: tl.constexpr
):
    """[BLOCK_N]: the sums of rows, with the factor of the norm, a row's only scale, and the bias."""
    y = tl.sum(tl.sum(acc, 2), 1) if VALUES != 0 else tl.sum(acc, 1)
    y *= factor
    if GROUP >= K:
        y *= wide_scales(tl.load(scales_ptr + rows, mask=rows < N, other=0))
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    return y
