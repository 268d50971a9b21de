"""Turns prompts into checked lists of token ids. The module needs no engine, so that another process can do this work.

tokens = PromptReader(tokenizer, vocab_size=32000, max_model_len=4096).read("Once upon a time")
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fa_serve.spec import ParameterError

MAX_IDS = 1 << 20
"""Tokens of a text that `PromptReader.encode` takes even if the model's context is shorter, so that they can be counted."""
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode's noncharacters, which are not meant to be in any text."""
PIECE = 1 << 18
"""How many characters of a text are tokenized at a time to count its tokens."""
NUM_IDS = 1 << 32
"""A tokenizer can be asked for the names of ids below this, and raises OverflowError for others."""


class PromptReader:
    """Turns prompts into token ids. Safe to use from any thread.

    tokenizer:  a fast tokenizer of transformers, or None; then prompts must be token ids
    vocab_size: tokens that the model has
    max_chars:  characters of a text that `encode` takes
    max_ids:    tokens of a text that `encode` takes
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.max_ids = max(2 * max_model_len, MAX_IDS)
        # `_backend` may change the tokenizer at its first call, which must come before threads use the tokenizer
        self.max_chars = 0 if tokenizer is None else max_model_len * _most_characters(self._backend())

    def read(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a text, or a checked copy of token ids.

        Raises ParameterError("prompt") for a prompt that is empty, too long, or has ids outside the vocabulary.
        """
        if not isinstance(prompt, str):
            tokens = self.checked(prompt)
        elif self._tokenizer is None:
            raise ParameterError("prompt", "be token ids because this engine has no tokenizer", prompt, "no_tokenizer")
        else:
            tokens = self.checked(self.encode(prompt))
        if not tokens:
            raise ParameterError("prompt", "have at least one token", prompt)
        if len(tokens) >= self._max_model_len:
            rule = f"be shorter than max_model_len = {self._max_model_len} tokens, to leave room for an answer"
            raise ParameterError("prompt", rule, len(tokens), "context_length_exceeded")
        return tokens

    def encode(self, text: str, special_tokens: bool = True, plain: Sequence[tuple[int, int]] = ()) -> list[int]:
        """The token ids of a text.

        special_tokens: let the tokenizer add the special tokens that it adds to every text
        plain:          ranges of the text, as (begin, end) and in order, where the name of a special token is plain text

        This calls the tokenizers library directly, because transformers takes longer and warns of texts longer than the
        model's limit. The text is sent as a batch of one, because that releases the interpreter's lock.

        Raises ParameterError("prompt") for a text that is too long or cannot be encoded as UTF-8.
        """
        if len(text) > self.max_chars:
            # Tokenizing many megabytes takes a thread several seconds, and the text would be refused anyway.
            raise self.too_long(len(text))
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            rule = f"be a text that UTF-8 can encode, without half of a surrogate pair at character {error.start}"
            raise ParameterError("prompt", rule, text[error.start : error.end]) from None
        if num_bytes > self.max_ids:
            self._require_few_ids(text)
        if plain:
            return self._encode_with_plain(text, special_tokens, plain)
        ids: list[int] = self._encoding(text, special_tokens).ids
        return ids

    def _encode_with_plain(self, text: str, special_tokens: bool, plain: Sequence[tuple[int, int]]) -> list[int]:
        """Marks between the characters of a name keep the tokenizer from finding the name. The marks' tokens are left out."""
        mark = find_mark(text)
        pieces = []
        position = 0
        for begin, end in plain:
            pieces += [text[position:begin], mark.join(text[begin:end])]
            position = end
        marked = "".join([*pieces, text[position:]])
        [encoding] = self._backend().encode_batch([marked], add_special_tokens=special_tokens)
        ids = []
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            source = marked[begin:end]
            if mark not in source:
                ids.append(token)
            elif source.strip(mark):
                break  # the token covers more than marks, as a tokenizer's token for unknown characters may
        else:
            return ids
        parts = marked.split(mark)
        return [token for n, part in enumerate(parts) for token in self._encoding(part, special_tokens and n == 0).ids]

    def too_long(self, length: int | str) -> ParameterError:
        """The error about a text with more than `max_chars` characters."""
        limit = f"{self._max_model_len} tokens, and so have at most {self.max_chars} characters"
        return ParameterError("prompt", f"be shorter than max_model_len = {limit}", length, "context_length_exceeded")

    def _encoding(self, text: str, special_tokens: bool) -> Any:
        return self._backend().encode_batch_fast([text], add_special_tokens=special_tokens)[0]

    def _backend(self) -> Any:
        """The tokenizer, with truncation and padding switched off.

        A tokenizer that was saved after training may have both switched on, and a trainer that shares it switches them on in
        each call with `truncation` or `padding`. Each such call sets them again, so switching them off here does no harm.
        """
        backend = self._tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        return backend

    def _require_few_ids(self, text: str) -> None:
        """Raise ParameterError for a text with more than `max_ids` tokens, before all of them are in memory.

        `max_chars` allows far more tokens if the vocabulary has one long token, such as 128 spaces, and a token takes 100 bytes
        of memory. A text that is cut into pieces has hardly more tokens than the whole text, and no more than it has bytes.
        """
        count = 0
        for begin in range(0, len(text), PIECE):
            count += len(self._encoding(text[begin : begin + PIECE], False))
            if count > self.max_ids:
                rule = f"have at most {self.max_ids} tokens"
                raise ParameterError("prompt", rule, f"at least {count}", "context_length_exceeded")

    def checked(self, prompt: Sequence[int]) -> list[int]:
        """A checked copy of token ids. A bad id would make a whole step fail later.

        The ids of a text are checked as well, because a tokenizer may have more tokens than its model.
        """
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise ParameterError("prompt", "be a text or a list of token ids", prompt)
        rule = f"hold token ids from 0 to {self.vocab_size - 1}"
        try:
            numbers = np.frombuffer(array("q", prompt), dtype=np.uint64)
        except (TypeError, OverflowError) as error:
            told = str(error)
            if any(isinstance(each, Mapping) for each in prompt):
                told = "tokenizer.apply_chat_template makes them from messages"
            raise ParameterError("prompt", f"{rule} ({told})", prompt) from None
        if not len(numbers):
            return []
        if np.maximum.reduce(numbers) >= self.vocab_size:  # a negative number is larger than all others
            signed = numbers.view(np.int64)
            least = int(signed.min())
            wrong = least if least < 0 else int(signed.max())
            name = None
            if 0 <= wrong < NUM_IDS and self._tokenizer is not None:
                name = self._tokenizer.backend_tokenizer.id_to_token(wrong)
            if name is not None:
                rule += f" (the model has fewer tokens than its tokenizer; leave out {name}, whose id is {wrong})"
            raise ParameterError("prompt", rule, wrong)
        tokens: list[int] = numbers.tolist()
        return tokens


def find_mark(text: str) -> str:
    """One of MARKS that is not in the text. Raises ParameterError if all of them are."""
    mark = next((mark for mark in MARKS if mark not in text), None)
    if mark is None:
        rule = "not hold both names of special tokens and all of Unicode's noncharacters from U+FDD0 to U+FDEF"
        raise ParameterError("prompt", rule, text)
    return mark


def _most_characters(tokenizer: Tokenizer) -> int:
    """How many characters of a text one token stands for at most.

    That is the length of its name. A normaliser may shorten the text, which is taken into account by a factor of 4.
    """
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return longest * (1 if tokenizer.normalizer is None else 4)
