"""How long a step takes, learned from the steps before it. Plain Python.

    cost = StepCost()
    cost.record(StepSize(rows=64, keys=64 * 900), 0.0064)                                # a step that only decodes
    cost.record(StepSize(rows=64, keys=64 * 900, prompt_tokens=512, pairs=512 * 256), 0.0184)
    cost.record(StepSize(rows=64, keys=64 * 900, image_tokens=100), 0.0084, ImageSeconds(own=0.002, beside=0.002))
    cost.seconds(StepSize(rows=64, keys=64 * 900, prompt_tokens=1024, pairs=1024 * 512))

The model has one term for each thing that takes time:

    seconds = decode(rows) + KEY * keys + prompt(tokens) * tokens + PAIR * pairs + image(images) * images

`decode`, `prompt` and `image` are medians of recent steps of about that size, one for each power of two, as none grows in
proportion: the rows that fit beside the reading of the weights cost nearly nothing. KEY and PAIR, the cost of a key that a row
reads and of a query with its key, are slopes: the median of the slopes from each new step to recent ones (Theil 1950, Sen 1968,
of as many pairs as a step can afford). Medians throughout, so that one step that waited for a compiler counts little.

What images take is measured by itself: a GPU begins with those of a step while it still computes the step before, which is the
one that they hold up. Derived from the time of the step that has them, images that are encoded in one step would seem to take
nothing, and the next step would encode as many as it can hold.

Before anything is measured, steps take no time. Unless recent steps tell a slope, a prompt token costs twice as much behind
PRIOR_KEYS keys as without any, and a key that a row reads costs nothing beside its row.

Left out: the clock, and what follows from the cost (prompt_share.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

RECENT = 64
"""Measured steps of a kind that count."""
MIN_SLOPES = 8
"""Slopes that recent steps have to give before they count."""
FAR = 2048
"""Keys by which two steps have to differ to give a slope. With fewer, other differences between them count for more."""
PRIOR_KEYS = 25_000
"""Keys behind which attention costs a prompt token as much as its products do: 8B parameters, 32 layers of 4,096."""


class StepSize(NamedTuple):
    """What a step computes.

    rows:          tokens of sequences that decode, and their drafts
    keys:          keys that these rows read, all together
    prompt_tokens: tokens of prompts
    pairs:         keys before each of these tokens, all together
    image_tokens:  embeddings of images that go through the towers; those of an image that is cut are counted in parts
    """

    rows: int = 0
    keys: int = 0
    prompt_tokens: int = 0
    pairs: int = 0
    image_tokens: int = 0


class ImageSeconds(NamedTuple):
    """own: what the device has worked on the images of a step; beside: on images of any step while it computed this one"""

    own: float = 0.0
    beside: float = 0.0


class StepCost:
    """Owner of the measurements of steps."""

    def __init__(self) -> None:
        self._decoding: deque[tuple[int, float, float]] = deque(maxlen=RECENT)  # rows, keys, seconds
        self._prompts: deque[tuple[int, float, float]] = deque(maxlen=RECENT)  # tokens, keys before one, seconds of one
        self._images: deque[tuple[int, float]] = deque(maxlen=RECENT)  # embeddings, seconds of one
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
        """A step has taken so long, and images so long of it; None are no images."""
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
        """Prompts have taken so long of a step."""
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
        """How long a step takes that only decodes, by measured steps of about that size; 0 without any."""
        return max(_nearest(self._rows, rows) + self._key * keys, 0.0)

    def prompt_seconds(self, tokens: int, before: float) -> float:
        """What so many prompt tokens add to a step. before: keys before the first of them"""
        return tokens * max(_nearest(self._tokens, tokens) + self._pair * (before + tokens / 2), 0.0)

    def image_seconds(self, count: int) -> float:
        """What so many embeddings of images add to a step; 0 before any was measured."""
        return count * _nearest(self._embeddings, count)

    def seconds(self, size: StepSize) -> float:
        """How long such a step takes."""
        prompts = size.prompt_tokens * _nearest(self._tokens, size.prompt_tokens) + self._pair * size.pairs
        images = self.image_seconds(size.image_tokens) if size.image_tokens else 0.0
        return self.decode_seconds(size.rows, size.keys) + max(prompts, 0.0) + images


def _slope(
    recent: Iterable[tuple[int, float, float]], slopes: deque[float | None], number: int, at: float, value: float
) -> float | None:
    """The slope of values over what they are measured at, after one more; None if recent steps do not tell.

    Steps of about the same number are compared, at places that are far from each other.
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
    """The median of numbers like this one, or of the nearest ones; 0 if there is none."""
    size = min(medians, key=lambda other: (abs(other - number.bit_length()), -other), default=None)
    return 0.0 if size is None else medians[size]
