"""The releases of Python that are declared: one list everywhere, sources that the oldest reads, and names that it has.

The grammar is checked by this interpreter. The names of the standard library, and the grammar once more, are checked by the
oldest and the newest declared interpreter, if they are on the path.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fa_serve.doctor import NEWEST_TESTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DECLARED = [
    tuple(map(int, found[1].split(".")))
    for each in PROJECT["project"]["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (\d+\.\d+)", each))
]
SOURCES = [path for folder in ("fa_serve", "server") for path in sorted((ROOT / folder).rglob("*.py"))]
CHECK = """
import ast, importlib, json, sys
given = json.load(sys.stdin)
for path in given["sources"]:
    compile(open(path, encoding="utf-8").read(), path, "exec", dont_inherit=True)
missing = []
for module, name in given["names"]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        missing.append(module)
        continue
    try:
        hasattr(found, name) or importlib.import_module(f"{module}.{name}")
    except ImportError:
        missing.append(f"{module}.{name}")
print(json.dumps(missing))
"""
GUARDED = {"resource", "fcntl", "pwd"}
"""Modules of POSIX systems, which are imported where they are there."""


def test_one_list_of_releases():
    assert [(3, minor) for minor in range(DECLARED[0][1], DECLARED[-1][1] + 1)] == DECLARED
    oldest = ".".join(map(str, DECLARED[0]))
    assert PROJECT["project"]["requires-python"] == f">={oldest}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert DECLARED[-1] == NEWEST_TESTED
    matrix = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"]["check"]["strategy"]["matrix"]
    tested = {tuple(map(int, each.split("."))) for each in matrix["python"]}
    assert tested <= set(DECLARED)
    assert DECLARED[-1] in tested


def test_every_declared_release_has_one_pin_of_each_package():
    """constraints.txt has two lines for a package that has dropped the oldest release, and exactly one of them holds."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    names = {pin.name for pin in pins}
    for release in DECLARED:
        python = {"python_version": ".".join(map(str, release))}
        held = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate(python)]
        assert sorted(held) == sorted(names), release
    assert len(pins) > len(names)


@pytest.mark.slow
def test_the_oldest_grammar_reads_every_source():
    for path in SOURCES:
        ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=DECLARED[0])
    with pytest.raises(SyntaxError):
        ast.parse("try: ...\nexcept* ValueError: ...", feature_version=DECLARED[0])


def standard_names(tree: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of what a source takes from the standard library, by `from module import name` or `module.name`."""
    names = set()
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names.add((modules[node.value.id], node.attr))
    return {(module, name) for module, name in names if module.partition(".")[0] in sys.stdlib_module_names - GUARDED}


def test_names_of_the_standard_library_are_found():
    source = (
        "import os, itertools as it\nfrom typing import Self\nfrom .os import x\nit.batched(os.path)\nimport torch\ntorch.x"
    )
    assert standard_names(ast.parse(source)) == {("typing", "Self"), ("itertools", "batched"), ("os", "path")}


@pytest.mark.parametrize("release", [DECLARED[0], DECLARED[-1]], ids=lambda release: ".".join(map(str, release)))
def test_an_interpreter_has_what_the_sources_take_from_it(release):
    program = shutil.which(f"python{release[0]}.{release[1]}")
    if program is None or subprocess.run([program, "-c", ""], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("it is not installed")
    names: set[tuple[str, str]] = set()
    for path in SOURCES:
        names |= standard_names(ast.parse(path.read_text(encoding="utf-8")))
    assert len(names) > 200
    given = json.dumps({"sources": list(map(str, SOURCES)), "names": sorted(names)})
    done = subprocess.run([program, "-I", "-c", CHECK], input=given, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert json.loads(done.stdout) == []
