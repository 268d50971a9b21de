"""Tensors go from process to process with the file that they lie in, and nobody changes them on the way."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fa_serve.engine.images.processed import ProcessedImage
from fa_serve.engine.images.shared_tensors import SharedTensors, share_tensors

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no files without a name")
SIZE = 1 << 16


@pytest.fixture
def file() -> Iterator[int]:
    number = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(number, SIZE)
    yield number
    os.close(number)


def image() -> ProcessedImage:
    values = torch.arange(100, dtype=torch.float32).view(4, 25)
    return ProcessedImage({"pixel_values": values, "grid": torch.tensor([[1, 2, 3]]), "none": torch.empty(0, 4)}, "")


def test_nobody_changes_what_is_shared(file: int) -> None:
    inputs = share_tensors(image().write(file), file)
    assert isinstance(inputs, SharedTensors)
    with pytest.raises(PermissionError):
        os.pwrite(file, bytes(400), 0)
    inputs["pixel_values"].zero_()  # for this process alone
    again = share_tensors({"inputs": [*inputs._described.values()], "bytes": SIZE}, file)
    torch.testing.assert_close(again["pixel_values"], image().inputs["pixel_values"], rtol=0, atol=0)


def test_a_file_that_a_process_can_still_write_is_copied(file: int) -> None:
    told = image().write(file)
    with mmap.mmap(file, SIZE) as other:
        inputs = share_tensors(told, file)
        other[:400] = bytes(400)
    assert not isinstance(inputs, SharedTensors)
    torch.testing.assert_close(inputs["pixel_values"], image().inputs["pixel_values"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"bytes": SIZE + 1}, id="longer-than-the-file"),
        pytest.param({"bytes": 100}, id="end"),
        pytest.param({"inputs": [{"name": "x", "dtype": "float32", "shape": [SIZE], "place": 0}]}, id="shape"),
        pytest.param({"inputs": [{"name": "x", "dtype": "float32", "shape": [-1, -4], "place": 0}]}, id="negative"),
        pytest.param({"inputs": [{"name": "x", "dtype": "float32", "shape": [1], "place": -4}]}, id="place"),
    ],
)
def test_tensors_outside_of_the_file(file: int, change: dict[str, Any]) -> None:
    """They would end the process that reads them, which is that of the engine."""
    with pytest.raises(ValueError, match="inputs must lie in the file of the image"):
        share_tensors(image().write(file) | change, file)


def test_through_a_pipe_goes_the_file_alone(file: int) -> None:
    inputs = share_tensors(image().write(file), file)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        ours.send({"image": inputs})
        sent = theirs.recv()["image"]
    assert isinstance(sent, SharedTensors)
    assert os.fstat(sent._file).st_ino == os.fstat(file).st_ino
    assert [*sent] == ["pixel_values", "grid", "none"]
    for name, x in image().inputs.items():
        torch.testing.assert_close(sent[name], x, rtol=0, atol=0)


def test_other_pickles_hold_the_tensors(file: int) -> None:
    found = pickle.loads(pickle.dumps(share_tensors(image().write(file), file)))
    assert type(found) is dict
    torch.testing.assert_close(found, dict(image().inputs), rtol=0, atol=0)


@pytest.mark.slow
def test_the_file_is_closed_with_its_last_tensor(file: int) -> None:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    told = image().write(file)
    before = count()
    inputs = share_tensors(told, file)
    kept = inputs["pixel_values"]
    del inputs
    assert kept.sum() == 4950
    del kept
    assert count() == before


def test_all_memory_of_the_file_counts(file: int) -> None:
    """Also what a process has written beside its tensors."""
    told = image().write(file)
    os.pwrite(file, b"x" * SIZE, 0)
    inputs = share_tensors(told, file)
    assert isinstance(inputs, SharedTensors)
    assert inputs.num_bytes >= SIZE
