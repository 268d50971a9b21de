"""The table of backends: lazy imports, the choice of `auto`, names that never fall back, and reasons that a user can read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fa_serve
from fa_serve.backends import ATTENTION, BackendTable, explain, load_backend, select_backend
from fa_serve.spec import AttentionSpec
from fa_serve.testing import make_qkv

CPU = AttentionSpec("paged", "cpu", 0, torch.float32, torch.float32, 64, 64, 4, 4, page_size=16)
PACKAGE = "table_of_backends"
MODULES = {
    "needs_library": "import a_library_that_is_not_installed\nclass Backend: ...",
    "broken": "raise RuntimeError('the module is broken')",
    "even": "class Backend:\n    def supports(self, spec):\n        return None if spec % 2 == 0 else f'is even, got {spec}'",
    "small": "class Backend:\n    def supports(self, spec):\n        return None if spec < 10 else f'is below 10, got {spec}'",
    "all": "class Backend:\n    def supports(self, spec):\n        return None",
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackendTable[Any]]:
    """A table over real modules. Its specs are numbers."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield BackendTable({name: f"{PACKAGE}.{name}:Backend" for name in MODULES}, auto=("needs_library", "even", "small"))
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_auto_takes_the_first_that_supports_the_spec(table: BackendTable[Any]) -> None:
    assert table.select(4) is table.load("even")
    assert table.select(5) is table.load("small")


def test_a_backend_is_imported_when_it_is_considered(table: BackendTable[Any]) -> None:
    assert not [name for name in sys.modules if name.startswith(PACKAGE)]
    table.select(4)
    assert f"{PACKAGE}.even" in sys.modules
    assert f"{PACKAGE}.small" not in sys.modules, "the backend before it supports the spec"
    table.select(5)
    assert f"{PACKAGE}.small" in sys.modules
    assert table.load("small") is table.load("small")


def test_an_import_error_is_a_reason(table: BackendTable[Any]) -> None:
    reason = "cannot be imported: No module named 'a_library_that_is_not_installed'"
    assert table.load("needs_library") == reason
    assert table.explain(4) == {"needs_library": reason, "even": None, "small": None}
    with pytest.raises(fa_serve.UnsupportedError, match=f"needs_library: {reason}"):
        table.select(4, "needs_library")


def test_another_error_of_a_module_is_not_hidden(table: BackendTable[Any]) -> None:
    with pytest.raises(RuntimeError, match=r"^the module is broken$"):
        table.select(4, "broken")


def test_a_name_never_falls_back(table: BackendTable[Any]) -> None:
    with pytest.raises(fa_serve.UnsupportedError) as caught:
        table.select(5, "even")
    assert str(caught.value).splitlines() == ["no backend can serve 5", "  even: is even, got 5"]


def test_a_backend_that_auto_leaves_out_is_chosen_by_its_name(table: BackendTable[Any]) -> None:
    assert table.select(11, "all") is table.load("all")
    assert "all" not in table.explain(11)


def test_every_reason_is_listed(table: BackendTable[Any]) -> None:
    assert [name for name, reason in table.explain(11).items() if reason is None] == []
    with pytest.raises(fa_serve.UnsupportedError) as caught:
        table.select(11)
    assert str(caught.value).splitlines() == [
        "no backend can serve 11",
        "  needs_library: cannot be imported: No module named 'a_library_that_is_not_installed'",
        "  even: is even, got 11",
        "  small: is below 10, got 11",
    ]


def test_an_unknown_name_is_refused(table: BackendTable[Any]) -> None:
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of \['all', .*'small'\], got 'fast'"):
        table.select(4, "fast")


def test_the_reference_is_chosen_by_its_name_only() -> None:
    assert set(ATTENTION.modules) - set(ATTENTION.auto) >= {"reference"}
    assert [name for name in ATTENTION.auto if name in ("hopper", "triton", "sdpa")] == ["hopper", "triton", "sdpa"]
    assert select_backend(CPU) is load_backend("sdpa")
    assert select_backend(CPU, "reference") is load_backend("reference")


@pytest.mark.parametrize("name", ATTENTION.modules)
def test_a_backend_knows_its_name(name: str) -> None:
    if name in ("hopper", "triton"):
        pytest.importorskip("triton")
    backend = load_backend(name)
    assert not isinstance(backend, str), backend
    assert backend.name == name


def test_an_explicit_backend_of_a_call_never_falls_back() -> None:
    q, k, v = make_qkv(2, 5, 7, 4, 2, 16)
    with pytest.raises(fa_serve.UnsupportedError, match="hopper: runs on Hopper"):
        fa_serve.attention(q, k, v, backend="hopper")


def test_no_backend_of_attention_lists_every_reason() -> None:
    spec = AttentionSpec("paged", "cpu", 0, torch.float32, torch.float32, 64, 64, 4, 4, page_size=16, needs_grad=True)
    assert all(explain(spec).values())
    with pytest.raises(fa_serve.UnsupportedError) as caught:
        select_backend(spec)
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == list(ATTENTION.auto)
    assert "float32, heads 4/4, head_dim 64, needs_grad, page_size 16" in str(caught.value)
