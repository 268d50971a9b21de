"""What the engine counts: one plain snapshot, which the worker sends to the server after each step."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from fa_serve.engine.cache.host_tier import HostTierStats
from fa_serve.engine.speculation.drafts import SpeculationStats

if TYPE_CHECKING:
    from fa_serve.engine.scheduler.scheduler import Scheduler
    from fa_serve.engine.scheduler.sequence import SequenceState

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Bounds of the histograms of the times of steps, and of how late the server's event loop is."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """How long steps have taken.

    counts: for each of STEP_SECONDS, how many steps took at most this time and more than the bound before it; then how many
            took longer than all bounds
    total:  seconds of all steps
    """

    counts: tuple[int, ...] = (0,) * (len(STEP_SECONDS) + 1)
    total: float = 0.0

    def plus(self, seconds: float) -> StepStats:
        """These numbers with one more step."""
        size = bisect_left(STEP_SECONDS, seconds)
        counts = (*self.counts[:size], self.counts[size] + 1, *self.counts[size + 1 :])
        return StepStats(counts, self.total + seconds)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. All counters start at 0 with the engine.

    num_running, num_waiting: sequences with and without a slot
    num_pages:         pages of the KV cache
    num_pages_used:    pages that sequences hold; those that only the prefix cache keeps are not counted
    num_states:        states of sequences that the device has memory for; 0 for a model that keeps none
    num_states_used:   states that sequences hold
    num_states_kept:   states that a later sequence could start from
    num_steps:         launched steps
    num_prompt_tokens: prompt tokens of sequences that have given a first token
    num_cached_tokens: how many of these prompt tokens had their keys and values in the prefix cache
    num_output_tokens: sampled tokens
    num_preemptions:   how often a sequence lost its pages to another one
    num_late_compilations: kernels that were compiled, or loaded from the cache on disk, while a request waited or ran
    num_late_captures: CUDA graphs that were captured while a request waited or ran
    speculation:       drafts, and how many of them were right
    host_tier:         what the host tier of the KV cache has done; None without a host tier
    weight_version:    how often the weights have been changed
    steps:             how long the steps of the engine loop have taken, including their outputs; not counted offline
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_used: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_late_compilations: int = 0
    num_late_captures: int = 0
    num_states: int = 0
    num_states_used: int = 0
    num_states_kept: int = 0
    weight_version: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    host_tier: HostTierStats | None = None
    steps: StepStats = StepStats()


@dataclass(slots=True)
class Counters:
    """The counters that the engine itself keeps. The fields are those of `EngineStats`."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    weight_version: int = 0

    def note_first_token(self, sequence: SequenceState) -> None:
        """Count the prompt of a sequence that has given a first token."""
        self.num_prompt_tokens += sequence.num_prompt_tokens
        self.num_cached_tokens += sequence.num_cached_tokens

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        states = scheduler.states
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.seats) + len(scheduler.towers),
            num_pages=scheduler.pages.num_pages,
            num_pages_used=scheduler.pages.num_held,
            num_preemptions=scheduler.num_preemptions,
            num_states=0 if states is None else states.num_states,
            num_states_used=0 if states is None else states.num_held,
            num_states_kept=0 if states is None else states.num_kept,
            speculation=scheduler.speculation.snapshot(),
            host_tier=None if scheduler.tier is None else scheduler.tier.snapshot(),
            **asdict(self),
        )
