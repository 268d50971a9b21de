"""Steps that verify drafts: what they compute, what is kept of them, and what they leave to other sequences."""

from __future__ import annotations

from scheduling import make_request, make_scheduler

from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.scheduled_batch import INVALID_TOKEN, sharers_of
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation.drafts import NgramDrafter, Speculation


class OneTwo(NgramDrafter):
    """Proposes the token 1 and then 2."""

    def propose(self, sequence: SequenceState, count: int) -> list[int]:
        return [1, 2, 2, 2, 2][:count]


def repeating(num_tokens: int) -> Speculation:
    return Speculation(num_tokens, OneTwo())


def decoding(scheduler: Scheduler, *requests: Request) -> list[SequenceState]:
    """Sequences whose prompts have been computed and whose first tokens are known."""
    sequences = [scheduler.add(request) for request in requests]
    scheduler.commit(scheduler.schedule(), [1] * len(sequences))
    return sequences


def test_a_step_verifies_the_drafts_of_a_sequence() -> None:
    scheduler = make_scheduler(speculation=repeating(4))
    (sequence,) = decoding(scheduler, make_request("a", [0, 0, 0, 0, 0], 8))
    batch = scheduler.schedule()
    (chunk,) = batch.chunks
    assert (chunk.start, chunk.length, chunk.num_samples, chunk.drafts) == (5, 5, 5, [1, 2, 2, 2])
    assert (batch.num_tokens, batch.num_drafts, len(sequence.pages)) == (5, 4, 3)
    assert not scheduler.schedule(), "how many drafts are right is not known yet"
    assert scheduler.needs_results()
    assert scheduler.commit(batch, [1, 2, 0, 2, 2]) == {sequence: [1, 2, 0]}
    assert (sequence.tokens[5:], sequence.num_computed, sequence.num_pending) == ([1, 1, 2, 0], 8, 0)
    chunk = scheduler.schedule().chunks[0]
    assert (chunk.start, chunk.length) == (8, 4), "3 tokens may follow the 4 that have been drawn"
    assert scheduler.speculation.snapshot().accepted_at == (1, 1, 0, 0)


def test_a_draft_ends_a_sequence_where_the_answer_ends() -> None:
    scheduler = make_scheduler(speculation=repeating(4))
    (sequence,) = decoding(scheduler, make_request("a", [0], 8, end_ids=frozenset({2})))
    assert scheduler.commit(scheduler.schedule(), [1, 2, 2, 2, 2]) == {sequence: [1, 2]}
    assert (sequence.finish_reason, sequence.tokens) == ("stop", [0, 1, 1, 2])
    (broken,) = decoding(scheduler, make_request("b", [0], 8))
    assert scheduler.commit(scheduler.schedule(), [1, INVALID_TOKEN, 2, 2, 2]) == {broken: [1]}
    assert broken.error.code == "not_finite"
    (wrong,) = decoding(scheduler, make_request("c", [0], 8))
    assert scheduler.commit(scheduler.schedule(), [0, INVALID_TOKEN, 2, 2, 2]) == {wrong: [0]}, (
        "draws after a wrong draft do not count"
    )
    scheduler.check_integrity()


def test_an_answer_that_is_complete_drops_the_tokens_after_it() -> None:
    scheduler = make_scheduler(speculation=repeating(4))
    (sequence,) = decoding(scheduler, make_request("a", [0] * 5, 5))
    scheduler.commit(scheduler.schedule(), [1, 2, 2, 2])
    assert (sequence.finish_reason, sequence.num_output_tokens) == ("length", 5)
    scheduler.stop(sequence, 2)
    assert (sequence.finish_reason, sequence.tokens[5:]) == ("stop", [1, 1, 2])
    scheduler.check_integrity()


def test_drafts_take_no_pages_that_others_need() -> None:
    scheduler = make_scheduler(num_pages=6, speculation=repeating(4))
    first, second = decoding(scheduler, make_request("a", [0] * 7, 8), make_request("b", [1] * 7, 8, 1))
    batch = scheduler.schedule()
    assert [(len(chunk.drafts), len(chunk.sequence.pages)) for chunk in batch.chunks] == [(0, 2), (0, 2)]
    assert scheduler.num_preemptions == 0
    assert (first.num_drafts, second.num_drafts) == (0, 0)


def test_drafts_stay_within_the_tokens_of_a_step() -> None:
    scheduler = make_scheduler(tokens=7, speculation=repeating(4))
    decoding(scheduler, make_request("a", [0], 8), make_request("b", [1], 8, 1))
    assert [chunk.length for chunk in scheduler.schedule().chunks] == [5, 2]


def test_a_sequence_with_drafts_in_flight_can_be_preempted() -> None:
    scheduler = make_scheduler(num_pages=32, caching=False, speculation=repeating(4))
    (sequence,) = decoding(scheduler, make_request("a", [0] * 5, 8))
    batch = scheduler.schedule()
    scheduler._requeue(sequence)
    assert not scheduler.schedule(), "it waits for its tokens"
    scheduler.commit(batch, [1, 2, 0, 2, 2])
    assert (sequence.num_computed, sequence.tokens[5:]) == (0, [1, 1, 2, 0])
    assert scheduler.schedule().chunks[0].length == 9
    scheduler.check_integrity()


def test_few_sequences_that_wait_do_not_stop_the_others() -> None:
    class Own(NgramDrafter):
        def propose(self, sequence: SequenceState, count: int) -> list[int]:
            return [1] * count if sequence.request.request_id == "0" else []

    scheduler = make_scheduler(num_pages=64, seqs=6, tokens=64, speculation=Speculation(4, Own()))
    requests = [make_request(str(number), [number], 8, number) for number in range(6)]
    for request in requests[:5]:
        scheduler.add(request)
    first = scheduler.schedule()
    assert not scheduler.needs_results(), "one of five"
    second = scheduler.schedule()
    assert [chunk.sequence.request.request_id for chunk in second.chunks] == ["1", "2", "3", "4"]
    scheduler.abort("4")
    assert scheduler.needs_results(), "one of four"
    scheduler.commit(first, [1] * 5)
    assert [len(chunk.drafts) for chunk in scheduler.schedule().chunks] == [4, 0, 0, 0]


def test_who_shares_what_the_chunks_of_a_step_fill() -> None:
    """Pages of earlier steps do not count, and neither do pages with other tokens."""
    scheduler = make_scheduler(tokens=8, seqs=4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    first = scheduler.add(make_request("first", [*text, *range(10, 15)], serial=0))
    scheduler.commit(scheduler.schedule(), [])
    early = scheduler.add(make_request("early", [*text, 60], serial=1))
    late = scheduler.add(make_request("late", [*text, 10, 11, 12, 13, 60], serial=2))
    batch = scheduler.schedule()
    assert [(chunk.sequence, chunk.start) for chunk in batch.chunks] == [(first, 8), (early, 8), (late, 12)]
    assert sharers_of(batch.chunks, scheduler.running, 4) == [late]
    assert sharers_of(batch.chunks_of([early]), scheduler.running, 4) == []
