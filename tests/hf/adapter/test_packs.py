"""What is noted of the packed sequences of a forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fa_serve.hf.adapter.packs import Forward, Packs, check_layer, packs_of_states, running, running_packs
from fa_serve.spec import UnsupportedModelError

STARTS = torch.tensor([0, 3, 3, 5], dtype=torch.int32)


def test_numbers_and_positions_of_tokens() -> None:
    packs = Packs(STARTS)
    assert packs.numbers(5).tolist() == [[0, 0, 0, 2, 2]]
    assert packs.positions(5).tolist() == [[0, 1, 2, 0, 1]]
    # rows behind the last sequence count on
    assert packs.positions(7).tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_a_call_of_another_size_has_no_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to a tower, which has no sequences of the text."""
    assert running_packs(1, 5) is None
    packs = Packs(STARTS, of_states=STARTS)
    monkeypatch.setattr(running, "forward", Forward(nn.Identity(), None, (1, 5), packs))
    assert running_packs(1, 5) is packs
    assert running_packs(1, 6) is None
    assert packs_of_states() is STARTS


def test_a_layer_is_refused_unless_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 2, 5, 8)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    packs = Packs(STARTS)
    monkeypatch.setattr(running, "forward", Forward(nn.Identity(), None, (1, 5), packs))
    check_layer(nn.Identity(), query, None, told=True)
    check_layer(nn.Identity(), query[:, :, :4], None, told=False)
    for given in (None, mask):
        with pytest.raises(
            UnsupportedModelError,
            match="every layer must know where packed sequences begin, but Identity gets from its model neither",
        ):
            check_layer(nn.Identity(), query, given, told=False)
    packs.in_masks = True
    check_layer(nn.Identity(), query, mask, told=False)
    with pytest.raises(
        UnsupportedModelError,
        match="every layer must know where packed sequences begin, but Identity gets from its model neither",
    ):
        check_layer(nn.Identity(), query, None, told=False)
    with pytest.raises(UnsupportedModelError, match="Identity lets its queries choose blocks of keys"):
        check_layer(nn.Identity(), query, mask, told=True, chooses_blocks=True)
