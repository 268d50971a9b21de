"""Batches are formed by tokens, clients take turns, and every input is accounted for."""

import random

import numpy as np
import pytest

from fa_serve.engine import QueueFullError
from fa_serve.engine.pooling import batches
from fa_serve.engine.pooling.batches import InputQueue
from fa_serve.engine.pooling.inputs import EncoderInput, EncoderInputs
from fa_serve.engine.pooling.params import PoolingParams
from fa_serve.spec import ParameterError


def inputs(*lengths: int) -> EncoderInputs:
    return EncoderInputs.of([EncoderInput(np.zeros(length, dtype=np.int32)) for length in lengths])


def names(batch) -> list[tuple[str, int]]:
    return [(run.request.name, index) for run in batch for index in range(run.begin, run.end)]


def test_a_batch_has_as_many_inputs_as_its_tokens_allow() -> None:
    queue = InputQueue(max_tokens=10, max_inputs=3)
    queue.add("a", inputs(4, 5, 3, 20, 1, 1, 1, 1), PoolingParams())
    found = []
    while batch := queue.next_batch():
        found.append([index for _, index in names(batch)])
        assert queue.num_running == len(found[-1])
        assert queue.finish(batch) == batch
    assert found == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert (queue.num_waiting, queue.num_waiting_tokens, "a" in queue) == (0, 0, False)


def test_a_turn_has_a_bound(monkeypatch) -> None:
    """A long run of short inputs does not fill the batch of another client's turn, and a longer input is a turn alone."""
    monkeypatch.setattr(batches, "RUN_TOKENS", 4)
    queue = InputQueue(max_tokens=12, max_inputs=100)
    queue.add("many", inputs(*[1] * 50), PoolingParams(), client="x")
    queue.add("few", inputs(5, 1), PoolingParams(), client="y")
    batch = queue.next_batch()
    assert [(run.request.name, run.begin, run.end, run.charge) for run in batch] == [
        ("many", 0, 4, 4),
        ("few", 0, 1, 5),
        ("many", 4, 7, 3),
    ]
    queue.check_integrity()


def test_clients_take_turns_by_tokens() -> None:
    """A client with a thousand inputs in one request does not delay a client that sends one."""
    queue = InputQueue(max_tokens=8, max_inputs=100)
    queue.add("many", inputs(*[4] * 50), PoolingParams(), client="x")
    queue.finish(queue.next_batch())
    queue.add("one", inputs(4), PoolingParams(), client="y")
    queue.add("long", inputs(8), PoolingParams(), client="z")
    seen = []
    for _ in range(4):
        batch = queue.next_batch()
        seen += [name for name, _ in names(batch)]
        queue.finish(batch)
    assert seen.index("one") <= 2
    assert seen.index("long") <= 4


def test_priorities_order_the_requests_of_a_client() -> None:
    queue = InputQueue(max_tokens=4, max_inputs=1)
    queue.add("late", inputs(1), PoolingParams(), priority=5)
    queue.add("soon", inputs(1), PoolingParams(), priority=-5)
    assert names(queue.next_batch()) == [("soon", 0)]


def test_vectors_of_tokens_and_of_texts_are_in_different_batches() -> None:
    queue = InputQueue(max_tokens=100, max_inputs=100)
    queue.add("a", inputs(1, 1), PoolingParams())
    queue.add("b", inputs(1, 1), PoolingParams(tokens=True))
    queue.add("c", inputs(1), PoolingParams())
    assert [names(queue.next_batch()) for _ in range(3)] == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)], [("c", 0)]]


def test_an_aborted_request_leaves_the_queue_and_its_running_inputs_are_dropped() -> None:
    queue = InputQueue(max_tokens=2, max_inputs=100)
    queue.add("a", inputs(1, 1, 1), PoolingParams())
    queue.add("b", inputs(1), PoolingParams())
    batch = queue.next_batch()
    assert names(batch) == [("a", 0), ("a", 1)]
    assert queue.abort("a") == [0, 1, 2]
    assert queue.abort("a") == []
    assert queue.finish(batch) == []
    assert names(queue.next_batch()) == [("b", 0)]
    queue.check_integrity()


def test_inputs_that_are_given_back_are_computed_again_in_their_order() -> None:
    queue = InputQueue(max_tokens=100, max_inputs=100)
    queue.add("a", inputs(1, 2), PoolingParams())
    queue.add("b", inputs(3), PoolingParams())
    batch = queue.next_batch()
    queue.abort("b")
    queue.give_back(batch)
    queue.check_integrity()
    assert names(queue.next_batch()) == [("a", 0), ("a", 1)]


def test_time_runs_out_for_requests_that_are_not_finished(monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(batches.time, "monotonic", lambda: now)
    queue = InputQueue(max_tokens=1, max_inputs=1)
    queue.add("a", inputs(1), PoolingParams(), timeout=1.0)
    queue.add("b", inputs(1), PoolingParams(), timeout=2.0)
    queue.finish(queue.next_batch())
    assert queue.expired(100.5) == []
    assert queue.expired(103.0) == ["b"]
    assert queue.expired(104.0) == []


def test_what_cannot_be_queued_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(batches, "MAX_WAITING_TOKENS", 10)
    queue = InputQueue(max_tokens=4, max_inputs=4)
    queue.add("a", inputs(20), PoolingParams())  # nothing waits, so it is taken
    with pytest.raises(QueueFullError):
        queue.add("b", inputs(1), PoolingParams())
    with pytest.raises(ParameterError, match="unique"):
        queue.add("a", inputs(1), PoolingParams())
    with pytest.raises(ParameterError, match="at least one"):
        queue.add("c", inputs(), PoolingParams())
    queue.check_integrity()


def test_random_traffic_loses_nothing() -> None:
    draw = random.Random(0)
    queue = InputQueue(max_tokens=30, max_inputs=5)
    wanted: dict[str, set[int]] = {}
    done: dict[str, set[int]] = {}
    for number in range(300):
        if draw.random() < 0.6:
            lengths = [draw.randint(1, 12) for _ in range(draw.randint(1, 6))]
            queue.add(str(number), inputs(*lengths), PoolingParams(), client=draw.choice("abc"), priority=draw.randint(-2, 2))
            wanted[str(number)] = set(range(len(lengths)))
        batch = queue.next_batch()
        if batch and draw.random() < 0.1:
            queue.give_back(batch)
        else:
            for name, index in names(queue.finish(batch)):
                assert index not in done.setdefault(name, set())
                done[name].add(index)
        if wanted and draw.random() < 0.1:
            name = draw.choice(sorted(wanted))
            queue.abort(name)
            del wanted[name]
        queue.check_integrity()
    while batch := queue.next_batch():
        for name, index in names(queue.finish(batch)):
            done.setdefault(name, set()).add(index)
    assert {name: done.get(name) for name in wanted} == wanted
