"""The parts of the benchmark of adapters that need no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tiny_models import make_model

from benchmarks.engine.bench_lora import REQUESTS, linear_layers, mixtures, vllm_rates, write_adapter, write_mark
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


PEER = """
import json, os
class SamplingParams:
    def __init__(self, **words): pass
class LLM:
    def __init__(self, model, max_loras, **words):
        assert os.path.exists(os.path.join(model, "config.json"))
    def generate(self, prompts, params, lora_request, use_tqdm):
        for each in filter(None, lora_request):
            config = json.load(open(os.path.join(each.folder, "adapter_config.json")))
            if "target_modules" not in config:
                raise ValueError("no target_modules")
"""
REQUEST = """
class LoRARequest:
    def __init__(self, name, number, folder): self.folder = folder
"""
TORCH = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
"""All of PyTorch that the peer's process asks for, where importing it takes most of the time."""


@pytest.mark.parametrize("whole", [True, False])
def test_a_peer_is_asked_without_adapters_first_and_its_words_are_kept(tmp_path: Path, capsys, whole: bool) -> None:
    (tmp_path / "vllm" / "lora").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(PEER)
    (tmp_path / "vllm" / "lora" / "request.py").write_text(REQUEST)
    (tmp_path / "torch.py").write_text(TORCH)
    folder = write_adapter(tmp_path / "adapter", linear_layers(make_model()), 8, seed=0)
    if not whole:
        (folder / "adapter_config.json").write_text("{}")
    words = {"shape": "tiny", "device": "cpu", "peer_path": str(tmp_path), "out": tmp_path, "tokens": 4, "runs": 1}
    found = dict(vllm_rates(argparse.Namespace(**words, cases=["1 adapter"]), 8, [folder]))
    assert list(found) == (["base", "1 adapter"] if whole else ["base"])
    assert ("ValueError: no target_modules" in capsys.readouterr().out) != whole
    assert (tmp_path / "peer_vllm_8.log").read_text().endswith(f"it ended with {int(not whole)}\n")
