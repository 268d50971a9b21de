"""The conda recipe needs what the wheel needs, under the names of conda-forge, and rattler-build can read it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "conda" / "recipe.yaml"
RECIPE = yaml.safe_load(FILE.read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMES = {
    "prometheus-client": "prometheus_client",
    "torch": "pytorch",
    "typing-extensions": "typing_extensions",
    "uvicorn[standard]": "uvicorn-standard",
}
"""What conda-forge calls a package otherwise."""
PLUGIN, SERVER = RECIPE["outputs"]


def declared(lines: list[str]) -> set[tuple[str, str]]:
    """(name on conda-forge, bound) of requirements of pyproject.toml; a marker is left out."""
    found = set()
    for line in lines:
        name, bound = re.fullmatch(r"([\w\[\]-]+)\s*([^;]*?)\s*(?:;.*)?", line).groups()
        found.add((NAMES.get(name, name), bound))
    return found


def required(lines: list[str]) -> set[tuple[str, str]]:
    return {(name, bound) for name, _, bound in (line.partition(" ") for line in lines)}


def test_the_plugin_needs_what_the_wheel_needs():
    requirements = PLUGIN["requirements"]
    python = ("python", PROJECT["requires-python"])
    found = required([*requirements["run"], *requirements["run_constraints"]])
    assert found == declared(PROJECT["dependencies"]) | {python}
    assert python in required(requirements["host"])
    [backend] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert declared([backend]) <= required(requirements["host"])
    assert PLUGIN["build"]["python"]["entry_points"] == [f"fa-serve = {PROJECT['scripts']['fa-serve']}"]


def test_the_server_needs_its_extra_and_the_plugin_of_the_same_version():
    found = required(SERVER["requirements"]["run"])
    assert found == declared(PROJECT["optional-dependencies"]["server"]) | {("fa-serve", "==${{ version }}")}
    assert RECIPE["context"]["version"] == PROJECT["version"]


def test_the_source_has_what_the_build_reads():
    for pattern in RECIPE["source"]["filter"]["include"]:
        assert (ROOT / pattern.removesuffix("/**")).exists(), pattern


def test_rattler_build_renders_two_packages():
    rattler = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    rendered = rattler.Stage0Recipe.from_yaml(FILE.read_text()).render()
    assert sorted(each.recipe.package.name for each in rendered) == ["fa-serve", "fa-serve-server"]
