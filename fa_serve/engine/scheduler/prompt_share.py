"""How many prompt tokens a step may compute while sequences decode, so that their next tokens do not come late. Plain Python.

    share = PromptShare(target=0.025)        # seconds from one token to the next; None takes the target from decoding itself
    share.record(num_rows=64, num_prompt_tokens=0, seconds=0.0064)
    share.record(num_rows=64, num_prompt_tokens=512, seconds=0.0184)
    share.limit(num_rows=64)                 # 576

A step that computes prompts and decodes takes longer than one that only decodes. The decoding sequences wait for all of it, so
the prompts get what the target leaves beside decoding. Two things are learned from recent steps, each by the size of the step:
how long steps that only decode take, and what a prompt token adds to a step. Both are medians, so that one step that waited for
a compiler counts little. The first rows of a step cost less than later ones, because up to about a hundred rows take the time
of reading the weights. Therefore the share is at most one size larger than the largest recent one.

Without a target, a step may compute a third more prompt tokens than its share if that completes a prompt. Otherwise the rest of
the prompt would make another step late.

Prompts never starve: a step may compute MIN_PROMPT_TOKENS of them whatever the target is. Steps have four sizes for each power
of two, because a step of a new size may need another CUDA graph.

The decisions depend on nothing but the arguments of `record` and `limit` and their order. Several processes that are given the
same times decide the same. Left out: the clock (engine.py), and which prompts get the share (scheduler.py). Source: the token
budget of Sarathi-Serve (Agrawal et al. 2024), which is set by hand there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

TARGET_STEPS = 4
"""Without a target, a step with prompts may take as long as so many steps that only decode: prompts get three quarters of it. A
step that completes a prompt may take one more."""
TARGET_SECONDS = 0.02
"""And in any case as long as this, which is 50 tokens per second, several times as fast as people read."""
COMPLETING = 3
"""Without a target, a step may compute limit + limit // COMPLETING prompt tokens if that completes a prompt."""
MIN_PROMPT_TOKENS = 64
"""Prompt tokens that every step may compute. CUDA graphs of steps with prompts have a multiple of so many tokens."""
RECENT = 64
"""Measured steps of a kind that count."""


class PromptShare:
    """Owner of the measurements of steps. target: seconds that a step should take while sequences decode; None derives it"""

    def __init__(self, target: float | None = None) -> None:
        self._target = target
        self._decoding: deque[tuple[int, float]] = deque(maxlen=RECENT)  # rows, seconds
        self._prompts: deque[tuple[int, float]] = deque(maxlen=RECENT)  # prompt tokens, seconds that each of them added

    def renewed(self) -> PromptShare:
        """One with the same target and without measurements."""
        return PromptShare(self._target)

    def record(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step has taken so long.

        num_rows: tokens of sequences that decode, and their drafts
        """
        if num_prompt_tokens:
            added = max(seconds - self.decode_seconds(num_rows), 0.0)
            self._prompts.append((num_prompt_tokens, added / num_prompt_tokens))
        elif num_rows:
            self._decoding.append((num_rows, seconds))

    def decode_seconds(self, num_rows: int) -> float:
        """How long a step that only decodes so many rows takes, by measured steps of about that size; 0 without any."""
        return _nearest(_medians(self._decoding), num_rows)

    def seconds(self, num_rows: int, num_prompt_tokens: int) -> float:
        """How long a step that decodes so many rows and computes so many prompt tokens takes, by measured steps."""
        return self.decode_seconds(num_rows) + num_prompt_tokens * _nearest(_medians(self._prompts), num_prompt_tokens)

    def target(self, num_rows: int) -> float:
        """How long a step that decodes so many rows and computes prompts should take."""
        if self._target is not None:
            return self._target
        return max(TARGET_STEPS * self.decode_seconds(num_rows), TARGET_SECONDS)

    def limit(self, num_rows: int) -> int:
        """How many prompt tokens a step that decodes so many rows may compute."""
        room = self.target(num_rows) - self.decode_seconds(num_rows)
        largest = max((tokens for tokens, _ in self._prompts), default=0)
        added = _medians(self._prompts)
        size = _rounded(num_rows + largest)
        size += _unit(size)
        while size - num_rows > MIN_PROMPT_TOKENS:
            tokens = size - num_rows
            if added and tokens * _nearest(added, tokens) <= room:
                return tokens
            size = _rounded(size - 1)
        return MIN_PROMPT_TOKENS

    def limits(self, num_rows: int, room: int) -> tuple[int, int]:
        """`limit`, and how many prompt tokens the step may compute if the last of them complete a prompt; at most `room`."""
        limit = self.limit(num_rows)
        completing = limit if self._target is not None else limit + limit // COMPLETING
        return min(limit, room), min(completing, room)


def _unit(size: int) -> int:
    """How far apart the sizes of steps are: four for each power of two, in multiples of MIN_PROMPT_TOKENS."""
    return max(1 << max(size.bit_length() - 3, 0), MIN_PROMPT_TOKENS)


def _rounded(size: int) -> int:
    """The largest size of a step up to this one."""
    return size // _unit(size) * _unit(size)


def _medians(measured: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The lower median of the values, for each power of two of the numbers that they belong to."""
    classes: dict[int, list[float]] = defaultdict(list)
    for number, value in measured:
        classes[number.bit_length()].append(value)
    return {size: sorted(values)[(len(values) - 1) // 2] for size, values in classes.items()}


def _nearest(medians: Mapping[int, float], number: int) -> float:
    """The median of numbers like this one, or of the nearest ones; 0 if there is none."""
    size = min(medians, key=lambda other: (abs(other - number.bit_length()), -other), default=None)
    return 0.0 if size is None else medians[size]
