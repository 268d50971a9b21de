"""A trial ends at its limits and when it is cancelled, and the next trial finds the process ready."""

from __future__ import annotations

import json
import threading
import time

import llguidance
import pytest
from tiny_models import VOCAB, make_tokenizer

from fa_serve.engine.structured import grammar_process
from fa_serve.sandbox.trials import Cancelled, TrialError, TrialLimits, Trials

MATCHER = llguidance.LLMatcher
SHORT = json.dumps(MATCHER.grammar_from_regex("[a-f]{3}")).encode()


def request(grammar: str) -> bytes:
    return json.dumps(grammar).encode()


def slow() -> bytes:
    """A schema that takes seconds."""
    properties = {f"k{i}": {"type": "string"} for i in range(6000)}
    return request(MATCHER.grammar_from_json_schema({"type": "object", "properties": properties}))


def error_of(trials: Trials, given: bytes) -> str:
    return json.loads(trials.trial().run(given))["error"]


@pytest.fixture
def make_trials():
    made = []

    def make(timeout: float = 30.0, memory: int = 256 << 20) -> Trials:
        given = {"tokenizer": make_tokenizer().backend_tokenizer.to_str(), "vocab_size": VOCAB, "end_ids": [1]}
        limits = TrialLimits("compile", timeout, memory, "grammar")
        made.append(Trials(grammar_process.__file__, given, limits, grammar_process.STACK))
        return made[-1]

    yield make
    for trials in made:
        trials.close()


def test_limits_of_time_and_memory_are_named(make_trials) -> None:
    trials = make_trials(timeout=0.2)
    with pytest.raises(TrialError, match=r"within 0.2 seconds \(--grammar-timeout\)"):
        trials.trial().run(slow())
    trials = make_trials(memory=1 << 20)
    with pytest.raises(TrialError, match=r"within 1048576 bytes \(--grammar-memory\)"):
        trials.trial().run(slow())
    assert error_of(trials, SHORT) == ""


def test_the_processors_time_of_the_work_is_told(make_trials) -> None:
    trial = make_trials().trial()
    assert trial.seconds == 0
    begin = time.monotonic()
    assert json.loads(trial.run(slow()))["error"] == ""
    assert 0.2 < trial.seconds < time.monotonic() - begin, "the schema takes seconds"
    trial = make_trials(timeout=0.3).trial()
    with pytest.raises(TrialError):
        trial.run(slow())
    assert 0.25 < trial.seconds < 5, "work that was ended counts as long as it was waited for"


def test_errors_are_reported_and_cancelling_kills(make_trials) -> None:
    trials = make_trials()
    assert "unclosed" in error_of(trials, request(MATCHER.grammar_from_regex("[0-9")))
    trial = trials.trial()
    threading.Timer(0.3, trial.cancel).start()
    begin = time.monotonic()
    with pytest.raises(Cancelled):
        trial.run(slow())
    assert time.monotonic() - begin < 5
    trials.close()
    with pytest.raises(Cancelled):  # a thread that is late starts no process that nobody ends
        trials.trial().run(SHORT)
    assert trials._process is None
