"""What one step computes, as the scheduler decides it, and the numbers that stand for a missing token. Plain data, no torch.

for chunk in batch.chunks: ...           # a part of a prompt, or the last token of a sequence and its drafts
batch.num_tokens
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from fa_serve.engine.errors import RequestError
from fa_serve.engine.images.prompt import ImageInput
from fa_serve.engine.request.request import Request
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.scheduler.step_cost import StepSize

INVALID_TOKEN = -1
"""What the sampler returns for a row whose logits are not finite, before any bias or mask."""
NO_TOKEN = -2
"""What the sampler returns for a row whose logits are finite, but whose biases and masks leave no token."""
WITHOUT_TOKEN = {
    INVALID_TOKEN: RequestError("not_finite", "the model's logits are not finite"),
    NO_TOKEN: RequestError("no_token_left", "the request's parameters exclude every token"),
}
"""The error of a sequence for which the sampler returns one of these numbers instead of a token."""


@dataclass(slots=True)
class Chunk:
    """Tokens start .. start + length - 1 of one sequence.

    num_samples: tokens that the step samples: none if the chunk ends before the last token, else one after the last known
            token and one after each draft
    num_prompt_logits: number of tokens, from the first of the chunk on, whose logits are wanted for `prompt_logprobs`
    drafts: guesses of the tokens after the last one, which are computed as the last tokens of the chunk
    postponed: the samples are not used, and a later step computes the last known token again
    source: state of linear attention that the step reads, after the last multiple of the page size up to `start`; -1 is the
            state before the first token, and stands for none in models without states
    stores: (position, state) in order: states that the step writes, and how many leading tokens they come after. A chunk of
            SHORT_CHUNK tokens at most, drafts included, stores one; a position among the drafts may turn out to be wrong
    """

    sequence: SequenceState
    slot: int
    start: int
    length: int
    num_samples: int
    num_prompt_logits: int = 0
    drafts: Sequence[int] = ()
    postponed: bool = False
    source: int = -1
    stores: Sequence[tuple[int, int]] = ()

    def numbers(self) -> tuple[int, ...]:
        """Numbers for the ranks' digest. Ranks whose schedules differ get different numbers."""
        pages = self.sequence.pages
        last = pages[-1] if pages else -1
        numbers = (self.slot, self.start, self.length, self.num_samples, len(pages), last, self.source, *self.drafts)
        return (*numbers, *chain.from_iterable(self.stores)) if self.stores else numbers


class PrefixGroup(NamedTuple):
    """Sequences that are neighbours in a step. size: their number; pages: leading pages that all of them share"""

    size: int
    pages: int


@dataclass(frozen=True, slots=True)
class TowerWork:
    """The images that one step encodes, or encodes a part of.

    images: images that are on their way through the towers, or begin; their keys differ
    limit:  how many of their embeddings the step has time for, which may be a part of one image; None: all that are left
    count:  how many embeddings the step is expected to encode; 0 if it only copies their pixels, which takes no time from it
    is_read: whether the step's own forward reads them, so that they are encoded before it. Otherwise the forward is launched
            first, so that the device computes it while the host prepares the towers' inputs
    """

    images: Sequence[ImageInput]
    limit: int | None
    count: int
    is_read: bool = False

    @property
    def expected(self) -> int:
        """How many embeddings the device encodes while the step runs: after a copy it begins with those of the next step."""
        return self.count or self.limit or 0


