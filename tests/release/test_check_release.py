"""Each check of a release finds a fault that is planted for it; `make release` runs them on real files."""

from __future__ import annotations

import pytest
from release import check_release
from release.check_release import (
    ROOT,
    changelog_complaints,
    expected_files,
    metadata_complaints,
    sdist_complaints,
    version,
    wheel_complaints,
)

INFO = "fa_serve-1.0.dist-info"
EXPECTED = {"fa_serve/__init__.py", "fa_serve/server/browser/playground.html"}
WHEEL = EXPECTED | {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE")}
SDIST = {f"fa_serve-1.0/{name}" for name in ("LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "pyproject.toml")}
METADATA = "Metadata-Version: 2.4\nName: fa-serve\nVersion: 1.0\nLicense-Expression: Apache-2.0\nRequires-Dist: torch>=2\n"


def test_the_data_of_the_package_is_expected() -> None:
    expected = expected_files(ROOT)
    assert {"fa_serve/demo/model/model.safetensors", "fa_serve/server/browser/playground.html", "fa_serve/py.typed"} <= expected
    assert {"fa_serve/server/browser/markdown.js", "fa_serve/server/bounds/guard.py"} <= expected
    assert {"fa_serve/server/app.py", "fa_serve/backends/hopper/__init__.py"} <= expected
    assert not any(name.startswith(("server/", "tests/")) for name in expected)


def test_a_good_release_is_not_blamed() -> None:
    assert list(wheel_complaints(WHEEL, EXPECTED, "1.0")) == []
    assert list(sdist_complaints(SDIST | {"fa_serve-1.0/fa_serve/testing.py"}, "1.0")) == []
    assert list(metadata_complaints(METADATA, "1.0")) == []
    assert list(changelog_complaints("# Changelog\n\n## [1.0] - 2026-11-30\n", "1.0")) == []


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (WHEEL - {"fa_serve/server/browser/playground.html"}, "the wheel lacks fa_serve/server/browser/playground.html"),
        (WHEEL | {"tests/test_api.py"}, "the wheel has tests/test_api.py, which is not a part of the package"),
        (WHEEL - {f"{INFO}/licenses/LICENSE"}, f"the wheel lacks {INFO}/licenses/LICENSE"),
    ],
)
def test_faults_of_a_wheel(names: set[str], complaint: str) -> None:
    assert list(wheel_complaints(names, EXPECTED, "1.0")) == [complaint]


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (SDIST - {"fa_serve-1.0/CHANGELOG.md"}, "the sdist lacks CHANGELOG.md"),
        (SDIST | {"fa_serve-1.0/tests/test_api.py"}, "the sdist has a part of tests/"),
    ],
)
def test_faults_of_an_sdist(names: set[str], complaint: str) -> None:
    assert list(sdist_complaints(names, "1.0")) == [complaint]


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        (METADATA.replace("1.0", "1.1"), "the metadata says version 1.1, pyproject.toml 1.0"),
        (METADATA.replace("Apache-2.0", "MIT"), "the metadata says license MIT"),
        (METADATA.replace("torch>=2", "torch @ file:///torch"), "the metadata depends on an address: torch @ file:///torch"),
    ],
)
def test_faults_of_the_metadata(metadata: str, complaint: str) -> None:
    assert list(metadata_complaints(metadata, "1.0")) == [complaint]


def test_a_version_needs_a_section_of_the_changelog() -> None:
    assert list(changelog_complaints("# Changelog\n\n## [Unreleased]\n", "1.0")) == ["CHANGELOG.md has no section [1.0]"]


def test_one_file_of_a_kind(tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"must hold one \*\.whl, holds \[\]"):
        check_release.only(tmp_path, "*.whl")


def test_the_version_is_that_of_the_package() -> None:
    import fa_serve

    assert version() == fa_serve.__version__
