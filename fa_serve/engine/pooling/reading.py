"""Tokenizes the inputs of a call piece by piece, in a thread that runs ahead of its caller.

    with closing(read_ahead(texts, partial(reader.read, prompt="query: "))) as pieces:
        for piece in pieces:                    # EncoderInputs, in the order of the texts
            ...

The caller launches batches and waits for the GPU, and has the next pieces at hand when it needs them. The tokenizer releases
the interpreter, so the two threads seldom wait for each other. Which inputs are in a piece depends on the inputs alone, and so
the batches of two equal calls are equal. Left out: how a piece is tokenized (inputs.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from fa_serve.engine.pooling.inputs import EncoderInputs, InputText, pieces_of

READ_CHARACTERS = 1 << 15
"""Characters of a piece, a third of what 16,384 tokens have. With larger pieces, the first batch is launched later."""
READ_INPUTS = 16
"""The fewest inputs of a piece. The tokenizer takes a processor for each, so a piece of one long text would occupy only one."""
PIECES_AHEAD = 8
"""The most pieces that are tokenized before they are asked for."""

Read = Callable[..., EncoderInputs]
"""`InputReader.read` with its options: takes inputs, and as `first` the number of the first one"""


def read_ahead(inputs: Sequence[InputText], read: Read) -> Generator[EncoderInputs]:
    """Yields the inputs in pieces, as token ids. Once it is closed, no thread works any more.

    The error of a piece is raised when it is this piece's turn, and nothing after it is tokenized. The first piece is tokenized
    by the caller's own thread, so that a call with few inputs starts no other.
    """
    pieces = _read_each(inputs, read)
    piece = next(pieces, None)
    if piece is None:
        return
    if len(piece) == len(inputs):
        yield piece
        return
    thread = ThreadPoolExecutor(1, "tokenizer")
    try:
        ahead = deque(thread.submit(next, pieces, None) for _ in range(PIECES_AHEAD))
        while piece is not None:
            yield piece
            piece = ahead.popleft().result()
            ahead.append(thread.submit(next, pieces, None))
    finally:
        thread.shutdown(cancel_futures=True)  # it waits for the piece that is being tokenized


def _read_each(inputs: Sequence[InputText], read: Read) -> Iterator[EncoderInputs]:
    begin = 0
    for piece in pieces_of(inputs, READ_CHARACTERS, READ_INPUTS):
        yield read(piece, first=begin)
        begin += len(piece)
