"""Attention that reads shared pages once is the attention of each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common_prefix_cases import plain, problem

from fa_serve.hf.adapter.common_prefix import CommonPrefixes


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"softcap": 2.0}, id="softcap"),
        pytest.param({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, id="sinks"),
    ],
)
def test_values_are_those_of_each_sequence_alone(options: dict[str, Any]) -> None:
    batch, given = problem(options)
    torch.testing.assert_close(batch.attention(**given), plain(batch, given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"left": 3}, {"attention_chunk": 4}])
def test_layers_that_do_not_see_all_keys_read_each_sequence(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, given = problem(options)
    monkeypatch.setattr(CommonPrefixes, "attend", lambda *args, **kwargs: pytest.fail("keys before the window are read"))
    assert torch.equal(batch.attention(**given), plain(batch, given))


def test_shared_pages_are_not_read_for_each_sequence() -> None:
    """The call of what follows does not see them."""
    batch, _ = problem({})
    assert batch.common is not None
    assert batch.common.own_seqused_k.tolist() == [1, 6, 4, 1, 6, 3]
    assert batch.common.own_block_table[:, :2].tolist() == [[9, 0], [1, 4], [2, 0], [6, 0], [8, 10], [11, 0]]
    assert batch.common.seqused_k.tolist() == [8, 4, 0]
