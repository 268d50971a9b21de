"""Float8 probabilities of the Hopper kernel, four in a register from the softmax of a block to its product with V.

Triton keeps a float8 tensor that a loop carries as single bytes. Each iteration would take the registers of P apart and put
them together again, which is 187 of 665 instructions for a block of 128 keys. So the loop carries P as integers of four
numbers each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_PACK = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {high, low}; }"
)
"""Round four numbers and put them into a register, the second pair first."""
_SWAP_HALVES = gl.constexpr("prmt.b32 $0, $1, $1, 0x1032;")
FLOAT8_SHIFT = gl.constexpr(8.0)
"""Float8 probabilities are multiplied by 2 to this power: the greatest becomes 256, and those down to 2^-17 of it are kept."""


@gluon.jit
def pack_probabilities(p, var: gl.constexpr):
    """P in float32 [64, block_n] -> int32 [64, block_n / 4].

    A thread has pairs of neighbours, but the product with V takes groups of four from it: of every 16 keys, key 8 h + 2 t + i
    moves to position 4 t + 2 h + i. V is stored with its keys in this order.
    """
    BLOCK_N: gl.constexpr = var.tiles.block_n
    groups = p.reshape([64, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, BLOCK_N // 4, 2, 2])
    even, odd = gl.split(groups)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    given = [first, second, third, fourth]
    return gl.inline_asm_elementwise(_PACK, "=r,f,f,f,f", given, dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _byte(packed, number: gl.constexpr):
    return gl.cast((packed >> (8 * number)).to(gl.int8), gl.float8e4nv, bitcast=True)


@gluon.jit
def unpack_probabilities(packed, var: gl.constexpr):
    """What `pack_probabilities` returned -> P in float8 [64, block_n], the left operand of the product with V.

    Each register takes one instruction, which puts the pairs in order and writes them to another register. Without it, the next
    block's P would be computed in the registers that a product still reads, and ptxas would wait for each product.
    """
    packed = gl.inline_asm_elementwise(_SWAP_HALVES, "=r,r", [packed], dtype=gl.int32, is_pure=False, pack=1)
    left = gl.join(_byte(packed, 0), _byte(packed, 1))
    right = gl.join(_byte(packed, 2), _byte(packed, 3))
    p = gl.join(left, right).permute((0, 1, 3, 2)).reshape([64, var.tiles.block_n])
    return gl.convert_layout(p, var.probability_layout)
