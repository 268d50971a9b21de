"""Tokens into text, as they come: never half a character, never any part of a stop string.

    stream = TextStream(tokenizer, context=prompt_token_ids, stop=("\\n\\n",))
    text += stream.push(token)               # what may be shown now; often all of it, sometimes nothing yet
    text += stream.flush()                   # at the end: what was held back

A character may take several tokens: `tokenizers.DecodeStream` waits for the last of them. A stop string may begin anywhere
and take several tokens: text that could be the beginning of one is held back until it is known. Bytes that never become a
character are shown as U+FFFD once the next character settles that, and left out at the very end.

The stream starts from the prompt's last tokens, because some tokenizers write a word differently at the start of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT = 6  # tokens of the prompt that the first word is written after
MAX_UNSETTLED = 32  # tokens without a whole character, after which their bytes are taken for what they are: not text
REPLACEMENT = "\ufffd"


class TextStream:
    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        context = list(context[-CONTEXT:])
        if tokenizer.decode(context).endswith(REPLACEMENT):
            context = []  # it ends inside a character
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = DecodeStream(ids=context, skip_special_tokens=self._skip)
        self._unsettled: list[int] = []
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def push(self, token: int, may_stop: bool = True) -> str:
        """The text that this token settles. After a stop string `stopped` is set, and there is no more text."""
        text = self._held + self._decode(token)
        for end in range(len(self._held) + 1, len(text) + 1) if self._stop and may_stop else ():
            # the stop string that is complete first wins; of two that end together, the longer
            matches = [stop for stop in self._stop if text.endswith(stop, 0, end)]
            if matches:
                self.stopped = True
                self._held = ""
                return text[: end - max(map(len, matches))]
        keep = self._longest_beginning(text) if may_stop else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """At the end of the request: the text held back because a stop string might have begun."""
        held = self._held
        self._held = ""
        return held

    def _decode(self, token: int) -> str:
        self._unsettled.append(token)
        try:
            text = self._decoder.step(self._tokenizer, token)
        except Exception:
            # tokenizers has no error class of its own: "Invalid prefix", for a decoder that rewrites what it has said
            text = self._restart()
        if text is None and len(self._unsettled) >= MAX_UNSETTLED:
            text = self._restart()
        if text:
            self._unsettled.clear()
        return text or ""

    def _restart(self) -> str:
        text: str = self._tokenizer.decode(self._unsettled, skip_special_tokens=self._skip)
        self._unsettled.clear()
        self._decoder = DecodeStream(skip_special_tokens=self._skip)
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
