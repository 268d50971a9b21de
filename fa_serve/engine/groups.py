"""Several answers to one prompt: requests of their own to the scheduler, one request with an index to the world outside.

    for name, params in members("request-1", SamplingParams(n=3)): ...      # schedule these
    groups.add("request-1", params)
    outputs = groups.merge(outputs)          # of "request-1" again, with index 0, 1 and 2
    groups.names("request-1")                # of all that are scheduled, to abort them

The answers share the full pages of the prompt and compute at most one page of it each; nothing is copied. With `best_of` all
answers are held back until the last has ended, and those that are likeliest per token are given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fa_serve.engine.request import RequestOutput, SamplingParams


@dataclass(slots=True)
class _Group:
    request_id: str
    params: SamplingParams
    unfinished: int
    held: dict[int, RequestOutput] = field(default_factory=dict)


class Groups:
    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._member: dict[str, tuple[_Group, int]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def add(self, request_id: str, params: SamplingParams) -> None:
        """The members have been scheduled. A single answer is no group."""
        if answers(params) > 1:
            group = self._groups[request_id] = _Group(request_id, params, answers(params))
            self._member |= {name: (group, index) for index, (name, _) in enumerate(members(request_id, params))}

    def names(self, request_id: str) -> list[str]:
        group = self._groups.get(request_id)
        return [request_id] if group is None else [name for name, _ in members(request_id, group.params)]

    def merge(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The same outputs under their requests' names; those that are held back come out when their group is complete."""
        return [seen for output in outputs for seen in self._outside(output)] if self._member else outputs

    def _outside(self, output: RequestOutput) -> Iterator[RequestOutput]:
        if output.request_id not in self._member:
            yield output
            return
        group, index = self._member[output.request_id]
        if output.finished:
            group.unfinished -= 1
            del self._member[output.request_id]
        output.request_id = group.request_id
        output.index = index
        if not _ranked(group.params):
            yield output
        elif index in group.held:
            group.held[index].absorb(output)
        else:
            group.held[index] = output
        if not group.unfinished:
            del self._groups[group.request_id]
            yield from _best(group)


def answers(params: SamplingParams) -> int:
    """How many are generated."""
    return params.best_of or params.n


def members(request_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """The name and the parameters of each answer's own request."""
    if answers(params) == 1:
        return [(request_id, params)]
    single = replace(params, n=1, best_of=None)
    if _ranked(params) and params.logprobs is None:
        single = replace(single, logprobs=0)
    # the prompt's log-probabilities are wanted once
    others = single if params.prompt_logprobs is None else replace(single, prompt_logprobs=None)
    return [(f"{request_id}\0{index}", others if index else single) for index in range(answers(params))]


def _ranked(params: SamplingParams) -> bool:
    return params.best_of is not None and params.best_of > params.n


def _best(group: _Group) -> Iterator[RequestOutput]:
    prompt_logprobs = group.held[0].prompt_logprobs if group.held else None
    ranked = sorted(group.held.values(), key=_likelihood, reverse=True)
    for index, output in enumerate(ranked[: group.params.n]):
        output.index, output.prompt_logprobs = index, prompt_logprobs if index == 0 else None
        if group.params.logprobs is None:
            output.logprobs = None
        yield output


def _likelihood(output: RequestOutput) -> tuple[bool, float]:
    """Mean log-probability of a token; an answer that failed comes last."""
    values = [entry.logprob for entry in output.logprobs or []]
    return output.finish_reason in ("stop", "length"), sum(values) / len(values) if values else float("-inf")
