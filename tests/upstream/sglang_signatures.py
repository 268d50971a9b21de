"""The signatures of SGLang's releases that the plugin relies on, from their wheels.

    python tests/upstream/sglang_signatures.py [--versions 0.5.16,0.5.23] [--out tests/results/sglang_signatures.json]

Each wheel is fetched once, into --cache, and a few of its files are read, as text: nothing of SGLang is imported.
tests/sglang_plugin/test_sglang_interface.py compares the file that is written with what the plugin needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path

from vllm_signatures import signatures

from fa_serve.adapters import missing
from fa_serve.sglang.sglang_interface import MODULES, REQUIRED

VERSIONS = "0.5.16,0.5.18,0.5.20,0.5.21,0.5.22,0.5.23"


def fetch(version: str, cache: Path) -> Path:
    """The wheel of a release."""
    pattern = f"sglang-{version}-*.whl"
    if not list(cache.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "--dest", str(cache)]
        subprocess.run([*pip, f"sglang=={version}"], check=True)
    return next(cache.glob(pattern))


def read(wheel: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as files:
        for module in MODULES:
            found |= signatures(files.read(f"{module.replace('.', '/')}.py"), REQUIRED)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--versions", default=VERSIONS)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fa_serve" / "upstream")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "sglang_signatures.json")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    results = {}
    for version in arguments.versions.split(","):
        results[version] = found = read(fetch(version, arguments.cache))
        absent = missing({name: frozenset(words) for name, words in found.items()}, REQUIRED)
        print(f"SGLang {version:8} {'lacks ' + ', '.join(absent) if absent else 'has all that the plugin needs'}", flush=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
