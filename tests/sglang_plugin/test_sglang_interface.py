"""The plugin registers itself when it is asked to, with an SGLang that has what it needs."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from torch_processes import after_torch

import fa_serve.sglang
from fa_serve import UnsupportedError
from fa_serve.adapters import installed, missing
from fa_serve.sglang.sglang_interface import MODULES, REQUIRED

ROOT = Path(__file__).parents[2]
RELEASES = json.loads((ROOT / "tests" / "results" / "sglang_signatures.json").read_text())


@pytest.mark.parametrize("version", RELEASES)
def test_releases_have_what_the_plugin_needs(version: str) -> None:
    found = {name: frozenset(words) for name, words in RELEASES[version].items()}
    assert missing(found, REQUIRED) == []
    without = found | {"AttentionBackend.forward_extend": frozenset({"q", "k", "v", "layer"})}
    assert missing(without, REQUIRED) == ["AttentionBackend.forward_extend(forward_batch, save_kv_cache)"]


def test_the_oldest_release_that_pyproject_allows_is_among_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = min(RELEASES, key=lambda version: [int(part) for part in version.split(".")])
    assert project["optional-dependencies"]["sglang"] == [f"sglang>={oldest}"]
    assert len(RELEASES) >= 6
    assert project["entry-points"]["sglang.srt.plugins"] == {"fa_serve": "fa_serve.sglang:register"}


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_SERVE_SGLANG", "0")
    program = "import sys, fa_serve.sglang; fa_serve.sglang.register(); print('sglang' in sys.modules)"
    ended = after_torch(program)
    assert ended.stdout.strip() == "False"


def test_registered_with_the_variable(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_SERVE_SGLANG", "1")
    assert installed(MODULES, REQUIRED).keys() == REQUIRED.keys()
    fa_serve.sglang.register()
    fa_serve.sglang.register()
    assert sglang.choices == ["triton", "fa_serve"]
    assert list(sglang.registered) == ["fa_serve"]


def test_an_unknown_release_is_refused_with_a_sentence(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_SERVE_SGLANG", "1")
    monkeypatch.delattr(sglang.pools, "KVWriteLoc")
    with pytest.raises(
        UnsupportedError, match=r"does not support SGLang 0\.9\.9: it lacks KVWriteLoc\(loc\); unset FA_SERVE_SGLANG"
    ):
        fa_serve.sglang.register()
    assert sglang.registered == {}
    assert sglang.choices == ["triton"]


def test_a_release_that_has_moved_something_is_refused_too(sglang: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_SERVE_SGLANG", "1")
    monkeypatch.delattr(sys.modules["sglang.srt.server_args"], "ATTENTION_BACKEND_CHOICES")
    with pytest.raises(UnsupportedError, match="it lacks cannot import name 'ATTENTION_BACKEND_CHOICES'"):
        fa_serve.sglang.register()
