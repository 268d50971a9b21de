"""What the buffers of ranks hold, at which place, and how the kernels of sums see them.

    flags of one shot | two halves for messages of one shot | two halves for pushed sums, with two ranks

With two ranks, the flags of pushed sums follow those of one shot, within the first FLAG_BYTES. Calls use the halves in turn.
Left out: who makes the buffers (peer_memory.py), and the kernels (one_shot.py, pushed_sum.py).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAX_BYTES = 2 << 20
"""Size of a message of one shot, which is the size of half of its buffer. For more bytes it would need too much of the link."""
MAX_WIDTH = 16384
"""Numbers of a row, which a program keeps in registers."""
MAX_RANKS = 8
"""With more ranks, each reads too much."""
MAX_PROGRAMS = 512
FLAG_BYTES = MAX_PROGRAMS * MAX_RANKS * 8
"""Size of the flags, with which a buffer begins. Those of one shot are int64, [program][rank that writes it]."""
PUSHED_RANKS = 2
"""How many ranks add larger messages by pushing. With more of them, each rank would send more bytes than with NCCL."""
PUSHED_FLAGS = MAX_PROGRAMS * PUSHED_RANKS * 8
"""Where the flags of pushed sums begin in a buffer, behind the flags of two ranks: int64, [program]."""
PUSHED_FIRST_BYTE = FLAG_BYTES + 2 * MAX_BYTES
PUSHED_BYTES = 16 << 20
"""Size of half of the buffer of pushed sums. A sum reuses its slots, so a sum may be larger than this."""


class Peers(NamedTuple):
    """The buffers of all ranks as this rank sees them.

    addresses:  (size,) int64, of the buffer of each rank
    calls:      (1 + MAX_PROGRAMS,) int64 of this rank, which begin with 0 as flags do: a count that belongs to the kernel, and
                a word for each program, whose largest value ends its waits
    processors: the least number of multiprocessors of all ranks, from which the number of programs follows
    """

    rank: int
    size: int
    addresses: Tensor
    calls: Tensor
    processors: int


def buffer_bytes(size: int) -> int:
    """Size of the buffer of each of `size` ranks."""
    return PUSHED_FIRST_BYTE + (2 * PUSHED_BYTES if size == PUSHED_RANKS else 0)
