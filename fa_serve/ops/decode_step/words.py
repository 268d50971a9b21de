"""Device functions of the persistent kernel: numbers that carry the layer which wrote them.

A word has a number and a tag. Who needs the number reads the word until it has the tag of its layer, so no fence, no
counter and no barrier lies between a store and its use: a number takes one store and one load (as the protocol LL of NCCL).
Numbers of 16 bits are the upper half of words of 32 bits with tags of 16 bits. Numbers of float32 are the lower half of
words of 64 bits. Each word is written in each layer, so what is there before has the tag before, and 16 bits are enough.

Stores and loads of words are single accesses of 32 or 64 bits, and nothing else is inferred from a tag. On NVIDIA GPUs each
thread reads its own words again until they are there (inline PTX); else, all threads do until all words are there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_words(words_ptr, y, tag, keep, DTYPE: tl.constexpr):
    """Store numbers, which are rounded to `DTYPE` before, with a tag."""
    bits = y.to(DTYPE).to(tl.float32).to(tl.int32, bitcast=True)
    if words_ptr.dtype.element_ty == tl.int32:
        tl.store(words_ptr, bits | tag, mask=keep)
    else:
        tl.store(words_ptr, bits.to(tl.int64) & 0xFFFFFFFF | tag.to(tl.int64) * 0x100000000, mask=keep)


@triton.jit
def _tags_of(words):
    if words.dtype == tl.int32:
        return words & 0xFFFF
    else:  # noqa: RET505 - what follows a return is compiled as well
        return (words >> 32).to(tl.int32)


@triton.jit
def _numbers_of(words):
    if words.dtype == tl.int32:
        return (words & -65536).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def poll_words(ptrs, tag, keep):
    """float32 numbers of words, as soon as all of them have a tag. keep: others are 0"""
    words = tl.load(ptrs, mask=keep, other=0, volatile=True)
    late = tl.max((keep & (_tags_of(words) != tag)).to(tl.int32))
    while late > 0:
        words = tl.load(ptrs, mask=keep, other=0, volatile=True)
        late = tl.max((keep & (_tags_of(words) != tag)).to(tl.int32))
    return tl.where(keep, _numbers_of(words), 0.0)


@triton.jit
def _eights(parts):
    """Eight tensors of numbers -> [..., 2, 2, 2], whose neighbours are those of one thread."""
    even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
    odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
    return tl.join(even, odd)


@triton.jit
def poll_eights(words_ptr, places, tag, keep, var: tl.constexpr):
    """float32 numbers [1, 8 * groups] of eight words from each of the places [1, groups] on, and the sums of eight squares.

    The squares are summed before the numbers are joined: a second use of them would be another layout, and a way through shared
    memory.
    """
    COLUMNS: tl.constexpr = places.shape[1] * 8
    if var.bulk and words_ptr.dtype.element_ty == tl.int32:
        # the results of a loop keep their layout; the statement alone would be repeated for each layout that a user prefers
        a = tl.zeros([1, places.shape[1]], tl.float32)
        b = a
        c = a
        d = a
        e = a
        f = a
        g = a
        h = a
        rounds = 0
        while rounds < 1:
            rounds += 1
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                """{
                    .reg .pred %some, %late;
                    .reg .b32 %a, %b;
                    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
                    mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;
                    setp.ne.b32 %some, $10, 0;
                    @!%some bra behind;
                again:
                    ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$8];
                    ld.relaxed.gpu.global.v4.b32 {$4, $5, $6, $7}, [$8+16];
                    xor.b32 %a, $0, $9; xor.b32 %b, $1, $9; or.b32 %a, %a, %b;
                    xor.b32 %b, $2, $9; or.b32 %a, %a, %b;
                    xor.b32 %b, $3, $9; or.b32 %a, %a, %b;
                    xor.b32 %b, $4, $9; or.b32 %a, %a, %b;
                    xor.b32 %b, $5, $9; or.b32 %a, %a, %b;
                    xor.b32 %b, $6, $9; or.b32 %a, %a, %b;
                    xor.b32 %b, $7, $9; or.b32 %a, %a, %b;
                    and.b32 %a, %a, 65535;
                    setp.ne.b32 %late, %a, 0;
                    @%late bra again;
                    and.b32 $0, $0, -65536; and.b32 $1, $1, -65536; and.b32 $2, $2, -65536; and.b32 $3, $3, -65536;
                    and.b32 $4, $4, -65536; and.b32 $5, $5, -65536; and.b32 $6, $6, -65536; and.b32 $7, $7, -65536;
                behind:
                }""",
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,r,r",
                [words_ptr + places, tag, keep.to(tl.int32)],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        squares = a * a + b * b + c * c + d * d + e * e + f * f + g * g + h * h
        return tl.reshape(_eights((a, b, c, d, e, f, g, h)), [1, COLUMNS]), squares
    else:  # noqa: RET505
        ptrs = words_ptr + (places[:, :, None] + tl.arange(0, 8)[None, None, :])
        x = poll_words(ptrs, tag, keep[:, :, None] & (ptrs.to(tl.int64) != 0))
        return tl.reshape(x, [1, COLUMNS]), tl.sum(x * x, 2)


@triton.jit
def poll_three(a_ptrs, b_ptrs, c_ptrs, tag, keep, var: tl.constexpr):
    """float32 numbers of words at three tensors of pointers, which are waited for together."""
    NARROW: tl.constexpr = a_ptrs.dtype.element_ty == tl.int32
    if var.bulk and NARROW:
        a = tl.zeros(keep.shape, tl.float32)
        b = a
        c = a
        rounds = 0
        while rounds < 1:
            rounds += 1
            a, b, c = tl.inline_asm_elementwise(
                """{
                    .reg .pred %some, %late;
                    .reg .b32 %a, %b;
                    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;
                    setp.ne.b32 %some, $7, 0;
                    @!%some bra behind;
                again:
                    ld.relaxed.gpu.global.b32 $0, [$3];
                    ld.relaxed.gpu.global.b32 $1, [$4];
                    ld.relaxed.gpu.global.b32 $2, [$5];
                    xor.b32 %a, $0, $6;
                    xor.b32 %b, $1, $6; or.b32 %a, %a, %b;
                    xor.b32 %b, $2, $6; or.b32 %a, %a, %b;
                    and.b32 %a, %a, 65535;
                    setp.ne.b32 %late, %a, 0;
                    @%late bra again;
                    and.b32 $0, $0, -65536; and.b32 $1, $1, -65536; and.b32 $2, $2, -65536;
                behind:
                }""",
                "=&r,=&r,=&r,l,l,l,r,r",
                [a_ptrs, b_ptrs, c_ptrs, tag, keep.to(tl.int32)],
                dtype=(tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        return a, b, c
    elif var.bulk:  # noqa: RET505
        a = tl.zeros(keep.shape, tl.float32)
        b = a
        c = a
        rounds = 0
        while rounds < 1:
            rounds += 1
            a, b, c = tl.inline_asm_elementwise(
                """{
                    .reg .pred %some, %late;
                    .reg .b32 %a, %b, %c;
                    .reg .b64 %x, %y, %z;
                    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0;
                    setp.ne.b32 %some, $7, 0;
                    @!%some bra behind;
                again:
                    ld.relaxed.gpu.global.b64 %x, [$3];
                    ld.relaxed.gpu.global.b64 %y, [$4];
                    ld.relaxed.gpu.global.b64 %z, [$5];
                    mov.b64 {$0, %a}, %x;
                    mov.b64 {$1, %b}, %y;
                    mov.b64 {$2, %c}, %z;
                    xor.b32 %a, %a, $6;
                    xor.b32 %b, %b, $6; or.b32 %a, %a, %b;
                    xor.b32 %c, %c, $6; or.b32 %a, %a, %c;
                    setp.ne.b32 %late, %a, 0;
                    @%late bra again;
                behind:
                }""",
                "=&r,=&r,=&r,l,l,l,r,r",
                [a_ptrs, b_ptrs, c_ptrs, tag, keep.to(tl.int32)],
                dtype=(tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        return a, b, c
    else:
        return poll_words(a_ptrs, tag, keep), poll_words(b_ptrs, tag, keep), poll_words(c_ptrs, tag, keep)
