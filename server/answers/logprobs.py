"""Log-probabilities in the shapes of OpenAI and vLLM, and the texts of single tokens.

A token may be a part of a character, and then it is not valid text. In a reply, `token` shows it with replacement characters,
and `bytes` has its exact bytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fa_serve.engine import TokenLogprob

from ..replies import ChatLogprob, CompletionLogprobs, PromptLogprob, PromptLogprobs, TopLogprob

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have; other servers use the same number
MAX_TEXTS = 1 << 18  # tokens whose bytes are cached: more than any vocabulary has
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: a printable byte is its own character, the others take characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


class TokenTexts:
    """The bytes of single tokens. They are cached, because the same tokens occur again and again."""

    ALPHABET = _byte_alphabet()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._special = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._bytes = lru_cache(MAX_TEXTS)(self._look_up)

    def of(self, token_id: int) -> bytes:
        return self._bytes(token_id)

    def text(self, token_id: int) -> str:
        return self.of(token_id).decode(errors="replace")

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the model's vocabulary is padded and larger than the tokenizer's
            return b""
        if token in self._special:
            return str(token).encode()
        if self._byte_level:
            return bytes(self.ALPHABET[character] for character in token)
        if byte := BYTE.fullmatch(token):
            return bytes.fromhex(byte[1])
        return str(token).replace("▁", " ").encode()


class TextOffsets:
    """Where the tokens of a choice begin in its text. Call `of` once for each token, in order.

    A token that continues a character begins where that character begins.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = 0

    def of(self, data: bytes) -> int:
        """Where the next token begins. data: its bytes"""
        incomplete = self._decoder.getstate()[0]
        text = self._decoder.decode(data)
        is_new = text.startswith("\ufffd") and not (incomplete + data).startswith("\ufffd".encode())
        begin = self._end + bool(incomplete and is_new)  # this token does not continue the incomplete character
        self._end += len(text)
        return begin


def for_chat(texts: TokenTexts, logprobs: Sequence[TokenLogprob], as_ids: bool) -> list[ChatLogprob]:
    """OpenAI's shape for chats. as_ids: `token` is the token's id (token_id:7), as in vLLM, and `bytes` is still its text"""
    return [
        {
            **_top(texts, entry.token_id, entry.logprob, as_ids),
            "top_logprobs": [_top(texts, *other, as_ids) for other in entry.top],
        }
        for entry in logprobs
    ]


def for_completion(
    texts: TokenTexts,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    offsets: TextOffsets,
    count: int,
    as_ids: bool,
) -> CompletionLogprobs:
    """OpenAI's shape for completions.

    entries: one for each of token_ids; None for the first token of a prompt, because no token comes before it
    offsets: the choice's offsets, which have already seen the tokens before these
    count:   how many of the most likely tokens to report besides the actual one
    as_ids:  whether tokens are named by their ids, as vLLM does; their offsets still refer to their texts
    """
    name = _id_name if as_ids else texts.text
    tokens = [name(token) for token in token_ids]
    places = [offsets.of(texts.of(token)) for token in token_ids]
    values: list[float | None] = [None if entry is None else max(entry.logprob, LOWEST) for entry in entries]
    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            top.append(None)
            continue
        reported: dict[str, float] = {}
        for token, value in entry.top[:count]:
            reported.setdefault(name(token), max(value, LOWEST))  # the most likely one of several tokens with the same text
        reported[name(entry.token_id)] = max(entry.logprob, LOWEST)
        top.append(reported)
    return {"text_offset": places, "token_logprobs": values, "tokens": tokens, "top_logprobs": top}


def for_prompt(texts: TokenTexts, entries: Sequence[TokenLogprob | None], count: int) -> PromptLogprobs:
    """vLLM's shape: by token id, the `count` most likely tokens and the actual one.

    The rank of the actual token is None unless it is one of the most likely ones.
    """
    scores: PromptLogprobs = []
    for entry in entries:
        if entry is None:
            scores.append(None)
            continue
        top: dict[int, tuple[float, int | None]] = {entry.token_id: (entry.logprob, None)}
        top |= {token: (value, rank) for rank, (token, value) in enumerate(entry.top[:count], 1)}
        score: dict[str, PromptLogprob] = {}
        for token, (value, rank) in top.items():
            score[str(token)] = {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": texts.text(token)}
        scores.append(score)
    return scores


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _top(texts: TokenTexts, token_id: int, logprob: float, as_ids: bool) -> TopLogprob:
    data = texts.of(token_id)
    name = _id_name(token_id) if as_ids else data.decode(errors="replace")
    return {"token": name, "logprob": max(logprob, LOWEST), "bytes": list(data)}
