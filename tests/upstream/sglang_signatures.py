"""The signatures of SGLang's releases that the plugin relies on, from their wheels.

    python tests/upstream/sglang_signatures.py [--versions 0.5.16,0.5.23] [--out tests/results/sglang_signatures.json]

Each wheel is fetched once, into --cache, and a few of its files are read, as text: nothing of SGLang is imported.
tests/sglang_plugin/test_sglang_interface.py compares the file that is written with what the plugin needs.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from vllm_signatures import record, signatures

from fa_serve.sglang.sglang_interface import MODULES, REQUIRED

VERSIONS = "0.5.16,0.5.18,0.5.20,0.5.21,0.5.22,0.5.23"


def fetch(version: str, cache: Path) -> Path:
    """The wheel of a release."""
    pattern = f"sglang-{version}-*.whl"
    if not list(cache.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "--dest", str(cache)]
        subprocess.run([*pip, f"sglang=={version}"], check=True)
    return next(cache.glob(pattern))


def read(version: str, cache: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(fetch(version, cache)) as files:
        for module in MODULES:
            found |= signatures(files.read(f"{module.replace('.', '/')}.py"), REQUIRED)
    return found


if __name__ == "__main__":
    record("SGLang", VERSIONS, read, REQUIRED)
