"""The example of a sparse prefill: the blocks that it chooses, and its error on the embedded model."""

import re

import pytest
import sparse_prefill
import torch
from sparse_prefill import BLOCK, antidiagonal_blocks


def test_a_block_that_holds_the_probability_is_chosen() -> None:
    """The queries of the last block match the keys of block 2, in the head that looks there."""
    q = torch.zeros(1, 6 * BLOCK - 5, 2, 16)
    k = torch.zeros(1, 6 * BLOCK - 5, 1, 16)
    q[:, 5 * BLOCK :, 1, 0] = 10.0
    k[:, 2 * BLOCK : 3 * BLOCK, 0, 0] = 10.0
    keep = antidiagonal_blocks(q, k, 0.25, threshold=0.7)
    assert keep.shape == (1, 2, 6, 6)
    assert keep[0, 1, 5].int().tolist() == [1, 0, 1, 0, 0, 1]
    assert int(keep[0, 0, 5].sum()) >= 4, "every block has the same estimate"
    assert not bool(keep.triu(1).any())


def test_the_error_falls_with_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    sparse_prefill.main(["--thresholds", "0.8", "0.99", "--tokens", "700"])
    text = capsys.readouterr().out
    [dense] = map(float, re.findall(r"dense: ([\d.]+) bits", text))
    found = re.findall(r"(\d+)% of the blocks, ([\d.]+) bits per token, error of a layer ([\d.]+)", text)
    (few, bits, error), (many, more_bits, less_error) = [tuple(map(float, row)) for row in found]
    assert 10 < few < many < 100
    assert error > 2 * less_error > 0
    assert abs(more_bits - dense) < abs(bits - dense)
    assert abs(more_bits - dense) < 0.05
