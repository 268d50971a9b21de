"""Matrices that follow each other in memory are one run, whatever their order and strides."""

from __future__ import annotations

import torch

from fa_serve.hf.lora.host_runs import cloned, is_dense, runs_of, viewed


def test_matrices_of_a_file_are_one_run() -> None:
    memory = torch.arange(30.0)
    given = [memory[18:30].view(4, 3).t(), memory[2:8].view(2, 3), memory[8:18].view(1, 10)]
    (run,) = runs_of(given)
    assert torch.equal(run.data.view(torch.float32), memory[2:30])
    assert run.members == [(1, 0), (2, 24), (0, 64)]
    for index, offset in run.members:
        assert torch.equal(viewed(run.data, offset, given[index]), given[index])


def test_a_gap_another_dtype_and_another_memory_begin_runs() -> None:
    memory = torch.arange(16.0)
    given = [memory[:4].view(2, 2), memory[5:9].view(2, 2), memory[9:11].view(torch.int32).view(1, 2), torch.ones(2, 2)]
    runs = runs_of(given)
    assert sorted(run.members for run in runs) == [[(0, 0)], [(1, 0)], [(2, 0)], [(3, 0)]]


def test_a_matrix_that_is_given_twice_is_in_two_runs() -> None:
    x = torch.ones(2, 3)
    assert sorted(run.members for run in runs_of([x, x])) == [[(0, 0)], [(1, 0)]]


def test_gaps_are_seen() -> None:
    x = torch.zeros(4, 6)
    assert is_dense(x)
    assert is_dense(x.t())
    assert is_dense(x[1:3])
    assert not is_dense(x[:, 1:3])
    assert not is_dense(x[:, 1:3].t())


def test_copies_keep_values_and_share_nothing() -> None:
    memory = torch.arange(40.0)
    given = [memory[:12].view(3, 4), memory[12:24].view(3, 4).t(), memory.view(4, 10)[:, 2:5]]
    wanted = [x.clone() for x in given]
    found = cloned(given)
    memory.zero_()
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert found[1].stride() == given[1].stride()
