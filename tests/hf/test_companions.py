"""Packages that people use with transformers: adapters of PEFT, weights placed by accelerate, quantised weights.

`make test-newest` installs these packages. Where one is missing, its tests are skipped.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import hybrids
import pytest
import torch
from hf_families import BY_NAME, assert_same, padding_mask, positions, tokens
from transformers import AutoModelForCausalLM, PreTrainedModel

import fa_serve
from fa_serve import hf
from fa_serve.hf.adapter.state_modules import find_state_modules
from fa_serve.testing import assert_matches_reference

# PEFT calls the newest transformers by an old name
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

FAMILIES = ["llama", "gemma2", "gpt-oss"]


def inputs(kind: str) -> dict[str, Any]:
    mask = padding_mask(kind)
    return {"input_ids": tokens(*mask.shape), "attention_mask": mask, "position_ids": positions(mask)}


@torch.no_grad()
def assert_same_everywhere(ours: Any, eager: Any, config: Any) -> None:
    """Compare logits of padded batches, and the tokens of `generate`, which uses a cache."""
    assert config._attn_implementation == "fa_serve"
    for kind in ("left", "right"):
        given = inputs(kind)
        assert_same(ours(**given).logits, eager(**given).logits, given["attention_mask"])
    given = inputs("left")
    options = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6}
    given.pop("position_ids")
    assert torch.equal(ours.generate(**given, **options), eager.generate(**given, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_adapters(family: str) -> None:
    """An adapter around the model, switched off, and merged into the weights."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    eager = peft.get_peft_model(BY_NAME[family].build(), adapter).eval()
    ours = copy.deepcopy(eager)
    fa_serve.patch(ours.base_model.model)
    assert_same_everywhere(ours, eager, ours.base_model.model.config)
    with torch.no_grad(), ours.disable_adapter(), eager.disable_adapter():
        plain = eager(**inputs("left")).logits
        assert_same(ours(**inputs("left")).logits, plain, padding_mask("left"))
    with torch.no_grad():
        assert (eager(**inputs("left")).logits - plain).abs().max() > 0.1, "the adapter does nothing"
    assert_same_everywhere(ours.merge_and_unload(), eager.merge_and_unload(), ours.base_model.model.config)


def test_prefix_tuning_prepends_keys() -> None:
    """Prefix tuning puts keys and values into the cache that belong to no token."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    adapter = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    eager = peft.get_peft_model(BY_NAME["llama"].build(), adapter).eval()
    ours = copy.deepcopy(eager)
    fa_serve.patch(ours.base_model)
    mask = padding_mask("left")
    given = {"input_ids": tokens(*mask.shape), "attention_mask": mask}
    with torch.no_grad():
        assert_same(ours(**given).logits, eager(**given).logits, mask)


def saved(family: str, folder: Path, **sizes: int) -> PreTrainedModel:
    model = BY_NAME[family].build(**sizes)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_in_different_places(family: str, tmp_path: Path) -> None:
    """A device_map with two places: the second layer's weights are loaded from disk at each call, and masks are moved to it."""
    pytest.importorskip("accelerate")
    eager = saved(family, tmp_path / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    ours = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        attn_implementation="fa_serve",
        device_map={**places, "model.layers.1": "disk"},
        offload_folder=tmp_path / "offload",
        experts_implementation="eager",
    )
    assert ours.hf_device_map["model.layers.1"] == "disk"
    assert next(ours.model.layers[1].parameters()).is_meta
    assert_same_everywhere(ours, eager, ours.config)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-next", "mamba2"])
def test_states_of_a_patched_model_whose_weights_are_offloaded(name: str) -> None:
    """Mixers read the weights of their convolution, which are on the meta device until hooks of accelerate bring them."""
    accelerate = pytest.importorskip("accelerate")
    model = hybrids.BY_NAME[name].build()
    ids = tokens(1, 12)
    expected = torch.cat([model(input_ids=part).logits for part in ids.split([5, 7], dim=1)], dim=1)
    fa_serve.patch(accelerate.cpu_offload(fa_serve.patch(model), execution_device="cpu"))
    assert find_state_modules(model)[0].conv1d.weight.is_meta
    assert_same(model(input_ids=ids[:, :5]).logits, expected[:, :5])
    cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 7, "max_length_k": 7}
    assert_same(model(input_ids=ids, use_cache=False, **told).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-next", "mamba2"])
def test_a_model_with_states_is_patched_before_it_is_offloaded(name: str, caplog: pytest.LogCaptureFixture) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = hybrids.BY_NAME[name].build()
    ids = tokens(1, 12)
    expected = model(input_ids=ids).logits
    fa_serve.patch(accelerate.cpu_offload(model, execution_device="cpu"))
    told = f"weights of {type(model).__name__} are offloaded, .*: call fa_serve.patch before accelerate offloads the weights"
    assert re.search(told, caplog.text)
    assert_same(model(input_ids=ids).logits, expected)


def quantised(kind: str) -> Any:
    import transformers

    if kind == "torchao":
        pytest.importorskip("torchao")
        from torchao.quantization import Int8WeightOnlyConfig

        return transformers.TorchAoConfig(Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**{"8bit": {"load_in_8bit": True}, "4bit": {"load_in_4bit": True}}[kind])


def rounds_to_bfloat16() -> bool:
    """Whether bitsandbytes multiplies 4-bit weights in bfloat16, as it does on processors that can."""
    from bitsandbytes.functional import has_avx512bf16

    return has_avx512bf16()


@pytest.mark.parametrize("kind", ["torchao", "4bit", "8bit"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_quantised_weights(family: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = quantised(kind)
    exact = saved(family, tmp_path, intermediate_size=128)  # some processors need whole blocks of 64
    eager, ours = (
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, device_map="cpu", attn_implementation=implementation, dtype=torch.float32
        ).eval()
        for implementation in ("eager", "fa_serve")
    )
    assert type(ours.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    if kind == "8bit" or (kind == "4bit" and rounds_to_bfloat16()):  # a rounding error may become a whole step
        valid = padding_mask("left").bool()
        with torch.no_grad():
            assert_matches_reference(*(model(**inputs("left")).logits[valid] for model in (ours, exact, eager)))
    else:
        assert_same_everywhere(ours, eager, ours.config)
    assert hf.model_layers(ours).attention[0].head_dim == hf.model_layers(ours.config).attention[0].head_dim
