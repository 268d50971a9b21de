"""Rows behind the last sequence of a packed call: the backends in PyTorch follow the rule of the kernels."""

from __future__ import annotations

import pytest
import torch
from tail_cases import PAGED, VARLEN, TailCase, attend, check_tail, check_tail_gradients, params

from fa_serve.backends.unseen_rows import without_keys


@pytest.mark.every_case
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("case", params([*VARLEN, *PAGED]))
def test_rows_behind_the_last_sequence(case: TailCase, backend: str) -> None:
    check_tail(case, attend(case, backend), torch.float32)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_gradients(backend: str) -> None:
    check_tail_gradients(backend, torch.float32)


def test_rows_of_a_sequence_without_keys_have_the_sink() -> None:
    out = torch.empty(5, 2, 8)
    lse = torch.empty(2, 5)
    without_keys(out, lse, torch.tensor([1.0, 2.0]), torch.tensor([0, 0, 3], dtype=torch.int32))
    assert torch.equal(out, torch.zeros(5, 2, 8))
    assert lse.tolist() == [[1.0] * 3 + [float("-inf")] * 2, [2.0] * 3 + [float("-inf")] * 2]
