"""Lists of key blocks in the Hopper kernel: the producer walks them, and tells the consumers which block has arrived.

A tile's rows lie in one block of queries, whose list the producer reads from global memory, one entry ahead of its use. With
each block of K it writes the block's number to shared memory and, for a partial block, where its bits are. The consumers read
only the bits themselves, because they need them in the registers that hold the scores. See `fa_serve.block_lists` for what a
list is.

A listed block of `block_k` keys is copied in `block_k / block_n` key blocks. Numbers and places count key blocks.

Lists that were scanned from a mask (see `fa_serve.backends.mask_blocks`) differ in two ways. Bits are stored at the number of
their block, because the host does not know how many blocks have bits. And a float mask has no bits: for partial blocks, the
consumers load its numbers into the registers that hold the scores.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PAIR_LAYOUT = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
"""A key block's number and bits in the producer's one warp: each thread has both."""


class Lists(NamedTuple):
    """The kernel's arguments about lists. Pointers are None without lists, or without full blocks.

    num, index, full_num, full_index: the tensors of `BlockLists`
    batch, head:       strides in lists, from one sequence and from one list head to the next; 0 if the lists are shared
    heads_per_list:    query heads that share a list
    width, full_width, bits_width: entries per row of index, of full_index and of the bits
    """

    num: gl.tensor
    index: gl.tensor
    full_num: gl.tensor
    full_index: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    heads_per_list: gl.tensor
    width: gl.tensor
    full_width: gl.tensor
    bits_width: gl.tensor


class AddedMask(NamedTuple):
    """The kernel's arguments about a float mask. The pointer is None without a mask, and for a bool mask, which has bits.

    batch, head, row, key: strides
    keys: keys of a sequence, or 0 without a float mask
    """

    mask: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    key: gl.tensor
    keys: gl.tensor


class TileList(NamedTuple):
    """The list of one tile.

    index, full_index: the rows of these tensors; full_index is not read if there are no full blocks
    partial, total:    key blocks of partial blocks, and of all blocks
    bits:              the number of its first key block among all key blocks that have bits
    end:               a key block that lies past the last key
    """

    index: gl.tensor
    full_index: gl.tensor
    partial: gl.tensor
    total: gl.tensor
    bits: gl.tensor
    end: gl.tensor


class KeyBlock(NamedTuple):
    """The keys that are copied at a time.

    number: keys [number * block_n, (number + 1) * block_n) of the sequence
    bits:   (with lists) the number of the key block among all key blocks that have bits, or -1 if its block is full
    """

    number: gl.tensor
    bits: gl.tensor


@gluon.jit
def list_of(tile, sequence, lists, var: gl.constexpr):
    """The list of a tile. If there is no tile, nothing is read, because the number of the sequence is undefined."""
    KEY_BLOCKS: gl.constexpr = var.block_k // var.tiles.block_n
    there = tile.row >= 0
    block = sequence * lists.batch + tile.head // lists.heads_per_list * lists.head + tile.row // var.block_q
    row = gl.where(there, block, 0).to(gl.int64)
    partial = gl.load(lists.num + row, mask=there, other=0) * KEY_BLOCKS
    total = partial
    full_index = lists.index
    if lists.full_num is not None:
        total = partial + gl.load(lists.full_num + row, mask=there, other=0) * KEY_BLOCKS
        full_index = lists.full_index + row * lists.full_width
    end = (tile.kv_len + var.tiles.block_n - 1) // var.tiles.block_n
    bits = row.to(gl.int32) * lists.bits_width * KEY_BLOCKS
    return TileList(lists.index + row * lists.width, full_index, partial, total, bits, end)


@gluon.jit
def listed_key_block(place, of, lists, var: gl.constexpr):
    """The key block at this place of a list, partial blocks first. Past the end of the list, a key block that no row sees."""
    KEY_BLOCKS: gl.constexpr = var.block_k // var.tiles.block_n
    listed = place < of.total
    if lists.full_num is None:
        block = gl.load(of.index + place // KEY_BLOCKS, mask=listed, other=0)
    else:
        block = gl.load(of.index + place // KEY_BLOCKS, mask=place < of.partial, other=0)
        place_of_full = gl.maximum(place - of.partial, 0) // KEY_BLOCKS
        block += gl.load(of.full_index + place_of_full, mask=listed & (place >= of.partial), other=0)
    number = gl.where(listed, block * KEY_BLOCKS + place % KEY_BLOCKS, of.end)
    stored = place if var.mask == "none" else number
    return KeyBlock(number, gl.where(place < of.partial, of.bits + stored, -1))


@gluon.jit
def announce_key_block(key_block, buffer):
    """Write what the consumers need to know of a key block, before its copy is announced at the barrier."""
    i = gl.arange(0, 2, layout=PAIR_LAYOUT)
    buffer.store(gl.where(i == 0, key_block.number, key_block.bits))


@gluon.jit
def read_key_block(buffer, layout: gl.constexpr):
    """What the producer has written for a key block whose keys have arrived."""
    pair = buffer.load(layout)
    i = gl.arange(0, 2, layout=layout)
    return KeyBlock(gl.sum(gl.where(i == 0, pair, 0), 0), gl.sum(gl.where(i == 1, pair, 0), 0))


@gluon.jit
def load_bits(bits_ptr, key_block, row, var: gl.constexpr):
    """The bits of 64 rows for a key block, [64, block_n / 32] words, all set if the block is full; without bits, a placeholder.

    row: the first row of the warpgroup in its sequence. A thread has two rows of scores and whole words of each, so the words
    are loaded into the registers where they are needed.
    """
    KEY_BLOCKS: gl.constexpr = var.block_k // var.tiles.block_n if var.bits else 1
    WORDS: gl.constexpr = var.tiles.block_n // 32
    LAYOUT: gl.constexpr = gl.SliceLayout(2, var.bits_layout)
    if var.bits:
        rows = row % var.block_q + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)), 1)
        columns = gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT)), 0)
        block = (gl.maximum(key_block.bits, 0) // KEY_BLOCKS).to(gl.int64) * (var.block_q * WORDS * KEY_BLOCKS)
        at = rows * (WORDS * KEY_BLOCKS) + key_block.bits % KEY_BLOCKS * WORDS + columns
        return gl.load(bits_ptr + block + at, mask=at * 0 + key_block.bits >= 0, other=-1)
    else:  # noqa: RET505
        return row


@gluon.jit
def first_of_mask(tile, row, added):
    """A pointer to row `row` of a float mask, the first row of a warpgroup; without a float mask, a placeholder."""
    if added.mask is not None:
        at = tile.origin.to(gl.int64) * added.batch + tile.head.to(gl.int64) * added.head + row.to(gl.int64) * added.row
        return added.mask + at
    else:  # noqa: RET505
        return row


@gluon.jit
def load_mask(key_block, limits, added, var: gl.constexpr):
    """The numbers of a float mask for 64 rows and a key block, as `added_scores` takes them. They are 0 in a full block and
    past the end. Without a float mask, the result is a placeholder.

    With `mask_words` they are [64, block_n / 2] words of two numbers, and a thread loads four neighbouring words. In the layout
    of the scores, a thread has only two neighbours of a row, so the loads of a warp would touch eight rows for 16 bytes each.
    Without `mask_words` they are [64, block_n] in the layout of the scores.
    """
    NUMBERS: gl.constexpr = 2 if var.mask_words else 1
    WIDTH: gl.constexpr = var.tiles.block_n // NUMBERS
    LAYOUT: gl.constexpr = var.mask_layout if var.mask_words else var.score_layout
    if var.mask == "float":
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        columns = gl.expand_dims(key_block.number * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT)), 0)
        partial = (row < limits.rows) & (key_block.bits >= 0)
        at = gl.expand_dims(row.to(gl.int64) * added.row, 1) + columns.to(gl.int64) * added.key
        pointers = limits.mask + at
        inside = gl.expand_dims(partial, 1) & (columns < added.keys // NUMBERS)
        if var.mask_words:
            # the compiler cannot know that strides and the end are multiples of four words: they are arguments of a partition
            pointers = gl.max_contiguous(gl.multiple_of(pointers, [1, 16]), [1, 4])
            inside = gl.max_constancy(inside, [1, 4])
        return gl.load(pointers, mask=inside, other=0)
    else:  # noqa: RET505
        return key_block.number


@gluon.jit
def added_scores(loaded, dtype: gl.constexpr, var: gl.constexpr):
    """Convert what `load_mask` has loaded to float32 [64, block_n] in the layout of the scores. Threads that share a row
    exchange words. dtype: the dtype of a mask that was loaded in words"""
    if var.mask_words:
        words = gl.convert_layout(loaded, var.word_layout)
        if dtype == gl.bfloat16:
            first = gl.cast(words << 16, gl.float32, bitcast=True)
            second = gl.cast(words & -65536, gl.float32, bitcast=True)
        else:
            first = gl.cast(words.to(gl.int16), dtype, bitcast=True).to(gl.float32)
            second = gl.cast((words >> 16).to(gl.int16), dtype, bitcast=True).to(gl.float32)
        numbers = gl.join(first, second).reshape([64, var.tiles.block_n])
        return gl.convert_layout(numbers, var.score_layout, assert_trivial=True)
    else:  # noqa: RET505
        return loaded.to(gl.float32)


@gluon.jit
def keep_by_bits(words, var: gl.constexpr):
    """Which scores the bits of 64 rows keep, [64, block_n] in the layout of the scores."""
    PARENT: gl.constexpr = var.bits_layout
    bit = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, PARENT))), 0), 1)
    keep = ((gl.expand_dims(words, 2) >> bit) & 1) != 0
    return gl.convert_layout(keep.reshape([64, var.tiles.block_n]), var.score_layout, assert_trivial=True)
