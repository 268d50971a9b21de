"""The plugin registers itself when it is asked to, with a vLLM that has what it needs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from torch_processes import after_torch

import fa_serve.vllm
from fa_serve import UnsupportedError
from fa_serve.adapters import installed, missing
from fa_serve.vllm.signatures import MODULES, REQUIRED

ROOT = Path(__file__).parents[2]
RELEASES = json.loads((ROOT / "tests" / "results" / "vllm_signatures.json").read_text())


@pytest.mark.parametrize("version", RELEASES)
def test_releases_have_what_the_plugin_needs(version: str) -> None:
    found = {name: frozenset(words) for name, words in RELEASES[version].items()}
    assert missing(found, REQUIRED) == []
    without = found | {"AttentionImpl.forward": found["AttentionImpl.forward"] - {"output", "layer"}}
    assert missing(without, REQUIRED) == ["AttentionImpl.forward(layer, output)"]


def test_the_oldest_release_that_pyproject_allows_is_among_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={min(RELEASES).removesuffix('.0')}"]
    assert project["entry-points"]["vllm.general_plugins"] == {"fa_serve": "fa_serve.vllm:register"}
    assert len(RELEASES) >= 4


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "0"):
        if value is None:
            monkeypatch.delenv("FA_SERVE_VLLM", raising=False)
        else:
            monkeypatch.setenv("FA_SERVE_VLLM", value)
        fa_serve.vllm.register()
    program = (
        "import sys, fa_serve.vllm; fa_serve.vllm.register(); print(sorted({'vllm', 'torch.cuda.graphs'} & sys.modules.keys()))"
    )
    ended = after_torch(program)
    assert ended.returncode == 0, ended.stderr
    assert "'vllm'" not in ended.stdout


def test_registered_with_the_variable(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_SERVE_VLLM", "1")
    assert installed(MODULES, REQUIRED).keys() == REQUIRED.keys()
    fa_serve.vllm.register()
    fa_serve.vllm.register()
    assert [(key.name, path) for key, path in vllm.registered.items()] == [("CUSTOM", fa_serve.vllm.BACKEND)]


def test_an_unknown_release_is_refused_with_a_sentence(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_SERVE_VLLM", "1")
    monkeypatch.delattr(vllm.backend, "MultipleOf")
    with pytest.raises(
        UnsupportedError, match=r"does not support vLLM 0\.99\.0: it lacks MultipleOf\(base\); unset FA_SERVE_VLLM"
    ):
        fa_serve.vllm.register()
    assert vllm.registered == {}
