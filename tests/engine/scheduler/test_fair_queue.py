"""The queue alone: turns, accounts, and what is forgotten; and clients whose sequences fill the scheduler's pages.

How the queue works with slots is tested in test_scheduler.py.
"""

from __future__ import annotations

import pytest

from fa_serve.engine import SamplingParams
from fa_serve.engine.cache.pages import PageTable
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.fair_queue import MAX_IDLE_CLIENTS, FairQueue
from fa_serve.engine.scheduler.scheduler import Scheduler
from fa_serve.engine.scheduler.sequence import SequenceState


def make_sequence(client: str | None, serial: int, rank: float = 0.0) -> SequenceState:
    return SequenceState(Request(f"{client}-{serial}", [1], SamplingParams(), 1, rank=(rank, serial), client=client))


def admit(queue: FairQueue, cost: int) -> SequenceState:
    sequence = queue.first()
    sequence.take_turn(queue.admit(cost))
    sequence.pay(cost)
    return sequence


def test_clients_take_turns_by_what_their_requests_cost() -> None:
    queue = FairQueue()
    for serial in range(9):
        for client in ("long", "short"):
            queue.add(make_sequence(client, serial))
    served = []
    for _ in range(8):
        client = queue.first().request.client
        admit(queue, 30 if client == "long" else 10)
        served.append(client)
    assert served == ["long", "short", "short", "short", "long", "short", "short", "short"]


def test_who_was_idle_has_no_claim_to_the_time_before() -> None:
    queue = FairQueue()
    for serial in range(9):
        queue.add(make_sequence("busy", serial))
    for _ in range(4):
        admit(queue, 10)
    for serial in range(9):
        queue.add(make_sequence("late", serial))
    assert [admit(queue, 10).request.client for _ in range(4)] == ["late", "busy", "late", "busy"]


def test_a_longer_answer_than_expected_is_charged_at_its_end() -> None:
    queue = FairQueue()
    for serial in range(9):
        for client in ("a", "b"):
            queue.add(make_sequence(client, serial))
    first = admit(queue, 10)
    admit(queue, 10)
    queue.settle(first, 25)
    assert [admit(queue, 10).request.client for _ in range(4)] == ["b", "b", "b", "a"]


def test_a_turn_that_is_given_back_goes_to_the_first_of_its_client() -> None:
    queue = FairQueue()
    for serial in range(3):
        queue.add(make_sequence("a", serial))
        queue.add(make_sequence("b", serial))
    preempted = [admit(queue, 10) for _ in range(4)][2]
    queue.give_back(preempted)
    urgent = make_sequence("a", 9, rank=-1.0)
    queue.add(urgent)
    assert admit(queue, 10) is urgent
    assert urgent.turn == preempted.turn


def test_a_sequence_that_ends_while_it_waits_leaves_no_turn_behind() -> None:
    queue = FairQueue()
    queue.add(make_sequence("a", 0))
    preempted = admit(queue, 10)
    queue.give_back(preempted)
    queue.check_integrity([])
    queue.remove(preempted)
    queue.check_integrity([])
    assert len(queue) == 0


def test_accounts_of_idle_clients_are_bounded() -> None:
    queue = FairQueue()
    queue.add(make_sequence("stays", 0))
    stays = admit(queue, 1)
    for serial in range(2 * MAX_IDLE_CLIENTS):
        queue.add(make_sequence(f"client-{serial}", serial))
        queue.settle(admit(queue, 1), 0)
    assert len(queue._clients) <= MAX_IDLE_CLIENTS + 1
    queue.settle(stays, 0)
    assert queue._clients == {}


def test_ten_thousand_requests_of_one_client_delay_another_by_one() -> None:
    scheduler = Scheduler(PageTable(64, 4), max_num_seqs=1, max_num_batched_tokens=16, keys_per_tile=8)
    for serial in range(10_000):
        scheduler.add(make_sequence("many", serial).request)
    late = [make_sequence("few", 10_000 + serial).request for serial in range(5)]
    for request in late:
        scheduler.add(request)
    order = []
    while any(request.request_id in scheduler.sequences for request in late):
        batch = scheduler.schedule()
        order += [sequence.request.client for sequence in batch.admitted]
        scheduler.commit(batch, [0] * len(batch.chunks))
    assert order == ["many", "few"] * 5


