"""From a float8 cache to the operands of a product, in registers.

Tensor cores before Blackwell multiply float8 by float8 only, and queries need more precision. So keys and values are widened to
float16, which holds every e4m3 number exactly, and bfloat16 queries are scaled by a power of two for each row, so that they
fit into float16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widen(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """A tile of the cache in the dtype of the product. With PTX the conversion of pairs is one instruction."""
    if PTX and x.dtype == tl.float8e4nv and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return x.to(dtype)


@triton.jit
def half_of_pairs(x, SELECT: tl.constexpr):
    """The first (SELECT 0x5410) or the second (0x7632) of two float8 numbers in 16 bits, as float16.

    8-bit numbers that have to be transposed would be read one by one from shared memory. Pairs of columns are read like 16-bit
    numbers: a register then holds two keys of one pair, and a byte permutation puts the two keys of one column side by side.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $1; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b; "
        f"prmt.b32 $0, x, y, {SELECT}; }}",
        "=r,r",
        [x],
        dtype=tl.float16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def fit_float16(q):
    """-> q / 2^e in float16 and 2^e [BLOCK_M], with 1 <= max |q / 2^e| < 2.

    The result is exact for bfloat16 numbers down to 2^-14 of the largest number in the row.
    """
    x = q.to(tl.float32)
    # The exponent bits without the others are a power of two. 0 and the largest exponent have no normal inverse: clamp them.
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)
    return (x * inverse[:, None]).to(tl.float16), exponent.to(tl.float32, bitcast=True)
