"""The engine on quantised models: the tokens of the dequantised model, with everything that the engine does to a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised_experts
import torch
from quantised_copies import FORMATS, copy_of, dequantised, load
from server_process import few_layers
from tiny_models import greedy
from transformers import AutoModelForCausalLM

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.hf import patch
from fa_serve.hf.surgery.fuse.fusion import fuse_layers
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.spec import ParameterError

PROMPTS = [list(range(40, 75)), [*range(40, 70), 9, 8, 7], [5, 6, 7], list(range(300, 321))]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="session")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


def two_layers() -> Path:
    """The embedded model with two of its six layers."""
    return Path(few_layers(2))


def engine(model: Path, **settings: Any) -> Engine:
    """In float32, where other sums of the same numbers choose the same tokens."""
    defaults = {"device": "cpu", "dtype": "float32", "num_pages": 64, "page_size": 4, "max_num_seqs": 4, "seed": 0}
    return Engine(EngineConfig(model=model, **defaults | settings))


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_dequantised_model(copies: Path, name: str) -> None:
    """Fused, in chunks, with shared prefixes and with preemption."""
    path = copy_of(two_layers(), name, copies)
    reference = dequantised(load(path, dtype="float32"))
    expected = [greedy(reference, prompt, 10) for prompt in PROMPTS]
    ran = engine(path, max_num_batched_tokens=16, num_pages=24)
    for _ in range(2):
        assert [c.token_ids for c in ran.generate(PROMPTS, GREEDY)] == expected
    stats = ran.stats()
    assert stats.num_cached_tokens > 0
    assert stats.num_preemptions > 0
    ran.check_integrity()


@pytest.mark.parametrize("name", FORMATS)
def test_every_layer_is_fused(copies: Path, name: str) -> None:
    model = load(copy_of(two_layers(), name, copies))
    assert fuse_layers(model) == 2
    layer = model.model.layers[1]
    assert isinstance(layer.forward, FusedLayer)
    for fused, parts in (
        (layer.forward.attention.qkv, [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
        (layer.forward.gate_up, [layer.mlp.gate_proj, layer.mlp.up_proj]),
    ):
        stored = fused.weight.data.untyped_storage().data_ptr()
        assert [part.weight.data.untyped_storage().data_ptr() for part in parts] == [stored] * len(parts)
        matrix = torch.cat([part.weight.dequantize(torch.float32) for part in parts])
        assert torch.equal(fused.weight.dequantize(torch.float32), matrix)


def test_layers_whose_projections_differ_are_left_alone(copies: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copy_of(two_layers(), "awq", copies)
    model = load(path)
    plain = AutoModelForCausalLM.from_pretrained(two_layers(), dtype="auto")
    model.model.layers[0].self_attn.k_proj = plain.model.layers[0].self_attn.k_proj
    assert fuse_layers(model) == 1
    model = load(path)
    other = load(copy_of(two_layers(), "fp8", copies))
    model.model.layers[1].mlp.up_proj = other.model.layers[1].mlp.up_proj
    assert fuse_layers(model) == 1
    assert "all or none of the projections that are merged must be quantised" in caplog.text
    assert "can be merged only if they agree, but their data differ" in caplog.text


class Kept(torch.nn.Parameter):
    """A parameter that keeps its numbers in another way, as torchao's do."""


def test_a_parameter_of_another_kind_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(two_layers(), dtype="auto")
    patch(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = Kept(layer.mlp.down_proj.weight.detach())
    assert fuse_layers(model) == 0
    assert "a projection must be a plain torch.nn.Linear of floats" in caplog.text


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "fp8-block"])
def test_deterministic_mode_keeps_every_bit(copies: Path, name: str) -> None:
    ran = engine(copy_of(two_layers(), name, copies), dtype="bfloat16", deterministic=True, max_num_batched_tokens=16)
    assert all(m.invariant for m in ran._runner.model.modules() if isinstance(m, QuantizedLinear))
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)
    alone = [ran.generate([prompt], params)[0] for prompt in PROMPTS]
    together = ran.generate(PROMPTS, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.logprobs for c in together] == [c.logprobs for c in alone]


def test_rounding_floats_is_a_setting() -> None:
    ran = engine(two_layers(), quantization="fp8")
    linears = [m for m in ran._runner.model.modules() if isinstance(m, QuantizedLinear)]
    assert len(linears) == 14
    assert not any(m.invariant for m in linears)
    assert len(ran.generate(PROMPTS, GREEDY)[0].token_ids) == 10
    with pytest.raises(ParameterError, match="quantization must be None or fp8, got 'int3'"):
        EngineConfig(quantization="int3")


@pytest.fixture(scope="session")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    for name in ("mxfp4", "fp8-block"):
        quantised_experts.WRITERS[name](folder / name)
    return folder


@pytest.mark.parametrize("name", ["mxfp4", "fp8-block"])
def test_tokens_of_quantised_experts_are_those_of_the_dequantised_model(mixtures: Path, name: str, caplog) -> None:
    """Beside fused layers and routers, in chunks, with shared prefixes and with preemption."""
    path = mixtures / name
    reference = quantised_experts.dequantised(load(path, dtype="float32"))
    reference.generation_config.eos_token_id = None
    prompts = [[token % 320 for token in prompt] for prompt in PROMPTS]
    expected = [greedy(reference, prompt, 10) for prompt in prompts]
    with caplog.at_level("INFO", logger="fa_serve"):
        ran = engine(path, max_num_batched_tokens=16, num_pages=24)
    assert "2 of 2 routers are fused" in caplog.text
    for _ in range(2):
        assert [c.token_ids for c in ran.generate(prompts, GREEDY)] == expected
    assert ran.stats().num_preemptions > 0
    ran.check_integrity()


@pytest.mark.parametrize("name", ["mxfp4", "fp8-block"])
def test_deterministic_mode_keeps_every_bit_of_quantised_experts(mixtures: Path, name: str) -> None:
    ran = engine(mixtures / name, dtype="bfloat16", deterministic=True, max_num_batched_tokens=16)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2, ignore_eos=True)
    prompts = [[token % 320 for token in prompt] for prompt in PROMPTS[1:3]]
    alone = [ran.generate([prompt], params)[0] for prompt in prompts]
    together = ran.generate(prompts, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.logprobs for c in together] == [c.logprobs for c in alone]
