"""How many tokens of a sequence a step computes.

    length = next_length(batch, sequence, state_grid=None, barrier=NOWHERE)     # 0: the sequence waits for a later step

Left out: drafts, which come after a sequence's last known token (speculation).
"""

from __future__ import annotations

from fa_serve.engine.cache.states import chunk_length
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState

MAX_PROMPT_LOGITS = 256
"""Prompt tokens in one step whose logits are kept for log-probabilities. Logits are large: a row has one for each token."""


def next_length(batch: ScheduledBatch, sequence: SequenceState, state_grid: int | None, barrier: int) -> int:
    """How many tokens of the sequence fit into the step, which has room for one.

    state_grid: the page size of a model that keeps states, else None
    barrier:    the first token that waits for something, as for an image; the tokens before it are computed meanwhile
    """
    missing = sequence.num_tokens - sequence.num_computed
    allowed = max(barrier - sequence.num_computed, 0)
    if missing == 1:
        return min(allowed, 1)
    length = missing if batch.completes(missing) else min(missing, batch.prompt_room)
    logits = MAX_PROMPT_LOGITS - batch.num_prompt_logits
    if length > logits and sequence.num_prompt_logits(length):
        length = min(logits, batch.prompt_room)
    if allowed < missing:
        length = min(length, allowed, batch.prompt_room)
    if sequence.has_blocks and length:
        length = _length_of_blocks(batch, sequence, length)
        length = length if length <= allowed else 0
    return length if state_grid is None else _length_with_states(batch, sequence, length, state_grid)


def _length_of_blocks(batch: ScheduledBatch, sequence: SequenceState, length: int) -> int:
    """The same for a prompt with blocks that attend both ways: a chunk holds a block whole, or up to its start.

    A block that is longer than what prompts may take of the step is computed all the same if it is the first of them.
    """
    start = sequence.num_computed
    last, whole = sequence.cuts(start + length)
    if last > start:
        return last - start
    return whole - start if whole - start <= batch.room and not batch.num_prompt_tokens else 0


def _length_with_states(batch: ScheduledBatch, sequence: SequenceState, length: int, page_size: int) -> int:
    """The same for a model with states, whose longer chunks begin at multiples of the page size.

    A prompt that gets less than a page beside other prompts waits for them instead: it would be cut off from this grid.
    """
    missing = sequence.num_tokens - sequence.num_computed
    fills = length >= min(missing, page_size - sequence.num_computed % page_size)
    if not fills and batch.num_prompt_tokens and batch.prompt_room + batch.num_prompt_tokens >= page_size:
        return 0
    return chunk_length(sequence.num_computed, length, missing, page_size)
