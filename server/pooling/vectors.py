"""Vectors as JSON: decimal numbers, base64 of numbers of 32 or 16 bits, or integers that hold 8 bits or 8 signs.

One call for many vectors would hold the interpreter's lock for a long time. So they are written one by one in a thread, with
pauses (answers/size.py).
"""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from pydantic_core import to_json

from ..answers.size import PAUSE_SECONDS

VectorFormat = Literal["float", "base64", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]
FLOAT_BYTES = 13
"""The most bytes of a number from -10 to 100 with its comma."""
FORMAT_BYTES: dict[VectorFormat, int] = {
    "float": FLOAT_BYTES,
    "base64": 6,
    "float16": 3,
    "bfloat16": 3,
    "int8": 5,
    "uint8": 4,
    "binary": 1,
    "ubinary": 1,
}
"""Bytes for each number of a vector, by format. An integer that holds 8 signs has up to 5 bytes with its comma."""
DIGITS = 9
"""Decimal places: near 0.01, neighbouring float32 numbers differ by about 1e-9."""
PIECE = 1 << 16
"""Bytes between two pauses."""
VectorValues = np.ndarray[Any, np.dtype[np.float32]]


def numbers(values: VectorValues) -> list[Any]:
    """The numbers of an array, in lists of its shape."""
    found: list[Any] = values.astype(np.float64).round(DIGITS).tolist()
    return found


def in_base64(values: VectorValues, form: VectorFormat = "base64") -> str:
    """The base64 of float32 numbers, or of the nearest numbers of 16 bits, little-endian. float16 is clipped to +-65,504."""
    if form == "float16":
        largest = np.float32(np.finfo(np.float16).max)
        return _text_of(np.clip(values, -largest, largest).astype("<f2"))
    if form == "bfloat16":  # the upper 16 bits of float32, rounded to nearest, ties to even
        bits = values.astype("<f4").view("<u4")
        return _text_of(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))
    return _text_of(values.astype("<f4"))


def _text_of(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def quantised(values: VectorValues, form: VectorFormat) -> np.ndarray[Any, Any]:
    """The integers of a vector, as `quantize_embeddings` of sentence-transformers defines them.

    int8, uint8:     255 steps from -m to m, where m is the largest absolute number of the vector: a request has no calibration
                     vectors that define a range, and cosine similarity does not depend on m. int8 is uint8 minus 128
    binary, ubinary: 8 signs in an integer, the first in its highest bit, 1 for numbers above 0. binary is ubinary minus 128
    """
    if form in ("binary", "ubinary"):
        packed = np.packbits(values > 0)
        return packed if form == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
    start = -np.abs(values).max()
    step = -2 * start / np.float32(255) or np.float32(1)
    places: VectorValues = np.clip(np.floor((values - start) / step), 0, 255)
    return places.astype(np.uint8) if form == "uint8" else (places - 128).astype(np.int8)


def written(values: VectorValues, form: VectorFormat) -> list[Any] | str:
    """A vector as the JSON of a reply has it: a list, or a string in base64."""
    if form == "float":
        return numbers(values)
    if form in ("base64", "float16", "bfloat16"):
        return in_base64(values, form)
    found: list[Any] = quantised(values, form).tolist()
    return found


def joined(pieces: Iterable[bytes]) -> bytes:
    """All pieces joined, with pauses in which other threads can run."""
    found = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size >= PIECE:
            size = 0
            time.sleep(PAUSE_SECONDS)
    return b"".join(found)


def embedding_list(vectors: Iterable[VectorValues], form: VectorFormat, tail: dict[str, Any]) -> Iterator[bytes]:
    """OpenAI's list of embeddings, in pieces. tail: the fields after the list"""
    yield b'{"object":"list","data":['
    for index, values in enumerate(vectors):
        vector = to_json(written(values, form))
        comma = b"," if index else b""
        yield comma + b'{"object":"embedding","index":' + str(index).encode() + b',"embedding":' + vector + b"}"
    yield b"]," + to_json(tail)[1:]


def plain_list(vectors: Iterable[VectorValues]) -> Iterator[bytes]:
    """Arrays as a list of lists, in pieces."""
    for index, values in enumerate(vectors):
        yield (b"," if index else b"[") + to_json(numbers(values))
    yield b"]"
