"""The scan of an element-wise mask: one pass that finds its empty, full and mixed blocks, and lists them.

    run = plan_over_blocks(plan_block_sparse, tensors, options)     # tensors.mask is not None
    out, lse = run(tensors)

In the first kernel, a program reads one block of 128 x 128 elements once and writes one byte: whether the block is empty, full
or mixed. A bool block is full if it keeps all elements, a float block if all its numbers are 0. A block is empty if it hides
all elements, by False or by numbers that are -inf in base 2, such as -inf and the lowest numbers of float32 and bfloat16. For a
mixed bool block the kernel also writes the bits. The second kernel counts the bytes of a block of queries and writes the two
lists. The host does not wait for the device.

Only the device knows the number of mixed blocks, so there is room for the bits of every block. The bits of a block are stored
at the number of its key block; in lists that a caller passes, they are stored at the block's place in the list. For a mixed
float block, attention kernels read the numbers from the mask and add them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.mask_blocks import SCANNED, SCANNED_BLOCK, ScannedMask
from fa_serve.block_lists import WORD, BlockLists
from fa_serve.launching.launch import Launch, on_device_of, power_of_2
from fa_serve.launching.plans import Run

EMPTY = tl.constexpr(0)
MIXED = tl.constexpr(1)
FULL = tl.constexpr(2)
HIDDEN = tl.constexpr(-2.4e38)
"""This number and lower numbers hide a key: kernels compute in base 2, and their products with log2(e) are -inf in float32."""
_LISTED_AT_A_TIME = 1024
"""Key blocks whose kinds a program of the second kernel reads at a time: 131,072 keys."""


@triton.jit
def _kind_of(seen, changed):
    """The kind of a block, or of some of its rows. `seen`: elements that the mask does not hide; `changed`: elements that it
    hides or changes. Both counts are at most 2^14, so one sum holds both."""
    counts = tl.sum(tl.sum(seen.to(tl.int32) + changed.to(tl.int32) * 65536, 1), 0)
    kind = MIXED
    if counts >> 16 == 0:
        kind = FULL
    if counts & 65535 == 0:
        kind = EMPTY
    return kind


@triton.jit
def _kind_of_rows(block_ptr, rows, keys, stride_q, stride_k, ADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The kind of the first rows of a block, element by element. ADDED: the mask is added to the scores."""
    row = tl.arange(0, ROWS)[:, None]
    key = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (key < keys)
    given = tl.load(block_ptr + row.to(tl.int64) * stride_q + key.to(tl.int64) * stride_k, mask=inside, other=0)
    if ADDED:
        hidden = given.to(tl.float32) <= HIDDEN  # False for a NaN
        kind = _kind_of(inside & (hidden == 0), inside & (given != 0))
    else:
        kind = _kind_of(given != 0, inside & (given == 0))
    return kind


@triton.jit
def _or(first, second):
    return first | second


@triton.jit
def _and(first, second):
    return first & second


