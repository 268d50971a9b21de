"""The state of one structured answer, and what following its grammar has cost so far.

    own = matcher.deep_copy()                # for another answer of the same request
    matcher.consume_token(token)
    matcher.is_stopped()                     # the answer is complete

If a mask or a token takes longer than usual, the excess is charged to the request. When the request's budget is spent, its
matchers report an error. Left out: how grammars are compiled and the masks of a step are computed (grammars.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

USUAL_SECONDS = 0.002
"""Processor time of a mask, or of a token that a matcher takes in, which no request is charged for."""
SLOW_SECONDS = 0.25
"""Processor time beyond the usual one that the masks and tokens of a request may take together."""


@dataclass(slots=True)
class FirstMask:
    """The mask of a grammar's first token, in 32-bit words of llguidance, shared by its answers; None until it is computed."""

    words: NDArray[np.int32] | None = None


class Matcher:
    """The state of one answer: an LLMatcher of llguidance, and the time that following the grammar has taken.

    slow:  seconds beyond the usual ones, in a list that the answers of one request share
    first: the mask at the start of an answer, which all answers of a grammar share
    """

    def __init__(self, inner: Any, slow: list[float] | None = None, first: FirstMask | None = None) -> None:
        self._inner = inner
        self._slow = [0.0] if slow is None else slow
        self._first = first

    def deep_copy(self) -> Matcher:
        """The same state, for another answer of the same request."""
        return Matcher(self._inner.deep_copy(), self._slow, self._first)

    def kept_first(self) -> NDArray[np.int32] | None:
        """The mask of the next token if it is the first one and some answer of the grammar has computed it."""
        return None if self._first is None else self._first.words

    def keep_first(self, words: NDArray[np.int32]) -> None:
        """Keep a copy of the mask of the next token, if that is the first one, for all answers of the grammar."""
        if self._first is not None and self._first.words is None and not self._inner.is_error():
            self._first.words = words.copy()

    def consume_token(self, token: int) -> None:
        self._first = None
        begin = time.thread_time()
        self._inner.consume_token(token)
        self.charge(time.thread_time() - begin)

    def fill(self, address: int, num_bytes: int) -> float:
        """Compute the mask of the next token. Returns the seconds of processor time that it has taken."""
        begin = time.thread_time()
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)
        return time.thread_time() - begin

    @property
    def slow_seconds(self) -> float:
        """What the request has been charged so far."""
        return self._slow[0]

    def charge(self, seconds: float, count: int = 1) -> None:
        """Charge the time of `count` masks, or of a token, beyond the usual time."""
        self._slow[0] += max(seconds - count * USUAL_SECONDS, 0.0)

    @property
    def inner(self) -> Any:
        """The LLMatcher."""
        return self._inner

    def is_stopped(self) -> bool:
        """Whether the answer is complete. It is not if there is an error."""
        return bool(self._inner.is_stopped()) and not self.is_error()

    def is_error(self) -> bool:
        return self._slow[0] > SLOW_SECONDS or bool(self._inner.is_error())

    def get_error(self) -> str:
        """Why the grammar cannot be followed any further, or ""."""
        if self._slow[0] > SLOW_SECONDS:
            return f"its token masks took more than {SLOW_SECONDS:g} s longer than usual"
        return str(self._inner.get_error())
