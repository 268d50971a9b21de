"""Turns a prompt with its parameters into requests, or raises a ParameterError that says what cannot be served.

    processor = InputProcessor(tokenizer, config, vocab_size=32000, eos_ids=frozenset({2}))
    requests = processor.process("request-1", "Once upon a time", SamplingParams(n=3), priority=0)     # one for each answer

This module decides the seed of a request that gives none, how many tokens it may get, which tokens end it, and its place in the
queue. Left out: whether the queue has room, whether the id is in use, and scheduling (engine.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.images.encoder import ImageEncoder, require_encoder
from fa_serve.engine.images.prompt import ImageInput, PromptImages
from fa_serve.engine.lora.pool import Adapter
from fa_serve.engine.request.groups import members, num_answers
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.prompts import PromptReader
from fa_serve.engine.request.request import Request
from fa_serve.engine.request.token_biases import TokenBiases
from fa_serve.spec import ParameterError

PRIORITY_SECONDS = 10.0
"""A request of priority p is ranked as if it had arrived p times this many seconds later, so no request waits forever."""
MAX_PRIORITY = 1000
"""The largest priority. The smallest one is its negative."""


class InputProcessor:
    """Makes requests.

    tokenizer: a fast tokenizer of transformers, or None
    config:    max_model_len must be resolved
    eos_ids:   the model's end-of-sequence tokens
    images:    encodes images with the model's towers; or a text, why prompts may have no images
    """

    def __init__(
        self,
        tokenizer: Any,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        images: ImageEncoder | str = "this engine takes no images",
    ) -> None:
        assert config.max_model_len is not None
        self.reader = PromptReader(tokenizer, vocab_size, config.max_model_len)
        self._has_tokenizer = tokenizer is not None
        self._capacity = config.max_num_seqs + config.max_waiting
        self._max_model_len = config.max_model_len
        self._max_stop_chars = config.max_stop_chars
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._images = images
        self._max_images = config.max_images
        # every running sequence may have a token in the same step
        self._max_block = max(config.max_num_batched_tokens - config.max_num_seqs, 1)
        self._serial = count()
        self._random = random.Random(config.seed)
        self._last: tuple[tuple[Any, ...], tuple[frozenset[int], TokenBiases]] | None = None

    def process(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        client: str | None = None,
        cache_salt: str | None = None,
        adapter: Adapter | None = None,
        images: Sequence[ImageInput] = (),
    ) -> list[Request]:
        """One request for each answer. Raises ParameterError as `Engine.add_request` says."""
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise ParameterError("priority", f"be between -{MAX_PRIORITY} and {MAX_PRIORITY}", priority)
        if not isinstance(cache_salt, str | None):
            raise ParameterError("cache_salt", "be None or a string", cache_salt)
        if num_answers(params) > self._capacity:
            name = "n" if params.best_of is None else "best_of"
            raise ParameterError(name, f"be at most {self._capacity}, the capacity of the queue", num_answers(params))
        placed = None
        if images:
            tokens, placed = self._place_images(prompt, images, params)
        else:
            tokens = self.reader.read(prompt)
        if params.stop and not self._has_tokenizer:
            raise ParameterError("stop", "be empty because this engine has no tokenizer", params.stop, "no_tokenizer")
        num_chars = sum(map(len, params.stop))
        if num_chars > self._max_stop_chars:
            rule = f"have at most {self._max_stop_chars} characters in all strings together (--max-stop-chars)"
            raise ParameterError("stop", rule, num_chars)
        end_ids, biases = self._tokens_of(params)
        room = self._max_model_len - len(tokens)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        now = time.monotonic()
        return [
            Request(
                request_id=name,
                prompt=tokens,
                params=own,
                max_tokens=min(room, params.max_tokens or room),
                end_ids=end_ids,
                seed=(seed + index + (1 << 63)) % (1 << 64) - (1 << 63),
                arrival=now,
                rank=(now + PRIORITY_SECONDS * priority, next(self._serial)),
                client=client,
                cache_salt=cache_salt,
                adapter=adapter,
                biases=biases,
                images=placed,
            )
            for index, (name, own) in enumerate(members(request_id, params))
        ]

    def _place_images(
        self, prompt: str | Sequence[int], images: Sequence[ImageInput], params: SamplingParams
    ) -> tuple[list[int], PromptImages]:
        """The tokens of a prompt, and what the engine must know about its images."""
        encoder = require_encoder(self._images)
        if isinstance(prompt, str):
            raise ParameterError("prompt", "be token ids, with an image token for each embedding of its images", prompt)
        if len(images) > self._max_images:
            raise ParameterError("images", f"hold at most {self._max_images} images per prompt (max_images)", len(images))
        if params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", "be None for a prompt with images", params.prompt_logprobs)
        for image in images:
            if not isinstance(image, ImageInput) or "input_ids" not in image.inputs:
                raise ParameterError("images", "hold what ImageInput.of returns for inputs with input_ids", image)
        image_token = encoder.reader.image_token
        if image_token < self._vocab_size:
            tokens = given = self.reader.read(prompt)
        else:  # models may number their image token beyond their vocabulary
            given = list(prompt)
            tokens = self.reader.read([encoder.reader.filler if token == image_token else token for token in given])
        return tokens, encoder.place(given, images, self._max_block)

    def _tokens_of(self, params: SamplingParams) -> tuple[frozenset[int], TokenBiases]:
        """The tokens that end an answer, and what is added to the logits of tokens.

        The prompts of one call come one after the other, with the same parameters, which may name thousands of tokens. So the
        newest result is kept, and these prompts share it.
        """
        # copies, because a caller may change its dict or list afterwards
        named = (
            dict(params.logit_bias or {}),
            None if params.allowed_token_ids is None else tuple(params.allowed_token_ids),
            tuple(params.bad_token_ids),
            tuple(params.stop_token_ids),
            params.min_tokens,
            params.ignore_eos,
        )
        if self._last is None or self._last[0] != named:
            end_ids = self._end_ids(params)
            self._last = (named, (end_ids, TokenBiases.of(params, end_ids, self._vocab_size)))
        return self._last[1]

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end an answer. Every token id in the parameters is checked on the way."""
        largest = max(params.token_ids(), default=0)
        if largest >= self._vocab_size:
            names = ("logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids")
            name = next(name for name in names if largest in (getattr(params, name) or ()))
            raise ParameterError(name, f"hold token ids below {self._vocab_size}, the size of the vocabulary", largest)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.allowed_token_ids is not None:
            never = end_ids.union(params.bad_token_ids) if params.min_tokens else params.bad_token_ids
            if not set(params.allowed_token_ids).difference(never):
                rule = "hold a token that is not in bad_token_ids and, with min_tokens, does not end the answer"
                raise ParameterError("allowed_token_ids", rule, params.allowed_token_ids)
        return end_ids
