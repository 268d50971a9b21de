"""Log-probabilities in OpenAI's two shapes, and the texts of single tokens that both are made of.

A token need not be text: it may be a piece of a character. `token` shows it as well as it can, `bytes` says what it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fa_serve.engine import TokenLogprob

from .replies import ChatLogprob, CompletionLogprobs, PromptLogprobs, TopLogprob

LOWEST = -9999.0  # JSON has no infinity; other servers say the same
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: the printable ones stand for themselves, the others for what follows U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


class TokenTexts:
    """The bytes of single tokens, by the tokenizer's own alphabet; remembered."""

    ALPHABET = _byte_alphabet()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def text(self, token_id: int) -> str:
        return self.of(token_id).decode(errors="replace")

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the vocabulary is padded beyond the tokenizer's
            return b""
        if token in self._special:
            return str(token).encode()
        if self._byte_level:
            return bytes(self.ALPHABET[letter] for letter in token)
        if byte := BYTE.fullmatch(token):
            return bytes.fromhex(byte[1])
        return str(token).replace("▁", " ").encode()


def for_chat(texts: TokenTexts, logprobs: Sequence[TokenLogprob]) -> list[ChatLogprob]:
    return [
        {**_top(texts, entry.token_id, entry.logprob), "top_logprobs": [_top(texts, *other) for other in entry.top]}
        for entry in logprobs
    ]


def for_completion(
    texts: TokenTexts, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], offset: int, count: int
) -> tuple[CompletionLogprobs, int]:
    """With the `count` likeliest tokens and the actual one; None is a prompt's first token, which has nothing before it.

    `offset` is where the first token begins in the choice's text; where the last one ends is returned too.
    """
    tokens = [texts.text(token) for token in token_ids]
    *offsets, end = accumulate(map(len, tokens), initial=offset)
    values: list[float | None] = [None if entry is None else max(entry.logprob, LOWEST) for entry in entries]
    top: list[dict[str, float] | None] = [
        None
        if entry is None
        else {texts.text(token): max(v, LOWEST) for token, v in [*entry.top[:count], (entry.token_id, entry.logprob)]}
        for entry in entries
    ]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": top}, end


def for_prompt(texts: TokenTexts, entries: Sequence[TokenLogprob | None], count: int) -> PromptLogprobs:
    """As vLLM writes them: by token id, the likeliest and the actual token, whose rank is known if it is among them."""
    scores: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            scores.append(None)
            continue
        top: dict[int, tuple[float, int | None]] = {entry.token_id: (entry.logprob, None)}
        top |= {token: (value, rank) for rank, (token, value) in enumerate(entry.top[:count], 1)}
        scores.append(
            {str(t): {"logprob": max(v, LOWEST), "rank": rank, "decoded_token": texts.text(t)} for t, (v, rank) in top.items()}
        )
    return scores


def _top(texts: TokenTexts, token_id: int, logprob: float) -> TopLogprob:
    data = texts.of(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}
