"""The kernel that packs rows of many tensors into one tensor, or unpacks them: one program for each piece of each row.

A page of the KV cache is two ranges of memory in each layer. With one launch for all of them, the host's cost does not grow
with the number of layers, and a single copy moves the packed rows to or from host memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch, launch_options
from fa_serve.launching.plans import PLANS
from fa_serve.ops.rows import PIECE_WORDS, RowTable


@triton.jit(do_not_specialize=["num_pieces", "num_words"])
def _move_rows(pieces_ptr, rows_ptr, packed_ptr, num_pieces, num_words, PACK: tl.constexpr, BLOCK: tl.constexpr):
    number = (tl.program_id(0) // num_pieces).to(tl.int64)
    piece_ptr = pieces_ptr + tl.program_id(0) % num_pieces * 4
    stride = tl.load(piece_ptr + 1)
    first = tl.load(piece_ptr + 2)
    size = tl.load(piece_ptr + 3)
    row = tl.load(rows_ptr + number)
    places = tl.arange(0, BLOCK)
    keep = places < size
    words_ptr = tl.load(piece_ptr).to(tl.pointer_type(tl.int64)) + row * stride + places
    packed_ptrs = packed_ptr + number * num_words + first + places
    if PACK:
        tl.store(packed_ptrs, tl.load(words_ptr, mask=keep), mask=keep)
    else:
        tl.store(words_ptr, tl.load(packed_ptrs, mask=keep), mask=keep)


def launch_move_rows(table: RowTable, rows: Tensor, packed: Tensor, pack: bool) -> None:
    """Arguments are those of `fa_serve.ops.move_rows`. One launch."""
    pieces = table.pieces
    key = ("move_rows", len(pieces), table.num_words, len(rows), pack, packed.get_device())
    run = PLANS.get(key)
    if run is None:
        if len(rows) == 0:
            return
        run = Launch(
            _move_rows,
            len(rows) * len(pieces),
            varying=(len(pieces), table.num_words),
            fixed=(pack, PIECE_WORDS),
            options=launch_options(False, 4),
        )
        run = PLANS.add(key, run)
    run((pieces, rows, packed))
