"""Matrices reach their places through a few buffers, which several threads fill. tests/gpu/test_lora_gpu.py has a GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from fa_serve.hf.lora import staging as staging_module
from fa_serve.hf.lora.host_runs import runs_of
from fa_serve.hf.lora.staging import NUM_BUFFERS, Copy, Staging


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
    """A `Staging` as on a GPU, with buffers of the CPU that hold one matrix of 12 numbers each."""
    found = Staging(torch.device("cpu"), 48)
    found._on_gpu = True
    found._buffers = [torch.full((64,), 255, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
    found._arrived = [torch.full((64,), 254, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
    found._copied = [Copied() for _ in range(NUM_BUFFERS)]
    return found


def copies_of(matrices: Sequence[torch.Tensor], places: torch.Tensor) -> list[Copy]:
    """Each matrix goes to one of the places (count, 4, 8), and its rows from the third on to one further away."""
    return [
        Copy(x, [places[i, :2, : x.shape[1]], places[i, 3 : len(x) + 1, : x.shape[1]]] if len(x) > 2 else [places[i, :2, :5]])
        for i, x in enumerate(matrices)
    ]


def check(matrices: Sequence[torch.Tensor], places: torch.Tensor) -> None:
    for x, place in zip(matrices, places, strict=True):
        columns = x.shape[1]
        assert torch.equal(place[:2, :columns], x[:2])
        assert torch.equal(place[3 : len(x) + 1, :columns], x[2:])
        assert place[2].eq(-1).all()
        assert place[:, columns:].eq(-1).all()


MATRICES = [torch.randn(2, 5), torch.randn(4, 3).t(), torch.randn(3, 2), *torch.randn(8, 3, 4)]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_rows_and_columns_reach_their_places(staging: Staging, on_gpu: bool) -> None:
    staging._on_gpu = on_gpu
    places = torch.full((len(MATRICES), 4, 8), -1.0)
    copies = copies_of(MATRICES, places)
    staging.send(copies[:4])
    staging.send(copies[4:])
    check(MATRICES, places)
    counts = [(each.waits, each.records) for each in staging._copied]
    assert counts == ([(4, 4), (4, 4), (3, 3)] if on_gpu else [(0, 0)] * 3)


def test_small_matrices_share_a_piece(staging: Staging) -> None:
    places = torch.full((6, 4, 8), -1.0)
    matrices = [torch.randn(1, 2).expand(2, 2).contiguous() for _ in range(6)]
    staging.send([Copy(x, [place[:2, :2]]) for x, place in zip(matrices, places, strict=True)])
    assert sum(each.records for each in staging._copied) == 3  # two of them in 64 bytes
    assert all(torch.equal(place[:2, :2], x) for place, x in zip(places, matrices, strict=True))


def test_several_pieces_are_filled_at_the_same_time(staging: Staging, monkeypatch) -> None:
    together = threading.Barrier(NUM_BUFFERS)

    def waiting(sources):
        together.wait(20)  # raises if the other pieces are not being filled
        return runs_of(sources)

    monkeypatch.setattr(staging_module, "runs_of", waiting)
    places = torch.full((NUM_BUFFERS, 4, 8), -1.0)
    staging.send(copies_of(MATRICES[-NUM_BUFFERS:], places))
    check(MATRICES[-NUM_BUFFERS:], places)


def test_no_thread_fills_a_buffer_after_an_error(staging: Staging, monkeypatch) -> None:
    started = threading.Event()
    filled = []

    def failing(sources):
        if sources[0] is MATRICES[3]:
            assert started.wait(20)
            raise ValueError("the file was cut off")
        started.set()
        threading.Event().wait(0.05)
        filled.append(len(sources))
        return runs_of(sources)

    monkeypatch.setattr(staging_module, "runs_of", failing)
    places = torch.full((3, 4, 8), -1.0)
    with pytest.raises(ValueError, match="cut off"):
        staging.send(copies_of(MATRICES[3:6], places))
    assert filled == [1, 1]
    monkeypatch.undo()
    staging.send(copies_of(MATRICES[-3:], places))
    check(MATRICES[-3:], places)
