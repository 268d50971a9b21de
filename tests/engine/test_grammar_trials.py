"""A trial ends at its limits and when it is cancelled, and the next trial finds the process ready."""

from __future__ import annotations

import threading
import time

import llguidance
import pytest
from tiny_models import VOCAB, make_tokenizer

from fa_serve.engine.grammar_trials import Cancelled, GrammarTrials, TrialError

MATCHER = llguidance.LLMatcher
SHORT = MATCHER.grammar_from_regex("[a-f]{3}")


def slow() -> str:
    """A schema that takes seconds."""
    return MATCHER.grammar_from_json_schema(
        {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(6000)}}
    )


@pytest.fixture
def make_trials():
    made = []

    def make(timeout: float = 30.0, memory: int = 256 << 20) -> GrammarTrials:
        text = make_tokenizer().backend_tokenizer.to_str()
        made.append(GrammarTrials(text, VOCAB, [1], timeout=timeout, memory=memory))
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
    assert trials.trial().run(SHORT).error == ""


def test_errors_are_reported_and_cancelling_kills(make_trials) -> None:
    trials = make_trials()
    assert "unclosed" in trials.trial().run(MATCHER.grammar_from_regex("[0-9")).error
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
