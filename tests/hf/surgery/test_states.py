"""Models with recurrent or convolution states in the engine's forward: the logits of whole sequences, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_families import Family, tokens
from hybrids import HYBRIDS, HybridPages
from torch import Tensor

import fa_serve
from fa_serve.hf.surgery.states import seat_states

TOLERANCE = 1e-4  # relative to the largest logit: in float32, transformers' own code is off by 6e-5 of the result in float64


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE, f"error {error:.1e}"


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda family: family.name)
@torch.no_grad()
def test_steps_of_the_engine_give_the_logits_of_whole_sequences(family: Family) -> None:
    """Packed prompts, chunks, few rows at any position, drafts that are dropped, pages that fill, and a sequence that rests."""
    eager = family.build()
    ids = tokens(2, 45)
    expected = eager(input_ids=ids).logits
    ours = fa_serve.patch(copy.deepcopy(eager))
    seat_states(ours)
    pages = HybridPages(ours, 2)
    wrong = tokens(2, seed=1)

    def step(spans: dict[int, tuple[int, int]], dropped: int = 0) -> None:
        new = {b: torch.cat([ids[b, first:last], wrong[:dropped]]) for b, (first, last) in spans.items()}
        for b, logits in pages.step(new, dropped=dict.fromkeys(new, dropped)).items():
            first, last = spans[b]
            assert_near(logits[: last - first], expected[b, first:last])

    step({0: (0, 20), 1: (0, 3)})  # a chunk beside few rows
    step({0: (20, 38), 1: (3, 14)})
    step({1: (14, 15)}, dropped=2)  # the drafts fill a page
    step({0: (38, 39), 1: (15, 16)})
    step({0: (39, 45), 1: (16, 33)})
    step({1: (33, 34)})
