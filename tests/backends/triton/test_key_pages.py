"""`triton.key_pages` on the host: which caches and masks need products of 64 bits.

What the kernels compute with them is in test_large_caches_interpreted.py and test_large_caches_compiled.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from large_caches import BOUND

from fa_serve.backends.triton.key_pages import has_wide_mask, has_wide_rows


def test_which_rows_are_wide() -> None:
    def paged(*strides: int, page_size: int = 16) -> Any:
        return SimpleNamespace(stride=lambda i: strides[i], dim=lambda: 4, shape=(2, page_size, 8, 64))

    assert not has_wide_rows(paged(16 * 512, 512), paged=True)
    assert not has_wide_rows(paged(BOUND - 512, 512), paged=True)
    assert has_wide_rows(paged(BOUND, 512), paged=True)
    assert not has_wide_rows(paged(BOUND, 512), paged=False), "a batch index is multiplied in 64 bits"
    assert has_wide_rows(paged(512, BOUND // 128), paged=True)
    assert not has_wide_rows(paged(512, BOUND // 128 - 1), paged=True)
    assert has_wide_rows(paged(512, 512, page_size=BOUND // 512), paged=True)
    assert not has_wide_rows(torch.zeros(5, 2, 8), paged=False)


def test_which_masks_are_wide() -> None:
    def mask(keys: int, stride: int) -> Any:
        return SimpleNamespace(shape=(1, 1, 1, keys), stride=lambda i: stride)

    assert not has_wide_mask(None)
    assert not has_wide_mask(mask(1 << 20, 1))
    assert not has_wide_mask(mask(1 << 16, (1 << 15) - 1))
    assert has_wide_mask(mask(1 << 16, 1 << 15))
