"""The kernel package holds attention alone, and Hugging Face's `kernels` loads it with and without an installed fa_serve."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from torch_processes import after_torch

import fa_serve
import fa_serve.flash_attn

ROOT = Path(__file__).parents[2]
needs_loader = pytest.mark.skipif(find_spec("kernels") is None, reason="needs the package kernels")


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = spec_from_file_location("kernel_package", ROOT / "deploy" / "kernel_package.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("kernel")
    builder.build(folder)
    return folder


def run(program: str, *arguments: Path) -> str:
    strict = f"import sys, warnings\nwarnings.simplefilter('error')\nsys.argv[1:] = {[*map(str, arguments)]}\n"
    ended = after_torch(strict + program)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_layout_is_the_documented_one(package: Path) -> None:
    """A variant holds metadata and one package of the kernel's name: huggingface.co/docs/kernels/kernel-requirements."""
    variant = package / "build" / "torch-universal"
    assert sorted(path.name for path in package.iterdir()) == ["LICENSE", "build"]
    assert sorted(path.name for path in variant.iterdir()) == ["fa_serve", "metadata.json"]
    metadata = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch(r"_fa_serve_[0-9a-f]{12}", metadata.pop("id"))
    assert metadata == {
        "name": "fa-serve",
        "version": 0,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }


def test_imports_are_relative_or_of_torch_and_triton(package: Path) -> None:
    """The loader's rule. numpy, transformers and everything else that fa-serve depends on are not needed for attention."""
    foreign = set()
    files = sorted(package.rglob("*.py"))
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                foreign |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                foreign.add((node.module or "").partition(".")[0])
    assert foreign - set(sys.stdlib_module_names) == {"torch", "triton"}


def test_another_content_has_another_name(builder: ModuleType) -> None:
    files = builder.packaged_files()
    assert builder.metadata(files) == builder.metadata(dict(reversed(files.items())))
    assert builder.metadata(files)["id"] != builder.metadata(files | {"api.py": files["api.py"] + "\n"})["id"]


def test_an_earlier_build_is_replaced(builder: ModuleType, tmp_path: Path) -> None:
    stale = builder.build(tmp_path) / "fa_serve" / "stale.py"
    stale.touch()
    builder.build(tmp_path)
    assert not stale.exists()
    assert (stale.parent / "api.py").exists()


@pytest.mark.parametrize(
    ("line", "depth", "expected"),
    [
        ("from fa_serve import spec", 1, "from . import spec"),
        ("from fa_serve.spec import A", 1, "from .spec import A"),
        ("    from fa_serve.backends.calls import (A, B)", 3, "    from ...backends.calls import (A, B)"),
        ("from fa_serve_more import A", 1, "from fa_serve_more import A"),
        ("from torch import fa_serve", 1, "from torch import fa_serve"),
        ('x = "from fa_serve import y"', 1, 'x = "from fa_serve import y"'),
    ],
)
def test_relative_imports(builder: ModuleType, line: str, depth: int, expected: str) -> None:
    indented = line.startswith(" ")
    head = "if True:\n" if indented else "import torch\n"
    assert builder.relative_imports(f"{head}{line}\n", depth) == f"{head}{expected}\n"


def test_an_import_without_a_relative_form_is_refused(builder: ModuleType) -> None:
    with pytest.raises(
        ValueError, match=r"line 2 must have the form 'from fa_serve import \.\.\.', got 'import fa_serve\.api'"
    ):
        builder.relative_imports("import torch\nimport fa_serve.api\n", 1)


ALONE = """
import importlib, json, pkgutil, sys
from pathlib import Path
sys.modules["fa_serve"] = None          # importing it raises ImportError, as if it were not installed
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path(sys.argv[1]))
for module in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:        # on a machine without Triton
        assert error.name.partition(".")[0] == "triton", error
torch.manual_seed(0)
q = torch.randn(2, 6, 4, 8)
k, v = torch.randn(2, 2, 9, 2, 8)
exact = kernel.attention(q, k, v, causal=True, backend="reference")
torch.testing.assert_close(kernel.attention(q, k, v, causal=True), exact)
torch.testing.assert_close(kernel.flash_attn_func(q, k, v, causal=True), exact)
torch.testing.assert_close(kernel.interface.flash_attn_func(q, k, v, causal=True), exact)
lengths = torch.tensor([0, 6, 12], dtype=torch.int32), torch.tensor([0, 9, 18], dtype=torch.int32)
packed = kernel.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *lengths, 6, 9, causal=True)
torch.testing.assert_close(packed.view_as(exact), exact)
try:
    kernel.flash_attn_func(q, k, v, dropout_p=0.5)
except kernel.ParameterError as error:
    assert error.field == "dropout_p"
else:
    raise AssertionError("dropout was not refused")
kernel.flash_attn.install()
import flash_attn, flash_attn_interface
assert flash_attn is kernel.flash_attn
assert flash_attn_interface is kernel.interface
print(json.dumps({"name": kernel.__name__, "all": kernel.__all__}))
"""


@pytest.mark.slow
@needs_loader
def test_loaded_without_fa_serve(package: Path) -> None:
    """Its functions compute, and stand in for those of flash-attn."""
    found = json.loads(run(ALONE, package))
    metadata = json.loads((package / "build" / "torch-universal" / "metadata.json").read_text())
    assert found["name"] == metadata["id"]
    of_models = {"UnsupportedModelError", "exact", "install", "patch", "token_logprobs"}
    public = {*fa_serve.__all__, *fa_serve.flash_attn.__all__} - of_models
    assert set(found["all"]) == public | {"bert_padding", "flash_attn", "interface"}


BESIDE = """
import sys
from pathlib import Path
import torch
import fa_serve
from kernels import get_local_kernel
packages = [fa_serve, *(get_local_kernel(Path(folder)) for folder in sys.argv[1:])]
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 5, 2, 8)
for package in packages:
    torch.testing.assert_close(package.attention(q, k, v), fa_serve.attention(q, k, v))
assert len({package.attention for package in packages}) == len({package.ParameterError for package in packages}) == 3
operators = {str(getattr(torch.ops, package.__name__).attention.default) for package in packages}
assert operators == {f"{package.__name__}.attention.default" for package in packages}
"""


@pytest.mark.slow
@needs_loader
def test_versions_are_loaded_beside_each_other(package: Path, tmp_path: Path) -> None:
    """Each has its own classes and its own operators."""
    other = shutil.copytree(package, tmp_path / "other")
    path = other / "build" / "torch-universal" / "metadata.json"
    path.write_text(path.read_text().replace("_fa_serve_", "_fa_serve_other_"))
    run(BESIDE, package, other)
