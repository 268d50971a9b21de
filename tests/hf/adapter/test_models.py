"""Which models are refused when they are loaded, and what is read from the source of those that are not."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_families import VOCAB, assert_same, tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import fa_serve
from fa_serve.hf.adapter import models
from fa_serve.spec import UnsupportedModelError


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "gptj", "gpt_neo", "codegen", "xlnet", "reformer"])
def test_a_model_that_computes_its_own_attention_is_refused_at_load(name: str) -> None:
    config = AutoConfig.for_model(name)
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match=r"computes its attention itself.*eager"):
        AutoModel.from_config(config, attn_implementation="fa_serve")


def test_an_unknown_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-M3 chooses blocks of keys itself and passes them to its attention in `block_indices`."""
    monkeypatch.setattr(models, "_KNOWN", models._KNOWN - {"block_indices"})
    with (
        torch.device("meta"),
        pytest.raises(UnsupportedModelError, match="passes its attention 'block_indices', which fa_serve"),
    ):
        AutoModel.from_config(AutoConfig.for_model("minimax_m3_vl_text"), attn_implementation="fa_serve")


def test_a_language_model_beside_a_tower_that_is_refused() -> None:
    """The tower of DeepSeek-OCR-2 is in the same module, and takes its attention from a table."""
    from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as module

    models.check_class(module.DeepseekOcr2TextModel)
    for model_class in (module.DeepseekOcr2ForConditionalGeneration, module.DeepseekOcr2VisionModel):
        with pytest.raises(UnsupportedModelError, match="computes its attention itself"):
            models.check_class(model_class)


def test_what_a_source_says_of_masks_and_arguments() -> None:
    source = """
def my_eager_attention_forward(module, query, key, value, attention_mask, alibi=None, **kwargs): ...
class Attention:
    def forward(self, attention_mask, **kwargs):
        return attention_interface(self, q, k, v, attention_mask, temperature=2.0, **kwargs)
class Other:
    def forward(self, attention_mask):
        return attention_mask[:, None]
"""
    plain = models._parse(source)
    assert plain.told - models._KNOWN == {"alibi", "temperature"}
    assert not plain.works_on_masks
    assert models._parse(source.replace("class Other:", "")).works_on_masks


@pytest.mark.parametrize("name", ["sam_vision_model", "deepseek_vl_hybrid"])
def test_a_table_of_classes_by_name_is_refused(name: str) -> None:
    config = AutoConfig.for_model(name)
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match="computes its attention itself"):
        AutoModel.from_config(config, attn_implementation="fa_serve")


def test_informers_other_attention_is_refused() -> None:
    config = AutoConfig.for_model("informer", prediction_length=4, context_length=8)
    with (
        torch.device("meta"),
        pytest.raises(UnsupportedModelError, match="works on its masks in the form that only its eager attention takes"),
    ):
        AutoModel.from_config(config, attn_implementation="fa_serve")


def test_attention_beside_the_interface_is_refused() -> None:
    with (
        torch.device("meta"),
        pytest.raises(UnsupportedModelError, match=r"BigBirdPegasus\w+ works on its masks in the form"),
    ):
        AutoModel.from_config(AutoConfig.for_model("bigbird_pegasus", encoder_layers=1), attn_implementation="fa_serve")


@torch.no_grad()
def test_a_model_that_works_on_its_mask_outside_of_attention_gets_a_tensor() -> None:
    """SigLIP 2 repeats its mask for the head that pools."""
    config = AutoConfig.for_model(
        "siglip2_vision_model",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_patches=16,
        patch_size=4,
    )
    torch.manual_seed(0)
    eager = AutoModel.from_config(config, attn_implementation="eager").eval()
    ours = fa_serve.patch(copy.deepcopy(eager))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    given = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 3]]),
    }
    theirs = eager(**given)
    found = ours(**given)
    torch.testing.assert_close(found.pooler_output, theirs.pooler_output, rtol=1e-4, atol=1e-5)
    assert_same(found.last_hidden_state, theirs.last_hidden_state, mask)


@torch.no_grad()
def test_a_model_whose_attention_works_on_its_mask_gets_a_tensor() -> None:
    config = AutoConfig.for_model(
        "doge",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        keep_window_size=8,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ours = fa_serve.patch(copy.deepcopy(eager))
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    ids = tokens(2, 24)
    assert_same(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask)
