"""A step that is wrong for a model which computes its attention itself is found."""

from __future__ import annotations

import copy

import pytest
import torch
from every_type import tiny_model

from fa_serve import hf
from fa_serve.hf.adapter.paged import PagedBatch
from fa_serve.spec import UnsupportedModelError


@pytest.mark.parametrize("fault", ["a token sees what comes after it", "a token sees another sequence", "keys are lost"])
def test_logits_of_steps_are_compared_with_those_of_the_model(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(self: PagedBatch) -> torch.Tensor:
        seen = own(self)
        if fault == "a token sees what comes after it":
            return seen | (seen.cumsum(1) > 0) & (seen.flip(1).cumsum(1).flip(1) == 0) & (torch.arange(seen.shape[1]) < 6)
        if fault == "a token sees another sequence":
            return seen | seen.any(0)
        return seen & (torch.arange(seen.shape[1]) > 0)

    model = tiny_model("git")
    hf.model_layers(model)
    own = PagedBatch.visible
    monkeypatch.setattr(PagedBatch, "visible", visible)
    with pytest.raises(UnsupportedModelError, match="does not follow a mask over gathered keys"):
        hf.model_layers(copy.deepcopy(model))
