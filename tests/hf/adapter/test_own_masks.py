"""Models that make their masks by a method (Kosmos-2)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from every_type import tiny_model
from torch import Tensor, nn

from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.own_masks import MaskMaker, patch_mask_makers
from fa_serve.hf.adapter.paged import OneSequence
from fa_serve.spec import UnsupportedModelError


def test_a_batch_that_rides_along_makes_no_mask() -> None:
    model: Any = tiny_model("kosmos-2").text_model
    assert patch_mask_makers(model)
    assert not patch_mask_makers(nn.Linear(1, 1))
    inner = model.model
    embeds = torch.zeros(1, 3, 4)
    given = torch.ones(1, 3, dtype=torch.int64)
    made = inner._prepare_decoder_attention_mask(given, (1, 3), embeds, 0)
    assert (made[0, 0] == 0).tolist() == torch.ones(3, 3).tril().bool().tolist()
    with riding(OneSequence()):
        assert inner._prepare_decoder_attention_mask(given, (1, 3), embeds, 0) is given
    copied = copy.deepcopy(model).model
    assert isinstance(copied._prepare_decoder_attention_mask, MaskMaker)
    assert copied._prepare_decoder_attention_mask.module is copied


def test_a_mask_that_says_more_is_refused() -> None:
    class Windowed(nn.Module):
        def _prepare_decoder_attention_mask(self, mask: Tensor, shape: Any, embeds: Tensor, length: int) -> Tensor:
            seen = torch.ones(1, 1, shape[1], shape[1]).tril().triu(-1)
            return torch.where(seen > 0, 0.0, torch.finfo(torch.float32).min)

    with pytest.raises(UnsupportedModelError, match="Windowed makes masks that do more than apply causality"):
        patch_mask_makers(Windowed())