@dataclass(slots=True)
class ScheduledBatch:
    """What one step computes. `admitted` are the sequences of which it has the first chunk since they were given their slot.

    number:        steps are numbered in their order
    num_prompt_tokens: tokens of chunks that hold more than the last token of a sequence and its drafts
    towers:        the images that it encodes before or after its forward, if any
    num_keys, num_pairs: keys that decoding tokens read, and keys that prompt tokens read, both summed over the tokens
    max_tokens:    the limit of num_tokens, for the scheduler; a block that attends both ways may exceed it
    completed:     requests whose prompts this step completes
    prompt_limits: the limit of num_prompt_tokens, and the limit if the last of them complete a prompt
    groups:        sequences that share leading pages which are read once: the first chunks, group by group
    """

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[SequenceState] = field(default_factory=list)
    number: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_prompt_logits: int = 0
    num_drafts: int = 0
    num_keys: int = 0
    num_pairs: int = 0
    max_tokens: int = 0
    completed: list[Request] = field(default_factory=list)
    prompt_limits: tuple[int, int] = (0, 0)
    groups: Sequence[PrefixGroup] = ()
    towers: TowerWork | None = None

    def chunks_of(self, sequences: Container[SequenceState]) -> list[Chunk]:
        """Its chunks of these sequences."""
        return [chunk for chunk in self.chunks if chunk.sequence in sequences]

    @property
    def room(self) -> int:
        """Tokens that still fit into the step."""
        return max(self.max_tokens - self.num_tokens, 0)

    @property
    def beyond_limit(self) -> ScheduledBatch:
        """Only its chunks that are longer than the limit of the whole step: blocks that attend both ways (chunk_lengths.py)."""
        return replace(self, chunks=[chunk for chunk in self.chunks if chunk.length > self.max_tokens])

    @property
    def prompt_room(self) -> int:
        """Prompt tokens that still fit into the step."""
        return max(min(self.room, self.prompt_limits[0] - self.num_prompt_tokens), 0)

    def completes(self, missing: int) -> bool:
        """Whether the step has room for all tokens that a prompt lacks. missing: their number"""
        return self.prompt_room > 0 and missing <= min(self.room, self.prompt_limits[1] - self.num_prompt_tokens)

    def completes_another(self, request: Request) -> bool:
        """Whether it completes the same prompt for another answer to this request, so that both should begin in one step."""
        return any(request.is_like(other) for other in self.completed)

    def widen(self, num_tokens: int, most: int) -> None:
        """Raise the limits so that prompts get at least `num_tokens` more tokens, unless that is more than `most`."""
        if num_tokens > most:
            return
        least = self.num_prompt_tokens + num_tokens
        self.prompt_limits = (max(self.prompt_limits[0], least), max(self.prompt_limits[1], least))

    def append(self, chunk: Chunk) -> None:
        length = chunk.length
        self.chunks.append(chunk)
        if chunk.sequence.is_new:
            self.admitted.append(chunk.sequence)
        self.num_tokens += length
        self.num_drafts += len(chunk.drafts)
        if length != chunk.num_samples:
            self.num_prompt_tokens += length
            self.num_prompt_logits += chunk.num_prompt_logits
            if chunk.num_samples:
                self.completed.append(chunk.sequence.request)
            self.num_pairs += length * (chunk.start + length // 2)
        else:
            self.num_keys += length * chunk.start

    @property
    def size(self) -> StepSize:
        """The size of the step, from which its cost is learned."""
        decoding = self.num_tokens - self.num_prompt_tokens
        images = 0 if self.towers is None else self.towers.count
        return StepSize(decoding, self.num_keys, self.num_prompt_tokens, self.num_pairs, images)

    def __bool__(self) -> bool:
        return bool(self.chunks)


def sharers_of(chunks: Iterable[Chunk], running: Iterable[SequenceState], page_size: int) -> list[SequenceState]:
    """The running sequences that found pages in the prefix cache which these chunks of the newest step fill.

    Pages are offered when the step that fills them is scheduled, so each of these sequences was admitted in that step. All of
    them need another computation if the step fails. The same is true if one value of a chunk is not finite: kernels multiply
    masked values by 0, so tokens before that value may be spoilt as well.
    """
    filled = {page for chunk in chunks for page in chunk.sequence.pages[chunk.start // page_size :]}
    return [sequence for sequence in running if not filled.isdisjoint(sequence.pages[: sequence.num_shared])]
