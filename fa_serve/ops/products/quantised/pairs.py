"""How kernels for Hopper turn quantised weights into pairs of 16-bit numbers in registers, where tensor cores expect them.

    w = weights_of_half(words, zeros, scales, layout, UPPER, VALUES, HALF)       # [BLOCK_N, 128] of a block of 256

A 32-bit register holds the numbers of two neighbouring columns, so one instruction serves two weights. A pair of 4-bit integers
becomes 16 + value in two instructions, and the zero point is subtracted, which is exact. A pair of e2m1 or float8 numbers is
put into the exponents and mantissas of 16-bit numbers, and one multiplication, which is exact, restores the exponents. Then the
scale multiplies, and the result is rounded. With the scale, a weight takes 2 instructions for integers, 3 for e2m1 and 2.5 for
float8. VALUES is that of `primitives.kernel_values`, and HALF says whether numbers are float16. A NaN in float8 becomes 480.
Left out: kernels (gemv.py, unpack_wgmma.py, moe/unpack_wgmma.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_serve.ops.products.quantised.weight import QuantizedWeight


@gluon.constexpr_function
def word_layout(BLOCK_N, WARPS, WORDS, PAIRS=False):
    """The layout of [BLOCK_N, WORDS] words of two neighbouring columns, in which a thread has the weights that `wgmma` expects.

    PAIRS: the layout is one of [BLOCK_N, 2 * WORDS], in which two neighbouring elements take the place of one word
    """
    warps = []
    row = 16
    while row < 16 * WARPS:
        warps.append([row, 0])
        row *= 2
    unit = 2 if PAIRS else 1
    registers = [[0, 1]] if PAIRS else []
    word = 4
    while word < WORDS:
        registers.append([0, word * unit])
        word *= 2
    registers.append([8, 0])
    while row < BLOCK_N:
        registers.append([row, 0])
        row *= 2
    lanes = [[0, unit], [0, 2 * unit], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, WORDS * unit])


@gluon.jit
def both_numbers(pairs, HALF: gl.constexpr):
    """[...] int32 -> [..., 2]: the numbers in the lower and in the upper half."""
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    lower = pairs.to(gl.int16).to(dtype, bitcast=True)
    upper = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(lower, upper)


@gluon.jit
def pairs_of_float8(words, UPPER: gl.constexpr, HALF: gl.constexpr):
    """int32: two numbers of the lower or the upper two bytes of words, exact. HALF: whether in float16."""
    SELECT: gl.constexpr = "0xb3a2" if UPPER else "0x9180"
    MOVE: gl.constexpr = (
        "shl.b32 t, t, 7; and.b32 t, t, 0xbf80bf80; mul.rn.f16x2 $0, t, $2; }"
        if HALF
        else "shl.b32 t, t, 4; and.b32 t, t, 0x87f087f0; mul.rn.bf16x2 $0, t, $2; }"
    )
    ASM: gl.constexpr = "{ .reg .b32 t; prmt.b32 t, $1, 0, " + SELECT + "; " + MOVE
    # 2^8 or 2^120, in both halves: the difference between the exponent biases
    factor = 0x5C005C00 if HALF else 0x7B807B80
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [words, factor], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pairs_of_float4(words, RUN: gl.constexpr):
    """int32: two e2m1 numbers in bfloat16, of the bits 4 * RUN to 4 * RUN + 3 of each half of words, exact.

    The three lower bits become the lowest bits of the exponent and the highest of the mantissa: the number times 2^-126.
    """
    SHIFT: gl.constexpr = 6 - 4 * RUN
    SIGN: gl.constexpr = 12 - 4 * RUN
    MOVE: gl.constexpr = f"shl.b32 t, $1, {SHIFT}; " if SHIFT >= 0 else f"shr.u32 t, $1, {-SHIFT}; "
    ASM: gl.constexpr = (
        "{ .reg .b32 t, s; "
        + MOVE
        + f"and.b32 t, t, 0x01c001c0; shl.b32 s, $1, {SIGN}; lop3.b32 t, s, $3, t, 0xea; mul.rn.bf16x2 $0, t, $2; "
        + "}"
    )
    # 2^126 and the signs, in both halves; negative because they are int32
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [words, 0x7E807E80, -0x7FFF8000], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pairs_of_int4(words, zero, RUN: gl.constexpr, HALF: gl.constexpr):
    """int32: two integers of the bits 4 * RUN to 4 * RUN + 3 of each half of words minus the zero point, exact.

    zero: 16 + zero point, in both halves
    """
    PLACE: gl.constexpr = 6 if HALF else 3
    SHIFT: gl.constexpr = PLACE - 4 * RUN
    MOVE: gl.constexpr = f"shl.b32 t, $1, {SHIFT}; " if SHIFT >= 0 else f"shr.u32 t, $1, {-SHIFT}; "
    MASK: gl.constexpr = "0x03c003c0" if HALF else "0x00780078"
    KIND: gl.constexpr = "f16x2" if HALF else "bf16x2"
    ASM: gl.constexpr = "{ .reg .b32 t; " + MOVE + f"lop3.b32 t, t, {MASK}, $3, 0xea; sub.rn.{KIND} $0, t, $2; " + "}"
    sixteen = 0x4C004C00 if HALF else 0x41804180
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [words, zero, sixteen], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def scaled(pairs, scale, HALF: gl.constexpr):
    """int32: pairs of numbers times the scale in both halves, rounded."""
    ASM: gl.constexpr = "mul.rn.f16x2 $0, $1, $2;" if HALF else "mul.rn.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [pairs, scale], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def words_of_half(words, LAYOUT: gl.constexpr, UPPER: gl.constexpr):
    """Words [BLOCK_N, 32] of a block -> [BLOCK_N, 16]: half of the block. The halves of a word are neighbouring columns."""
    even, odd = gl.split(gl.reshape(words, [words.shape[0], 16, 2]))
    if UPPER:
        t = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        t = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
        )
    return gl.convert_layout(t, LAYOUT)


@gluon.jit
def bytes_of_runs(bytes_, LAYOUT: gl.constexpr):
    """Four tensors [BLOCK_N, 16] int32 of 32 columns each, two float8 numbers in the lower half. bytes_: [BLOCK_N, 64] int16"""
    split = gl.permute(gl.reshape(bytes_.to(gl.int32), [bytes_.shape[0], 2, 2, 16]), (0, 3, 1, 2))
    even, odd = gl.split(split)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, LAYOUT),
        gl.convert_layout(second, LAYOUT),
        gl.convert_layout(third, LAYOUT),
        gl.convert_layout(fourth, LAYOUT),
    )


@gluon.jit
def weights_of_half(words, zeros, scales, LAYOUT: gl.constexpr, UPPER: gl.constexpr, VALUES: gl.constexpr, HALF: gl.constexpr):
    """[BLOCK_N, 128]: the weights of columns 0 to 127 of a block, or with UPPER of columns 128 to 255.

    words:  for 4-bit values the words of the block, [BLOCK_N, 32] int32; for float8 those of the half, [BLOCK_N, 64] int16
    scales: a tuple of [BLOCK_N, 1] int32, one for each equal part of the half; () leaves float8 numbers and integers unscaled
    zeros:  zero points of integers in the same form, or ()
    LAYOUT: layout of [BLOCK_N, 16] words
    """
    PARTS: gl.constexpr = len(scales)
    runs = bytes_of_runs(words, LAYOUT) if VALUES == 0 else (words_of_half(words, LAYOUT, UPPER),)
    pairs = ()
    for run in gl.static_range(4):
        t = runs[run if VALUES == 0 else 0]
        if VALUES == 0:
            pair = pairs_of_float8(t, False, HALF)
        elif VALUES == 2:
            pair = pairs_of_float4(t, run)
        else:
            zero, _ = gl.broadcast(zeros[run * len(zeros) // 4], t)
            pair = pairs_of_int4(t, zero, run, HALF)
        if PARTS > 0:
            scale, _ = gl.broadcast(scales[run * PARTS // 4], t)
            pair = scaled(pair, scale, HALF)
        pairs += (pair,)
    joined = gl.join(gl.join(pairs[0], pairs[2]), gl.join(pairs[1], pairs[3]))  # type: ignore[misc]
    return gl.reshape(gl.permute(both_numbers(joined, HALF), (0, 2, 3, 1, 4)), [words.shape[0], 128])


@gluon.jit
def load_scales(ptr, offsets, start, GROUPS: gl.constexpr, GROUP: gl.constexpr, VALUES: gl.constexpr, HALF: gl.constexpr):
    """Tensors [BLOCK_N, 1] int32: the scales of the equal parts of the 128 columns from `start` on, in both halves.

    offsets: [BLOCK_N], the offset of each row's first scale

    A scale of e8m0 is the exponent of a bfloat16. 0 stands for 2^-127, which is subnormal.
    """
    dtype: gl.constexpr = gl.float16 if HALF else gl.bfloat16
    WIDTH: gl.constexpr = min(GROUP, 128)
    found = ()
    for part in gl.static_range(128 // WIDTH):
        group = gl.minimum((start + part * WIDTH) // GROUP, GROUPS - 1)
        scale = gl.load(ptr + offsets + group)
        if VALUES == 2:
            bits = scale.to(gl.int32)
            bits = gl.where(bits == 0, 0x40, bits << 7)
        else:
            bits = scale.to(dtype).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        found += (gl.expand_dims(bits | (bits << 16), 1),)
    return found


@gluon.jit
def load_zeros(
    ptr,
    offsets,
    start,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    VALUES: gl.constexpr,
    HALF: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """As `load_scales`, for 16 + the zero points of integers; () for other values. LAYOUT: layout of [BLOCK_N, 1]"""
    # a zero point below 16 is the highest bits of the mantissa of 16 + itself
    SIXTEEN: gl.constexpr = 0x4C00 if HALF else 0x4180
    PLACE: gl.constexpr = 6 if HALF else 3
    EIGHT: gl.constexpr = (8 << PLACE | SIXTEEN) * 0x10001
    WIDTH: gl.constexpr = min(GROUP, 128)
    found = ()
    if VALUES == 1:
        for part in gl.static_range(128 // WIDTH):
            if ptr is not None:
                group = gl.minimum((start + part * WIDTH) // GROUP, GROUPS - 1)
                bits = (gl.load(ptr + offsets + group).to(gl.int32) << PLACE) | SIXTEEN
                found += (gl.expand_dims(bits | (bits << 16), 1),)
            else:
                found += (gl.full([offsets.shape[0], 1], EIGHT, gl.int32, layout=LAYOUT),)
    return found


def product_tensors(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """What these kernels read of a weight: data, scales and zero points. Float8 numbers are read in pairs."""
    data = weight.data if weight.is_packed else weight.data.view(torch.int16)
    return data, weight.scales, weight.zeros


def product_input(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x with its columns in the weight's order, and at an address from which 16 bytes at a time can be copied. (m, k)"""
    if weight.columns is not None:
        return x.index_select(1, weight.columns)
    return x.clone() if x.data_ptr() % 16 else x
