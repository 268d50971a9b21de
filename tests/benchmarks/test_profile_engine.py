"""The lower bound of a step counts the weights that the step reads."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from quantised_copies import load
from quantised_experts import write_awq
from sampled_cases import whole_runs
from tiny_models import make_model

from benchmarks.engine import engine_workloads
from benchmarks.engine.engine_workloads import SHAPES, make_tiny, tiny_sizes
from benchmarks.tuning import profile_engine
from benchmarks.tuning.profile_engine import decode, floor_bytes, profile, weights_of_step
from fa_serve.engine import Engine, EngineConfig
from fa_serve.engine.scheduler.sequence import SequenceState
from fa_serve.engine.speculation import drafts as speculation
from fa_serve.engine.speculation.drafts import Speculation


def test_weights_of_a_dense_model_are_all_but_the_embedding() -> None:
    model = make_model("llama")
    expected = sum(x.nbytes for x in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert weights_of_step(model, 1) == weights_of_step(model, 64) == expected


def test_weights_of_a_mixture_are_those_of_the_experts_that_are_met() -> None:
    """3 of 6 experts: one token meets half of them, two tokens three quarters."""
    model = make_model("qwen3-moe")
    experts = sum(x.nbytes for layer in model.model.layers for x in layer.mlp.experts.parameters())
    others = sum(x.nbytes for x in model.parameters()) - model.get_input_embeddings().weight.nbytes - experts
    assert weights_of_step(model, 1) == pytest.approx(others + experts / 2)
    assert weights_of_step(model, 2) == pytest.approx(others + experts * 3 / 4)
    assert weights_of_step(model, 64) == pytest.approx(others + experts)


def test_weights_of_quantised_experts_are_those_of_the_experts_that_are_met(tmp_path: Path) -> None:
    """2 of 4 experts: one token meets half of them."""
    model = load(write_awq(tmp_path))
    experts = [w for layer in model.model.layers for w in (layer.mlp.experts.weights.gate_up, layer.mlp.experts.weights.down)]
    total = sum(x.nbytes for w in experts for x in (w.data, w.scales, w.zeros))
    assert weights_of_step(model, 1000) - weights_of_step(model, 1) == pytest.approx(total / 2)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        # keys and values of 2 heads of 64 in each layer; one of two layers sees 128 tokens
        pytest.param("gptoss20b", 2 * 2 * 64 * (640 + 128), id="window"),
        pytest.param("deepseek-lite", 2 * (32 + 16) * 640, id="latent"),
    ],
)
def test_the_floor_has_the_keys_and_values_that_layers_see(shape: str, numbers: int) -> None:
    model = engine_workloads.make_model(shape, "cpu", dtype=torch.float32, **tiny_sizes(shape))
    engine = Engine(EngineConfig(device="cpu", num_pages=64, max_model_len=1024), model=model)
    assert floor_bytes(engine, 3) == weights_of_step(engine._runner.model, 3) + 3 * 4 * numbers


@pytest.mark.slow
def test_one_command_prints_steps_beside_their_floors(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(engine_workloads, "SHAPES", dict(SHAPES))
    monkeypatch.setitem(engine_workloads.TINY, "num_hidden_layers", 1)
    monkeypatch.setattr(profile_engine, "LENGTH", 64)
    monkeypatch.setattr(profile_engine, "STEPS", 3)
    make_tiny()
    args = Namespace(shapes=["qwen30a3b-w4"], device="cpu", budget=600.0, requests=1, tensor_parallel=1, set={"num_pages": 256})
    args.tiny = True
    args.layers = None
    decode(args)
    said = capsys.readouterr().out
    assert "qwen30a3b-w4: greedy float32 tokens of a small model of this kind are those of model.generate" in said
    assert "| qwen30a3b-w4, num_pages=256 | 1 | " in said
    assert "batch 256 is left out" in said


@pytest.fixture
def small_profile(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """The arguments of a profile with batches of 1, 3 and 5 sequences, the last of which is too large. 4 rows verify drafts."""
    monkeypatch.setattr(engine_workloads, "SHAPES", dict(SHAPES))
    monkeypatch.setitem(engine_workloads.TINY, "num_hidden_layers", 1)
    make_tiny()
    monkeypatch.setattr(profile_engine, "BATCHES", (1, 3, 5))
    monkeypatch.setattr(profile_engine, "LENGTH", 64)
    monkeypatch.setattr(profile_engine, "PROMPT", 32)
    monkeypatch.setattr(profile_engine, "STEPS", 3)  # PyTorch takes 2 ms for each event that its profiler has seen
    monkeypatch.setattr(speculation, "MAX_ROWS", 4)
    args = Namespace(shapes=["llama8b"], device="cpu", budget=600.0, requests=3, tensor_parallel=1, tiny=True)
    args.layers = None
    args.top = 4
    args.set = {"num_pages": 256}
    return args


@pytest.mark.slow
def test_a_profile_of_an_engine_that_speculates_shows_decoding_and_verifying(
    small_profile: Namespace, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    verified = set()
    record = Speculation.record

    def recorded(self: Speculation, sequence: SequenceState, num_drafts: int, accepted: int) -> None:
        verified.add((num_drafts, accepted))
        record(self, sequence, num_drafts, accepted)

    monkeypatch.setattr(Speculation, "record", recorded)
    small_profile.set |= {"speculative": "ngram"}
    profile(small_profile)
    said = capsys.readouterr().out
    assert "decode, batch 1, kv 64: " in said
    assert "decode, batch 3, kv 64: " in said
    assert "verify, batch 1 x 3 drafts, kv 64: " in said
    assert verified == {(3, 1)}, "each step verifies 3 drafts, of which one is accepted"
    assert "verify 3: so many sequences draft nothing" in said
    assert "verify 5: left out" in said
    last_timed = said.index("verify, batch 1: ")
    assert last_timed < said.index("decode, batch 1, kv 64: "), "a profiler that has run makes launches on a GPU slower"


@whole_runs
def test_a_profile_without_speculation_shows_decoding_alone(small_profile: Namespace, capsys) -> None:
    profile(small_profile)
    said = capsys.readouterr().out
    assert "decode, batch 3, kv 64: " in said
    assert "decode 5: left out" in said
    assert "verify" not in said
    steps = re.findall(r"([.0-9]+) ms a step, .*host ([.0-9]+) \((.*?)\)", said)
    assert len(steps) == 3, "batches of 1 and 3, and prompts"
    for wall, host, parts in steps:
        spent = {name: float(ms) for name, ms in (part.split() for part in parts.split(", "))}
        assert {"schedule", "arrays", "sending", "launch", "towers", "rows", "sampling", "outputs"} == spent.keys()
        assert 0 < spent["launch"] < sum(spent.values()) <= float(host) + 0.01 <= float(wall) + 0.02
