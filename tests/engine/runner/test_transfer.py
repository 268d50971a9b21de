"""Several arrays in one copy: what arrives is what was sent, at aligned addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa_serve.engine.runner.transfer import ALIGN, PackedTensors, packed_size, send

ARRAYS = {
    "ids": np.array([1, 2, 3], dtype=np.int64),
    "none": np.zeros(0, dtype=np.int32),
    "scores": np.array([[0.5], [-1.0]], dtype=np.float32),
    "flags": np.array([7], dtype=np.int32),
}


@pytest.mark.parametrize("block", [None, torch.zeros(256, dtype=torch.uint8)], ids=["new memory", "block"])
def test_arrays_arrive(block) -> None:
    sent = send(ARRAYS, torch.device("cpu"), block)
    assert {name: x.dtype for name, x in sent.items()} == {
        "ids": torch.int64,
        "none": torch.int32,
        "scores": torch.float32,
        "flags": torch.int32,
    }
    for name, array in ARRAYS.items():
        assert np.array_equal(sent[name].numpy(), array)


def test_places_depend_on_sizes_alone() -> None:
    block = torch.zeros(256, dtype=torch.uint8)
    assert packed_size(ARRAYS) == 32 + 0 + 16 + 16
    send(ARRAYS, torch.device("cpu"), block)
    views = PackedTensors(block, {name: np.zeros_like(array) for name, array in ARRAYS.items()})
    assert views["flags"].tolist() == [7]
    assert (views["flags"].data_ptr() - block.data_ptr()) % ALIGN == 0
