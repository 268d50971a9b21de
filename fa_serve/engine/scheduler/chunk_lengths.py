"""How many tokens of a sequence a step computes.

    length = next_length(batch, sequence, state_grid=None, barrier=NOWHERE)     # 0: the sequence waits for a later step

Left out: drafts, which come after a sequence's last known token (speculation).
"""

from __future__ import annotations

from fa_serve.engine.cache.states import chunk_length
from fa_serve.engine.scheduler.scheduled_batch import ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState

MAX_PROMPT_LOGITS = 256
"""Prompt tokens in one step whose logits are kept for log-probabilities. Logits are large: each row covers the vocabulary."""


def next_length(batch: ScheduledBatch, sequence: SequenceState, state_grid: int | None, barrier: int) -> int:
    """How many tokens of the sequence fit into the step, which has room for at least one.

    state_grid: the page size of a model that keeps states, else None
    barrier:    the first token that waits for something, such as an image; the tokens before it are computed meanwhile
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
    """`next_length` for a prompt with blocks that attend both ways: a chunk ends before such a block or after it.

    A block that is longer than the step's limit for prompts is computed all the same if it fits and comes first in the step.
    So is a block that fits into no step, because the device lacked memory and the limit was lowered: it would wait forever.
    """
    start = sequence.num_computed
    last, whole = sequence.cuts(start + length)
    if last > start:
        return last - start
    size = whole - start
    may_come_first = size <= batch.room or size > batch.max_tokens
    return size if may_come_first and not batch.num_prompt_tokens else 0


def _length_with_states(batch: ScheduledBatch, sequence: SequenceState, length: int, page_size: int) -> int:
    """`next_length` for a model with states, whose longer chunks begin at multiples of the page size.

    A prompt that would get less than a page because other prompts are in the step waits: its next chunk would be off this grid.
    """
    missing = sequence.num_tokens - sequence.num_computed
    fills = length >= min(missing, page_size - sequence.num_computed % page_size)
    if not fills and batch.num_prompt_tokens and batch.prompt_room + batch.num_prompt_tokens >= page_size:
        return 0
    return chunk_length(sequence.num_computed, length, missing, page_size)
