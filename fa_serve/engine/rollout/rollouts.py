"""What a trainer gets: the answers to one prompt, with the log-probability of each token. Plain data, no torch.

A group with an answer that the engine could not compute is not returned: `RolloutError` is raised instead, and holds the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fa_serve.engine.errors import RequestError
from fa_serve.engine.request.outputs import FinishReason, RequestOutput
from fa_serve.spec import FaServeError


@dataclass(slots=True)
class Rollout:
    """One answer, finished or unfinished.

    token_ids:       sampled tokens
    logprobs:        the log-probability of each token, natural logarithm, as `EngineConfig.logprobs_mode` says
    top_logprobs:    for each token, (token id, log-probability) of the most likely ones; None if none were asked for
    weight_versions: for each token, the version of the weights that it was sampled with
    text:            of the tokens; empty without a tokenizer
    finish_reason, error: as in `RequestOutput`; None while the answer is unfinished
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] | None = None
    weight_versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None

    def absorb(self, output: RequestOutput, version: int) -> None:
        """Append what the answer has gained by a step with the weights of this version."""
        self.token_ids += output.token_ids
        self.text += output.text
        self.weight_versions += [version] * len(output.token_ids)
        entries = output.logprobs or []
        self.logprobs += [entry.logprob for entry in entries]
        if self.top_logprobs is not None:
            self.top_logprobs += [entry.top for entry in entries]
        if output.finished:
            self.finish_reason = output.finish_reason
            self.error = output.error


@dataclass(slots=True)
class RolloutGroup:
    """The answers to one prompt.

    index:            the number of the prompt among those that were submitted, from 0 on
    prompt_token_ids: as the model gets them
    """

    index: int
    prompt_token_ids: list[int]
    rollouts: list[Rollout]

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(rollout.finish_reason is not None for rollout in self.rollouts)

    def require_whole(self) -> None:
        """Raise RolloutError if an answer has ended with an error."""
        for number, rollout in enumerate(self.rollouts):
            if rollout.error is not None:
                raise RolloutError(self, number, rollout.error)


class RolloutError(FaServeError, RuntimeError):
    """An answer of a `RolloutEngine` could not be computed.

    group: the answers to its prompt, with the tokens that they have; error: why the first failed answer has ended
    """

    def __init__(self, group: RolloutGroup, number: int, error: RequestError) -> None:
        super().__init__(
            f"answer {number} to prompt {group.index} has ended after {len(group.rollouts[number].token_ids)} tokens "
            f"with an error: {error.message}"
        )
        self.group = group
        self.error = error
        self._number = number

    def __reduce__(self) -> tuple[type[RolloutError], tuple[RolloutGroup, int, RequestError]]:
        return type(self), (self.group, self._number, self.error)
