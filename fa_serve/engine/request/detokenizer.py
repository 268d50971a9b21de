"""Turns tokens into text as they arrive: never half a character, never any part of a stop string.

    stream = TextStream(tokenizer, context=prompt_token_ids, stop=StopStrings(("\\n\\n",)))
    text += stream.push(token)               # what may be shown now: often all of it, sometimes nothing yet
    text += stream.flush()                   # at the end: what was held back

A character may take several tokens: `tokenizers.DecodeStream` waits for the last of them. A stop string may begin anywhere and
take several tokens: text that could be the beginning of a stop string is held back until the next tokens decide. Bytes that
never become a character are shown as U+FFFD as soon as the next character makes that certain, or are left out at the very end.

The stream starts from the last tokens of the prompt, because some tokenizers write a word differently at the start of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from fa_serve.engine.request.stop_strings import StopStrings

CONTEXT = 6
"""Tokens of the prompt that the stream starts from."""
MAX_UNSETTLED = 32
"""After this many tokens without a whole character, their bytes are shown as U+FFFD."""
REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one answer.

    context: the prompt's token ids; stop: stop strings; skip_special_tokens: leave special tokens out of the text
    stop_string: the stop string that has ended the text, or None
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        stop: StopStrings | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        context = list(context[-CONTEXT:])
        if tokenizer.decode(context).endswith(REPLACEMENT):
            context = []  # the prompt ends inside a character
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._decoder = DecodeStream(ids=context, skip_special_tokens=self._skip)
        self._unsettled: list[int] = []
        self._stop = stop or None  # None without stop strings, tested once here because `push` must be fast
        self._state = 0  # state of the stop strings at the end of the text
        self._held = ""
        self.stop_string: str | None = None

    def push(self, token: int, may_stop: bool = True) -> str:
        """The text that this token settles. When a stop string is complete, the text has ended."""
        new = self._decode(token)
        text = self._held + new
        if self._stop is None or not may_stop:
            self._state = 0
            self._held = ""
            return text
        state = self._state
        for end, character in enumerate(new, len(self._held) + 1):
            state = self._stop.step(state, character)
            # The stop string that is complete first ends the text. If two end at the same place, the longer one does.
            if length := self._stop.complete(state):
                self.stop_string = text[end - length : end]
                self._held = ""
                return text[: end - length]
        self._state = state
        shown = len(text) - self._stop.pending(state)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The text that was held back because a stop string might have begun. The answer has ended."""
        held = self._held
        self._held = ""
        return held

    def _decode(self, token: int) -> str:
        self._unsettled.append(token)
        try:
            text = self._decoder.step(self._tokenizer, token)
        except Exception:
            # tokenizers raises a bare Exception, "Invalid prefix", for a decoder that changes text it has returned before
            text = self._restart()
        if text is None and len(self._unsettled) >= MAX_UNSETTLED:
            text = self._restart()
        if text:
            self._unsettled.clear()
        return text or ""

    def _restart(self) -> str:
        """Decode the unsettled tokens by themselves and start a new stream after them."""
        text: str = self._tokenizer.decode(self._unsettled, skip_special_tokens=self._skip)
        self._unsettled.clear()
        self._decoder = DecodeStream(skip_special_tokens=self._skip)
        return text