def test_a_priority_goes_first_among_the_requests_of_its_client() -> None:
    queue = FairQueue()
    for serial, rank in enumerate((5.0, -5.0, 0.0)):
        queue.add(make_sequence("a", serial, rank))
    assert [admit(queue, 1).request.rank[0] for _ in range(3)] == [-5.0, 0.0, 5.0]


def test_a_client_that_runs_nothing_goes_before_one_whose_sequences_take_the_pages() -> None:
    queue = FairQueue()
    for serial in range(3):
        queue.add(make_sequence("many", serial))
    running = [admit(queue, 10) for _ in range(3)]
    queue.add(make_sequence("idle", 0))
    queue.add(make_sequence("idle", 1))
    queue.give_back(running.pop())
    assert queue.first().request.client == "many", "its turn came first"
    queue.prefer_idle()
    assert queue.first().request.client == "idle"
    queue.prefer_idle()
    queue.check_integrity(running)
    assert queue.crowding(running) is running[-1]
    running.append(admit(queue, 10))
    assert queue.first().request.client == "many"
    queue.prefer_idle()
    assert queue.first().request.client == "many", "no client runs nothing"
    assert queue.crowding(running) is None
    queue.check_integrity(running)


def make_scheduler(num_pages: int, seqs: int) -> Scheduler:
    return Scheduler(PageTable(num_pages, 4), max_num_seqs=seqs, max_num_batched_tokens=256, keys_per_tile=8)


def make_request(name: str, prompt: list[int], max_tokens: int, serial: int, client: str, rank: float = 0.0) -> Request:
    return Request(name, prompt, SamplingParams(), max_tokens, rank=(rank, serial), client=client)


def steps_until_done(scheduler: Scheduler, sequence: SequenceState, limit: int = 2000) -> int:
    for step in range(limit):
        if sequence.finished:
            return step
        scheduler.commit(batch := scheduler.schedule(), [3] * sum(chunk.num_samples for chunk in batch.chunks))
    return limit


@pytest.mark.every_case
@pytest.mark.parametrize("steps_before", [2, 20, 60, 200])
@pytest.mark.parametrize("prompt", [1, 60])
def test_a_client_whose_sequences_fill_all_pages_holds_up_nobody(steps_before, prompt) -> None:
    """It wants eight times the pages that there are, so that it always has preempted sequences which came first.

    Without `prefer_idle` and room in pages, the other client waited for 70 to 300 steps: until sequences of the first ended.
    """
    scheduler = make_scheduler(num_pages=128, seqs=32)
    for serial in range(60):
        scheduler.add(make_request(f"flood-{serial}", [4, serial], 300, serial, client="flood", rank=-1000.0))
    for _ in range(steps_before):
        scheduler.commit(batch := scheduler.schedule(), [3] * sum(chunk.num_samples for chunk in batch.chunks))
    for serial in range(3):  # one after the other
        other = scheduler.add(make_request(f"other-{serial}", [serial + 5] * prompt, 4, 100 + serial, client="other"))
        assert steps_until_done(scheduler, other) <= 8
        scheduler.check_integrity()


def test_pages_are_taken_from_the_client_with_the_most_sequences() -> None:
    """A client with one sequence keeps it, although it has the last turn."""
    scheduler = make_scheduler(num_pages=40, seqs=16)
    for serial in range(8):
        scheduler.add(make_request(f"flood-{serial}", [4], 60, serial, client="flood"))
    for _ in range(3):
        scheduler.commit(batch := scheduler.schedule(), [3] * len(batch.chunks))
    other = scheduler.add(make_request("other", [5], 60, 9, client="other"))
    assert steps_until_done(scheduler, other) == 60
    assert scheduler.num_preemptions > 0
