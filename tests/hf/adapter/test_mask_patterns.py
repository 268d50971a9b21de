"""`classify`: plain patterns are recognised, however transformers composes them, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from fa_serve.hf.adapter.mask_patterns import Chunks, Pattern, classify

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


@pytest.mark.parametrize(
    "function",
    [
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
