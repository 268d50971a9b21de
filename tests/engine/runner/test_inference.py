"""Inference mode around a method: as torch.inference_mode, at fewer calls."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from fa_serve.engine.runner.inference import in_inference_mode


class Doubler:
    @in_inference_mode
    def double(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        """Two of them."""
        if fails:
            raise ValueError("refused")
        return x + x

    @torch.inference_mode()
    def double_by_torch(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


def count_calls(call: Callable[[], object]) -> int:
    count = 0

    def follow(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_a_method_runs_in_inference_mode() -> None:
    x = torch.ones(2, requires_grad=True)
    assert Doubler().double(x).is_inference()
    assert not torch.is_inference_mode_enabled()
    assert Doubler.double.__doc__ == "Two of them."
    with pytest.raises(ValueError, match="refused"):
        Doubler().double(x, fails=True)
    assert not torch.is_inference_mode_enabled()


def test_a_call_takes_one_call_more() -> None:
    doubler = Doubler()
    x = torch.ones(2)
    calls = count_calls(lambda: doubler.double(x))
    assert calls == 3  # the lambda, the wrapper and the method
    assert calls < count_calls(lambda: doubler.double_by_torch(x))
