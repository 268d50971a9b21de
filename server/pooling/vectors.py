"""Vectors as JSON: as numbers with as many digits as float32 has, or as base64.

One call for many vectors would hold the interpreter's lock for a long time, so they are written one by one, in a thread, with
pauses (answers/size.py).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from pydantic_core import to_json

from ..answers.size import PAUSE_SECONDS

FLOAT_BYTES = 13
"""Bytes of a number with its comma, at most for numbers below 100."""
BASE64_BYTES = 6
DIGITS = 9
"""Behind the point: float32 tells numbers of about 0.01 apart that differ by 1e-9."""
PIECE = 1 << 16
"""Bytes between two pauses."""
VectorValues = np.ndarray[Any, np.dtype[np.float32]]


def numbers(values: VectorValues) -> list[Any]:
    """The numbers of an array, in lists of its shape."""
    found: list[Any] = values.astype(np.float64).round(DIGITS).tolist()
    return found


def in_base64(values: VectorValues) -> str:
    """float32 numbers, the lowest byte first."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def joined(pieces: Iterable[bytes]) -> bytes:
    """All pieces as one, with pauses for the other threads."""
    found = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= PIECE:
            size = 0
            time.sleep(PAUSE_SECONDS)
    return b"".join(found)


def embedding_list(vectors: Iterable[VectorValues], in_text: bool, tail: dict[str, Any]) -> Iterator[bytes]:
    """OpenAI's list of embeddings. in_text: as base64. tail: the fields behind the list"""
    yield b'{"object":"list","data":['
    for index, values in enumerate(vectors):
        vector = to_json(in_base64(values)) if in_text else to_json(numbers(values))
        comma = b"," if index else b""
        yield comma + b'{"object":"embedding","index":' + str(index).encode() + b',"embedding":' + vector + b"}"
    yield b"]," + to_json(tail)[1:]


def plain_list(vectors: Iterable[VectorValues]) -> Iterator[bytes]:
    """Arrays as a list of lists."""
    for index, values in enumerate(vectors):
        yield (b"," if index else b"[") + to_json(numbers(values))
    yield b"]"
