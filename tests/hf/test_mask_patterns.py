"""`classify`: plain patterns are recognised, however transformers composes them, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from fa_serve.hf.mask_patterns import classify

CAUSAL = masking_utils.causal_mask_function


FULL = masking_utils.bidirectional_mask_function


NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2]])


SEQUENCES = masking_utils.packed_sequence_mask_function(NUMBERS)


SLIDING = masking_utils.sliding_window_causal_mask_function(3)


SLIDING_FULL = masking_utils.sliding_window_bidirectional_mask_function(3)


def test_plain_patterns_are_recognised() -> None:
    assert classify(CAUSAL) == ((-1, 0), None)
    assert classify(FULL) == ((-1, -1), None)
    assert classify(SLIDING) == ((2, 0), None)
    assert classify(SLIDING_FULL) == ((3, 3), None)
    assert classify(masking_utils.and_masks(CAUSAL, SEQUENCES)) == ((-1, 0), NUMBERS)
    assert classify(masking_utils.and_masks(SLIDING, SEQUENCES)) == ((2, 0), NUMBERS)


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
        masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64)),
        masking_utils.or_masks(CAUSAL, masking_utils.blockwise_overlay(NUMBERS)),
        lambda b, h, q, k: k <= q,
    ],
)
def test_everything_else_is_not(function: Any) -> None:
    assert classify(function) is None
