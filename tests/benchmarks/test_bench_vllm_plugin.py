"""The benchmark of the plugin, with a stand-in for vLLM whose backends answer as they are told."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import bench_vllm_plugin

ROOT = Path(__file__).parents[2]
LLM = """
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, max_tokens, **others):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, folder, attention_backend, **others):
        assert (os.environ["FA_SERVE_VLLM"] == "1") == (attention_backend.name == "CUSTOM")
        assert os.path.exists(os.path.join(folder, "tokenizer.json"))
        self.shift = int(attention_backend.name in os.environ.get("WRONG", ""))

    def generate(self, prompts, sampling, use_tqdm):
        return [self.answer(prompt["prompt_token_ids"], each.max_tokens) for prompt, each in zip(prompts, sampling)]

    def answer(self, prompt, count):
        token = sum(prompt) % 97 + self.shift
        logprobs = {token: SimpleNamespace(logprob=-1.0), token + 1: SimpleNamespace(logprob=-2.0)}
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token] * count, logprobs=[logprobs] * count)])
"""
REGISTRY = """
from enum import Enum
AttentionBackendEnum = Enum("AttentionBackendEnum", "CUSTOM FLASH_ATTN TRITON_ATTN")
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    backends = tmp_path / "vllm" / "v1" / "attention" / "backends"
    backends.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text(LLM)
    (backends / "registry.py").write_text(REGISTRY)
    return tmp_path


@pytest.mark.timeout(240)
def test_tokens_of_each_backend_are_compared(peer: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("WRONG", "TRITON_ATTN")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["bench", "tokens", "--device", "cpu", "--peer-path", str(peer), "--gpus", "0,1"])
    bench_vllm_plugin.main()
    said = capsys.readouterr().out
    for shape in bench_vllm_plugin.SMALL:
        assert f"{shape} CUSTOM: of 6 answers {{'equal': 6}}" in said
        assert f"{shape} TRITON_ATTN: of 6 answers {{'differ': 6}}" in said


def test_other_tokens_of_the_plugin_are_an_error() -> None:
    second = [[(3, 0.2)], [(3, 0.2)]]
    answers = {("tiny", "FLASH_ATTN"): {"tokens": [[1], [2]], "second": second}, ("tiny", "CUSTOM"): {"tokens": [[1], [3]]}}
    assert bench_vllm_plugin.compare(["tiny"], ["CUSTOM", "FLASH_ATTN"], answers) == ["tiny: 1 answers differ"]
    missing = bench_vllm_plugin.compare(["tiny"], ["TRITON_ATTN"], answers)
    assert missing == ["tiny has no tokens of TRITON_ATTN or of FLASH_ATTN"]


@pytest.mark.parametrize(
    ("tokens", "kind"), [([7, 8, 9], "equal"), ([7, 1, 4], "part at a tie"), ([7, 2, 9], "differ"), ([3, 8, 9], "differ")]
)
def test_answers_may_part_where_two_tokens_are_as_good(tokens: list[int], kind: str) -> None:
    second = [(3, 1.0), (1, 0.03), (4, 0.0)]
    assert bench_vllm_plugin.kind_of(tokens, [7, 8, 9], second, 0.03) == kind


def test_the_plugin_of_a_clone_is_declared(tmp_path: Path) -> None:
    bench_vllm_plugin.declare_plugin(tmp_path / "plugins")
    [found] = importlib.metadata.distributions(path=[str(tmp_path / "plugins")])
    assert [(point.group, point.name, point.load().__name__) for point in found.entry_points] == [
        ("vllm.general_plugins", "fa_serve", "register")
    ]


def test_rates_are_written_when_a_backend_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured is not lost if a later backend never ends."""
    written: list[dict[str, float]] = []

    def answers(command: list[str], *given: object) -> Iterator[object]:
        path = tmp_path / "vllm_plugin.jsonl"
        written.append(json.loads(path.read_text())["peers"] if path.exists() else {})
        yield {"A": {"CUSTOM": 6.0, "FLASH_ATTN": 3.0, "TRITON_ATTN": 2.0}[command[-1]]}
        yield "done"

    monkeypatch.setattr(bench_vllm_plugin, "told", answers)
    backends = list(bench_vllm_plugin.BACKENDS)
    args = argparse.Namespace(part="rates", shape="tiny", backends=backends, out=tmp_path, peer_path="", budget=1.0)
    jobs: queue.Queue[tuple[str, str]] = queue.Queue()
    for backend in args.backends:
        jobs.put(("tiny", backend))
    bench_vllm_plugin.work(jobs, "0", tmp_path, {}, args)
    assert written == [{}, {}, {"FLASH_ATTN": 3.0}]
    line = json.loads((tmp_path / "vllm_plugin.jsonl").read_text())
    assert (line["case"], line["ours"], line["peers"]) == ("tiny A", 6.0, {"FLASH_ATTN": 3.0, "TRITON_ATTN": 2.0})
