"""Prompts into token ids, checked. It stands apart from the engine so that another process can do it.

tokens = PromptReader(tokenizer, vocab_size=32000, max_model_len=4096).read("Once upon a time")
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fa_serve.spec import ParameterError


class PromptReader:
    """tokenizer: of transformers, or None: then prompts are token ids. Safe to use from any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_chars = 0 if tokenizer is None else max_model_len * _longest(tokenizer.backend_tokenizer)

    def read(self, prompt: str | Sequence[int]) -> list[int]:
        """Raises ValueError for a prompt that is empty, too long, or not of this vocabulary."""
        if not isinstance(prompt, str):
            try:
                numbers = np.frombuffer(array("q", prompt), dtype=np.int64)  # whatever is no integer shows here, not in a step
            except (TypeError, OverflowError) as error:
                raise ParameterError("prompt", f"hold token ids from 0 to {self._vocab_size - 1}", str(error)) from None
            least, largest = (numbers.min(), numbers.max()) if len(numbers) else (0, 0)
            if not 0 <= least <= largest < self._vocab_size:
                rule = f"hold token ids from 0 to {self._vocab_size - 1}"
                raise ParameterError("prompt", rule, least if least < 0 else largest)
            tokens: list[int] = numbers.tolist()
        elif self._tokenizer is None:
            raise ParameterError("prompt", "be token ids because this engine has no tokenizer", prompt, "no_tokenizer")
        else:
            tokens = self.encode(prompt)
        if not tokens:
            raise ParameterError("prompt", "have at least one token", prompt)
        if len(tokens) >= self._max_model_len:
            rule = f"be shorter than max_model_len = {self._max_model_len} tokens, to leave room for an answer"
            raise ParameterError("prompt", rule, len(tokens), "context_length_exceeded")
        return tokens

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Straight to tokenizers: transformers around it takes longer, and warns of texts longer than the model's limit. As a
        batch of one, because that lets go of the interpreter meanwhile. Raises ValueError for a text that cannot fit."""
        if len(text) > self._max_chars:
            # tokenizing a text of many megabytes takes seconds of a thread, to be refused after all
            rule = (
                f"be shorter than max_model_len = {self._max_model_len} tokens, and therefore have at most "
                f"{self._max_chars} characters"
            )
            raise ParameterError("prompt", rule, len(text), "context_length_exceeded")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError("prompt", "be a text that UTF-8 can encode", text[error.start : error.end]) from None
        ids: list[int] = self._tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids
        return ids


def _longest(tokenizer: Tokenizer) -> int:
    """Characters that one token stands for at most: those of its name, or a few times as many if texts are normalised."""
    return max(map(len, tokenizer.get_vocab()), default=1) * (1 if tokenizer.normalizer is None else 4)
