"""The layout of the buffers that the ranks share, and how the kernels of sums see them.

    one-shot flags | two halves for one-shot messages | two halves for pushed sums, only with two ranks

With two ranks, the flags of pushed sums follow the one-shot flags, within the first FLAG_BYTES. Calls use the halves in turn.
Left out: who makes the buffers (peer_memory.py), and the kernels (one_shot.py, pushed_sum.py).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAX_BYTES = 2 << 20
"""Size of the largest one-shot message, and of each half of the one-shot buffer. Larger messages would take too much of the
link, because each rank reads the whole message of every rank."""
MAX_WIDTH = 16384
"""The most numbers of a row: a program keeps a row in registers."""
MAX_RANKS = 8
"""The most ranks. With more, each rank would read too much."""
MAX_PROGRAMS = 512
FLAG_BYTES = MAX_PROGRAMS * MAX_RANKS * 8
"""Size of the flags at the beginning of a buffer. The one-shot flags are int64, [program][rank that writes it]."""
PUSHED_RANKS = 2
"""The number of ranks that add larger messages by pushing. With more ranks, each would send more bytes than with NCCL."""
PUSHED_FLAGS = MAX_PROGRAMS * PUSHED_RANKS * 8
"""Where the flags of pushed sums begin in a buffer, after the one-shot flags of two ranks: int64, [program]."""
PUSHED_FIRST_BYTE = FLAG_BYTES + 2 * MAX_BYTES
PUSHED_BYTES = 16 << 20
"""Size of each half of the buffer of pushed sums. A sum reuses its slots, so it may be larger than this."""


class Peers(NamedTuple):
    """The buffers of all ranks as this rank sees them.

    addresses:  (size,) int64: the address of each rank's buffer
    calls:      (1 + MAX_PROGRAMS,) int64 in this rank's memory, initially 0 like the flags: the count of calls, which the
                kernels keep, and a word for each program, which ends the program's waits when it has the largest int64 value
    processors: the smallest number of multiprocessors of any rank's GPU; it limits the number of programs
    """

    rank: int
    size: int
    addresses: Tensor
    calls: Tensor
    processors: int


def buffer_bytes(size: int) -> int:
    """Size of the buffer of each of `size` ranks."""
    return PUSHED_FIRST_BYTE + (2 * PUSHED_BYTES if size == PUSHED_RANKS else 0)
