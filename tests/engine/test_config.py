"""The engine's settings: what is refused, and what is derived from them."""

from __future__ import annotations

import pytest

from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.spec import ParameterError


def test_bad_values_name_the_field() -> None:
    for field, value in (
        ("page_size", 0),
        ("page_size", True),
        ("page_size", None),
        ("num_pages", 1.0),
        ("num_states", 2),
        ("num_states", True),
        ("max_num_seqs", "8"),
        ("dtype", "int8"),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", "1"),
        ("max_waiting", -1),
        ("max_waiting", 1.5),
        ("max_restarts", -1),
        ("kv_cache_dtype", "int4"),
        ("attention_precision", "fp16"),
        ("seed", 0.5),
        ("target_itl", -1.0),
        ("target_itl", True),
        ("target_itl", float("nan")),
        ("lora", ["a=x", "b=y", "a=z"]),
        ("target_ttft", 0),
        ("target_ttft", True),
        ("target_ttft", float("inf")),
    ):
        with pytest.raises(ParameterError) as error:
            EngineConfig(**{field: value})
        assert error.value.field == field
        assert repr(value) in str(error.value)


def test_deterministic_mode_refuses_float8_products() -> None:
    rule = r"attention_precision must be bf16 with deterministic=True, .*, got 'qk8'"
    with pytest.raises(ParameterError, match=rule) as error:
        EngineConfig(attention_precision="qk8", deterministic=True)
    assert error.value.field == "attention_precision"
    assert EngineConfig(deterministic=True).attention_precision == "bf16"


@pytest.mark.parametrize("precision", ["qk8", "fp8"])
def test_a_device_without_float8_products_is_refused_at_start(precision: str) -> None:
    with pytest.raises(
        ParameterError, match=r"hopper runs on Hopper .* only, got cpu; triton .*; sdpa computes only in q's dtype"
    ) as error:
        Engine(EngineConfig(device="cpu", attention_precision=precision))
    assert error.value.field == "attention_precision"
    assert error.value.value == precision


def test_a_draft_model_is_not_divided() -> None:
    with pytest.raises(ParameterError, match="ngram with tensor_parallel above 1"):
        EngineConfig(speculative="draft=small", tensor_parallel=2)


def test_a_folder_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ParameterError, match=r"model must be a hub name, .*, or an existing folder, got .*nowhere") as error:
        Engine(EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"))
    assert error.value.field == "model"


def test_derived_values(tmp_path) -> None:
    assert EngineConfig().model_name == "fa-serve-demo"
    assert EngineConfig(model="org/name").model_name == "org/name"
    assert EngineConfig(model=tmp_path).model_name == tmp_path.name
    assert EngineConfig(device="cuda:1").uses_process
    assert not EngineConfig(device="cpu").uses_process
    assert EngineConfig(device="cpu", process=True).uses_process


def test_graphs_and_fusion_of_deterministic_engines_are_two_things(make_engine) -> None:
    """Fused layers round differently, so a deterministic engine has the same bits with graphs, which are fused, and without."""
    assert EngineConfig().fuses
    assert not EngineConfig(eager=True).fuses
    assert not EngineConfig(eager=True, deterministic=True, fusion=False).fuses
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    bits = []
    for eager in (False, True):
        engine = make_engine(deterministic=True, eager=eager)
        assert any(isinstance(vars(module).get("forward"), FusedLayer) for module in engine._runner.model.modules())
        [completion] = engine.generate([list(range(5, 40))], params)
        bits.append([(entry.token_id, entry.logprob) for entry in completion.logprobs or []])
    assert bits[0] == bits[1]
