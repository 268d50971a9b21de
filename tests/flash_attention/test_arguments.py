"""Values that flash-attn allows are translated, and what has no kernel is refused with the argument's name."""

from __future__ import annotations

import pytest
import torch

from fa_serve import ParameterError
from fa_serve.flash_attn.arguments import softmax_arguments


def test_unlimited_and_off_have_many_spellings() -> None:
    plain = {"softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
    assert softmax_arguments(None, False, (-1, -1), 0.0) == plain
    assert softmax_arguments(None, False, [-7, -2], -1.0) == plain
    assert softmax_arguments(None, False, torch.tensor([3, -2]), 0.0) == plain | {"window_size": (3, -1)}


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (-5, 3)])
def test_a_chunk_passes_on_for_causal_calls_without_a_left_bound(window: tuple[int, int]) -> None:
    assert softmax_arguments(None, True, window, 0.0, attention_chunk=4)["attention_chunk"] == 4
    assert "attention_chunk" not in softmax_arguments(None, True, window, 0.0)


@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (False, (-1, 0)), (True, (0, 0)), (True, (8, -1))])
def test_another_chunk_is_refused(causal: bool, window: tuple[int, int]) -> None:
    with pytest.raises(ParameterError, match=r"attention_chunk must be 0 unless causal is True .* got 4$") as refused:
        softmax_arguments(None, causal, window, 0.0, attention_chunk=4)
    assert (refused.value.field, refused.value.code) == ("attention_chunk", "unsupported")
