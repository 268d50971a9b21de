"""A scheduler with towers: a model of the towers takes the place of the encoder, and a formula that of the clock."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

import numpy as np

from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.images.prompt import ImageInput, PlacedImage, PromptImages, content_of
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.prompt_share import PromptShare
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch, TowerWork
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.step_cost import ImageSeconds
from fa_serve.engine.scheduler.tower_queue import TowerQueue

DECODING = 0.005
PER_PROMPT_TOKEN = 2e-5
PER_EMBEDDING = 5e-5
"""Seconds. An image of 400 embeddings takes four times as long as a step that decodes."""


class Towers:
    """An encoder: embeddings are there when steps have had time for all of them."""

    def __init__(self, capacity: int = 10_000) -> None:
        self.capacity = capacity
        self.known: dict[bytes, int] = {}
        self.held: set[bytes] = set()
        self.failed: set[bytes] = set()
        self.encoded: list[bytes] = []
        self._left: int | None = None

    @property
    def is_busy(self) -> bool:
        return self._left is not None

    def is_encoded(self, key: bytes) -> bool:
        return key in self.known

    def has_failed(self, key: bytes) -> bool:
        return key in self.failed and key in self.known

    def hold(self, key: bytes) -> None:
        self.held.add(key)

    def retry(self, key: bytes) -> None:
        if key in self.failed:
            self.failed.discard(key)
            del self.known[key]

    def release(self, key: bytes) -> None:
        self.held.discard(key)
        self.evict()

    def release_all(self) -> None:
        self._left = None
        for key in [*self.held]:
            self.release(key)

    def evict(self) -> None:
        for key in [*self.known]:
            if sum(self.known.values()) > self.capacity and key not in self.held:
                del self.known[key]

    def advance(self, work: TowerWork | None) -> int:
        """Returns how many embeddings it encodes: none in the step that copies the pixels of images which are cut."""
        count = 0
        if work is not None:
            images = [(image.key, image.inputs["count"]) for image in work.images if image.key not in self.known]
            copies = self._left is None and work.limit is not None
            if self._left is None:
                self._left = sum(size for _, size in images)
            if not copies:
                count = self._left if work.limit is None else min(work.limit, self._left)
            self._left -= count
            if self._left <= 0:
                self._left = None
                self.encoded += [key for key, _ in images]
                self.known |= dict(images)
        self.evict()
        return count


class Case:
    """A scheduler with towers, whose steps take what the formula says.

    ahead: a step is launched while the device computes the one before, beside which the device begins with its images
    """

    def __init__(
        self,
        share: PromptShare | None = None,
        *,
        towers: Towers | None = None,
        pages: int = 900,
        slots: int = 64,
        ahead: bool = False,
    ):
        self.towers = towers or Towers()
        self.ahead = ahead
        self._launched: deque[ScheduledBatch] = deque()
        self._encoded: dict[int, int] = {}  # embeddings, by the number of the step
        self.scheduler = Scheduler(
            PageTable(pages, 16),
            max_num_seqs=slots,
            max_num_batched_tokens=4096,
            keys_per_tile=16,
            prompt_share=share,
            towers=TowerQueue(self.towers),
        )
        self.now = 0.0
        self.seconds: list[float] = []
        self.firsts: dict[str, int] = {}
        self.checks = 25
        self._serial = count()

    def add(self, name: str, *parts: int | bytes, **options: Any) -> None:
        """parts: numbers of tokens of text, and keys of images of so many embeddings"""
        answer = options.get("answer", 1)
        embeddings = options.get("embeddings", 400)
        client = options.get("client")
        serial = next(self._serial)
        tokens: list[int] = []
        placed = []
        for part in parts:
            size = part if isinstance(part, int) else embeddings
            if not isinstance(part, int):
                places = np.arange(len(tokens), len(tokens) + size)
                placed.append(PlacedImage(ImageInput(part, {"count": size}), places))
            tokens += [1000 * serial + n for n in range(size)]
        blocks = ((0, len(tokens)),) if options.get("whole") else ()
        images = PromptImages(tuple(placed), content_of(tokens, placed), blocks) if placed else None
        params = SamplingParams(max_tokens=answer)
        rank = (self.now, serial)
        self.scheduler.add(Request(name, tokens, params, answer, rank=rank, arrival=self.now, client=client, images=images))

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self._encoded[batch.number] = self.towers.advance(batch.towers)
        for chunk in batch.chunks:
            images = chunk.sequence.request.images
            for each in () if images is None else images.placed:
                if chunk.start <= each.places[-1] and each.places[0] < chunk.start + chunk.length:
                    assert self.towers.is_encoded(each.image.key), "a step reads what is not encoded"
                    assert each.image.key in self.towers.held
        self._launched.append(batch)
        if len(self._launched) > self.ahead:
            self._commit(self._launched.popleft(), batch)
        if not batch and self._launched:
            self._commit(self._launched.popleft(), None)
        return batch

    def _commit(self, batch: ScheduledBatch, newest: ScheduledBatch | None) -> None:
        """newest: the step whose images the device has encoded meanwhile"""
        size = batch.size
        seconds = DECODING * bool(size.rows) + PER_PROMPT_TOKEN * size.prompt_tokens + self._image_seconds(newest)
        self.now += seconds
        self.seconds.append(seconds)
        tokens = [1] * sum(chunk.num_samples for chunk in batch.chunks)
        images = ImageSeconds(self._image_seconds(batch), self._image_seconds(newest))
        gained = self.scheduler.commit(batch, tokens, seconds, images)
        for sequence in gained:
            self.firsts.setdefault(sequence.request.request_id, len(self.seconds))
        if not len(self.seconds) % self.checks:
            self.scheduler.check_integrity()

    def _image_seconds(self, batch: ScheduledBatch | None) -> float:
        return 0.0 if batch is None else PER_EMBEDDING * self._encoded[batch.number]

    def run(self) -> None:
        for _ in range(5000):
            if not self.scheduler.sequences:
                break
            self.step()
        assert not self.scheduler.sequences, "requests do not end"
        self.step()
        assert not self.towers.held, "an image is held that nobody needs"
