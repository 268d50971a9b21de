"""The images have every package that the project needs: requirements/*.txt are up to date with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
IMAGE = {"python_version": "3.11", "sys_platform": "linux"}


def pins(name: str) -> dict[str, Version]:
    """The versions that a file of requirements/ installs."""
    text = (ROOT / "requirements" / name).read_text()
    return {
        canonicalize_name(package): Version(version)
        for package, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE)
    }


def lacking(needed: list[str], installed: dict[str, Version]) -> list[str]:
    """The requirements of the image's Python that are not met by what is installed."""
    requirements = [Requirement(each) for each in needed]
    asked = [each for each in requirements if each.marker is None or each.marker.evaluate(IMAGE)]
    return [
        str(each)
        for each in asked
        if canonicalize_name(each.name) not in installed
        or not each.specifier.contains(installed[canonicalize_name(each.name)], prereleases=True)
    ]


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt"])
def test_the_image_has_what_the_server_needs(name: str) -> None:
    installed = pins(name)
    needed = [*PROJECT["dependencies"], *EXTRAS["server"], *EXTRAS["otel"]]
    if name == "cuda.txt":  # torchvision's wheels on PyPI are for CUDA
        needed += EXTRAS["images"]
    assert len(needed) > 20
    assert lacking(needed, installed) == []
    without = {package: version for package, version in installed.items() if package != "pillow"}
    assert {*lacking(needed, without)} == {"pillow>=11"}


def test_the_image_with_ray_has_it() -> None:
    assert lacking(EXTRAS["ray"], pins("ray.txt")) == []


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt", "ray.txt"])
def test_the_image_has_the_versions_that_are_tested(name: str) -> None:
    """constraints.txt pins them; torch and torchvision differ, as its comment says."""
    constraints = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    tested = {canonicalize_name(each.name): each for each in constraints if each.marker is None or each.marker.evaluate(IMAGE)}
    for package, version in pins(name).items():
        if package not in ("torch", "torchvision") and package in tested:
            assert tested[package].specifier.contains(Version(version.public), prereleases=True), package
