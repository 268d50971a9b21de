"""A prompt and its parameters into requests, or a ValueError that says what cannot be served. Nothing is scheduled yet.

    admission = Admission(tokenizer, config, vocab_size=32000, eos_ids=frozenset({2}))
    requests = admission.requests("request-1", "Once upon a time", SamplingParams(n=3), priority=0)     # one for each answer

What is decided here and nowhere else: the seed of a request that gives none, how many tokens it may get, which tokens end it,
and its place in the queue. Left out: whether there is room in the queue and whether the name is free (engine.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from fa_serve.engine.config import EngineConfig
from fa_serve.engine.groups import answers, members
from fa_serve.engine.prompts import PromptReader
from fa_serve.engine.request import Request, SamplingParams
from fa_serve.spec import ParameterError

PRIORITY_SECONDS = 10.0  # a request of priority p is served as if it had come p times so much later: nobody starves


class Admission:
    """config: with its max_model_len resolved; tokenizer: of transformers, or None; eos_ids: of the model."""

    def __init__(self, tokenizer: Any, config: EngineConfig, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        assert config.max_model_len is not None
        self._reader = PromptReader(tokenizer, vocab_size, config.max_model_len)
        self._has_text = tokenizer is not None
        self._capacity = config.max_num_seqs + config.max_waiting
        self._max_model_len = config.max_model_len
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._serial = count()
        self._random = random.Random(config.seed)

    def requests(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams, priority: int = 0
    ) -> list[Request]:
        """One request for each answer. Raises ValueError as `Engine.add_request` says."""
        if answers(params) > self._capacity:
            name = "n" if params.best_of is None else "best_of"
            raise ParameterError(name, f"be at most {self._capacity}, which is what the queue holds", answers(params))
        tokens = self._reader.read(prompt)
        if params.stop and not self._has_text:
            raise ParameterError("stop", "be empty because this engine has no tokenizer", params.stop, "no_tokenizer")
        ends = self._ends(params)
        room = self._max_model_len - len(tokens)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        now = time.monotonic()
        return [
            Request(
                request_id=name,
                prompt=tokens,
                params=own,
                max_tokens=min(room, params.max_tokens or room),
                end_ids=ends,
                seed=(seed + index + (1 << 63)) % (1 << 64) - (1 << 63),
                arrival=now,
                rank=(now + PRIORITY_SECONDS * priority, next(self._serial)),
            )
            for index, (name, own) in enumerate(members(request_id, params))
        ]

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end an answer, after a look at every token that the parameters name."""
        if (largest := max(params.token_ids(), default=0)) >= self._vocab_size:
            names = ("logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids")
            name = next(name for name in names if largest in (getattr(params, name) or ()))
            raise ParameterError(name, f"hold token ids below {self._vocab_size}, the size of the vocabulary", largest)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        if params.allowed_token_ids is not None:
            never = ends.union(params.bad_token_ids) if params.min_tokens else params.bad_token_ids
            if not set(params.allowed_token_ids).difference(never):
                rule = "hold a token that is not in bad_token_ids and, with min_tokens, does not end the answer"
                raise ParameterError("allowed_token_ids", rule, params.allowed_token_ids)
        return ends
