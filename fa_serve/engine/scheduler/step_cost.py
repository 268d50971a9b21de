"""How long a step takes, learned from the steps before it. Plain Python.

    cost = StepCost()
    cost.record(StepSize(rows=64, keys=64 * 900), 0.0064)                                # a step that only decodes
    cost.record(StepSize(rows=64, keys=64 * 900, prompt_tokens=512, pairs=512 * 256), 0.0184)
    cost.record(StepSize(rows=64, keys=64 * 900, image_tokens=100), 0.0084, ImageSeconds(own=0.002, beside=0.002))
    cost.seconds(StepSize(rows=64, keys=64 * 900, prompt_tokens=1024, pairs=1024 * 512))

The model has one term for each thing that takes time:

    seconds = decode(rows) + KEY * keys + prompt(tokens) * tokens + PAIR * pairs + image(images) * images

`decode`, `prompt` and `image` are medians of recent steps of about that size, one for each power of two, because none grows in
proportion: rows that are computed in the time of reading the weights cost nearly nothing. KEY is the cost of a key that a row
reads, and PAIR the cost of a query with one key. Both are slopes: each new step gives its median slope to recent steps, and the
median of these counts (Theil 1950, Sen 1968, for as many pairs as a step can afford). Everything is a median, so that one step
that waited for a compiler counts little.

The time of images is measured separately, because a GPU begins with the images of a step while it still computes the previous
step, which they delay. If their time were derived from the step that has them, images that are encoded in one step would seem
to take no time, and the next step would encode as many as it can hold.

Before anything is measured, steps are assumed to take no time. Until recent steps give a slope, a prompt token is assumed to
cost twice as much after PRIOR_KEYS keys as without keys, and a key that a row reads is assumed to cost nothing.

Left out: the clock, and what follows from the cost (prompt_share.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

RECENT = 64
"""How many of the newest measured steps of each kind count."""
MIN_SLOPES = 8
"""Slopes that recent steps have to give before they count."""
FAR = 2048
"""Keys by which two steps have to differ to give a slope. With fewer, other differences between them count for more."""
PRIOR_KEYS = 25_000
"""Keys before a prompt token at which its attention costs as much as its products: 8B parameters, 32 layers of 4,096."""


class StepSize(NamedTuple):
    """What a step computes.

    rows:          tokens of sequences that decode, and their drafts
    keys:          keys that these rows read, summed over the rows
    prompt_tokens: tokens of prompts
    pairs:         keys before each prompt token, summed over the tokens
    image_tokens:  image embeddings that go through the towers; an image that is encoded in several steps counts in parts
    """

    rows: int = 0
    keys: int = 0
    prompt_tokens: int = 0
    pairs: int = 0
    image_tokens: int = 0


class ImageSeconds(NamedTuple):
    """own: seconds that the device worked on the images of a step; beside: on images of any step while it computed this step"""

    own: float = 0.0
    beside: float = 0.0


class StepCost:
    """Owner of the measurements of steps."""

    def __init__(self) -> None:
        self._decoding: deque[tuple[int, float, float]] = deque(maxlen=RECENT)  # rows, keys, seconds
        self._prompts: deque[tuple[int, float, float]] = deque(maxlen=RECENT)  # tokens; for each: keys before it, seconds
        self._images: deque[tuple[int, float]] = deque(maxlen=RECENT)  # embeddings, seconds for each
        self._key_slopes: deque[float | None] = deque(maxlen=RECENT)
        self._pair_slopes: deque[float | None] = deque(maxlen=RECENT)
        self._rows: dict[int, float] = {}
        self._tokens: dict[int, float] = {}
        self._embeddings: dict[int, float] = {}
        self._key = 0.0
        self._pair = 0.0

    @property
    def largest(self) -> int:
        """Prompt tokens of the largest recent step."""
        return max((tokens for tokens, _, _ in self._prompts), default=0)

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with prompts was measured."""
        return bool(self._prompts)

    @property
    def knows_images(self) -> bool:
        """Whether a step that encodes images was measured."""
        return bool(self._images)

    def record(self, size: StepSize, seconds: float, images: ImageSeconds | None = None) -> None:
        """A step of this size has taken `seconds`. images: how much of that was for images; None: there were none"""
        images = images or ImageSeconds()
        if size.image_tokens:
            self._images.append((size.image_tokens, images.own / size.image_tokens))
            self._embeddings = _medians(self._images)
        if size.prompt_tokens:
            added = seconds - images.beside - self.decode_seconds(size.rows, size.keys)
            self._record_prompts(size, max(added, 0.0))
        elif size.rows and not images.beside:
            self._key = _slope(self._decoding, self._key_slopes, size.rows, size.keys, seconds) or 0.0
            self._decoding.append((size.rows, size.keys, seconds))
            self._rows = _medians((rows, value - self._key * keys) for rows, keys, value in self._decoding)

    def _record_prompts(self, size: StepSize, seconds: float) -> None:
        """Prompts have added `seconds` to a step of this size."""
        added = seconds / size.prompt_tokens
        before = size.pairs / size.prompt_tokens
        pair = _slope(self._prompts, self._pair_slopes, size.prompt_tokens, before, added)
        self._prompts.append((size.prompt_tokens, before, added))
        if pair is None:
            plain = _median([value / (1 + keys / PRIOR_KEYS) for _, keys, value in self._prompts])
            pair = plain / PRIOR_KEYS
        self._pair = pair
        self._tokens = _medians((tokens, value - self._pair * keys) for tokens, keys, value in self._prompts)

    def decode_seconds(self, rows: int, keys: float) -> float:
        """How long a step that only decodes takes, from measured steps of about that size; 0 if there are none."""
        return max(_nearest(self._rows, rows) + self._key * keys, 0.0)

    def prompt_seconds(self, tokens: int, before: float) -> float:
        """Seconds that so many prompt tokens add to a step. before: keys before the first of them"""
        return tokens * max(_nearest(self._tokens, tokens) + self._pair * (before + tokens / 2), 0.0)

    def image_seconds(self, count: int) -> float:
        """Seconds that so many image embeddings add to a step; 0 before any were measured."""
        return count * _nearest(self._embeddings, count)

    def seconds(self, size: StepSize) -> float:
        """How long such a step takes."""
        prompts = size.prompt_tokens * _nearest(self._tokens, size.prompt_tokens) + self._pair * size.pairs
        images = self.image_seconds(size.image_tokens) if size.image_tokens else 0.0
        return self.decode_seconds(size.rows, size.keys) + max(prompts, 0.0) + images


