"""The same with the kernels of GPUs, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from common_prefix_cases import plain, problem

from fa_serve.hf.adapter import common_prefix
from fa_serve.ops import TABLE


@pytest.mark.parametrize("max_seqlen_q", [3, 17], ids=["few queries", "many queries"])
def test_values_are_those_of_each_sequence_alone(max_seqlen_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, given = problem({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 3.0})
    assert batch.common is not None
    monkeypatch.setattr(common_prefix.ops, "select_ops", lambda device: TABLE.load("triton"))
    batch = replace(batch, backend="triton", common=replace(batch.common, max_seqlen_q=max_seqlen_q))
    torch.testing.assert_close(batch.attention(**given), plain(batch, given), rtol=1e-4, atol=1e-5)
