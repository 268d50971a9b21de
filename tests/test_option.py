"""An option of attention is added in the files that CONTRIBUTING.md lists: two are added to a copy of the tree, one is called.

The edits put an option beside `softcap` and `slope`, whatever else stands there, so that they still apply to a tree to which
somebody has added an option by the recipe. That the same edits apply twice shows this. The functions that have grown by two
options, docstrings included, keep the budget of lines of `house.statements`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house.source import House
from house.statements import sizes_stay_readable

ROOT = Path(__file__).parents[1]
MOST_FILES = 7
Edits = dict[str, list[tuple[str, str]]]
EDITS: Edits = {
    "fa_serve/api.py": [
        ("    softcap: float = ...,\n", "    softcap: float = ...,\n    score_factor: float = ...,\n"),
        ("    softcap: float = 0.0,\n", "    softcap: float = 0.0,\n    score_factor: float = 1.0,\n"),
        ("    softcap: replaces", "    score_factor: factor of the scores after softcap; 1.0 is off\n    softcap: replaces"),
        ("    softmax_scale, window_size,", "    score_factor: as in `attention`\n    softmax_scale, window_size,"),
        ("            float(softcap),\n", "            float(softcap),\n            float(score_factor),\n"),
    ],
    "fa_serve/backends/calls.py": [
        ("    softcap: float = 0.0\n", "    softcap: float = 0.0\n    score_factor: float = 1.0\n"),
        ("    skip_q: int = 0\n", "    skip_q: int = 0\n    score_factor: float = 1.0\n"),
        ('            "softcap":', '            "score_factor": self.score_factor != 1.0,\n            "softcap":'),
        (
            "    scale = q.shape",
            '    if given.score_factor <= 0:\n        raise ValueError("score_factor must be above 0")\n    scale = q.shape',
        ),
        ("        softcap=float(", "        score_factor=given.score_factor,\n        softcap=float("),
    ],
    "fa_serve/spec.py": [
        ("OPTIONS = (", 'OPTIONS = ("score_factor", '),
        ("    deterministic: bool = False\n", "    deterministic: bool = False\n    score_factor: bool = False\n"),
    ],
    "fa_serve/backends/reference.py": [
        ("    softcap: float = 0.0,\n", "    softcap: float = 0.0,\n    score_factor: float = 1.0,\n"),
        ("    if mask is not None:\n", "    s = s * score_factor\n    if mask is not None:\n"),
        (
            "        softcap=options.softcap,\n",
            "        softcap=options.softcap,\n        score_factor=options.score_factor,\n",
        ),
        ("_COMPUTED = frozenset({", '_COMPUTED = frozenset({"score_factor", '),
    ],
    "fa_serve/backends/triton/__init__.py": [('"prefill": frozenset({', '"prefill": frozenset({"score_factor", ')],
    "fa_serve/backends/triton/prefill/kernel.py": [
        ("float(options.softcap), ", "float(options.softcap), float(options.score_factor), "),
        ("    softcap,\n", "    softcap,\n    score_factor,\n"),
        (" slope = scaling\n", " score_factor, slope = scaling\n"),
        (" slope),\n", " score_factor, slope),\n"),
        (
            '        if var.mask != "none":\n            inside',
            '        factor *= score_factor\n        if var.mask != "none":\n            inside',
        ),
    ],
    "tests/support/cases.py": [
        ("    chunk: int = 0\n", "    chunk: int = 0\n    factor: float = 1.0\n"),
        ("    same = {", '    same = {"score_factor": case.factor, '),
    ],
}
"""The option `score_factor` multiplies the scores after softcap: old and new text, by file."""
CALLS = """
import re
import pytest
import torch
import cases
import fa_serve
from fa_serve.backends import explain
from fa_serve.spec import AttentionSpec

assert fa_serve.__file__.startswith({root!r}) and cases.__file__.startswith({root!r})
for case in (
    cases.Case((17,), (33,), causal=True, factor=2.5),
    cases.Case((17,), (33,), causal=True, factor=0.5, softcap=20.0, sinks=True, alibi="heads", window=(9, -1)),
):
    cases.check(case, "triton", torch.float32)
    cases.check(case, "reference", torch.float32)
q = torch.randn(1, 17, 4, 64)
plain, doubled = (fa_serve.attention(q, q, q, score_factor=x, backend="triton") for x in (1.0, 2.0))
assert torch.allclose(doubled, fa_serve.attention(q, q, q, softmax_scale=0.25, backend="triton"), atol=1e-6)
assert not torch.allclose(doubled, plain, atol=1e-3)
with pytest.raises(TypeError, match="score_factor must be a number, got None"):
    fa_serve.attention(q, q, q, score_factor=None)
with pytest.raises(fa_serve.UnsupportedError, match="sdpa: does not support score_factor, which the call uses"):
    fa_serve.attention(q, q, q, score_factor=2.0, backend="sdpa")
with pytest.raises(fa_serve.UnsupportedError, match="has no backward pass for score_factor"):
    fa_serve.attention(q.requires_grad_(), q, q, score_factor=2.0, backend="triton")
spec = AttentionSpec("dense", "cpu", 0, torch.float32, torch.float32, 64, 64, 4, 4, op="decode", score_factor=True)
assert explain(spec)["triton"] == "does not support score_factor in its decode kernel, which this call needs"
assert "float softcap, float score_factor, float earlier_factor" in str(torch.ops.fa_serve.attention.default._schema)
print("computed")
"""


def test_the_files_are_those_that_are_listed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("### An option of attention\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(EDITS)
    assert len(EDITS) <= MOST_FILES


@pytest.mark.slow
def test_an_option_is_added_in_these_files(tmp_path: Path) -> None:
    """The oracle and the portable kernel of prompts compute it, the others refuse it, and graphs have it."""
    for folder in ("fa_serve", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    _add_option(tmp_path, "earlier_factor", "earlier")
    _add_option(tmp_path, "score_factor", "factor")
    assert list(sizes_stay_readable(_edited(tmp_path))) == []
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{tmp_path / 'tests/support'}", "TRITON_INTERPRET": "1"}
    program = CALLS.format(root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "computed"), done.stderr[-3000:]


def test_an_option_too_much_is_noticed(tmp_path: Path) -> None:
    """The budget is that of the real functions: there is an end to how many options they take."""
    (tmp_path / "fa_serve").mkdir()
    text = (ROOT / "fa_serve/api.py").read_text(encoding="utf-8")
    for number in range(10):
        for old, new in EDITS["fa_serve/api.py"]:
            text = text.replace(old, new.replace("score_factor", f"factor_{number}"))
    (tmp_path / "fa_serve/api.py").write_text(text, encoding="utf-8")
    assert any("fa_serve.api.attention has " in complaint for complaint in sizes_stay_readable(House(tmp_path)))


def _add_option(root: Path, option: str, field: str) -> None:
    """Apply EDITS to a copy of the tree, with other names of the option and of its field in `Case`."""
    for name, edits in EDITS.items():
        path = root / name
        text = path.read_text(encoding="utf-8")
        for old, new in edits:
            assert old in text, f"{name} has no {old!r}"
            new = new.replace("score_factor", option).replace("case.factor", f"case.{field}")
            text = text.replace(old, new.replace("    factor: float", f"    {field}: float"))
        path.write_text(text, encoding="utf-8")


def _edited(root: Path) -> House:
    """The files of EDITS alone, as the rules see them."""
    house = House(root)
    paths = {root / name for name in EDITS}
    house.modules = {name: module for name, module in house.modules.items() if module.path in paths}
    house.scripts = [module for module in house.scripts if module.path in paths]
    return house
