"""The parts of the benchmark of adapters that need no GPU."""

from __future__ import annotations

from tiny_models import make_model

from benchmarks.engine.bench_lora import REQUESTS, linear_layers, mixtures, write_adapter, write_mark
from fa_serve.hf.lora.format import read_adapter


def test_adapters_are_read_as_they_are_written(tmp_path) -> None:
    model = make_model()
    layers = linear_layers(model)
    assert len(layers) == 14
    adapter = read_adapter(write_adapter(tmp_path / "a", layers, 8, seed=0))
    assert {name: (len(low.b), low.a.shape[1]) for name, low in adapter.modules.items()} == layers
    name = "model.layers.1.mlp.down_proj"
    [low] = read_adapter(write_mark(tmp_path / "b", name, model.lm_head.weight.detach()[9], 48)).modules.values()
    assert low.bias.norm() > 100


def test_each_case_has_its_adapters() -> None:
    cases = mixtures(["a", "b", "c"])
    assert {case: len(set(names)) for case, names in cases.items()} == {
        "base": 1,
        "1 adapter": 1,
        "3 adapters": 3,
        "half base": 4,
        "one beside": 2,
        "alone": 1,
    }
    assert list(mixtures(["a", "b"], ["alone", "2 adapters"])) == ["2 adapters", "alone"]
    assert cases["half base"].count(None) == REQUESTS // 2
