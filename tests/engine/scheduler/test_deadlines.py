"""Requests end when their time is up, and deadlines of ended requests are not kept."""

from __future__ import annotations

from fa_serve.engine import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.deadlines import SPARE, Deadlines
from fa_serve.engine.scheduler.sequence import SequenceState

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def test_deadlines_expire_in_order_and_once() -> None:
    deadlines = Deadlines()
    sequences = [SequenceState(Request(name, [1], SamplingParams(), 1)) for name in "abc"]
    for sequence, deadline in zip(sequences, (3.0, 1.0, 2.0), strict=True):
        deadlines.add(deadline, sequence)
    assert deadlines.expired(0.5, 3) == []
    sequences[2].finish("stop")
    assert deadlines.expired(2.0, 3) == [sequences[1]], "the other one has ended in time"
    assert deadlines.expired(9.0, 3) == [sequences[0]]
    assert len(deadlines) == 0


def test_ended_requests_are_not_kept_for_their_deadlines(make_engine) -> None:
    engine = make_engine()
    for i in range(300):
        engine.add_request(str(i), [1], timeout=1000.0)
        engine.abort(str(i))
        engine.step()
    assert len(engine._scheduler.deadlines) <= SPARE + 1


def test_a_request_ends_when_its_time_is_up(make_engine, monkeypatch) -> None:
    engine = make_engine(max_num_seqs=1)
    now = [100.0]
    monkeypatch.setattr("fa_serve.engine.engine.time.monotonic", lambda: now[0])
    for name, timeout in (("running", 5.0), ("waiting", 2.5), ("unhurried", None), ("quick", 3.0)):
        engine.add_request(name, [1], GREEDY, timeout=timeout)
    engine.abort("quick")
    engine.step()
    now[0] += 4.0
    ended = [output for output in engine.step() if output.finished]
    assert [(o.request_id, o.finish_reason, o.error.code) for o in ended] == [("waiting", "error", "timeout")]
    now[0] += 4.0
    assert [(o.request_id, o.num_output_tokens) for o in engine.step() if o.finished] == [("running", 2)]
    engine.check_integrity()
    tokens = [token for _ in range(20) for output in engine.step() for token in output.token_ids]
    assert len(tokens) == 11, "the first of its 12 came with the step that ended the running one"
