"""The answers to a list of prompts, from an engine whose queue may hold fewer requests than there are prompts.

    completions = complete(engine, [(request_id, params, requests), ...], on_step=bar.update)

Left out: how a prompt becomes requests (input_processor.py), and requests that arrive one by one (engine.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from fa_serve.engine.request.outputs import Completion, JoinedOutputs, RequestOutput
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request


class Stepping(Protocol):
    """What an engine must have to answer prompts."""

    @property
    def room(self) -> int:
        """How many more requests its queue has room for."""

    def submit(self, request_id: str, params: SamplingParams, requests: list[Request]) -> None: ...

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request_id: str) -> list[RequestOutput]: ...


def complete(
    engine: Stepping, prompts: Sequence[tuple[str, SamplingParams, list[Request]]], on_step: Callable[[int], object]
) -> list[Completion]:
    """The answers to all prompts, in their order; the n answers to one prompt follow each other.

    prompts: for each, the id of its request, its parameters, and the requests of its n answers
    on_step: is called after each step with the number of answers that have finished in it

    Requests that have not ended when this raises, for example because of Ctrl-C, are aborted. Outputs of other requests are
    discarded.
    """
    queue = deque(prompts)
    answers = JoinedOutputs()
    try:
        while queue or engine.has_unfinished():
            while queue and len(queue[0][2]) <= engine.room:
                engine.submit(*queue.popleft())
            outputs = engine.step()
            for output in outputs:
                answers.add(output)
            on_step(sum(output.finished for output in outputs))
    finally:
        for request_id, _, _ in prompts:
            engine.abort(request_id)
    return [answers.completion(name, index) for name, params, _ in prompts for index in range(params.n)]
