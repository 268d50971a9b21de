"""The rows of logits that a step samples, and the NumPy arrays that the sampler reads for them.

    rows = sampled_rows(batch, arrays, vocab_size=32000)         # arrays: what `batch_arrays` has made for the step
    sent = send(rows.arrays, device)

The forward reads none of these arrays, so they may be made and sent after its launch. Left out: the arrays of the forward
(batch_arrays.py), and sampling itself (sampler.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa_serve.engine.request.request import Request
from fa_serve.engine.runner.batch_arrays import BatchArrays
from fa_serve.engine.runner.results import PromptSpan
from fa_serve.engine.runner.sampler import draft_arrays, sampling_arrays
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What is sampled from the logits of one step.

    sampling:  the fields of `SampleParams` that this step needs
    rows:      "sampled_slots", (n,) slots of the sequences that sample; if they are needed, "logprob_rows", (m,) rows among
               these, and "prompt_targets", (k,) prompt tokens whose log-probabilities are wanted
    sequences: the sequences that sample, by row of the logits; a sequence with k drafts has 1 + k rows
    logprob_rows: rows of `sequences` that want log-probabilities
    prompt_spans: the prompt tokens of "prompt_targets"; their logits come after those of `sequences`
    """

    sampling: Arrays
    rows: Arrays
    sequences: list[SequenceState]
    logprob_rows: list[int]
    prompt_spans: list[PromptSpan]

    @property
    def arrays(self) -> Arrays:
        """All arrays that the sampler reads."""
        return self.sampling | self.rows


def sampled_rows(
    batch: ScheduledBatch, arrays: BatchArrays, *, vocab_size: int, drafting: bool = False, tokens_ahead: int = 0
) -> SampledRows:
    """The rows that one step samples. drafting, tokens_ahead: as in `batch_arrays`"""
    sampling_chunks = [chunk for chunk in batch.chunks if chunk.num_samples]
    requests = [chunk.sequence.request for chunk in sampling_chunks]
    sequences = [chunk.sequence for chunk in sampling_chunks for _ in range(chunk.num_samples)]
    sampled = arrays.inputs["logits_indices"][: len(sequences)]
    rows: Arrays = {"sampled_slots": np.repeat(arrays.inputs["slots"], arrays.num_samples)}
    logprob_rows = [] if drafting else _logprob_rows(requests, sequences)
    if logprob_rows:
        rows["logprob_rows"] = np.array(logprob_rows, dtype=np.int64)
    prompt_spans = _prompt_spans(batch)
    if prompt_spans:
        targets = chain.from_iterable(sequence.request.prompt[first:last] for sequence, first, last in prompt_spans)
        rows["prompt_targets"] = np.fromiter(targets, dtype=np.int64)
    num_rows = arrays.num_samples[arrays.num_samples > 0] if batch.num_drafts else None
    drawn_positions = arrays.places[sampled] + tokens_ahead + 1
    sampling = sampling_arrays(requests, drawn_positions, vocab_size, num_rows=num_rows, penalties=not drafting)
    if batch.num_drafts and "repetition" in sampling:
        sampling |= draft_arrays([chunk.drafts for chunk in sampling_chunks], vocab_size)
    return SampledRows(sampling, rows, sequences, logprob_rows, prompt_spans)


def _logprob_rows(requests: list[Request], sequences: list[SequenceState]) -> list[int]:
    """The rows that want log-probabilities. requests: those of `sequences`, once each"""
    if all(request.params.logprobs is None for request in requests):
        return []  # the usual case takes one look-up for each sequence, and not for each of its rows of drafts
    return [row for row, sequence in enumerate(sequences) if sequence.request.params.logprobs is not None]


def _prompt_spans(batch: ScheduledBatch) -> list[PromptSpan]:
    """The logits of a token give the log-probabilities of the token after it."""
    if not batch.num_prompt_logits:
        return []
    return [
        PromptSpan(chunk.sequence, chunk.start + 1, chunk.start + 1 + chunk.num_prompt_logits)
        for chunk in batch.chunks
        if chunk.num_prompt_logits
    ]
