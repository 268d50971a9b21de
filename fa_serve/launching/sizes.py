"""Sizes for launches. This module does not import Triton, because tiles are also chosen where Triton is not installed."""

from __future__ import annotations


def power_of_2(n: int) -> int:
    """The least power of two that is at least n > 0. Triton's own function takes microseconds, because kernels call it too."""
    return 1 << (n - 1).bit_length()


def norm_warps(block: int) -> int:
    """Warps of a program that normalises a row of up to `block` numbers, a power of two. The sum of squares depends on it."""
    return min(8, max(1, block // 256))
