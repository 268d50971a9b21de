"""TRL's GRPO trainer with rollouts of fa_serve, in the trainer's process. trl is not imported.

    trainer = GRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(...), train_dataset=data)
    engine = RolloutEngine(trainer.model, tokenizer)
    use_rollouts(trainer, engine, fa_serve.exact(trainer.model))       # use_vllm stays False in the config
    trainer.train()

The trainer calls two methods of an object: `sync_weights` after a step, and `generate`. `TrlGeneration` implements them with a
live engine, which uses the trainer's weights, so that `sync_weights` is only `RolloutEngine.update`. The log-probabilities of
the rollouts enter the trainer's correction by importance sampling as those of vLLM do. With `exact`, the trainer's own
log-probabilities are computed by the model's head and `token_logprobs` instead of TRL's fused head, which adds in another
order. So the importance ratios of the first pass over a batch are exactly 1.

Written for trl 1.16 (grpo_trainer.py, `_generate_single_turn` and `_get_per_token_logps_and_entropies`). Left out: images, and
an engine that several processes share: each process has an engine over its own whole copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fa_serve.engine.request.params import SamplingParams, StructuredOutput
from fa_serve.engine.rollout.rollout_engine import RolloutEngine
from fa_serve.hf import ExactForward, token_logprobs
from fa_serve.spec import ParameterError


def use_rollouts(trainer: Any, engine: RolloutEngine, exact: ExactForward | None = None) -> None:
    """Let a GRPOTrainer of trl generate with this engine.

    exact: the context in which its log-probabilities are computed, for an engine with `deterministic=True`; None leaves them to
           TRL

    Raises ParameterError for a trainer that already generates in another way, or without the attributes that are replaced.
    """
    if getattr(trainer, "use_vllm", None) is not False:
        raise ParameterError("use_vllm", "be False in the trainer's config, because fa_serve takes its place", True)
    if exact is not None and getattr(trainer, "aux_loss_enabled", False):
        rule = "be 0 in the trainer's config, because an exact forward does not return a router loss"
        raise ParameterError("router_aux_loss_coef", rule, trainer.router_aux_loss_coef)
    generation = TrlGeneration(trainer, engine)
    generation.params()  # raises before anything is replaced
    trainer.vllm_generation = generation
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
    if exact is not None:
        trainer._get_per_token_logps_and_entropies = partial(_exact_logprobs, trainer, exact)
        trainer.accelerator.backward = partial(_exact_backward, exact, trainer.accelerator.backward)


def _exact_logprobs(
    trainer: Any,
    exact: ExactForward,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **inputs: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Replaces the trainer's method: log-probabilities and entropies of the last tokens, (batch, logits_to_keep)."""
    given = sorted(name for name, value in inputs.items() if value is not None)
    if given or compute_aux_loss:
        raise ParameterError("inputs", "be tokens only, without a router loss, in an exact forward", given)
    size = batch_size or len(input_ids)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for ids, mask in zip(torch.split(input_ids, size), torch.split(attention_mask, size), strict=True):
        with exact:
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=logits_to_keep + 1).logits[:, :-1]
            logprobs.append(token_logprobs(logits, ids[:, -logits_to_keep:], trainer.temperature))
        if compute_entropy:
            scores = (logits.float() / trainer.temperature).log_softmax(-1)
            entropies.append(-(scores.exp() * scores).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies) if compute_entropy else None, None


def _exact_backward(exact: ExactForward, backward: Callable[..., None], *args: Any, **inputs: Any) -> None:
    """Replaces the accelerator's method, so that checkpointed layers are computed again in the same way as in the forward."""
    with exact:
        backward(*args, **inputs)


class TrlGeneration:
    """Replaces trl's `VLLMGeneration`. trainer: its sampling parameters are read at each call"""

    def __init__(self, trainer: Any, engine: RolloutEngine) -> None:
        self._trainer = trainer
        self._engine = engine

    def sync_weights(self) -> None:
        """A training step has changed the parameters in place."""
        self._engine.update()

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One answer to each prompt, as token ids.

        prompts: each prompt `num_generations` times in a row, unless a process has only part of a group

        Returns the prompts, the answers, and for each token of an answer its log-probability and its id, each in a list of one.
        Raises ParameterError for images.
        """
        if images is not None and any(each is not None for each in images):
            raise ParameterError("images", "be None, because rollouts with images are not supported", len(images))
        with profiler or nullcontext():
            groups = self._engine.generate(prompts, n=1, params=self.params())
        rollouts = [group.rollouts[0] for group in groups]
        return (
            [group.prompt_token_ids for group in groups],
            [rollout.token_ids for rollout in rollouts],
            [[[logprob] for logprob in rollout.logprobs] for rollout in rollouts],
            [[[token] for token in rollout.token_ids] for rollout in rollouts],
        )

    def params(self) -> SamplingParams:
        """The trainer's sampling parameters, including `generation_kwargs`. Its top_k means all tokens if it is 0, -1 or None.

        Raises ParameterError for a name that `SamplingParams` does not have, and for a value that is not allowed.
        """
        trainer = self._trainer
        given: dict[str, Any] = {
            "max_tokens": trainer.max_completion_length,
            "temperature": float(trainer.temperature),
            "top_p": float(trainer.top_p),
            "top_k": trainer.top_k,
            "min_p": float(trainer.min_p or 0.0),
            "repetition_penalty": float(trainer.repetition_penalty),
        }
        given |= trainer.args.generation_kwargs or {}
        unknown = sorted(given.keys() - {each.name for each in fields(SamplingParams)} - {"structured_outputs"})
        if unknown:
            raise ParameterError("generation_kwargs", "hold only names of SamplingParams fields", unknown)
        regex = trainer.args.vllm_structured_outputs_regex
        structured = given.pop("structured_outputs", None) if regex is None else {"regex": regex}
        if structured is not None:
            given["structured"] = StructuredOutput(**structured)
        return SamplingParams(**given | {"n": 1, "top_k": max(given["top_k"] or 0, 0)})
