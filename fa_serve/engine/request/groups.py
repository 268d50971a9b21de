"""Several answers to one prompt: one request for each answer inside the engine, one request with indices outside.

    for name, params in members("request-1", SamplingParams(n=3)): ...      # schedule a request for each
    groups.add("request-1", params)
    outputs = groups.merge(outputs)          # of "request-1" again, with index 0, 1 and 2
    groups.names("request-1")                # the ids of all requests that are scheduled, to abort them

The answers share the full pages of the prompt, and each computes at most one page of it. With `best_of` larger than `n`, all
outputs are held until the last answer has ended; then the answers with the largest mean log-probability are returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fa_serve.engine.request.outputs import RequestOutput
from fa_serve.engine.request.params import SamplingParams


@dataclass(slots=True)
class _Group:
    request_id: str
    params: SamplingParams
    unfinished: int
    held: dict[int, RequestOutput] = field(default_factory=dict)


class Groups:
    """Owner of the unfinished groups. A request for a single answer is not a group."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._member: dict[str, tuple[_Group, int]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def add(self, request_id: str, params: SamplingParams) -> None:
        """The requests of `members(request_id, params)` have been scheduled."""
        count = num_answers(params)
        if count == 1:
            return
        group = _Group(request_id, params, count)
        self._groups[request_id] = group
        for index, (name, _) in enumerate(members(request_id, params)):
            self._member[name] = (group, index)

    def names(self, request_id: str) -> list[str]:
        """The ids of the scheduled requests that the client knows as `request_id`."""
        group = self._groups.get(request_id)
        return [request_id] if group is None else [name for name, _ in members(request_id, group.params)]

    def merge(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs with the ids and indices that the client knows. Held outputs appear when their group is complete."""
        if not self._member:
            return outputs
        return [visible for output in outputs for visible in self._visible(output)]

    def _visible(self, output: RequestOutput) -> Iterator[RequestOutput]:
        if output.request_id not in self._member:
            yield output
            return
        group, index = self._member[output.request_id]
        if output.finished:
            group.unfinished -= 1
            del self._member[output.request_id]
        output.request_id = group.request_id
        output.index = index
        if not _is_ranked(group.params):
            yield output
        elif index in group.held:
            group.held[index].absorb(output)
        else:
            group.held[index] = output
        if not group.unfinished:
            del self._groups[group.request_id]
            yield from _best(group)


def num_answers(params: SamplingParams) -> int:
    """How many answers are generated."""
    return params.best_of or params.n


def members(request_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """The id and the parameters of the request for each answer."""
    count = num_answers(params)
    if count == 1:
        return [(request_id, params)]
    single = params.with_numbers(n=1, best_of=None)
    if _is_ranked(params) and params.logprobs is None:
        single = single.with_numbers(logprobs=0)
    # The log-probabilities of the prompt are computed once, with the first answer.
    others = single.with_numbers(prompt_logprobs=None)
    return [(f"{request_id}\0{index}", others if index else single) for index in range(count)]


def _is_ranked(params: SamplingParams) -> bool:
    """Whether more answers are generated than returned."""
    return params.best_of is not None and params.best_of > params.n


def _best(group: _Group) -> Iterator[RequestOutput]:
    prompt_logprobs = group.held[0].prompt_logprobs if group.held else None
    ranked = sorted(group.held.values(), key=_likelihood, reverse=True)
    for index, output in enumerate(ranked[: group.params.n]):
        output.index = index
        output.prompt_logprobs = prompt_logprobs if index == 0 else None
        if group.params.logprobs is None:
            output.logprobs = None
        yield output


def _likelihood(output: RequestOutput) -> tuple[bool, float]:
    """Sort key: complete answers before those that failed, then by the mean log-probability of a token."""
    values = [entry.logprob for entry in output.logprobs or []]
    return output.finish_reason in ("stop", "length"), sum(values) / len(values) if values else float("-inf")
