"""A step between its launch and its sampling."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fa_serve.engine.images.tower_time import Stopwatch
from fa_serve.engine.runner.cuda_graphs import Inputs, Shape
from fa_serve.engine.runner.results import PromptSpan
from fa_serve.engine.runner.sampler import SampleParams
from fa_serve.engine.scheduler.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """The tensors of one step, on the device.

    inputs:         what the forward takes; or a shape, if the inputs are in the block of the graphs, padded to that shape
    sampled_slots:  (n,) int64, the slots of the sequences that sample
    logprob_rows:   (m,) int64, rows that want log-probabilities; None if there are none
    prompt_targets: (k,) int64, prompt tokens whose log-probabilities are wanted; None if there are none
    """

    inputs: Inputs | Shape
    sampled_slots: Tensor
    logprob_rows: Tensor | None
    prompt_targets: Tensor | None
    sampling: SampleParams


@dataclass(frozen=True, slots=True)
class Forward:
    """A launched forward whose tokens have not been sampled yet.

    logits:       (rows, vocab), first the rows of `sequences`, then those of `prompt_spans`; valid until the next launch
    sequences:    the sequences that sample, by row
    logprob_rows: rows of `sequences` that want log-probabilities
    prompt_spans: the prompt tokens whose log-probabilities are wanted
    watch:        measures how long encoding the step's images takes; None if it encodes none
    """

    prepared: PreparedBatch
    logits: Tensor
    sequences: list[SequenceState]
    logprob_rows: list[int]
    prompt_spans: list[PromptSpan]
    watch: Stopwatch | None = None
