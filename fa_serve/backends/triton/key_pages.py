"""Where the decoding kernel finds the keys and values of a block: in the pages of a cache, or in a dense one.

Address computation was the largest part of that kernel's instructions (see docs/kernels/decode.md), so each relation of page
size to block size has its own, cheapest computation. `var` is the variant of the kernel, such as `decode.kernel.DecodeVariant`.
This module leaves out what is done with keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.backends import MAX_KEYS_PER_TILE

_LIMIT = 1 << 31
"""The first number that does not fit in 32 bits."""


def has_wide_rows(*operands: Tensor, paged: bool, rows: int = MAX_KEYS_PER_TILE) -> bool:
    """Whether a kernel needs 64 bits for the offset of a row within its page or its tile of `rows` rows.

    It does if a page spans 2^31 elements or more, or if tokens are so far apart that its rows do, as where all pages of a cache
    lie between two tokens. Other kernels save instructions with 32 bits. The offset of a tile that is not paged always has 64.
    """
    for x in operands:
        page, token = (x.stride(0), x.stride(1)) if x.dim() == 4 else (0, x.stride(0))
        if max(rows, x.shape[1] if paged else 0) * token >= _LIMIT or (paged and page >= _LIMIT):
            return True
    return False


def has_wide_mask(mask: Tensor | None) -> bool:
    """Whether a column of a mask (batch, heads, queries, keys) may lie 2^31 elements or more after the first column."""
    return mask is not None and mask.shape[3] * mask.stride(3) >= _LIMIT


@triton.jit
def read_pages(table_ptr, block, offs_n, first_key, kv_len, var: tl.constexpr):
    """The page of each key of a block, 0 for keys outside of the sequence or before its window.

    The result is a single number if a page is a whole number of blocks.
    """
    BLOCK_N: tl.constexpr = var.split.block_n
    PAGE_SIZE: tl.constexpr = var.page_size
    if PAGE_SIZE % BLOCK_N == 0:
        owned = (block * BLOCK_N < kv_len) & (block * BLOCK_N + BLOCK_N > first_key)
        index = block * BLOCK_N // PAGE_SIZE
    else:
        cols = block * BLOCK_N + offs_n
        owned = cols < kv_len
        if var.split.has_left:
            owned = owned & (cols >= first_key)
        # Both forms give the same number. In the first, only one term changes from block to block, and all keys share it.
        index = block * (BLOCK_N // PAGE_SIZE) + offs_n // PAGE_SIZE if BLOCK_N % PAGE_SIZE == 0 else cols // PAGE_SIZE
    return tl.load(table_ptr + index, mask=owned, other=0)


@triton.jit
def key_offsets(page, block, offs_n, stride_page, stride_token, var: tl.constexpr):
    """Where the keys of a block lie in the cache, in 64 bits, because caches hold more than 2^31 elements.

    Products within a page have 32 bits unless `has_wide_rows` says that these are not enough.
    """
    BLOCK_N: tl.constexpr = var.split.block_n
    PAGE_SIZE: tl.constexpr = var.page_size
    if var.wide:
        stride_token = tl.cast(stride_token, tl.int64)
    if PAGE_SIZE == 0:
        where = page * stride_page + tl.cast(block * BLOCK_N, tl.int64) * stride_token + offs_n * stride_token
    elif PAGE_SIZE % BLOCK_N == 0:
        slot = tl.cast(block * BLOCK_N % PAGE_SIZE, tl.int64)
        where = page.to(tl.int64) * stride_page + slot * stride_token + offs_n * stride_token
    else:
        if var.ptx and not var.wide:
            # This is one instruction. LLVM takes five, once it has widened the stride ahead of the loop.
            start = tl.inline_asm_elementwise(
                "mul.wide.s32 $0, $1, $2;", "=l,r,r", [page, stride_page], dtype=tl.int64, is_pure=True, pack=1
            )
            if var.aligned:
                start = tl.multiple_of(start, [16] * len(page.shape))
        else:
            start = page.to(tl.int64) * stride_page
        if BLOCK_N % PAGE_SIZE == 0:
            where = start + offs_n % PAGE_SIZE * stride_token
        else:
            where = start + (block * BLOCK_N + offs_n) % PAGE_SIZE * stride_token
    return where
