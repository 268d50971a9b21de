"""A step between its launch and its sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fa_serve.engine.images.tower_time import Stopwatch
from fa_serve.engine.runner.sampled_rows import SampledRows
from fa_serve.engine.runner.sampler import SampleParams


@dataclass(frozen=True, slots=True)
class SentRows:
    """The arrays of `SampledRows` on the device.

    sampled_slots:  (n,) int64, the slots of the sequences that sample
    logprob_rows:   (m,) int64, rows that want log-probabilities; None if there are none
    prompt_targets: (k,) int64, prompt tokens whose log-probabilities are wanted; None if there are none
    """

    sampled_slots: Tensor
    logprob_rows: Tensor | None
    prompt_targets: Tensor | None
    sampling: SampleParams

    @classmethod
    def of(cls, rows: SampledRows, sent: Mapping[str, Tensor]) -> SentRows:
        """sent: has the arrays of `rows`"""
        top_k = rows.sampling.get("top_k")
        return cls(
            sampled_slots=sent["sampled_slots"],
            logprob_rows=sent.get("logprob_rows"),
            prompt_targets=sent.get("prompt_targets"),
            sampling=SampleParams(
                **{name: sent[name] for name in rows.sampling},
                largest_top_k=None if top_k is None else int(top_k.max()),
            ),
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """A launched forward whose tokens have not been sampled yet.

    logits:  (rows, vocab), first the rows of `rows.sequences`, then those of `rows.prompt_spans`; valid until the next launch
    rows:    what is sampled; sent: its arrays on the device
    watch:   measures how long encoding the step's images takes; None if it encodes none
    """

    logits: Tensor
    rows: SampledRows
    sent: SentRows
    watch: Stopwatch | None = None
