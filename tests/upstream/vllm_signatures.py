"""The signatures of vLLM's releases that the plugin relies on, from their source distributions.

    python tests/upstream/vllm_signatures.py [--versions 0.24.0,0.33.0] [--out tests/results/vllm_signatures.json]

Each source distribution is fetched once, into --cache, and only two of its files are read, as text: nothing of vLLM is built or
imported. tests/vllm_plugin/test_signatures.py compares the file that is written with what the plugin needs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Collection
from pathlib import Path

from fa_serve.adapters import Signatures, missing
from fa_serve.vllm.signatures import REQUIRED

FILES = ("vllm/v1/attention/backend.py", "vllm/v1/attention/backends/registry.py")
VERSIONS = "0.24.0,0.25.1,0.26.0,0.27.1,0.28.0,0.29.0,0.30.0,0.31.0,0.32.0,0.33.0"
TOOLS = ["setuptools", "setuptools_scm", "setuptools_rust", "semantic_version", "vcs_versioning", "jinja2"]
"""What pip needs to ask a distribution for its name and version."""


def fetch(version: str, cache: Path) -> Path:
    archive = cache / f"vllm-{version}.tar.gz"
    tools = cache / "vllm-tools"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if not tools.exists():
        subprocess.run([*pip, "install", "-q", "--no-deps", "--target", str(tools), *TOOLS], check=True)
    if not archive.exists():
        environment = os.environ | {"PYTHONPATH": str(tools), "VLLM_TARGET_DEVICE": "empty"}
        environment |= {"VLLM_VERSION_OVERRIDE": version, "SETUPTOOLS_SCM_PRETEND_VERSION": version}
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(cache)]
        subprocess.run([*pip, "download", "-q", *options, f"vllm=={version}"], check=True, env=environment)
    return archive


def names(node: ast.stmt) -> set[str]:
    """Parameters of a function; fields, members and methods of a class."""
    if isinstance(node, ast.FunctionDef):
        return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    found = set()
    for item in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(item, ast.FunctionDef):
            found.add(item.name)
        elif isinstance(item, ast.AnnAssign):
            found.add(ast.unparse(item.target))
        elif isinstance(item, ast.Assign):
            found |= {ast.unparse(target) for target in item.targets}
    return found


def signatures(source: bytes, required: Collection[str]) -> dict[str, list[str]]:
    """Those of `required` that a module defines, by the name of a class, method or function."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        parts = {node.name: names(node)}
        if isinstance(node, ast.ClassDef):
            parts |= {f"{node.name}.{m.name}": names(m) for m in node.body if isinstance(m, ast.FunctionDef)}
        found |= {name: sorted(words) for name, words in parts.items() if name in required}
    return found


def read(version: str, cache: Path) -> dict[str, list[str]]:
    archive = fetch(version, cache)
    found: dict[str, list[str]] = {}
    with tarfile.open(archive) as files:
        for path in FILES:
            member = files.extractfile(f"{archive.name.removesuffix('.tar.gz')}/{path}")
            assert member is not None
            found |= signatures(member.read(), REQUIRED)
    return found


def record(host: str, versions: str, read: Callable[[str, Path], dict[str, list[str]]], required: Signatures) -> None:
    """Write the signatures of the releases that the command line names, and print what each of them lacks.

    host:     the name of the package; versions: of its releases, by default
    read:     the signatures of a release, which it keeps in a folder
    required: what the adapter needs
    """
    parser = argparse.ArgumentParser(description=f"The signatures of {host}'s releases that the plugin relies on")
    parser.add_argument("--versions", default=versions)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "fa_serve" / "upstream")
    out = Path(__file__).parents[1] / "results" / f"{host.lower()}_signatures.json"
    parser.add_argument("--out", type=Path, default=out)
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    results = {}
    for version in arguments.versions.split(","):
        results[version] = found = read(version, arguments.cache)
        absent = missing({name: frozenset(words) for name, words in found.items()}, required)
        print(f"{host} {version:8} {'lacks ' + ', '.join(absent) if absent else 'has all that the plugin needs'}", flush=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    record("vLLM", VERSIONS, read, REQUIRED)
