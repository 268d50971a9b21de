"""`classify`: plain patterns are recognised, however transformers composes them, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay

from fa_serve.hf.adapter.mask_patterns import Chunks, Pattern, classify, without_packs
from fa_serve.hf.adapter.releases import REMAPPING

CAUSAL = masking_utils.causal_mask_function


FULL = masking_utils.bidirectional_mask_function


NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2]])


SEQUENCES = masking_utils.packed_sequence_mask_function(NUMBERS)


SLIDING = masking_utils.sliding_window_causal_mask_function(3)


NO_PADDING = torch.zeros(1, dtype=torch.int64)


CHUNKED = masking_utils.chunked_causal_mask_function(3, NO_PADDING)


SLIDING_FULL = masking_utils.sliding_window_bidirectional_mask_function(3)


def test_plain_patterns_are_recognised() -> None:
    assert classify(CAUSAL) == Pattern((-1, 0))
    assert classify(FULL) == Pattern((-1, -1))
    assert classify(SLIDING) == Pattern((2, 0))
    assert classify(SLIDING_FULL) == Pattern((3, 3))
    assert classify(CHUNKED) == Pattern((-1, 0), chunks=Chunks(3, NO_PADDING))
    assert classify(masking_utils.and_masks(CAUSAL, SEQUENCES)) == Pattern((-1, 0), NUMBERS)
    assert classify(masking_utils.and_masks(SLIDING, SEQUENCES)) == Pattern((2, 0), NUMBERS)


def test_the_rest_of_a_mask_with_packed_sequences() -> None:
    assert without_packs(masking_utils.and_masks(CAUSAL, SEQUENCES)) is CAUSAL
    assert without_packs(masking_utils.and_masks(SEQUENCES, SLIDING)) is SLIDING
    rest = without_packs(masking_utils.and_masks(SEQUENCES, FULL, SLIDING_FULL))
    assert [bool(rest(0, 0, torch.tensor(1), key)) for key in range(6)] == [True] * 5 + [False]
    assert without_packs(CAUSAL) is CAUSAL
    assert classify(without_packs(SLIDING)) == Pattern((2, 0))


@pytest.mark.skipif(REMAPPING is None, reason="transformers 5.17 counts positions from the start of the row")
def test_positions_may_be_those_within_packed_sequences() -> None:
    """Releases differ in the order of the two."""
    remapped = masking_utils.remap_positions_for_packed_sequence(SLIDING, NUMBERS)
    for parts in ((SEQUENCES, remapped), (remapped, SEQUENCES)):
        assert classify(masking_utils.and_masks(*parts)) == Pattern((2, 0), NUMBERS)
    assert classify(remapped) is None


EVERYTHING = masking_utils.or_masks(CAUSAL, lambda *args: torch.tensor(True, dtype=torch.bool))


def test_gemma_3s_masks_in_both_directions_are_recognised() -> None:
    """Of EmbeddingGemma: the functions are made by the model's own module."""
    window = masking_utils.or_masks(SLIDING, _bidirectional_window_overlay(3))
    assert classify(EVERYTHING) == Pattern((-1, -1))
    assert classify(window) == Pattern((2, 2))
    assert classify(masking_utils.and_masks(EVERYTHING, SEQUENCES)) == Pattern((-1, -1), NUMBERS)
    assert classify(masking_utils.and_masks(window, SEQUENCES)) == Pattern((2, 2), NUMBERS)


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.or_masks(SLIDING, _bidirectional_window_overlay(4)),
        masking_utils.or_masks(CAUSAL, lambda *args: torch.tensor(False, dtype=torch.bool)),
        masking_utils.or_masks(CHUNKED, lambda *args: torch.tensor(True, dtype=torch.bool)),
        masking_utils.or_masks(CAUSAL, SLIDING),
        masking_utils.and_masks(CAUSAL, lambda b, h, q, k: q != k),
        masking_utils.and_masks(CAUSAL, SLIDING, SEQUENCES),
        masking_utils.and_masks(SLIDING, masking_utils.sliding_window_overlay(2)),
        masking_utils.and_masks(masking_utils.and_masks(CAUSAL, SEQUENCES), SEQUENCES),
        masking_utils.and_masks(masking_utils.sliding_window_overlay(3), FULL),
        masking_utils.sliding_window_causal_mask_function(0),
        masking_utils.and_masks(CHUNKED, SEQUENCES),
        masking_utils.and_masks(masking_utils.chunked_overlay(3, NO_PADDING), FULL),
        masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(NUMBERS)),
        lambda b, h, q, k: k <= q,
    ],
)
def test_everything_else_is_not(function: Any) -> None:
    assert classify(function) is None
