"""Pieces of memory are filled through a few buffers by several threads. What a GPU does is in tests/gpu/test_lora_gpu.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from fa_serve.hf.lora.staging import NUM_BUFFERS, Staging


class Copied:
    """An event after a copy, which is done at once on a CPU."""

    def __init__(self) -> None:
        self.waits = 0
        self.records = 0

    def synchronize(self) -> None:
        self.waits += 1

    def record(self) -> None:
        self.records += 1


@pytest.fixture
def staging() -> Staging:
    """A `Staging` as on a GPU, with buffers of the CPU."""
    found = Staging(torch.device("cpu"), torch.float32, 6)
    found._on_gpu = True
    found._buffers = [torch.full((6,), -1.0) for _ in range(NUM_BUFFERS)]
    found._copied = [Copied() for _ in range(NUM_BUFFERS)]
    return found


def filler(number: int, filled: list[int], seconds: float = 0.0) -> Callable[[torch.Tensor], None]:
    def write(view: torch.Tensor) -> None:
        time.sleep(seconds)
        view.fill_(number)
        filled.append(number)

    return write


def test_without_a_gpu_pieces_are_written_in_place() -> None:
    memory = torch.ones(10)
    Staging(torch.device("cpu"), torch.float32, 6).send([(memory[2:4], filler(5, [])), (memory[4:7], filler(6, []))])
    assert memory.tolist() == [1.0, 1.0, 5.0, 5.0, 6.0, 6.0, 6.0, 1.0, 1.0, 1.0]


def test_pieces_that_take_different_times_are_copied_in_their_order(staging: Staging) -> None:
    memory = torch.zeros(11, 6)
    filled: list[int] = []
    lengths = [6, 1, 3, 6, 2, 5, 6, 4, 6, 6, 1]
    pieces = [(memory[i, :n], filler(i + 1, filled, 0.002 * (i % 3 == 0))) for i, n in enumerate(lengths)]
    staging.send(pieces[:4])
    staging.send(pieces[4:])
    assert memory.tolist() == [[float(i + 1)] * n + [0.0] * (6 - n) for i, n in enumerate(lengths)]
    assert sorted(filled) == list(range(1, 12))
    assert [(each.waits, each.records) for each in staging._copied] == [(4, 4), (4, 4), (3, 3)]


def test_several_pieces_are_filled_at_the_same_time(staging: Staging) -> None:
    together = threading.Barrier(NUM_BUFFERS)
    memory = torch.zeros(NUM_BUFFERS, 2)

    def write(view: torch.Tensor) -> None:
        together.wait(20)  # raises if the other pieces are not being filled
        view.fill_(1.0)

    staging.send((row, write) for row in memory)
    assert memory.eq(1.0).all()


def test_no_thread_fills_a_buffer_after_an_error(staging: Staging) -> None:
    filled: list[int] = []

    def fail(view: torch.Tensor) -> None:
        raise ValueError("the file was cut off")

    memory = torch.zeros(3, 6)
    with pytest.raises(ValueError, match="cut off"):
        staging.send([(memory[0], fail), (memory[1], filler(1, filled, 0.05)), (memory[2], filler(2, filled, 0.05))])
    assert sorted(filled) == [1, 2]
    staging.send([(row, filler(7, [])) for row in memory])
    assert memory.eq(7.0).all()
