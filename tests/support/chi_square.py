"""Whether drawn tokens follow a distribution, by a chi-square statistic.

Tests fix their seeds, so a test either always passes or never does. A correct sampler exceeds the bound for one seed in a
million.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assert_distribution(counts: Tensor, probabilities: Tensor) -> None:
    """Compare how often each token was drawn with its probability. Tokens expected less than 5 times are counted as one."""
    expected = probabilities.double() * counts.sum()
    common = expected >= 5
    observed = torch.cat([counts[common].double(), counts[~common].sum()[None].double()])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed = observed[expected > 0]
    expected = expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    # Wilson and Hilferty: the cube root of chi-square over its mean is nearly normal; 4.75 sigma is one in a million
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4.75 * spread**0.5) ** 3, f"chi-square {statistic:.1f}, {freedom} degrees"