def _slope(
    recent: Iterable[tuple[int, float, float]], slopes: deque[float | None], number: int, at: float, value: float
) -> float | None:
    """The slope of `value` over `at`, with one more measurement; None if recent steps do not give one.

    Only steps with about the same `number` are compared, and only if their `at` are far apart.
    """
    found = [
        (value - other) / (at - where)
        for size, where, other in recent
        if size.bit_length() == number.bit_length() and abs(at - where) > max(FAR, 0.25 * max(at, where))
    ]
    slopes.append(_median(found) if found else None)
    known = [slope for slope in slopes if slope is not None]
    return max(_median(known), 0.0) if len(known) >= MIN_SLOPES else None


def _median(values: Iterable[float]) -> float:
    """The lower median; 0 without values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


def _medians(measured: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The lower median of the values, for each power of two of the numbers that they belong to."""
    classes: dict[int, list[float]] = defaultdict(list)
    for number, value in measured:
        classes[number.bit_length()].append(value)
    return {size: _median(values) for size, values in classes.items()}


def _nearest(medians: Mapping[int, float], number: int) -> float:
    """The median for the power of two of this number, or for the nearest one that has a median; 0 if none has."""
    size = min(medians, key=lambda other: (abs(other - number.bit_length()), -other), default=None)
    return 0.0 if size is None else medians[size]
