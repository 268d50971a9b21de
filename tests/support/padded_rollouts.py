"""Rollouts of a tiny model in deterministic mode, as a batch that a trainer computes."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import random_prompts
from torch import Tensor, nn
from transformers import PreTrainedModel

import fa_serve
from fa_serve.engine import RolloutEngine, SamplingParams

SIZES: dict[str, Any] = {"device": "cpu", "num_pages": 64, "page_size": 4, "max_num_seqs": 8, "seed": 0, "max_model_len": 64}
ANSWER = 5


class Batch:
    """Rollouts as trainers pad them: prompts to the left, answers to the right.

    ids, mask: (batch, tokens); logprobs: (batch, answer), of the rollouts, 0 where `kept` is False
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float = 1.0, longest: int = 9, answer: int = ANSWER, **settings: Any
    ) -> None:
        prompts = random_prompts(3, longest=longest, seed=2)
        engine = RolloutEngine(model, **SIZES | {"max_num_batched_tokens": 9} | settings, deterministic=True)
        params = [SamplingParams(max_tokens=n, temperature=temperature, seed=n) for n in (answer, 1, answer - 1)]
        groups = engine.generate(prompts, params=params)
        engine.close()
        self.longest = max(map(len, prompts))
        self.ids = torch.zeros(3, self.longest + answer, dtype=torch.int64, device=model.device)
        self.mask = torch.zeros_like(self.ids)
        self.kept = torch.zeros(3, answer, dtype=torch.bool, device=model.device)
        self.logprobs = torch.zeros(3, answer, device=model.device)
        for row, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
            [rollout] = group.rollouts
            place = slice(self.longest - len(prompt), self.longest + len(rollout.token_ids))
            self.ids[row, place] = torch.tensor(prompt + rollout.token_ids)
            self.mask[row, place] = 1
            self.kept[row, : len(rollout.token_ids)] = True
            self.logprobs[row, : len(rollout.token_ids)] = torch.tensor(rollout.logprobs)

    def compute(self, model: nn.Module, temperature: float = 1.0, **inputs: Any) -> Tensor:
        """The log-probabilities that the model has for the answers: (batch, answer), 0 where there is none."""
        logits = model(input_ids=self.ids, attention_mask=self.mask, **inputs).logits[:, self.longest - 1 : -1]
        found = fa_serve.token_logprobs(logits, self.ids[:, self.longest :], temperature)
        return found.masked_fill(~self.kept, 0.0)

    @property
    def positions(self) -> Tensor:
        return (self.mask.cumsum(1) - 1).clamp(min=0)
