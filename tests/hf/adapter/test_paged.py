"""What a batch that rides along on a paged cache refuses. `test_families.py` compares the values."""

from __future__ import annotations

import pytest
import torch
from hf_families import BY_NAME, Pages, pair, tokens

from fa_serve import hf
from fa_serve.hf.adapter.probe import Probe
from fa_serve.spec import UnsupportedModelError


def test_a_step_must_come_without_a_mask() -> None:
    """Only `paged_forward` prevents that a model makes one; another caller hears of it."""
    eager, ours = pair(BY_NAME["llama"])
    eager(tokens(1, 4))
    batches = []
    pages = Pages(ours, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "paged_forward", lambda model, ids, at, batch, rows: batches.append(batch) or rows)
        pages.step([tokens(4)])
    with pytest.raises(UnsupportedModelError, match="LlamaAttention makes a mask itself, which attention on a paged cache"):
        ours(tokens(1, 4), fa_serve_batch=batches[0])


def test_a_position_bias_has_no_place_in_pages() -> None:
    query = torch.zeros(1, 2, 3, 8)
    bias = torch.zeros(1, 2, 3, 3)
    with pytest.raises(UnsupportedModelError, match="Module adds a position_bias to its scores, which attention on a paged"):
        hf.attention_forward(torch.nn.Module(), query, query, query, None, position_bias=bias, fa_serve_batch=Probe())


def test_chosen_blocks_have_no_place_in_pages() -> None:
    """A model whose choice is not turned off would attend to all keys otherwise."""
    _, ours = pair(BY_NAME["llama"])
    batches = []
    pages = Pages(ours, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "paged_forward", lambda model, ids, at, batch, rows: batches.append(batch) or rows)
        pages.step([tokens(4)])
    query = torch.zeros(1, 4, 4, 16)
    chosen = torch.zeros(1, 2, 4, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match="chooses blocks of keys, which attention on a paged cache cannot apply"):
        hf.attention_forward(
            ours.model.layers[0].self_attn, query, query, query, None, block_indices=chosen, fa_serve_batch=batches[0]
        )
