"""Texts, pairs of texts and token ids as checked inputs of an encoder. Another process than the engine's may do this work.

    reader = InputReader(tokenizer, card, vocab_size=30522)
    [first, second] = reader.read(["a text", ("a question", "a text")])

An input that is too long is refused, or is cut if the caller asks for it. All texts of a call are tokenized together, which the
tokenizer does in parallel. Left out: threads and turns (fa_serve.server.tokenization).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers

from fa_serve.engine.pooling.params import EncoderCard
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.spec import ParameterError

Ids = np.ndarray[Any, np.dtype[np.int32]]
InputText = str | tuple[str, str] | Sequence[int]
"""A text, two texts that belong together, or token ids as they are."""
MAX_TOKENS = 1 << 20
"""Of all inputs of a call together."""
MAX_PROMPTS = 64
"""Prompts whose lengths are remembered."""
PIECE = 1 << 18
"""Characters that are tokenized at once: their offsets take a hundred times as many bytes."""


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """ids: (tokens,) int32; types: the same of the types of tokens, or None; skipped: tokens of the prompt"""

    ids: Ids
    types: Ids | None = None
    skipped: int = 0


class InputReader:
    """Safe to use from any thread. vocab_size: of the model"""

    def __init__(self, tokenizer: Any, card: EncoderCard, vocab_size: int) -> None:
        self._card = card
        self._prompts = PromptReader(tokenizer, vocab_size, card.max_tokens)
        self._special = frozenset(tokenizer.all_special_ids)
        side = getattr(tokenizer, "truncation_side", "right")
        self._whole = _copy(tokenizer.backend_tokenizer, card.lower_case)
        self._cut = _copy(tokenizer.backend_tokenizer, card.lower_case)
        self._cut.enable_truncation(card.max_tokens, strategy="longest_first", direction=side)
        self._prompt_length = lru_cache(MAX_PROMPTS)(self._count_prompt)

    def prompt(self, name: str | None) -> str:
        """The text of a prompt by its name; None is the model's default. Raises ParameterError for an unknown name."""
        name = self._card.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self._card.prompts:
            known = ", ".join(self._card.prompts) or "none"
            raise ParameterError("prompt_name", f"be the name of a prompt of this model ({known})", name)
        return self._card.prompts[name]

    def read(
        self, inputs: Sequence[InputText], *, prompt: str = "", truncate: bool = False, special_tokens: bool = True
    ) -> list[EncoderInput]:
        """The inputs as token ids, in their order.

        prompt:         written before each text
        truncate:       inputs that are too long are cut, pairs at their longer text, instead of refused
        special_tokens: texts get those that the tokenizer adds to every text

        Raises ParameterError("input") for an input that is empty, too long, not of this vocabulary or no text, and for too many
        tokens of all inputs together.
        """
        found: list[EncoderInput | None] = [None] * len(inputs)
        count = 0
        texts: list[tuple[int, Any]] = []
        for number, each in enumerate(inputs):
            if isinstance(each, str | tuple):
                texts.append((number, self._checked_text(each, number, prompt, truncate)))
            else:
                found[number] = self._from_ids(each, number, truncate)
                count += len(each)
        skipped = self._prompt_length(prompt) if prompt and self._card.skips_prompt else 0
        tokenizer = self._cut if truncate else self._whole
        for piece in _pieces(texts):
            encodings = tokenizer.encode_batch_fast([text for _, text in piece], add_special_tokens=special_tokens)
            for (number, _), encoding in zip(piece, encodings, strict=True):
                count += len(encoding.ids)
                if count > MAX_TOKENS:
                    raise ParameterError("input", f"have at most {MAX_TOKENS} tokens in all inputs together", count)
                types = np.array(encoding.type_ids, dtype=np.int32) if self._card.takes_types else None
                found[number] = self._checked(np.array(encoding.ids, dtype=np.int32), types, number, skipped)
        return [each for each in found if each is not None]

    def _checked_text(self, text: str | tuple[str, str], number: int, prompt: str, truncate: bool) -> Any:
        """The text with its prompt. What cannot fit is refused or cut before it is tokenized, which takes long."""
        parts = [prompt + text] if isinstance(text, str) else list(text)
        limit = self._prompts.max_chars
        for index, part in enumerate(parts):
            if len(part) > limit:
                if not truncate:
                    raise self._too_long(number, f"{len(part)} characters")
                part = parts[index] = part[:limit]
            try:
                part.encode()
            except UnicodeEncodeError as error:
                rule = f"be a text that UTF-8 can encode, without half of a surrogate pair at character {error.start}"
                raise ParameterError("input", f"{rule}, in item {number}", part[error.start : error.end]) from None
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _from_ids(self, ids: Sequence[int], number: int, truncate: bool) -> EncoderInput:
        try:
            tokens = self._prompts.checked(ids)
        except ParameterError as error:
            raise ParameterError("input", error.rule, error.value, error.code) from None
        if truncate:
            tokens = tokens[: self._card.max_tokens]
        types = np.zeros(len(tokens), dtype=np.int32) if self._card.takes_types else None
        return self._checked(np.array(tokens, dtype=np.int32), types, number, 0)

    def _checked(self, ids: Ids, types: Ids | None, number: int, skipped: int) -> EncoderInput:
        if not len(ids):
            raise ParameterError("input", f"have at least one token in each item, and item {number} has none", ids.tolist())
        if len(ids) > self._card.max_tokens:
            raise self._too_long(number, len(ids))
        if ids.max() >= self._prompts.vocab_size:
            self._prompts.checked(ids.tolist())  # which says more
        return EncoderInput(ids, types, skipped)

    def _too_long(self, number: int, length: object) -> ParameterError:
        limit = self._card.max_tokens
        rule = f"have at most {limit} tokens in each item, which is this model's limit, or be cut on demand (item {number})"
        return ParameterError("input", rule, length, "context_length_exceeded")

    def _count_prompt(self, prompt: str) -> int:
        """The tokens of a prompt, without a special token at its end."""
        ids = self._whole.encode(prompt).ids
        return len(ids) - (bool(ids) and ids[-1] in self._special)


def _copy(tokenizer: Tokenizer, lower_case: bool) -> Tokenizer:
    """A tokenizer whose settings nobody else changes, without padding and truncation."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    if lower_case:
        own = [] if copy.normalizer is None else [copy.normalizer]
        copy.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    return copy


def _pieces(texts: list[tuple[int, Any]]) -> Iterator[list[tuple[int, Any]]]:
    """The texts in groups of about PIECE characters."""
    piece: list[tuple[int, Any]] = []
    length = 0
    for each in texts:
        text = each[1]
        piece.append(each)
        length += len(text) if isinstance(text, str) else sum(map(len, text))
        if length >= PIECE:
            yield piece
            piece = []
            length = 0
    if piece:
        yield piece
