"""A reasoning model's thoughts apart from its answer: <think>...</think>, as the text comes.

    reader = ThoughtReader(inside=False)
    thoughts, answer = reader.read("<think>\\nHm")     # also when a tag comes in pieces: text that may be one is held back
    thoughts, answer = reader.read("m.</think>4", last=True)

Some chat templates open the tag themselves, and some close it at once when thinking is turned off: the end of the prompt says
where the answer begins (`opened_by`). White space next to a tag belongs to neither part. A second <think> is plain text.
"""

from __future__ import annotations

OPENING = "<think>"
CLOSING = "</think>"


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)


def opened_by(prompt: str) -> bool | None:
    """Whether an answer to this prompt begins among thoughts; None if it is the model's to say."""
    end = prompt[-64:].rstrip()
    return True if end.endswith(OPENING) else False if end.endswith(CLOSING) else None


class ThoughtReader:
    def __init__(self, inside: bool | None):
        """inside: as `opened_by` gives it."""
        self._part = {True: "thoughts", False: "answer", None: "start"}[inside]
        self._text = ""
        self._begun = False

    def read(self, text: str, last: bool = False) -> tuple[str, str]:
        """What is known by now to be thoughts and to be answer; with `last`, all that is left."""
        self._text += text
        thoughts = answer = ""
        if self._part == "start":
            beginning = self._text.lstrip()
            if beginning.startswith(OPENING):
                self._part = "thoughts"
                self._text = beginning[len(OPENING) :]
            elif last or not OPENING.startswith(beginning):
                self._part = "answer"
        if self._part == "thoughts":
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
                known = len(self._text[: len(self._text) - held_back(self._text, CLOSING)].rstrip())
                thoughts = self._text[:known]
                self._text = self._text[known:]
        if self._part == "gap":
            self._text = self._text.lstrip()
            if self._text:
                self._part = "answer"
        if self._part == "answer":
            answer = self._text
            self._text = ""
        return thoughts, answer
