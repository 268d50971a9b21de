"""Separates a reasoning model's thoughts, <think>...</think>, from its answer while the text arrives.

    reader = ThoughtReader(inside=False)
    thoughts, answer = reader.read("<think>\\nHm")     # a tag may arrive in pieces: text that may belong to one is held back
    thoughts, answer = reader.read("m.</think>4", last=True)

Some chat templates open the tag themselves, and some close it at once when thinking is turned off. The end of the prompt tells
which (`opened_by`). White space next to a tag belongs neither to the thoughts nor to the answer. A second <think> is plain
text.
"""

from __future__ import annotations

OPENING = "<think>"
CLOSING = "</think>"


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def opened_by(prompt: str, continued: str | None = None) -> bool | None:
    """True if an answer to this prompt begins inside thoughts, False if it begins after them, None if the model decides.

    continued: the message that the answer continues, if it does
    """
    if continued and not continued.isspace():
        return continued.rfind(OPENING) > continued.rfind(CLOSING)
    end = prompt[-64:].rstrip()
    if end.endswith(OPENING):
        return True
    return False if end.endswith(CLOSING) else None


class ThoughtReader:
    """The reader of one answer.

    inside: what `opened_by` returns for the prompt
    begun:  whether the answer continues a text, so that white space at the beginning of the thoughts is kept
    """

    def __init__(self, inside: bool | None, begun: bool = False):
        self._part = {True: "thoughts", False: "answer", None: "start"}[inside]
        self._text = ""  # text that has arrived and has not been returned
        self._begun = begun  # whether thoughts other than white space have arrived

    def read(self, text: str, last: bool = False) -> tuple[str, str]:
        """The thoughts and the answer that are certain by now. With `last`, everything that is left."""
        self._text += text
        thoughts = answer = ""
        if self._part == "start":
            self._read_start(last)
        if self._part == "thoughts":
            thoughts = self._read_thoughts(last)
        if self._part == "gap":
            self._text = self._text.lstrip()
            if self._text:
                self._part = "answer"
        if self._part == "answer":
            answer = self._text
            self._text = ""
        return thoughts, answer

    def _read_start(self, last: bool) -> None:
        beginning = self._text.lstrip()
        if beginning.startswith(OPENING):
            self._part = "thoughts"
            self._text = beginning[len(OPENING) :]
        elif last or not OPENING.startswith(beginning):
            self._part = "answer"

    def _read_thoughts(self, last: bool) -> str:
        if not self._begun:
            self._text = self._text.lstrip()
            self._begun = bool(self._text)
        found = self._text.find(CLOSING)
        if found >= 0:
            thoughts = self._text[:found].rstrip()
            self._text = self._text[found + len(CLOSING) :]
            self._part = "gap"
        elif last:
            thoughts = self._text.rstrip()
            self._text = ""
        else:
            certain = self._text[: len(self._text) - held_back(self._text, CLOSING)]
            thoughts = certain.rstrip()
            self._text = self._text[len(thoughts) :]
        return thoughts
