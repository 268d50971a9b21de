"""Modules whose queries choose all keys up to a length (MiniMax M3, GLM 5 Next), and blocks of keys without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_type import tiny_model

from fa_serve import BlockLists, patch
from fa_serve.engine import Engine, EngineConfig
from fa_serve.hf.adapter import attention
from fa_serve.hf.adapter.releases import cache_argument
from fa_serve.hf.adapter.short_choices import find_short_choices, length_limit, patch_short_choices
from fa_serve.spec import ParameterError, UnsupportedModelError

BLOCKS = {"text_config": {"index_block_size": 4, "index_topk_blocks": 2}}


@pytest.mark.parametrize(("name", "limit"), [("minimax_m3_vl", 256), ("glm5_next", 192), ("llava", None)])
def test_up_to_which_length_all_keys_are_chosen(name: str, limit: int | None) -> None:
    model = tiny_model(name)
    assert length_limit(model) is None
    assert patch_short_choices(model) == limit
    assert length_limit(model) == limit
    assert len(list(find_short_choices(model))) == (limit is not None)


def test_longer_sequences_are_refused() -> None:
    model = tiny_model("minimax_m3_vl", BLOCKS)
    with pytest.raises(
        ParameterError, match="max_model_len must be at most 8, because in longer sequences its queries select keys"
    ):
        Engine(EngineConfig(num_pages=16, max_model_len=32, page_size=4), model=model)


def test_a_choice_that_leaves_out_keys_before_is_refused() -> None:
    model = tiny_model("glm5_next", {"text_config": {"index_kpool_always_select_tail": False}})
    with pytest.raises(UnsupportedModelError, match="Glm5NextTextIndexer leaves out keys of sequences of 24 tokens"):
        patch_short_choices(model)


@torch.no_grad()
@pytest.mark.parametrize("listed", [True, False])
def test_blocks_of_keys_in_the_plugin(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of eager attention, for sequences of which each query sees two blocks of four keys, one row padded. The
    blocks become lists, for which no number of each query and key is held, or a bias."""
    model: Any = tiny_model("minimax_m3_vl", BLOCKS)
    ids = torch.randint(3, 140, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits
    wide = tiny_model("minimax_m3_vl", {"text_config": {"index_block_size": 4}})(input_ids=ids, attention_mask=mask).logits
    assert (wide - expected)[0].abs().max() > 1e-3, "the choice does not matter"
    if listed:
        monkeypatch.delattr(attention, "_bias_of_blocks")
    else:
        monkeypatch.setattr(attention, "_lists_blocks", lambda *call: False)
    actual = patch(model)(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_few_queries_that_have_chosen_blocks_get_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token after a prompt: its call looks like that of the next one, whatever it has chosen."""
    model: Any = tiny_model("minimax_m3_vl", BLOCKS)
    ids = torch.randint(3, 140, (1, 40), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids).logits[:, -1]
    patch(model)
    name = cache_argument(type(model).forward)
    cache = getattr(model(input_ids=ids[:, :-1], use_cache=True), name)
    monkeypatch.setattr(BlockLists, "from_chosen_blocks", None)
    actual = model(input_ids=ids[:, -1:], **{name: cache}).logits[:, -1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
