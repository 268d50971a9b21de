"""Build the folder that Hugging Face's `kernels` loads: fa_serve's attention without the engine, the server and the adapters.

    python deploy/kernel_package.py build/kernel-package        # or `make kernel-package`
    kernel = kernels.get_local_kernel(Path("build/kernel-package"))

    build/torch-universal/metadata.json    name, version, and the name under which the kernel is imported
    build/torch-universal/fa_serve/        the modules of PARTS, and kernel_entry.py as `__init__.py`

The loader imports a kernel under the id in its metadata, so that several versions of it can be loaded beside each other and
beside an installed fa_serve. The build therefore makes imports of the package relative, and changes nothing else. The loader's
rules are in its documentation, "Kernel requirements".
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "fa_serve"
VARIANT = "torch-universal"
PARTS = (
    "spec.py",
    "kept_values.py",
    "index_functions.py",
    "block_lists.py",
    "score_mods.py",
    "argument_checks.py",
    "value_checks.py",
    "autograd.py",
    "dispatch.py",
    "operators.py",
    "transforms.py",
    "api.py",
    "launching",
    "backends",
    "flash_attn",
)
"""Modules and packages of fa_serve that attention consists of."""


def relative_imports(text: str, depth: int) -> str:
    """The text of a module whose imports of the package are relative.

    depth: how many packages the module is in: 1 for fa_serve/api.py, 2 for fa_serve/backends/calls.py

    Raises ValueError for `import fa_serve`, which has no relative form.
    """
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(_is_ours(alias.name) for alias in node.names):
            raise ValueError(f"line {node.lineno} must have the form 'from {PACKAGE} import ...', got {ast.unparse(node)!r}")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            line = node.lineno - 1
            lines[line] = re.sub(rf"\bfrom {PACKAGE}\b\.?", "from " + "." * depth, lines[line], count=1)
    return "".join(lines)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE


def packaged_files() -> dict[str, str]:
    """The text of each file by its path in the package, such as "backends/calls.py"."""
    source = ROOT / PACKAGE
    paths = [path for part in PARTS for path in _modules(source / part)]
    names = {path.relative_to(source).as_posix(): path for path in paths}
    names["__init__.py"] = ROOT / "deploy" / "kernel_entry.py"
    return {name: relative_imports(path.read_text(), name.count("/") + 1) for name, path in names.items()}


def _modules(part: Path) -> list[Path]:
    return sorted(part.rglob("*.py")) if part.is_dir() else [part]


def metadata(files: dict[str, str]) -> dict[str, object]:
    """The contents of metadata.json. The id, under which the loader imports the package, contains a digest of the files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return {
        "id": f"_{PACKAGE}_{digest[:12]}",
        "name": project["name"],
        "version": int(project["version"].partition(".")[0]),
        "license": project["license"],
        "python-depends": [],
        # The loader knows no backend for every device. A variant called universal is loaded whatever stands here.
        "backend": {"type": "cuda"},
    }


def build(folder: Path) -> Path:
    """Write the package and its metadata into the folder, and replace an earlier build -> the folder of the variant."""
    variant = folder / "build" / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    files = packaged_files()
    for name, text in files.items():
        path = variant / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (variant / "metadata.json").write_text(json.dumps(metadata(files), indent=2) + "\n")
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to build")
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
