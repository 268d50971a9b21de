"""One request to an encoder: its inputs become token ids, the engine computes their results, and errors become HTTP errors.

work = PoolingWork(service, request, "input", body.KNOWN, priority=0)
async with work.computed(inputs, params, prompt="", cuts=False, size=4096) as found:
    found.pooled                            # one for each input, in their order
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from fastapi import Request

from fa_serve.engine import Pooled, PoolingParams
from fa_serve.engine.pooling.inputs import Place
from fa_serve.engine.pooling.params import PooledRows
from fa_serve.spec import ParameterError

from ..answers.generation import REFUSALS, Job, RequestFields, engine_errors, failure
from ..errors import BadRequest, parameter_refused
from ..observe.metrics import SequenceMetrics
from ..observe.timelines import Timeline
from ..service import Service
from .vectors import VectorValues

INPUTS_PER_SEQUENCE = 16
"""Inputs that cost the event loop about as much as one sequence of generation."""


@dataclass(frozen=True, slots=True)
class Computed:
    """rows: the engine's results, in the order of the inputs; num_tokens: tokens of all inputs together"""

    rows: list[PooledRows]
    num_tokens: int

    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}

    @property
    def pooled(self) -> list[Pooled]:
        return [each for rows in self.rows for each in rows]

    @property
    def values(self) -> list[VectorValues]:
        return [each.values for each in self.pooled]