@triton.jit
def _kind_of_words(words_ptr, rows, keys, stride_q, BLOCK: tl.constexpr):
    """The kind of a block of a bool mask, in words of four elements, which are combined by OR and by AND.

    It takes one instruction to combine two words, so the memory is the limit, not the arithmetic. A byte that is True is 1.
    """
    row = tl.arange(0, BLOCK)[:, None]
    word = tl.arange(0, BLOCK // 4)[None, :]
    inside = (row < rows) & (word < keys // 4)
    given = tl.load(words_ptr + row.to(tl.int64) * (stride_q // 4) + word, mask=inside, other=0)
    some = tl.reduce(given, None, _or)
    if (rows < BLOCK) | (keys < BLOCK):
        given = tl.where(inside, given, 0x01010101)
    every = tl.reduce(given, None, _and)
    kind = MIXED
    if every & 0x01010101 == 0x01010101:
        kind = FULL
    if some == 0:
        kind = EMPTY
    return kind


@triton.jit
def _store_bits(bits_ptr, block_ptr, rows, keys, stride_q, stride_k, BLOCK: tl.constexpr):
    """The bits of a block of a bool mask, in words of 32."""
    WORDS: tl.constexpr = BLOCK // 32
    # a row of words of 32 elements, so that bits are packed without an exchange between distant threads
    bit = tl.arange(0, 32)[None, None, :]
    row = tl.arange(0, BLOCK)[:, None, None]
    key = tl.arange(0, WORDS)[None, :, None] * 32 + bit
    given_ptrs = block_ptr + row.to(tl.int64) * stride_q + key.to(tl.int64) * stride_k
    given = tl.load(given_ptrs, mask=(row < rows) & (key < keys), other=0)
    words = tl.sum((given != 0).to(tl.int32) << bit, 2)
    at = tl.arange(0, BLOCK)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    tl.store(bits_ptr + at, words)


@triton.jit(do_not_specialize=["heads", "seqlen_q", "query_blocks", "key_blocks"])
def _classify_blocks(
    mask_ptr,
    words_ptr,
    kinds_ptr,
    bits_ptr,
    heads,
    seqlen_q,
    query_blocks,
    key_blocks,
    seqlen_k,
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    BLOCK: tl.constexpr,
):
    """One program: the kind of one block, and its bits if it is a mixed block of a bool mask.

    words_ptr: a bool mask as int32 words of four elements, so that one instruction handles four elements; or None
    """
    WORDS: tl.constexpr = BLOCK // 32
    program = tl.program_id(0)
    key_block = program % key_blocks
    list_row = program // key_blocks
    query_block = list_row % query_blocks
    batch_head = list_row // query_blocks
    first = (batch_head // heads).to(tl.int64) * stride_b + (batch_head % heads).to(tl.int64) * stride_h
    first += query_block.to(tl.int64) * BLOCK * stride_q
    block_ptr = mask_ptr + first + key_block.to(tl.int64) * BLOCK * stride_k
    rows = seqlen_q - query_block * BLOCK
    keys = seqlen_k - key_block * BLOCK
    if words_ptr is not None:
        kind = _kind_of_words(words_ptr + first // 4 + key_block * (BLOCK // 4), rows, keys, stride_q, BLOCK)
    else:
        kind = MIXED
        if bits_ptr is None:  # in most biases, a few rows show that the block is mixed
            kind = _kind_of_rows(block_ptr, rows, keys, stride_q, stride_k, bits_ptr is None, 8, BLOCK)
        if (kind != MIXED) | (bits_ptr is not None):
            kind = _kind_of_rows(block_ptr, rows, keys, stride_q, stride_k, bits_ptr is None, BLOCK, BLOCK)
    tl.store(kinds_ptr + program, kind)
    if bits_ptr is not None:  # noqa: SIM102  # known when the kernel is compiled, unlike the kind
        if kind == MIXED:
            _store_bits(bits_ptr + program.to(tl.int64) * (BLOCK * WORDS), block_ptr, rows, keys, stride_q, stride_k, BLOCK)


@triton.jit(do_not_specialize=["key_blocks"])
def _list_blocks(kinds_ptr, num_ptr, index_ptr, full_num_ptr, full_index_ptr, key_blocks, CHUNK: tl.constexpr):
    """One program: both lists of one block of queries, in the order of keys."""
    list_row = tl.program_id(0)
    first = list_row.to(tl.int64) * key_blocks
    mixed_before = 0
    full_before = 0
    for start in range(0, key_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        kinds = tl.load(kinds_ptr + first + block, mask=block < key_blocks, other=EMPTY)
        mixed = (kinds == MIXED).to(tl.int32)
        full = (kinds == FULL).to(tl.int32)
        mixed_place = mixed_before + tl.cumsum(mixed, 0) - 1
        full_place = full_before + tl.cumsum(full, 0) - 1
        tl.store(index_ptr + first + mixed_place, block, mask=mixed != 0)
        tl.store(full_index_ptr + first + full_place, block, mask=full != 0)
        mixed_before += tl.sum(mixed, 0)
        full_before += tl.sum(full, 0)
    tl.store(num_ptr + list_row, mixed_before)
    tl.store(full_num_ptr + list_row, full_before)


class MaskScan:
    """The scan of masks that look like this one: bool or floating point, broadcastable to (batch, num_heads, queries, keys).

    rows: numbers of sequences, heads and blocks of queries that have separate lists
    """

    def __init__(self, mask: Tensor, seqlen_q: int, seqlen_k: int) -> None:
        strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
        # an expanded dimension repeats the same mask, so one set of lists serves all its indices
        batch, heads = (size if stride else 1 for size, stride in zip(mask.shape[:2], strides[:2], strict=True))
        query_blocks = -(-seqlen_q // SCANNED_BLOCK)
        key_blocks = -(-seqlen_k // SCANNED_BLOCK)
        self.rows = (batch, heads, query_blocks)
        self._key_blocks = key_blocks
        self._has_bits = mask.dtype == torch.bool
        count = batch * heads * query_blocks
        self._fills_words = self._has_bits and strides[3] == 1 and all(n % 4 == 0 for n in (seqlen_k, *mask.stride()[:3]))
        # without the words of a mask, and with them: at each call of a launch, the same tensors must be None
        self._classify, self._classify_words = (
            Launch(
                _classify_blocks,
                count * key_blocks,
                varying=(heads, seqlen_q, query_blocks, key_blocks),
                # elements are loaded 16 at a time if the compiler knows that no group of 16 crosses the end
                strides=(seqlen_k, *strides),
                fixed=(SCANNED_BLOCK,),
                options={"num_warps": 4},
            )
            for _ in range(2)
        )
        self._list = Launch(
            _list_blocks,
            count,
            varying=(key_blocks,),
            fixed=(min(power_of_2(key_blocks), _LISTED_AT_A_TIME),),
            options={"num_warps": 1},
        )

    def lists_on(self, device: torch.device | str) -> BlockLists:
        """Uninitialised lists with the shapes of this scan."""

        def new(*shape: int) -> Tensor:
            return torch.empty(*self.rows, *shape, dtype=torch.int32, device=device)

        width = self._key_blocks
        bits = new(width, SCANNED_BLOCK, SCANNED_BLOCK // WORD) if self._has_bits else None
        return BlockLists(new(), new(width), new(), new(width), (SCANNED_BLOCK, SCANNED_BLOCK), bits)

    def __call__(self, mask: Tensor) -> ScannedMask:
        """Scan a mask by two launches on the current stream, without waiting for them."""
        lists = self.lists_on(mask.device)
        num, index, full_num, full_index, bits = lists.tensors
        kinds = torch.empty(*self.rows, self._key_blocks, dtype=torch.uint8, device=mask.device)
        elements = mask.view(torch.uint8) if self._has_bits else mask
        if self._fills_words and mask.storage_offset() % 4 == 0:
            self._classify_words((elements, elements.view(torch.int32), kinds, bits))
        else:
            self._classify((elements, None, kinds, bits))
        self._list((kinds, num, index, full_num, full_index))
        return ScannedMask(lists, kinds)


def plan_over_blocks(plan: Callable[[Any, AttentionOptions], Run], tensors: AttentionTensors, options: AttentionOptions) -> Run:
    """Plan a dense call with a mask. plan: for a kernel that takes lists together with their mask (see `AttentionTensors`)"""
    assert tensors.mask is not None
    scan = MaskScan(tensors.mask, options.max_seqlen_q, options.max_seqlen_k)
    run_over_lists = plan(tensors._replace(blocks=scan.lists_on("meta")), options)

    def run(tensors: AttentionTensors) -> tuple[Tensor, Tensor | None]:
        mask = tensors.mask
        assert mask is not None
        blocks = scan_once(mask, scan).lists
        if mask.is_floating_point() and mask.data_ptr() & 15:
            mask = _at_aligned_address(mask)
        result: tuple[Tensor, Tensor | None] = run_over_lists(tensors._replace(mask=mask, blocks=blocks))
        return result

    return run


def _at_aligned_address(mask: Tensor) -> Tensor:
    """A copy with the same strides at a multiple of 16 bytes, as kernels that load several numbers together need it."""
    held = mask[tuple([slice(None) if stride else slice(1) for stride in mask.stride()])]
    copy = torch.empty_strided(held.shape, held.stride(), dtype=mask.dtype, device=mask.device)
    return copy.copy_(held).expand(mask.shape)


def scan_once(mask: Tensor, scan: MaskScan) -> ScannedMask:
    """The result of the scan of this mask, kept from an earlier call if there was one."""
    stream = 0
    if mask.is_cuda:
        with on_device_of(mask):
            if torch.cuda.is_current_stream_capturing():
                return scan(mask)
        stream = driver.active.get_current_stream(mask.get_device())
    return SCANNED.find(mask, stream) or SCANNED.keep(mask, stream, scan(mask))
