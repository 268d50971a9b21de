"""The example of fixed block-sparse patterns runs, and its patterns are what they are called."""

import pytest
import sparse_patterns
import torch
from sparse_patterns import butterfly, local_and_global


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    sparse_patterns.main()
    text = capsys.readouterr().out
    assert "local and global: 122 of 528 causal blocks, 23%" in text
    assert "butterfly: 112 of 528 causal blocks, 21%" in text


def test_local_and_global() -> None:
    assert local_and_global(6, window=2, first=1).int().tolist()[5] == [1, 0, 0, 0, 1, 1]
    assert not bool(local_and_global(6).triu(1).any())


def test_a_butterfly_connects_all_blocks_in_few_layers() -> None:
    keep = butterfly(8)
    assert keep.int().tolist()[6] == [0, 0, 1, 0, 1, 0, 1, 0]
    reached = torch.linalg.matrix_power(keep.double(), 3) > 0
    assert bool(reached[7].all())
    assert not bool(keep.triu(1).any())
