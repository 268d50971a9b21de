"""The numbers of a step, by hand: positions, slots, rows of logits, pending tokens."""

from __future__ import annotations

import numpy as np
import torch

from fa_serve.engine import SamplingParams
from fa_serve.engine.cache.block_table import BlockTable
from fa_serve.engine.images.prompt import ImageInput, PlacedImage, PromptImages
from fa_serve.engine.request.request import Request
from fa_serve.engine.runner.batch_arrays import BatchArrays, batch_arrays
from fa_serve.engine.runner.padded_steps import Shape, padding
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState


def make_sequence(name: str, prompt: list[int], slot: int, pages: list[int], **params: object) -> SequenceState:
    sequence = SequenceState(Request(name, prompt, SamplingParams(temperature=0.0, **params), 8))
    sequence.start(slot, pages, num_shared=0, page_size=4)
    return sequence


def make_arrays(*chunks: Chunk, **options: object) -> BatchArrays:
    batch = ScheduledBatch()
    for chunk in chunks:
        batch.append(chunk)
    table = BlockTable(4, 5, torch.device("cpu"))
    return batch_arrays(batch, table, page_size=4, vocab_size=100, **options)


def test_a_chunk_of_a_prompt_beside_a_decoding_sequence() -> None:
    decoding = make_sequence("a", [1, 2, 3, 4, 5], slot=3, pages=[9, 7], logprobs=2)
    decoding.advance(5, samples=True)  # the sampled token is still on the device
    prompt = make_sequence("b", [11, 12, 13, 14, 15], slot=0, pages=[2, 3], prompt_logprobs=0)
    arrays = make_arrays(Chunk(decoding, 3, 5, 1, 1), Chunk(prompt, 0, 0, 3, 0, num_prompt_logits=3))
    assert {name: array.tolist() for name, array in arrays.inputs.items()} == {
        "input_ids": [-4, 11, 12, 13],
        "position_ids": [5, 0, 1, 2],
        "slot_mapping": [7 * 4 + 1, 8, 9, 10],
        "slots": [3, 0],
        "seqused_k": [6, 3],
        "cu_seqlens_q": [0, 1, 4],
        "logits_indices": [0, 1, 2, 3],
    }
    assert (arrays.num_samples.tolist(), arrays.places.tolist(), arrays.num_prompt_logits) == ([1, 0], [5, 0, 1, 2], 3)
    assert (arrays.num_tokens, arrays.num_sequences, arrays.max_seqlen_q, arrays.max_seqlen_k) == (4, 2, 3, 6)
    assert (arrays.decoding, arrays.fresh) == (False, False)


def test_steps_after_a_prompt_with_images_are_those_that_graphs_run() -> None:
    """Only the prompt has positions on three axes; the tokens after it have one, moved by what is missing."""
    positions = np.array([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2]])
    image = PlacedImage(ImageInput(b"key", {}), np.array([1, 2]))
    images = PromptImages((image,), [5, -1, -2, 6], positions=positions, delta=-1)
    request = Request("a", [5, 9, 9, 6], SamplingParams(temperature=0.0), 8, images=images)
    sequence = SequenceState(request)
    sequence.start(0, [2, 3], num_shared=0, page_size=4)
    prompt = make_arrays(Chunk(sequence, 0, 0, 4, 1))
    assert not prompt.is_plain
    assert prompt.inputs["position_ids"].tolist() == positions.tolist()
    assert [(piece.first, list(piece.rows)) for piece in prompt.images] == [(0, [1, 2])]
    text = make_arrays(Chunk(sequence, 0, 3, 1, 1))
    assert text.is_plain, "the axes of what follows the image are equal"
    assert text.inputs["position_ids"].tolist() == [2]
    sequence.advance(4, samples=True)
    after = make_arrays(Chunk(sequence, 0, 4, 1, 1))
    assert after.is_plain
    assert after.decoding
    assert after.inputs["position_ids"].tolist() == [3]


def test_a_draft_model_sees_tokens_in_the_place_of_images() -> None:
    """Without embeddings, blocks and positions on several axes. An image token beyond the vocabulary is token 0."""
    image = PlacedImage(ImageInput(b"key", {}), np.array([1, 2]))
    images = PromptImages((image,), [1, -5, -6, 2], ((1, 3),), np.array([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2]]), delta=-1)
    sequence = SequenceState(Request("a", [1, 100, 100, 99], SamplingParams(temperature=0.0), 8, images=images))
    sequence.start(0, [2], num_shared=0, page_size=4)
    arrays = make_arrays(Chunk(sequence, 0, 0, 4, 1), drafting=True)
    assert arrays.inputs["input_ids"].tolist() == [1, 0, 0, 99]
    assert arrays.inputs["position_ids"].tolist() == [0, 1, 2, 3]
    assert (arrays.images, arrays.blocks, arrays.is_plain) == ([], [], True)
    ahead = make_arrays(Chunk(sequence, 0, 0, 4, 1), drafting=True, tokens_ahead=1)
    assert ahead.inputs["input_ids"].tolist() == [0, 0, 99, -1], "the last one is on the device"


def test_what_counts_as_decoding_and_as_fresh() -> None:
    sequence = make_sequence("a", [1, 2, 3], slot=0, pages=[0])
    assert make_arrays(Chunk(sequence, 0, 2, 1, 1)).decoding
    assert not make_arrays(Chunk(sequence, 0, 1, 1, 0)).decoding, "a chunk of one token samples nothing"
    assert make_arrays(Chunk(sequence, 0, 0, 3, 1)).fresh
    assert not make_arrays(Chunk(sequence, 0, 1, 2, 1)).fresh


def test_names_and_dtypes_are_those_of_the_graphs() -> None:
    sequence = make_sequence("a", [1, 2, 3], slot=2, pages=[0])
    inputs = make_arrays(Chunk(sequence, 2, 0, 3, 1)).inputs
    expected = padding(Shape(4, 4, 4, 4))
    assert {name: array.dtype for name, array in inputs.items()} == {name: array.dtype for name, array in expected.items()}


def test_a_chunk_with_drafts_has_a_row_for_each_of_its_tokens() -> None:
    plain = make_sequence("a", [1, 2, 3], slot=1, pages=[0])
    guessed = make_sequence("b", [4, 5, 6, 7], slot=2, pages=[1, 2], presence_penalty=1.0, logprobs=1)
    arrays = make_arrays(Chunk(plain, 1, 2, 1, 1), Chunk(guessed, 2, 3, 3, 3, drafts=[8, 9]))
    assert arrays.inputs["input_ids"].tolist() == [3, 7, 8, 9]
    assert arrays.inputs["position_ids"].tolist() == [2, 3, 4, 5]
    assert arrays.inputs["slot_mapping"].tolist() == [2, 7, 8, 9]
    assert arrays.inputs["logits_indices"].tolist() == [0, 1, 2, 3]
    assert arrays.num_samples.tolist() == [1, 3]
    assert arrays.decoding
    assert arrays.inputs["seqused_k"].tolist() == [3, 6]
    assert arrays.max_seqlen_q == 3


def test_drafts_beside_a_chunk_that_does_not_sample() -> None:
    prompt = make_sequence("a", [1, 2, 3, 4], slot=0, pages=[0])
    guessed = make_sequence("b", [4, 5, 6], slot=2, pages=[1, 2])
    arrays = make_arrays(Chunk(prompt, 0, 0, 3, 0), Chunk(guessed, 2, 2, 2, 2, drafts=[8]))
    assert arrays.inputs["logits_indices"].tolist() == [3, 4]
    assert arrays.num_samples.tolist() == [0, 2]
    assert not arrays.decoding
