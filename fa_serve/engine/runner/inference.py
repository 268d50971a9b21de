"""Inference mode for methods that every step calls, without the two objects and five calls that PyTorch's decorator costs.

    @in_inference_mode
    def launch(self, batch): ...

Left out: methods that no step calls; they use `torch.inference_mode()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def in_inference_mode(method: Callable[P, T]) -> Callable[P, T]:
    """The method, run in inference mode."""

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C._InferenceMode(True):  # what `torch.inference_mode` enters
            return method(*args, **kwargs)

    return run
