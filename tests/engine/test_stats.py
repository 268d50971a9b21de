"""What the engine counts itself, and the snapshot of all counters."""

from __future__ import annotations

from scheduling import make_request, make_scheduler

from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.stats import Counters


def test_a_snapshot_has_every_counter() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [0, 1, 2], 4))
    scheduler.add(make_request("b", [3], 4))
    scheduler.schedule()
    scheduler.add(make_request("c", [4], 4))
    counters = Counters(num_steps=1, num_output_tokens=2)
    sequence = SequenceState(make_request("d", [5, 6], 1))
    counters.note_first_token(sequence)
    stats = counters.snapshot(scheduler)
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (1, 2, 0, 2)
    assert stats.num_pages == scheduler.pages.num_pages
    assert stats.num_pages_used == scheduler.pages.num_held > 0
    assert (stats.num_preemptions, stats.speculation.num_drafts) == (0, 0)
