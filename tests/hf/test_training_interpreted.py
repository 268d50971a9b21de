"""Training through the portable kernels, in Triton's interpreter, where memory that nobody wrote is NaN."""

from __future__ import annotations

import pytest
import torch
from packed_training import packed_training_gradients


@pytest.mark.slow
def test_a_packed_batch_with_rows_behind_its_last_sequence_has_the_gradients_of_one_without() -> None:
    padded, plain = packed_training_gradients("cpu", torch.float32)
    assert len(padded) > 10
    for ours, expected in zip(padded, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
