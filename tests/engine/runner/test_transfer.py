"""Several arrays in one copy: what arrives is what was sent, at aligned addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fa_serve.engine.runner.transfer import ALIGN, PackedTensors, StagedArrays, packed_size, send

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


@pytest.mark.parametrize("room", [0, 16, 4096], ids=["no room", "too little room", "room"])
def test_staged_arrays_are_those_that_were_written_last(room) -> None:
    cpu = torch.device("cpu")
    staged = StagedArrays({"ids": np.zeros(3, dtype=np.int64), "scores": np.zeros((2, 1), dtype=np.float32)}, cpu, room)
    staged["ids"][:2] = [1, 2]
    staged["scores"][...] = ARRAYS["scores"]
    more = {"flags": ARRAYS["flags"], "none": ARRAYS["none"]}
    staged.extend(more)
    staged["ids"][2] = 3
    assert staged.size == packed_size(staged) == 32 + 16 + 16
    assert list(staged) == ["ids", "scores", "flags", "none"]
    block = torch.zeros(256, dtype=torch.uint8)
    sent = send(staged, cpu, block)
    for name in staged:
        assert np.array_equal(sent[name].numpy(), ARRAYS[name])
    staged["ids"][0] = 9
    assert sent["ids"].tolist() == [1, 2, 3], "the block is a copy"
