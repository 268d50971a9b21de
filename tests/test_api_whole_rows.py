"""`api._of_whole_rows`: which caches have rows that copy engines can address."""

from __future__ import annotations

import pytest
import torch

from fa_serve.api import _of_whole_rows


@pytest.mark.parametrize(
    ("strides", "whole"),
    [
        ((2048, 128, 64, 1), True),
        ((4096, 128, 64, 1), True),
        ((2048, 64, 1024, 1), True),
        ((2050, 128, 64, 1), False),
        ((2048, 132, 64, 1), False),
        ((2048, 128, 60, 1), False),
    ],
    ids=str,
)
def test_which_caches_have_whole_rows(strides: tuple[int, ...], whole: bool) -> None:
    cache = torch.zeros(20_000, dtype=torch.bfloat16).as_strided((3, 16, 2, 64), strides)
    assert _of_whole_rows(cache) == whole
    assert not _of_whole_rows(cache.as_strided(cache.shape, strides, storage_offset=4))
