"""The fields of a step that tell recurrences which states they read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fa_serve.engine.cache.states import SHORT_CHUNK
from fa_serve.engine.config import EngineConfig
from fa_serve.engine.request.params import SamplingParams
from fa_serve.engine.request.request import Request
from fa_serve.engine.runner.padded_steps import Shape, padding
from fa_serve.engine.runner.state_arrays import (
    check_settings_with_states,
    empty_state_arrays,
    num_graph_pieces,
    state_arrays,
    state_batch,
)
from fa_serve.engine.scheduler.scheduled_batch import Chunk, ScheduledBatch
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.ops import FEW_ROWS, PIECE_ROWS
from fa_serve.spec import ParameterError


def chunk(start: int, length: int, **given: Any) -> Chunk:
    sequence = SequenceState(Request("x", [1] * 400, SamplingParams(), max_tokens=1))
    return Chunk(sequence, 0, start, length, 0, **given)


def test_few_rows_have_a_target_and_chunks_have_pieces() -> None:
    assert (SHORT_CHUNK, FEW_ROWS, PIECE_ROWS) == (16, 16, 64)
    batch = ScheduledBatch()
    batch.append(chunk(37, 1, source=5))
    batch.append(chunk(32, 16, source=6, stores=[(48, 7)]))
    batch.append(chunk(48, 150, source=8, stores=[(112, 9), (160, 10), (192, 11)]))
    batch.append(chunk(0, 17, stores=[(16, 12)]))
    arrays = state_arrays(batch)
    assert arrays["sources"].tolist() == [5, 6, 8, -1]
    assert arrays["targets"].tolist() == [-1, 7, -1, -1]
    assert arrays["pieces"].tolist() == [
        [17, 16, 2, -1],  # to the grid of 64
        [33, 48, 2, 9],
        [81, 16, 2, -1],
        [97, 32, 2, 10],
        [129, 32, 2, 11],
        [161, 6, 2, -1],
        [167, 16, 3, 12],
        [183, 1, 3, -1],
    ]


def test_a_step_without_chunks_has_no_pieces() -> None:
    arrays = state_arrays(ScheduledBatch([chunk(3, 1)]))
    assert arrays["pieces"].shape == (0, 4)
    assert {x.dtype for x in arrays.values()} == {np.dtype(np.int32)}


def test_sequences_of_an_empty_step_begin() -> None:
    arrays = empty_state_arrays([1, 1, 70])
    assert arrays["sources"].tolist() == arrays["targets"].tolist() == [-1, -1, -1]
    assert arrays["pieces"].tolist() == [[2, 64, 2, -1], [66, 6, 2, -1]]


def test_the_batch_has_the_fields_of_the_step() -> None:
    names = ("sources", "targets", "slots", "cu_seqlens_q", "seqused_k", "pieces")
    fields = {name: torch.tensor([number]) for number, name in enumerate(names)}
    fields["input_ids"] = torch.zeros(1)
    batch = state_batch(fields, 16, max_seqlen_q=1)
    assert [batch.page_size, *(int(x) for x in batch[1:])] == [16, 0, 1, 2, 3, 4, 5, 1, 1]
    assert state_batch(fields, 16, max_seqlen_q=2).most_rows == FEW_ROWS


@pytest.mark.parametrize(
    ("tokens", "longest", "even"), [(8 * 400, 400, 8), (400 + 63, 400, 1), (100, 128, 1), (2 * 512 + 9, 512, 2)]
)
def test_short_sequences_do_not_count_as_loops(tokens: int, longest: int, even: int) -> None:
    """A step of a long prompt beside decoding waits for the loop over its pieces. A graph may have room for longer ones."""
    names = ("sources", "targets", "slots", "cu_seqlens_q", "seqused_k", "pieces")
    fields = {name: torch.zeros(1) for name in names} | {"input_ids": torch.zeros(tokens)}
    assert state_batch(fields, 16, max_seqlen_q=longest).even_seqs == even


def test_the_padding_of_a_graph_reads_and_writes_no_states() -> None:
    fields = padding(Shape(128, 2, 128, 1024), states=True)
    pieces = [[0, 0, 0, -1]] * (128 // PIECE_ROWS + 3 * 2)
    assert [fields[x].tolist() for x in ("sources", "targets", "pieces")] == [[-1, -1], [-1, -1], pieces]
    assert padding(Shape(2, 2, 1, 1024), states=True)["pieces"].shape == (0, 4)
    assert (num_graph_pieces(2, 128, True), num_graph_pieces(2, 2, False)) == (len(pieces), 0)


def test_settings_that_models_with_states_do_not_have() -> None:
    check_settings_with_states("Qwen3NextForCausalLM", EngineConfig(lora_bytes=1 << 20), drafting=False)
    with pytest.raises(ParameterError, match=r"^lora_bytes must be 0.* above 1 for Qwen3NextForCausalLM.*, got 1048576"):
        check_settings_with_states("Qwen3NextForCausalLM", EngineConfig(lora_bytes=1 << 20, tensor_parallel=2), drafting=False)
    with pytest.raises(ParameterError, match="draft model that keeps no states"):
        check_settings_with_states("Qwen3NextForCausalLM", EngineConfig(), drafting=True)
    with pytest.raises(ParameterError, match="be False for Qwen3NextForCausalLM"):
        check_settings_with_states("Qwen3NextForCausalLM", EngineConfig(deterministic=True), drafting=False)
