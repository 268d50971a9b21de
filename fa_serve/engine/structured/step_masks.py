"""The grammars of one step: which tokens structured outputs allow in each row of the logits, and which answers they end.

    masks = step_masks(grammars, batch, output_states)
    pending = runner.sample(forward, masks.rows)
    ends = grammar_ends(gained, output_states)

Compute the masks only when the host knows every token before the step. Left out: how a mask is computed (grammars.py) and where
it is applied to the logits (sampler.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_serve.engine.errors import RequestError
from fa_serve.engine.request.output_state import OutputState
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.structured.grammars import Grammars


class StepMasks(NamedTuple):
    """The masks of a step. A step without structured outputs has none.

    rows:    masks by row of the logits, as `ModelRunner.sample` takes them
    failed:  request id and error for each matcher that has given up
    late:    indices of chunks whose masks are late. Their rows allow no token, so the caller postpones these chunks
    seconds: how long computing the masks took
    """

    rows: Mapping[int, NDArray[np.int32]] = {}
    failed: Sequence[tuple[str, RequestError]] = ()
    late: Sequence[int] = ()
    seconds: float = 0.0


def step_masks(grammars: Grammars, batch: ScheduledBatch, states: Mapping[str, OutputState]) -> StepMasks:
    """The masks of a step.

    states: output states of unfinished requests, by request id; a step may also compute sequences that have ended
    """
    begin = time.monotonic()
    rows: list[int] = []
    indices: list[int] = []
    constrained: list[OutputState] = []
    first = 0
    for index, chunk in enumerate(batch.chunks):
        state = states.get(chunk.sequence.request.request_id)
        if chunk.num_samples and not chunk.postponed and state is not None and state.matcher is not None:
            rows += range(first, first + chunk.num_samples)
            indices.append(index)
            constrained.append(state)
        first += chunk.num_samples
    if not rows:
        return StepMasks()
    matchers = [state.matcher for state in constrained]
    chunks = [batch.chunks[index] for index in indices]
    masks, late = grammars.masks(matchers, [x.sequence.request.client for x in chunks], [x.drafts for x in chunks])
    failed = []
    first = 0
    for state, chunk in zip(constrained, chunks, strict=True):
        end = first + chunk.num_samples
        grammars.allow_ends(masks[first:end], state.sequence.request.end_ids)
        first = end
        if state.matcher.is_error():
            reason = state.matcher.get_error()[:200]
            name = state.sequence.request.request_id
            failed.append((name, RequestError("grammar", f"the matcher of the structured output failed: {reason}")))
    by_row = dict(zip(rows, masks, strict=True))
    return StepMasks(by_row, failed, [indices[each] for each in late], time.monotonic() - begin)


def grammar_ends(gained: Mapping[SequenceState, Sequence[int]], states: Mapping[str, OutputState]) -> dict[str, int]:
    """Let the matchers take in the tokens of a step. Returns how many of them complete an answer, by request id; 0 if none do.

    gained: new tokens of unfinished sequences
    """
    followed = {states[sequence.request.request_id]: tokens for sequence, tokens in gained.items()}
    return {
        state.sequence.request.request_id: state.follow(tokens)
        for state, tokens in followed.items()
        if state.matcher is not None
    }
