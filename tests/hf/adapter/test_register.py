"""Registration with transformers in any order of imports, and the three ways to switch a model to fa_serve."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from every_type import tiny_model
from hf_families import BY_NAME, assert_same, tokens
from torch_processes import after_torch, after_transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForPreTraining

import fa_serve
from fa_serve.spec import UnsupportedModelError

REGISTERED = """
from transformers import AttentionInterface, AttentionMaskInterface
assert 'fa_serve' in AttentionInterface() and 'fa_serve' in AttentionMaskInterface()
"""


@pytest.mark.parametrize(
    "first", ["import fa_serve, transformers.modeling_utils", "import transformers.modeling_utils, fa_serve"]
)
def test_any_order_of_imports_registers(first: str) -> None:
    """That `import fa_serve.hf` alone registers is shown by the fresh process of test_traced_export.py."""
    done = after_transformers(first + REGISTERED)
    assert done.returncode == 0, done.stderr


def test_without_transformers_only_patch_is_missing() -> None:
    code = "import sys; sys.modules['transformers'] = None; import fa_serve; fa_serve.attention; fa_serve.patch"
    done = after_torch(code)
    assert done.returncode == 1
    assert "fa_serve's adapter needs transformers >= 5.17: " in done.stderr


def test_an_old_transformers_is_named() -> None:
    done = after_transformers("import transformers; transformers.__version__ = '5.16.2'; import fa_serve.hf")
    assert done.returncode == 1
    assert "needs transformers >= 5.17: found 5.16.2. Install it with pip install 'transformers>=5.17'" in done.stderr


@torch.no_grad()
def test_three_ways_to_the_same_tokens(tmp_path: Path) -> None:
    eager = BY_NAME["llama"].build()
    eager.save_pretrained(tmp_path)
    ids = tokens(2, 9)
    expected = eager.generate(ids, do_sample=False, max_new_tokens=8)

    named = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="fa_serve")
    switched = AutoModelForCausalLM.from_pretrained(tmp_path)
    switched.set_attn_implementation("fa_serve")
    patched = fa_serve.patch(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
    for model in (named, switched, patched):
        assert model.config._attn_implementation == "fa_serve"
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=8), expected)


def implementations(model: torch.nn.Module) -> set[str]:
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


@pytest.mark.parametrize("name", ["t5", "vit_mae"])
@pytest.mark.parametrize("how", ["patch", "set_attn_implementation"])
def test_a_switch_reaches_what_holds_a_copy_of_the_config(name: str, how: str) -> None:
    """The stacks of T5 are models with a copy of its config, and the decoder of ViTMAE is a module with one."""
    if name == "t5":
        model = BY_NAME[name].build()
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        of_decoder = {f"decoder_{name}": size for name, size in sizes.items()}
        config = AutoConfig.for_model(name, image_size=8, patch_size=4, **sizes, **of_decoder)
        model = AutoModelForPreTraining.from_config(config, attn_implementation="eager")
    if how == "patch":
        fa_serve.patch(model)
    else:
        model.set_attn_implementation("fa_serve")
    assert implementations(model) == {"fa_serve"}
    model.set_attn_implementation("eager")
    assert implementations(model) == {"eager"}


def test_a_refused_switch_changes_nothing() -> None:
    """transformers switches part after part: here a tower of SAM comes after parts that fa_serve serves."""
    model = tiny_model("deepseek_vl_hybrid")
    with pytest.raises(UnsupportedModelError, match="SamVisionModel computes its attention itself"):
        model.set_attn_implementation("fa_serve")
    assert implementations(model) == {"eager"}
    model.set_attn_implementation({"text_config": "fa_serve"})
    assert model.model.language_model.config._attn_implementation == "fa_serve"
    model.set_attn_implementation("eager")
    assert implementations(model) == {"eager"}


@pytest.mark.parametrize("asked", ["fa_serve", {"text_config": "fa_serve"}], ids=["all", "text"])
@pytest.mark.parametrize("name", ["bloom", "blip"])
def test_a_switch_that_reaches_no_part_is_refused(name: str, asked: Any) -> None:
    """transformers only warns."""
    model = tiny_model(name)
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__} computes its attention itself"):
        model.set_attn_implementation(asked)
    assert implementations(model) == {"eager"}


def test_a_dict_switches_some_parts_only() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", "vocab_size": 32, "num_key_value_heads": 2, **sizes},
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **sizes},
    )
    model = AutoModel.from_config(config, attn_implementation={"text_config": "fa_serve", "vision_config": "eager"})
    assert model.language_model.config._attn_implementation == "fa_serve"
    assert model.vision_tower.config._attn_implementation == "eager"


@pytest.mark.parametrize("given", [torch.nn.Linear(2, 2), None, "Qwen/Qwen3-0.6B"], ids=["module", "none", "name"])
def test_patch_says_what_it_takes(given: Any) -> None:
    with pytest.raises(TypeError, match="model must be a model of transformers, as from_pretrained returns it"):
        fa_serve.patch(given)


def test_patch_says_how_to_pass_a_model_that_something_holds() -> None:
    wrapper = torch.nn.DataParallel(BY_NAME["llama"].build())
    with pytest.raises(TypeError, match=r"got torch\..*\.DataParallel: patch the model inside it, .* wrapper\.module"):
        fa_serve.patch(wrapper)  # type: ignore[arg-type]
    assert fa_serve.patch(wrapper.module).config._attn_implementation == "fa_serve"


def test_patch_refuses_before_it_changes_anything() -> None:
    config = AutoConfig.for_model("bloom", n_layer=1, hidden_size=32, n_head=2, vocab_size=32)
    model = AutoModel.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModelError, match="BloomModel computes its attention itself"):
        fa_serve.patch(model)
    assert model.config._attn_implementation == "eager"


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_that_is_switched_back_is_as_it_was(name: str) -> None:
    """All its parts have the other attention, and arguments that tell packed sequences change and refuse nothing."""
    eager = BY_NAME[name].build()
    model = fa_serve.patch(copy.deepcopy(eager))
    model.set_attn_implementation("eager")
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    given = {"input_ids": tokens(1, 12), "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    if name == "t5":
        given = {"input_ids": tokens(1, 12), "decoder_input_ids": tokens(1, 12), "output_attentions": True}
    assert torch.equal(model(**given).logits, eager(**given).logits)
    assert {part.config._attn_implementation for part in model.modules() if hasattr(part, "get_input_embeddings")} == {"eager"}
    assert fa_serve.patch(model).config._attn_implementation == "fa_serve"
    if name == "llama":
        packed = model(**given, max_length_q=7, max_length_k=7, use_cache=False).logits
        assert_same(packed[:, 5:], eager(input_ids=tokens(1, 12)[:, 5:]).logits)