class PoolingWork:
    """One request. field: the request's field with the inputs, for errors; known: the names of all fields of the request"""

    def __init__(self, service: Service, request: Request, field: str, known: frozenset[str], priority: int | None) -> None:
        state = request.scope["state"]
        self._service = service
        self._field = field
        self._known = known
        self._priority = priority or 0
        self.key: str | None = state.get("key")
        self._timeline: Timeline | None = state.get("timeline")
        self._arrival = time.perf_counter()
        self.name = f"pool-{os.urandom(16).hex()}"

    def prompt(self, name: str | None) -> str:
        """The text of a named prompt that comes with the model. Raises BadRequest for an unknown name."""
        assert self._service.engine.inputs is not None
        try:
            return self._service.engine.inputs.prompt(name)
        except ParameterError as error:
            raise parameter_refused(error, "prompt_name") from None

    @asynccontextmanager
    async def computed(
        self,
        inputs: Sequence[str | tuple[str, str] | list[int]],
        params: PoolingParams,
        *,
        prompt: str = "",
        cuts: bool | None = None,
        size: int = 64,
        places: Sequence[Place] | None = None,
    ) -> AsyncIterator[Computed]:
        """The encoder's results. The request keeps its place in the queue while the context lasts.

        prompt: text that is written before each text
        cuts:   whether inputs that are too long are cut
        size:   bytes of the answer for each input
        places: where each input, or each text of a pair, is in the request, for errors. Then the caller has checked how many
                inputs there are

        Raises ApiError.
        """
        service = self._service
        if places is None:
            self._require_few(len(inputs))
        answer = size * len(inputs)
        service.require_size(answer, self._field, [self._field])
        letters = sum(len(each) if isinstance(each, str) else sum(map(_letters, each)) for each in inputs)
        with service.reserve(1, self.key), service.reserve_bytes(answer + letters):
            read = service.tokenization.read_inputs
            tokens = await read(inputs, self.key, self._field, places=places, prompt=prompt, cuts=bool(cuts))
            await service.costs.begin_sequences(1 + len(inputs) // INPUTS_PER_SEQUENCE)
            job = self._job(len(inputs))
            sent = self._timeline.send() if self._timeline is not None else 0.0
            metrics = SequenceMetrics(service.metrics, service.model_name, self._arrival)
            reason = "error"
            with engine_errors(service, job):
                try:
                    outputs = await service.engine.encode(tokens, params, self.name, priority=self._priority, client=job.client)
                    bad = next((each for each in outputs if each.pooled is None), None)
                    if bad is not None:
                        raise failure(service, job, bad)
                    reason = "stop"
                except asyncio.CancelledError:
                    reason = "abort"
                    raise
                except REFUSALS:
                    reason = "refused"
                    raise
                finally:
                    if reason != "stop":
                        metrics.end(reason)
            for output in outputs:
                if self._timeline is not None:
                    self._timeline.take(sent, output)
            last = outputs[-1]
            last.num_prompt_tokens = len(tokens.ids)
            metrics.observe(last)
            if self._timeline is not None:
                self._timeline.complete = True
            yield Computed([each.pooled for each in outputs if each.pooled is not None], len(tokens.ids))

    async def scores(
        self, pairs: Sequence[tuple[str, str]], *, cuts: bool | None, raw: bool = False, ranks: bool = False
    ) -> tuple[list[float], dict[str, int]]:
        """The score of each pair of texts, and the usage. A score is that of a cross-encoder, or the cosine similarity of the
        two vectors of an embedder.

        raw:   whether the scores of a cross-encoder are its logits, without an activation
        ranks: the first texts are the query and the second ones documents, so that an embedder's prompts for these are used.
               Otherwise the first texts are the request's `text_1`
        """
        service = self._service
        task = service.require_task("score", "embed")
        params = PoolingParams(activation="none" if raw else "default")
        self._require_few(len(pairs))
        named = self._places(pairs, ranks)
        if task == "score":
            async with self.computed(pairs, params, cuts=cuts, places=named) as found:
                return [float(each[0]) for each in found.values], found.usage()
        queries, documents = (self._prompt_of("query"), self._prompt_of("document")) if ranks else ("", "")
        prompts = [queries] if queries == documents else [queries, documents]
        vectors: dict[tuple[str, str], VectorValues] = {}
        count = 0
        for prompt in prompts:
            sides = [side for side in (0, 1) if (queries, documents)[side] == prompt]
            texts: dict[str, str] = {}  # by text, its first place in the request: each text is encoded once
            for side in sides:
                for pair, places_of_pair in zip(pairs, named, strict=True):
                    texts.setdefault(pair[side], places_of_pair[side])
            places = [*texts.values()]
            async with self.computed([*texts], PoolingParams(normalize=True), prompt=prompt, cuts=cuts, places=places) as found:
                vectors |= zip(((prompt, text) for text in texts), found.values, strict=True)
                count += found.num_tokens
        scores = [float(np.dot(vectors[queries, first], vectors[documents, second])) for first, second in pairs]
        return scores, {"prompt_tokens": count, "total_tokens": count}

    def _places(self, pairs: Sequence[tuple[str, str]], ranks: bool) -> list[tuple[str, str]]:
        """Where the texts of each pair are in the request. ranks: as in `scores`"""
        sides = []
        for side, field in enumerate(("query" if ranks else "text_1", self._field)):
            is_one = len({pair[side] for pair in pairs}) == 1
            sides.append([field if is_one else f"{field}[{number}]" for number in range(len(pairs))])
        return [*zip(*sides, strict=True)]

    def _prompt_of(self, kind: str) -> str:
        """The model's prompt for queries or for documents, as `encode_query` and `encode_document` of sentence-transformers
        choose it: if the model has no prompt of this name, no prompt is used, not even the model's default."""
        try:
            return self.prompt(kind)
        except BadRequest:
            return ""

    def _require_few(self, count: int) -> None:
        limit = self._service.settings.max_inputs
        if not count:
            raise BadRequest(f"{self._field} must hold at least one input.", param=self._field, code="invalid_value")
        if count > limit:
            message = f"{self._field} must hold at most {limit} inputs (--max-inputs), got {count}."
            raise BadRequest(message, param=self._field, code="invalid_value")

    def _job(self, count: int) -> Job:
        fields = RequestFields(names=self._known, prompt=self._field)
        client = self._service.isolation.client(self.key)
        return Job(self.name, self._priority, self._arrival, count, fields, client, None, timeline=self._timeline)


def _letters(part: str | int) -> int:
    """The estimated bytes of a text or of a token id."""
    return len(part) if isinstance(part, str) else 4
