"""The automaton of stop strings agrees with a plain search, in linear time."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from fa_serve.engine.request.stop_strings import StopStrings

TEXT = st.text(alphabet="abc", max_size=20)


@settings(deadline=None)
@given(strings=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=5), text=TEXT)
def test_it_agrees_with_a_plain_search(strings, text) -> None:
    automaton = StopStrings(strings)
    state = 0
    for end, character in enumerate(text, 1):
        state = automaton.step(state, character)
        so_far = text[:end]
        assert automaton.complete(state) == max((len(x) for x in strings if so_far.endswith(x)), default=0)
        prefixes = {x[:length] for x in strings for length in range(len(x) + 1)} | {""}
        assert automaton.pending(state) == max(len(x) for x in prefixes if so_far.endswith(x))


def test_long_strings_that_nearly_match_take_linear_time() -> None:
    """A search for each prefix of each string, as before, takes minutes for this."""
    automaton = StopStrings(["a" * 4000 + str(number) for number in range(10)])
    begin = time.process_time()
    state = 0
    for _ in range(100_000):
        state = automaton.step(state, "a")
    assert automaton.pending(state) == 4000
    assert time.process_time() - begin < 2
