"""Beam search on top of the engine: the `n` best of the answers that `n` beams find.

    async for index, output in beams_of_prompt(service, job, 0, prompt, params, length_penalty=1.0): ...

Each step asks the engine for one more token after every beam, with the log-probabilities of the 2 n most likely ones, of which
at least n go on if there is one end token. What a beam has in common with others is in the engine's prefix cache, so a step
computes less than a page of tokens for each beam. Beams that end are kept beside those that go on. The search ends when no beam
can become better than the n best that have ended, so it finds what it would find at max_tokens.

The score of an answer is its log-probability by the number of its tokens, the end token included, to the power of the length
penalty, as in section 7 of "Google's Neural Machine Translation System" (Wu et al., 2016) without the constant there. Left
out: which other fields of a request are allowed (schemas.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from fa_serve.engine import RequestOutput, SamplingParams, TokenLogprob

from .generation import Job, engine_errors, failure, generate, merge
from .metrics import SequenceMetrics
from .service import Service


@dataclass(frozen=True, slots=True)
class Beam:
    """tokens: generated so far; logprob: of all of them together; entries: of each; ended: the last one is an end token"""

    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    entries: list[TokenLogprob] = field(default_factory=list)
    ended: bool = False

    def after(self, entry: TokenLogprob, end_ids: frozenset[int]) -> list[Beam]:
        """This beam with each of the most likely tokens behind it."""
        return [
            Beam(
                [*self.tokens, token],
                self.logprob + logprob,
                [*self.entries, TokenLogprob(token, logprob, entry.top)],
                token in end_ids,
            )
            for token, logprob in entry.top
            if logprob > float("-inf")
        ]


class Search:
    """The beams that go on, `live`, and the best that have ended. Plain data, without an engine.

    width: of both; max_tokens: of an answer
    """

    def __init__(self, width: int, max_tokens: int, end_ids: frozenset[int], length_penalty: float) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._length_penalty = length_penalty
        self.live = [Beam()]
        self._ended: list[Beam] = []

    def step(self, entries: Iterable[TokenLogprob]) -> None:
        """Go on with what comes after each live beam, in their order."""
        found = [beam for live, entry in zip(self.live, entries, strict=True) for beam in live.after(entry, self._end_ids)]
        self._ended = self._best([*self._ended, *(beam for beam in found if beam.ended)])
        going_on = sorted((beam for beam in found if not beam.ended), key=lambda beam: -beam.logprob)
        self.live = going_on[: self._width]

    def is_over(self) -> bool:
        """Whether nothing that the live beams could still become would be among the best."""
        if not self.live or len(self.live[0].tokens) >= self._max_tokens:
            return True
        if len(self._ended) < self._width:
            return False
        # log-probabilities only fall; a positive penalty is kindest to the longest answer, a negative one to the shortest
        length = self._max_tokens if self._length_penalty > 0 else len(self.live[0].tokens) + 1
        return self._score(self.live[0].logprob, length) <= self._score_of(self._ended[-1])

    def best(self) -> list[Beam]:
        """The best answers, the best one first. Beams that have not ended are answers at max_tokens only."""
        return self._best([*self._ended, *(beam for beam in self.live if len(beam.tokens) >= self._max_tokens)])

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -self._score_of(beam))[: self._width]

    def _score_of(self, beam: Beam) -> float:
        return self._score(beam.logprob, len(beam.tokens))

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._length_penalty)


async def beams_of_prompt(
    service: Service, job: Job, number: int, prompt: list[int], params: SamplingParams, length_penalty: float
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The `n` best answers to prompt `number`, each as one output, by index. Raises as `sequences_of_prompt` does."""
    assert params.max_tokens is not None
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else service.engine.eos_ids)
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=2 * job.n)
    search = Search(job.n, params.max_tokens, end_ids, length_penalty)
    metrics = [SequenceMetrics(service.metrics, service.model_name, job.arrival) for _ in range(job.n)]
    unfinished_reason = "abort"  # also if the engine fails, as for other sequences of a request
    num_cached_tokens = None
    sent = job.timeline.send() if job.timeline is not None else 0.0
    try:
        while not search.is_over():
            begun = len(search.live[0].tokens)
            asked = [
                _next(service, job, f"{number}-{begun}-{index}", index, prompt + beam.tokens, one_token)
                for index, beam in enumerate(search.live)
            ]
            entries: dict[int, TokenLogprob] = {}
            async with aclosing(merge(asked)) as outputs:
                async for index, output in outputs:
                    assert output.logprobs is not None
                    entries[index] = output.logprobs[0]
                    num_cached_tokens = output.num_cached_tokens if num_cached_tokens is None else num_cached_tokens
            search.step(entries[index] for index in range(len(asked)))
        for index, beam in enumerate(search.best()):
            tokens = beam.tokens[:-1] if beam.ended else beam.tokens
            final = RequestOutput(
                request_id=job.name,
                prompt_token_ids=prompt,
                text=await service.tokenization.continuation(prompt, tokens, params.skip_special_tokens, job.client),
                token_ids=beam.tokens,
                logprobs=None if params.logprobs is None else [_reported(entry, params.logprobs) for entry in beam.entries],
                finished=True,
                finish_reason="stop" if beam.ended else "length",
                num_prompt_tokens=len(prompt),
                num_output_tokens=len(beam.tokens),
                num_cached_tokens=num_cached_tokens or 0,
                index=index,
            )
            metrics.pop(0).observe(final)
            if job.timeline is not None:
                job.timeline.take(sent, final)
            yield number * job.n + index, final
    finally:
        for unfinished in metrics:
            unfinished.end(unfinished_reason)


async def _next(
    service: Service, job: Job, name: str, index: int, tokens: list[int], params: SamplingParams
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The output with what comes after these tokens, with the index of the beam."""
    with engine_errors(service, job):
        async with aclosing(generate(service, job, name, tokens, params)) as outputs:
            async for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise failure(service, job, output)
                if output.logprobs:
                    yield index, output


def _reported(entry: TokenLogprob, count: int) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob, entry.top[:count])
