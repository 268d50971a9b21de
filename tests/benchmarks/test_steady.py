"""What is timed, of calls whose first ones take longer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import steady
from benchmarks.steady import steady_seconds


def scripted(*seconds: float) -> tuple[Callable[[Callable[[], object]], float], list[float]]:
    """A measure that makes each call and says that it took these seconds, the last of them again and again; and those said."""
    said: list[float] = []

    def measure(call: Callable[[], object]) -> float:
        call()
        said.append(seconds[min(len(said), len(seconds) - 1)])
        return said[-1]

    return measure, said


def test_calls_that_take_longer_at_first_are_not_timed() -> None:
    measure, said = scripted(9, 5, 2, 1.9, 1.0, 3.0, 2.0)
    assert steady_seconds(lambda: None, lambda: 0, measure=measure) == 2.0
    assert said == [9, 5, 2, 1.9, 1.0, 3.0, 2.0], "2 and 1.9 agree"


def test_a_warm_up_ends_without_agreement_as_well() -> None:
    measure, said = scripted(1, 2, 4, 8, 16, 3, 3, 3)
    assert steady_seconds(lambda: None, lambda: 0, measure=measure) == 3
    assert len(said) == steady.MAX_WARM_UPS + 3


def test_a_timed_call_that_compiles_is_made_again() -> None:
    """Two calls agree although the third one compiles, as a graph is captured when a shape has come repeatedly."""
    late = 0
    number = 0

    def call() -> None:
        nonlocal late, number
        number += 1
        late += number in (3, 5)

    measure, said = scripted(1, 1, 7, 1, 8, 1.1, 1.2)
    assert steady_seconds(call, lambda: late, measure=measure) == 1.1
    assert len(said) == 7


def test_what_always_compiles_is_not_timed() -> None:
    late = 0

    def call() -> None:
        nonlocal late
        late += 1

    with pytest.raises(RuntimeError, match="compiled a kernel"):
        steady_seconds(call, lambda: late)


def test_a_budget_leaves_one_timed_call() -> None:
    measure, said = scripted(1)
    assert steady_seconds(lambda: None, lambda: 0, budget=0, measure=measure) == 1
    assert len(said) == 3


def test_a_given_warm_up_takes_the_place_of_whole_calls() -> None:
    measure, said = scripted(9, 5, 2, 1)
    warmed: list[bool] = []
    late = 0

    def call() -> None:
        nonlocal late
        late += len(said) < 2

    found = steady_seconds(call, lambda: late, calls=1, measure=measure, warm_up=lambda: warmed.append(not said))
    assert found == 2, "the first call in which nothing is compiled"
    assert said == [9, 5, 2]
    assert warmed == [True], "made once, before any timed call"
