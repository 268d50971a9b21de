"""One request for one answer: what was asked, complete and checked. Nothing in it ever changes.

`InputProcessor` makes requests. A client's request for `n` answers becomes n of these (groups.py). What happens to a request is
kept elsewhere: the scheduler's half in `SequenceState`, the client's half in `OutputState`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa_serve.engine.images.prompt import PromptImages
from fa_serve.engine.lora.pool import Adapter
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.token_biases import NO_BIASES, TokenBiases


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one answer is made from.

    prompt:     token ids, at least one; never changed
    max_tokens: number of tokens after which the answer ends, within what the model's length leaves room for
    seed:       64-bit integer that all random numbers of the answer come from
    end_ids:    tokens that end the answer
    rank:       position among the requests of the client; a smaller rank is served first and preempted last
    arrival:    when the request arrived, in seconds of `time.monotonic`
    client:     whose request it is; clients get equal shares of the engine (fair_queue.py)
    cache_salt: the request shares cached prefixes only with requests of the same salt
    adapter:    what is added to the model's weights for it; None for the model itself
    biases:     what `params` and `end_ids` add to the logits of single tokens
    images:     images of the prompt; None if it has none
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    end_ids: frozenset[int] = frozenset()
    rank: tuple[float, int] = (0.0, 0)
    arrival: float = 0.0
    client: str | None = None
    cache_salt: str | None = None
    adapter: Adapter | None = None
    biases: TokenBiases = NO_BIASES
    images: PromptImages | None = None

    def has_chain_of(self, other: Request) -> bool:
        """Whether pages with the same tokens have the same hashes for both."""
        return (self.cache_salt, self.adapter_number) == (other.cache_salt, other.adapter_number)

    def is_like(self, other: Request) -> bool:
        """Whether both are answers to one prompt: their prompts are the same list, and may share cached prefixes."""
        return self.prompt is other.prompt and self.images is other.images and self.has_chain_of(other)

    @property
    def adapter_number(self) -> int:
        """The number of its adapter, or 0 for the model itself. Cached prefixes are shared only if it is the same."""
        return 0 if self.adapter is None else self.adapter.number
