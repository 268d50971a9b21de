"""The rules of the house hold, and each of them finds a violation that is planted for it; the rules are in `house/`."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path

import pytest
import torch
from house import caches, floors, layout, messages, references, statements
from house.source import CLEAN, Allowed, House, Planted, Rule, build
from torch_processes import after_torch

ROOT = Path(__file__).parents[1]
SUBJECTS = (floors, layout, statements, caches, messages, references)
PLANTED: list[Planted] = [planted for subject in SUBJECTS for planted in subject.PLANTED]
ALLOWED: list[Allowed] = [allowed for subject in SUBJECTS for allowed in getattr(subject, "ALLOWED", [])]
RULES = list(dict.fromkeys(rule for rule, _, _ in PLANTED))


@pytest.mark.timeout(600)
def test_the_house_holds() -> None:
    """All rules in one test, so that one process parses the 1,400 files. Two that share the tests would do so twice.

    Nobody searches for garbage among the millions of nodes of the trees: that would take as long as to parse them.
    """
    gc.disable()
    try:
        house = House(ROOT)
        complaints = [f"{rule.__name__}: {complaint}" for rule in RULES for complaint in rule(house)]
    finally:
        gc.enable()
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clean_house_is_not_blamed(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(build(tmp_path, CLEAN))) == []


@pytest.mark.parametrize(("rule", "files"), ALLOWED, ids=[f"{rule.__name__}-{n}" for n, (rule, _) in enumerate(ALLOWED)])
def test_what_is_allowed_is_not_blamed(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    assert list(rule(build(tmp_path, CLEAN | files))) == []


@pytest.mark.parametrize(("rule", "files", "complaint"), PLANTED, ids=[f"{rule.__name__}-{what}" for rule, _, what in PLANTED])
def test_a_planted_violation_is_found(rule: Rule, files: dict[str, str], complaint: str, tmp_path: Path) -> None:
    complaints = list(rule(build(tmp_path, CLEAN | files)))
    assert any(complaint in line for line in complaints), complaints


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_every_rule_is_run(subject: object) -> None:
    """A rule is a public function that takes a House; each has a planted violation, which is what puts it into RULES."""
    rules = [value for name, value in vars(subject).items() if not name.startswith("_") and _takes_a_house(value)]
    assert [rule for rule in rules if rule not in RULES] == []


def _takes_a_house(value: object) -> bool:
    return getattr(value, "__annotations__", {}).get("house") == "House"


def test_exported_names_exist() -> None:
    for name in ("fa_serve", "fa_serve.engine"):
        module = importlib.import_module(name)
        assert [export for export in module.__all__ if not hasattr(module, export)] == []


def test_fresh_memory_is_poisoned() -> None:
    """The fixture of conftest.py does this for every test."""
    assert torch.empty(3).isnan().all()
    assert torch.empty(3, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


ALONE = """
import sys
for name in ("triton", "fastapi", "starlette", "pydantic", "pydantic_settings", "prometheus_client", "uvicorn", "typer"):
    sys.modules[name] = None            # importing it raises ImportError, as if it were not installed
import torch, fa_serve, fa_serve.engine, fa_serve.ops
from fa_serve.backends import explain
from fa_serve.spec import AttentionSpec
q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
exact = fa_serve.attention(q, k, v, causal=True, backend="reference")
torch.testing.assert_close(fa_serve.attention(q, k, v, causal=True), exact)
weight = torch.randn(6, 8)
torch.testing.assert_close(fa_serve.ops.linear(q[0, 0], weight), q[0, 0] @ weight.t())
spec = AttentionSpec(
    layout="dense", device="cuda", arch=80, dtype=torch.float16, kv_dtype=torch.float16,
    head_dim=64, head_dim_v=64, num_heads=4, num_kv_heads=4,
)
print(explain(spec)["triton"])
"""


def test_a_machine_without_triton_or_the_server_extra_is_served() -> None:
    done = after_torch(ALONE)
    assert done.returncode == 0, done.stderr
    assert "cannot be imported" in done.stdout
