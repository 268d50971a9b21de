"""The kernel that lists the sequences of a call of the functional form, and their pieces, in the form of a step of the engine.

One launch replaces about forty launches of PyTorch, which took longer than the recurrence of a short prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_serve.launching.launch import Launch
from fa_serve.launching.plans import PLANS
from fa_serve.ops.linear_attention.problem import PIECE_ROWS, Sequences

BLOCK_PIECES = 128
"""Pieces of a program."""
BLOCK_SEQS = 16
"""Sequences that a program reads at a time."""


class SequenceList(NamedTuple):
    """int32 tensors for sequences that begin at position 0.

    bounds:  (num_seqs + 1,): the first row of each sequence, and the row past the last one
    lengths: (num_seqs,)
    own:     (num_seqs,): the numbers of the sequences
    none:    (num_seqs,): -1
    pieces:  (total // PIECE_ROWS + num_seqs, 4), as in `StateBatch`: the last piece of sequence b stores page b. The table has
             room for the most pieces that sequences of `total` rows can need; the entries left over have no rows
    """

    bounds: Tensor
    lengths: Tensor
    own: Tensor
    none: Tensor
    pieces: Tensor


@triton.jit(do_not_specialize=["num_seqs", "seqlen", "num_pieces"])
def _list_sequences(
    bounds_ptr,
    lengths_ptr,
    own_ptr,
    none_ptr,
    piece_ptr,
    given_ptr,
    num_seqs,
    seqlen,
    num_pieces,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """given_ptr: the bounds of packed sequences; None if all sequences have `seqlen` rows"""
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    seq = tl.zeros([BLOCK_P], tl.int32)
    before = tl.zeros([BLOCK_P], tl.int32)  # how many pieces the sequences before that of piece p have
    listed = 0
    for low in range(0, num_seqs, BLOCK_B):
        b = low + tl.arange(0, BLOCK_B)
        exists = b < num_seqs
        if given_ptr is None:
            begin = b * seqlen
            stop = begin + seqlen
        else:
            begin = tl.load(given_ptr + b, mask=exists, other=0)
            stop = tl.load(given_ptr + b + 1, mask=exists, other=0)
        counts = tl.where(exists, (stop - begin + ROWS - 1) // ROWS, 0)
        ends = listed + tl.cumsum(counts, 0)
        passed = exists[None, :] & (ends[None, :] <= p[:, None])
        seq += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, ends[None, :], 0), 1))
        listed += tl.sum(counts, 0)
        if tl.program_id(0) == 0:
            tl.store(bounds_ptr + b, begin, mask=exists)
            tl.store(bounds_ptr + b + 1, stop, mask=b == num_seqs - 1)
            tl.store(lengths_ptr + b, stop - begin, mask=exists)
            tl.store(own_ptr + b, b, mask=exists)
            tl.store(none_ptr + b, tl.zeros([BLOCK_B], tl.int32) - 1, mask=exists)

    there = seq < num_seqs
    if given_ptr is None:
        row = seq * seqlen
        last = row + seqlen
    else:
        row = tl.load(given_ptr + seq, mask=there, other=0)
        last = tl.load(given_ptr + seq + 1, mask=there, other=0)
    row += (p - before) * ROWS
    rows = tl.where(there, tl.minimum(last - row, ROWS), 0)
    page = tl.where(there & (row + rows == last), seq, -1)
    in_table = p < num_pieces
    tl.store(piece_ptr + 4 * p, row, mask=in_table)
    tl.store(piece_ptr + 4 * p + 1, rows, mask=in_table)
    tl.store(piece_ptr + 4 * p + 2, seq, mask=in_table)
    tl.store(piece_ptr + 4 * p + 3, page, mask=in_table)


def list_sequences(sequences: Sequences, total: int, device: torch.device) -> SequenceList:
    """The list of the sequences of `total` rows. Nothing is read back."""
    num_seqs = sequences.num_seqs
    num_pieces = total // PIECE_ROWS + num_seqs
    each = -(-(num_seqs + 1) // 4) * 4  # launches require addresses that are multiples of 16 bytes
    made = torch.empty(4 * (each + num_pieces), dtype=torch.int32, device=device)
    bounds, lengths, own, none = made[: 4 * each].view(4, each).unbind()
    pieces = made[4 * each :].view(num_pieces, 4)
    given = sequences.cu_seqlens
    key = ("list_sequences", num_seqs, sequences.seqlen, num_pieces, given is None, device)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, _plan(num_seqs, sequences.seqlen, num_pieces))
    run((bounds, lengths, own, none, pieces, given))
    return SequenceList(bounds[: num_seqs + 1], lengths[:num_seqs], own[:num_seqs], none[:num_seqs], pieces)


def _plan(num_seqs: int, seqlen: int, num_pieces: int) -> Launch:
    return Launch(
        _list_sequences,
        -(-num_pieces // BLOCK_PIECES),
        varying=(num_seqs, seqlen, num_pieces),
        fixed=(PIECE_ROWS, BLOCK_PIECES, BLOCK_SEQS),
        options={"num_warps": 4},
    )
