"""Finds stop strings in a text that arrives in pieces, in time linear in the text: the automaton of Aho and Corasick.

    strings = StopStrings(("\\n\\n", "END"))
    state = strings.step(state, character)   # begins with 0
    strings.complete(state)                  # length of the longest string that ends here, or 0
    strings.pending(state)                   # length of the longest suffix of the text that begins a string

A library such as ahocorasick-rs searches whole texts. It does not expose its state, nor how much text must be held back.
Source: Aho and Corasick, "Efficient string matching: an aid to bibliographic search", Communications of the ACM 18 (6), 1975.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton. It never changes once it is built, so the answers to one request share it.

    A state stands for a prefix of a string: the longest one that is a suffix of the text so far. State 0 is the empty prefix.
    Building takes time and memory linear in the lengths of the strings.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]  # the state of the longest proper suffix that is a prefix of a string
        self._complete = [0]
        for string in strings:
            state = 0
            for character in string:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._depth.append(self._depth[state] + 1)
                    self._next.append({})
                    self._fallback.append(0)
                    self._complete.append(0)
                state = self._next[state][character]
            self._complete[state] = len(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def complete(self, state: int) -> int:
        """Length of the longest string that the text ends with, or 0."""
        return self._complete[state]

    def pending(self, state: int) -> int:
        """Length of the longest suffix of the text that is a prefix of a string."""
        return self._depth[state]

    def _link(self) -> None:
        """Set the fallbacks, the shorter prefixes first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._complete[state] = self._complete[state] or self._complete[self._fallback[state]]
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                queue.append(child)
