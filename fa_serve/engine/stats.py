"""What the engine counts: one plain snapshot, which crosses from the worker to the server after each step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_serve.engine.scheduler import Scheduler
    from fa_serve.engine.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """A snapshot of the counters of speculation.

    num_drafts:       verified drafts, one for each sequence and step
    num_draft_tokens: their tokens
    accepted_at:      how often the first, the second, ... token of a draft was right and all before it too
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_at: tuple[int, ...] = ()

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens of drafts that were right."""
        return sum(self.accepted_at)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine. All counters start at 0 with the engine.

    num_running, num_waiting: sequences with and without a slot
    num_pages:         pages of the KV cache
    num_pages_used:    pages that sequences hold; those that only the prefix cache keeps are not counted
    num_steps:         launched steps
    num_prompt_tokens: prompt tokens of sequences that have given a first token
    num_cached_tokens: those of them whose keys and values came from the prefix cache
    num_output_tokens: sampled tokens
    num_preemptions:   how often a sequence lost its pages to another one
    speculation:       drafts, and how many of them were right
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
    speculation: SpeculationStats = SpeculationStats()


@dataclass(slots=True)
class Counters:
    """What an engine counts itself. The fields are those of `EngineStats`."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def note_first_token(self, sequence: SequenceState) -> None:
        """Count the prompt of a sequence that has given a first token."""
        self.num_prompt_tokens += sequence.num_prompt_tokens
        self.num_cached_tokens += sequence.num_cached_tokens

    def snapshot(self, scheduler: Scheduler) -> EngineStats:
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=scheduler.pages.num_pages,
            num_pages_used=scheduler.pages.num_held,
            num_preemptions=scheduler.num_preemptions,
            speculation=scheduler.speculation.snapshot(),
            **asdict(self),
        )
