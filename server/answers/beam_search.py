"""Beam search on top of the engine: the `n` best of the answers that `n` beams find.

    async for index, output in beams_of_prompt(service, job, 0, prompt, params, length_penalty=1.0): ...

Each step asks the engine for one more token after every beam, with the log-probabilities of the 2 n most likely tokens. With
one end token, at least n of these continue the beam. With several end tokens, fewer beams may be left. The engine's prefix
cache holds the tokens that beams share, so a step computes less than a page of tokens for each beam. Beams that have ended are
kept in addition to the live ones. The search ends when no live beam can become better than the n best ended beams, so its
result is the same as if it went on to max_tokens.

The score of an answer is its log-probability divided by its length to the power of the length penalty, where the length is the
number of tokens including the end token. This is the score in section 7 of "Google's Neural Machine Translation System" (Wu et
al., 2016) without its constant. Left out: which other fields of a request are allowed (schemas.py), and the limits of a search
(answer.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from heapq import nlargest
from operator import itemgetter

from fa_serve.engine import RequestOutput, SamplingParams, SequenceTimes, TokenLogprob

from ..errors import ApiError, BadRequest, TooManyRequests
from ..service import Service
from .generation import Job, engine_errors, failure, generate, merge, sequence_metrics


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of an answer, or a whole answer.

    logprob: the log-probability of all its tokens together
    entry:   the log-probabilities at its last token; None for the empty beam
    parent:  the beam without its last token; None for the empty beam
    ended:   whether its last token is an end token
    """

    tokens: list[int]
    logprob: float
    entry: TokenLogprob | None = None
    parent: Beam | None = None
    ended: bool = False

    def entries(self) -> list[TokenLogprob]:
        """The log-probabilities of each token."""
        found = []
        beam: Beam | None = self
        while beam is not None and beam.entry is not None:
            found.append(beam.entry)
            beam = beam.parent
        return found[::-1]


class Search:
    """The live beams, and the best beams that have ended. It does not use the engine.

    width:      how many live and how many ended beams are kept
    max_tokens: the most tokens of an answer
    num_shown:  how many of the most likely tokens an entry keeps
    """

    def __init__(self, width: int, max_tokens: int, end_ids: frozenset[int], length_penalty: float, num_shown: int = 0) -> None:
        self._width = width
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._length_penalty = length_penalty
        self._num_shown = num_shown
        self.live = [Beam([], 0.0)]
        self._ended: list[Beam] = []

    def step(self, entries: Sequence[TokenLogprob]) -> None:
        """Extend the beams by one token. entries: the log-probabilities after each live beam, in the order of `live`"""
        found = [
            (live.logprob + logprob, live, entry, token, logprob)
            for live, entry in zip(self.live, entries, strict=True)
            for token, logprob in entry.top[: 2 * self._width]
            if logprob > float("-inf")
        ]
        # beams are made only for the best tokens, because each new beam copies the tokens before it
        ends = nlargest(self._width, (each for each in found if each[3] in self._end_ids), key=itemgetter(0))
        rest = nlargest(self._width, (each for each in found if each[3] not in self._end_ids), key=itemgetter(0))
        self._ended = self._best([*self._ended, *(self._extended(*each) for each in ends)])
        self.live = [self._extended(*each) for each in rest]

    def _extended(self, total: float, parent: Beam, entry: TokenLogprob, token: int, logprob: float) -> Beam:
        kept = TokenLogprob(token, logprob, entry.top[: self._num_shown])
        return Beam([*parent.tokens, token], total, kept, parent, ended=token in self._end_ids)

    def is_over(self) -> bool:
        """Whether no live beam can still become one of the best answers."""
        if not self.live or len(self.live[0].tokens) >= self._max_tokens:
            return True
        if len(self._ended) < self._width:
            return False
        # more tokens only lower the log-probability; a positive penalty favours the longest answer, a negative one the shortest
        length = self._max_tokens if self._length_penalty > 0 else len(self.live[0].tokens) + 1
        return self._score(self.live[0].logprob, length) <= self._score_of(self._ended[-1])

    def best(self) -> list[Beam]:
        """The best answers, the best one first. A beam that has not ended is an answer only at max_tokens."""
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
    """Yield (index, output) for the `n` best answers to prompt `number`. Raises ApiError as `sequences_of_prompt` does."""
    assert params.max_tokens is not None
    end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else service.engine.eos_ids)
    num_shown = params.logprobs or 0
    one_token = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        stop_token_ids=params.stop_token_ids,  # so that the engine checks them
        logprobs=max(2 * job.n, num_shown),
    )
    search = Search(job.n, params.max_tokens, end_ids, length_penalty, num_shown)
    if job.adapter is not None:
        await service.adapters.require(job.adapter)
    metrics = [sequence_metrics(service, job) for _ in range(job.n)]
    unfinished_reason = "error"
    first: RequestOutput | None = None
    last: RequestOutput | None = None
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
                async for index, last in outputs:
                    assert last.logprobs is not None
                    entries[index] = last.logprobs[0]
                    first = first or last
            search.step([entries[index] for index in range(len(asked))])
            if not begun:
                for each in metrics:
                    each.observe(RequestOutput(job.name, prompt, token_ids=[0]))  # every beam has its first token now
        times = _times_of_all(first, last)
        for index, beam in enumerate(search.best()):
            shown = beam.tokens[:-1] if beam.ended else beam.tokens
            final = RequestOutput(
                request_id=job.name,
                prompt_token_ids=prompt,
                text=await service.tokenization.continuation(prompt, shown, params.skip_special_tokens, job.client),
                token_ids=beam.tokens,
                logprobs=None if params.logprobs is None else beam.entries(),
                finished=True,
                finish_reason="stop" if beam.ended else "length",
                num_prompt_tokens=len(prompt),
                num_output_tokens=len(beam.tokens),
                num_cached_tokens=first.num_cached_tokens if first is not None else 0,
                index=index,
                times=times,
            )
            metrics.pop(0).observe(final)
            if job.timeline is not None:
                job.timeline.take(sent, final)
            yield number * job.n + index, final
    except (GeneratorExit, asyncio.CancelledError):
        unfinished_reason = "abort"
        raise
    except ApiError as error:
        if first is None and isinstance(error, BadRequest | TooManyRequests):
            unfinished_reason = "refused"
        raise
    finally:
        for unfinished in metrics:
            unfinished.end(unfinished_reason)


async def _next(
    service: Service, job: Job, name: str, index: int, tokens: list[int], params: SamplingParams
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The index of the beam, and the output with the token that follows the beam's tokens."""
    with engine_errors(service, job):
        async with aclosing(generate(service, job, name, tokens, params)) as outputs:
            async for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise failure(service, job, output)
                if output.logprobs:
                    yield index, output


def _times_of_all(first: RequestOutput | None, last: RequestOutput | None) -> SequenceTimes | None:
    """The times of a search: those up to its first token, and everything after that as decoding."""
    if first is None or last is None or first.times is None or last.times is None:
        return None
    until = max(first.times.until, last.times.until)
    return replace(first.times, until=until, decode=first.times.decode + until - first.times.until)
