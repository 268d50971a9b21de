"""Bounds on the JSON of a body, checked before it is parsed.

    JsonBounds(values=1_000_000, fields=100_000).check(body)      # raises TooLarge

The cost of a body depends on its number of values, not on its bytes: 10 MB can hold one text, or 3.3 million empty messages.
Parsing and validation are single calls in C that hold the interpreter's lock, so a thread by itself does not protect other
requests from them. A number costs a fifth of an object or a text, hence two bounds. The check counts commas, quotation marks
and opening brackets. The first count includes those inside texts, so it is never too low. Only a body that may be above a bound
is counted again without its texts. Both counts are made in pieces, because a call in C for many megabytes would hold the
interpreter's lock for tens of milliseconds.

The time to read an integer is quadratic in its digits, so a number may have at most MAX_DIGITS of them. Nesting needs no bound
here, because the parser refuses more than 200 levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import TooLarge

PIECE = 1 << 16  # bytes that are counted in one go, which takes less than two milliseconds
MAX_DIGITS = 512  # of a number within a piece; the longest float that is written without an exponent has 309
BODY = "the body"
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


@dataclass(frozen=True)
class JsonBounds:
    """values: the most values of any kind; fields: the most objects, lists and texts, where each name in an object is a text"""

    values: int
    fields: int

    def check(self, body: bytes) -> None:
        """Raise TooLarge if the body has more values or fields. A body that is not JSON may pass, because it fails later."""
        if len(body) <= min(self.values, self.fields, PIECE) and not _has_long_number(body):
            return  # a value takes at least one byte
        values = fields = quotes = 0
        is_long = False
        for begin in range(0, len(body), PIECE):
            piece = body[begin : begin + PIECE]
            containers = _containers(piece)
            quotes += piece.count(b'"')
            values += containers + piece.count(b",")
            fields += containers
            is_long = is_long or _has_long_number(piece)
        if is_long or self._refusal(values, fields + quotes // 2, BODY) is not None:
            self.count_without_texts(body, 0, 0, BODY)

    def count_without_texts(self, text: bytes, values: int, fields: int, subject: str) -> tuple[int, int]:
        """Count the values and fields of a JSON text, and add them to the given counts. Raises TooLarge above a bound."""
        before = fields
        quotes = 0
        for piece, piece_quotes in _without_texts(text):
            containers = _containers(piece)
            quotes += piece_quotes
            values += containers + piece.count(b",")
            before += containers
            fields = before + quotes // 2
            if reason := self._refusal(values, fields, subject):
                raise TooLarge(reason, code="too_many_values")
            if _has_long_number(piece):
                raise TooLarge(f"A number in {subject} must have at most {MAX_DIGITS} digits.", code="number_too_long")
        return values, fields

    def _refusal(self, values: int, fields: int, subject: str) -> str | None:
        subject = subject[0].upper() + subject[1:]
        if fields > self.fields:
            return f"{subject} must have at most {self.fields} objects, lists and strings (--max-json-fields), got more."
        if values > self.values:
            return f"{subject} must have at most {self.values} values (--max-json-values), got more."
        return None


class JsonTotal:
    """Counts the JSON inside several texts of a body, such as the arguments of all tool calls, against the bounds of one body.

    subject: what the texts are, for errors
    """

    def __init__(self, bounds: JsonBounds, subject: str):
        self._bounds = bounds
        self._subject = subject
        self._values = 0
        self._fields = 0

    def add(self, text: str) -> None:
        """Count one more text. Raises TooLarge if all texts so far together have too many values or fields."""
        count = self._bounds.count_without_texts
        self._values, self._fields = count(text.encode(), self._values, self._fields, self._subject)


def _containers(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _has_long_number(piece: bytes) -> bool:
    return LONG_NUMBER in piece.translate(ZEROS)


def _without_texts(body: bytes) -> Iterator[tuple[bytes, int]]:
    """The body in pieces, without the characters of its texts, and the number of quotation marks in each piece."""
    inside = escaped = False
    for begin in range(0, len(body), PIECE):
        piece = body[begin : begin + PIECE]
        if escaped:
            piece = b" " + piece[1:]  # the backslash before it ended the last piece
        # replace() goes from left to right, so no backslash that is left follows another backslash
        piece = piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        escaped = piece.endswith(b"\\")
        parts = piece.split(b'"')
        yield b" ".join(parts[1::2] if inside else parts[::2]), len(parts) - 1
        inside ^= not len(parts) % 2
