"""The layout of the buffers of ranks."""

from __future__ import annotations

from fa_serve.ops.collectives.peer_buffers import (
    FLAG_BYTES,
    MAX_BYTES,
    MAX_PROGRAMS,
    PUSHED_BYTES,
    PUSHED_FIRST_BYTE,
    PUSHED_FLAGS,
    buffer_bytes,
)


def test_the_parts_of_a_buffer_do_not_overlap() -> None:
    """Flags of one shot, [program][rank]; those of pushed sums behind those of two ranks; and the halves of both."""
    assert PUSHED_FLAGS == 8 * MAX_PROGRAMS * 2
    assert PUSHED_FLAGS + 8 * MAX_PROGRAMS <= FLAG_BYTES
    assert PUSHED_FIRST_BYTE == FLAG_BYTES + 2 * MAX_BYTES
    assert buffer_bytes(2) == PUSHED_FIRST_BYTE + 2 * PUSHED_BYTES
    assert buffer_bytes(3) == buffer_bytes(8) == PUSHED_FIRST_BYTE
