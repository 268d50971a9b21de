"""Turns a `ScheduledBatch` into the NumPy arrays that the forward reads in one step.

    arrays = batch_arrays(batch, block_table, page_size=16, vocab_size=32000)

A sampled token that is not known on the host yet is written as -(slot + 1): the device keeps the last sampled token of each
slot. A chunk with drafts has a row of logits for its last known token and one for each draft. Left out: what the sampler
reads (sampled_rows.py), the transfer to the device (transfer.py) and padding (cuda_graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fa_serve.engine.cache.block_table import BlockTable
from fa_serve.engine.images.prompt import ImagePiece, PromptImages
from fa_serve.engine.runner.group_arrays import group_arrays
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.hf import TwoWayBlock

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class BatchArrays:
    """One step on the host.

    inputs:    what the forward reads; names and dtypes are those of `padded_steps.padding`
    num_samples: (chunks,) int64, rows of logits that each chunk samples
    places:    (total,) int64, the positions of the tokens in their sequences
    num_prompt_logits: prompt tokens whose logits are wanted; their rows come after those that are sampled
    num_tokens, num_sequences: numbers of tokens and sequences in the step, as attention sees it
    max_seqlen_q, max_seqlen_k: largest number of queries and of keys of one sequence
    images:    pieces of images in the step; blocks: their tokens that attend both ways
    decoding:  whether every sequence computes its last token, possibly with drafts after it, and samples
    fresh:     whether no sequence has keys in the cache from before this step
    """

    inputs: Arrays
    num_samples: NDArray[np.int64]
    places: NDArray[np.int64]
    num_prompt_logits: int
    num_tokens: int
    num_sequences: int
    max_seqlen_q: int
    max_seqlen_k: int
    decoding: bool
    fresh: bool
    images: list[ImagePiece] = field(default_factory=list)
    blocks: list[TwoWayBlock] = field(default_factory=list)

    @property
    def has_groups(self) -> bool:
        """Whether sequences of the step share pages that are to be read once."""
        return "group_ends" in self.inputs

    @property
    def num_axes(self) -> int:
        """The number of axes of the positions of its tokens."""
        positions = self.inputs["position_ids"]
        return 1 if positions.ndim == 1 else len(positions)

    @property
    def is_plain(self) -> bool:
        """Whether the step has neither images nor positions on several axes."""
        return not self.images and self.inputs["position_ids"].ndim == 1


def batch_arrays(
    batch: ScheduledBatch,
    block_table: BlockTable,
    *,
    page_size: int,
    vocab_size: int,
    drafting: bool = False,
    tokens_ahead: int = 0,
) -> BatchArrays:
    """The arrays of one step. New pages are written into the block table.

    drafting: the tokens are drafts, without penalties, log-probabilities and images; image tokens are treated like any others
    tokens_ahead: as in `ModelRunner`
    """
    chunks = batch.chunks
    input_ids = _input_ids(batch, block_table, tokens_ahead)
    slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    bounds = np.zeros(len(chunks) + 1, dtype=np.int64)
    lengths.cumsum(out=bounds[1:])
    firsts = bounds[:-1]
    ends = bounds[1:]
    tokens = np.arange(len(input_ids))
    # token t of the step is token t - firsts[c] of its chunk c
    positions = tokens + (starts - firsts).repeat(lengths)
    pages = block_table.pages(slots.repeat(lengths), positions // page_size)
    with_images = [] if drafting else _chunks_with_images(batch, firsts)
    inputs: Arrays = {
        "input_ids": _within(vocab_size, input_ids) if drafting else np.array(input_ids, dtype=np.int64),
        "position_ids": _position_ids(positions, with_images),
        "slot_mapping": pages * page_size + positions % page_size,
        "slots": slots,
        "seqused_k": (starts + lengths).astype(np.int32),
        "cu_seqlens_q": bounds.astype(np.int32),
    }
    if batch.groups and not drafting:
        inputs |= group_arrays(batch.groups, slots)
    decoding = not batch.num_prompt_tokens
    if decoding:
        num_samples = lengths
        inputs["logits_indices"] = tokens
    else:
        num_samples = np.array([chunk.num_samples for chunk in chunks], dtype=np.int64)
        sampled = _sampled_tokens(ends, num_samples)
        inputs["logits_indices"] = np.concatenate([sampled, *_prompt_rows(batch, firsts)])
    return BatchArrays(
        inputs=inputs,
        num_samples=num_samples,
        places=positions,
        num_prompt_logits=batch.num_prompt_logits,
        num_tokens=len(input_ids),
        num_sequences=len(chunks),
        max_seqlen_q=max(chunk.length for chunk in chunks),
        max_seqlen_k=int(inputs["seqused_k"].max()),
        decoding=decoding,
        fresh=not any(chunk.start for chunk in chunks),
        images=_image_pieces(with_images),
        blocks=_two_way_blocks(with_images),
    )


class _ChunkWithImages(NamedTuple):
    """number: index of the chunk in the step; first: index of the chunk's first token among the tokens of the step"""

    chunk: Chunk
    images: PromptImages
    number: int
    first: int


