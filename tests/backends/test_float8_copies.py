"""`backends.float8_copies`: what the copies of a paged call take, beside what the Hopper backend allocates."""

from __future__ import annotations

import pytest
import torch

from fa_serve.backends.calls import AttentionOptions
from fa_serve.backends.float8_copies import copied_bytes
from fa_serve.backends.layout import TensorLayout
from fa_serve.backends.triton.float8_inputs import InputQuantizer
from fa_serve.spec import Precision


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_bytes_are_those_of_the_copies(cache_dtype: torch.dtype, precision: Precision) -> None:
    """Beside scales, and up to 127 keys of each sequence."""
    cache = torch.empty(9, 16, 2, 64, dtype=cache_dtype)
    q = torch.empty(70, 4, 64, dtype=torch.bfloat16)
    options = AttentionOptions(1.0, (-1, 0), 0.0, 70, 1024, return_lse=False, precision=precision)
    layouts = [TensorLayout(x.shape, x.stride(), x.dtype) for x in (q, cache, cache)]
    _, k, v = InputQuantizer(layouts, "paged", 3, options, 64).layouts
    taken = sum(torch.Size(x.shape).numel() * x.dtype.itemsize for x in (k, v))
    assert copied_bytes(cache, cache, 3, 1024, precision) == taken
    assert copied_bytes(cache, cache, 3, 1024, "bf16") == 0