def _chunks_with_images(batch: ScheduledBatch, firsts: NDArray[np.int64]) -> list[_ChunkWithImages]:
    return [
        _ChunkWithImages(chunk, chunk.sequence.request.images, number, int(firsts[number]))
        for number, chunk in enumerate(batch.chunks)
        if chunk.sequence.request.images is not None
    ]


def _position_ids(places: NDArray[np.int64], found: Sequence[_ChunkWithImages]) -> NDArray[np.int64]:
    """(total,) int64, or (axes, total) if a token's position differs between axes. places: of the tokens in their sequences"""
    positions = places.copy() if found else places
    for chunk, images, _, first in found:
        prompt = chunk.sequence.num_prompt_tokens
        end = min(max(prompt, chunk.start), chunk.start + chunk.length)
        positions[..., first + end - chunk.start : first + chunk.length] += images.delta
        if images.positions is not None and end > chunk.start:
            own = images.positions[:, chunk.start : end]
            # axes differ only within images, and positions on one axis fit the CUDA graphs of steps without images
            differ = bool((own != own[0]).any())
            if differ and positions.ndim == 1:
                positions = np.repeat(positions[None], len(own), axis=0)
            positions[..., first : first + end - chunk.start] = own if differ else own[0]
    return positions


def _image_pieces(found: Sequence[_ChunkWithImages]) -> list[ImagePiece]:
    """The pieces of images whose embeddings replace tokens of the step."""
    pieces = []
    for chunk, images, _, first in found:
        for placed in images.placed:
            begin, end = np.searchsorted(placed.places, (chunk.start, chunk.start + chunk.length)).tolist()
            if begin < end:
                rows = (placed.places[begin:end] - chunk.start + first).tolist()
                pieces.append(ImagePiece(placed.image, begin, rows))
    return pieces


def _two_way_blocks(found: Sequence[_ChunkWithImages]) -> list[TwoWayBlock]:
    """The tokens of the step that attend both ways. An earlier step may have computed the first tokens of a block."""
    blocks = []
    for chunk, images, number, first in found:
        for begin, end in images.blocks:
            start = max(begin, chunk.start)
            if start < end <= chunk.start + chunk.length:
                blocks.append(TwoWayBlock(first + start - chunk.start, first + end - chunk.start, number, begin, end))
    return blocks


def _input_ids(batch: ScheduledBatch, block_table: BlockTable, tokens_ahead: int) -> list[int]:
    """The step's tokens, with -(slot + 1) for those that the host does not know yet. Also fills in the block table."""
    input_ids: list[int] = []
    for chunk in batch.chunks:
        sequence = chunk.sequence
        tokens = sequence.tokens
        block_table.fill(chunk.slot, sequence.pages)
        start = chunk.start + tokens_ahead
        end = start + chunk.length
        input_ids += tokens[start:end]
        if chunk.drafts:
            input_ids += chunk.drafts
        elif end > len(tokens):
            input_ids.append(-1 - chunk.slot)
    return input_ids


def _within(vocab_size: int, tokens: list[int]) -> NDArray[np.int64]:
    """The tokens, with 0 for numbers beyond the vocabulary, which models may give to image tokens."""
    ids = np.array(tokens, dtype=np.int64)
    return np.where(ids < vocab_size, ids, 0)


def _sampled_tokens(ends: NDArray[np.int64], num_samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last num_samples tokens of each chunk. ends: the token after each chunk"""
    last_rows = np.cumsum(num_samples)
    return np.arange(num_samples.sum()) + np.repeat(ends - last_rows, num_samples)


def _prompt_rows(batch: ScheduledBatch, firsts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The prompt tokens of the step whose logits are wanted. firsts: the first token of each chunk"""
    if not batch.num_prompt_logits:
        return []
    return [
        np.arange(first, first + chunk.num_prompt_logits)
        for chunk, first in zip(batch.chunks, firsts, strict=True)
        if chunk.num_prompt_logits
    ]
