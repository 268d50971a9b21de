"""A repository as the rules see it: modules by dotted name, scripts and documents by path."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def inside(name: str, *rooms: str) -> bool:
    """Whether a dotted name is one of these rooms or lies in one of them."""
    return any(name == room or name.startswith(room + ".") for room in rooms)


@dataclass(frozen=True)
class Module:
    """One Python file. `name` is the dotted name of an installed module, and the path of a script."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree. Most rules read them, and to walk the tree takes as long as to parse it."""
        return list(ast.walk(self.tree))

    @cached_property
    def statements(self) -> list[ast.stmt]:
        """All statements in the order of the text."""
        found = [node for node in self.nodes if isinstance(node, ast.stmt)]
        return sorted(found, key=lambda statement: (statement.lineno, statement.col_offset))

    def comments(self, *words: str) -> Iterator[tokenize.TokenInfo]:
        """The comments that hold one of these words. Few files do, and the others are not divided into tokens."""
        if any(word in self.text for word in words):
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT and any(word in token.string for word in words):
                    yield token

    @cached_property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def imports(self) -> list[tuple[str, bool]]:
        """(dotted name, relative?) of everything that the file imports anywhere; `from a import b` is a.b."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, False) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = self.name.split(".")
                    keep = len(parts) - node.level + self.is_package
                    base = ".".join([*parts[:keep], *([node.module] if node.module else [])])
                found += [(f"{base}.{alias.name}", bool(node.level)) for alias in node.names]
            elif isinstance(node, ast.Call) and _called(node) in ("importlib.import_module", "__import__"):
                found += [(a.value, False) for a in node.args[:1] if isinstance(a, ast.Constant)]
        return found

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def has_kernels(self) -> bool:
        return any(is_kernel(function) for function in self.functions)


def _called(call: ast.Call) -> str:
    """The name that is called, dotted at most once; "" for anything else. `ast.unparse` takes a hundred times as long."""
    match call.func:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name(owner), name):
            return f"{owner}.{name}"
    return ""


def is_kernel(function: Function) -> bool:
    """Whether Triton or Gluon compiles the function."""
    return any(ast.unparse(decorator).partition("(")[0].rpartition(".")[2] == "jit" for decorator in function.decorator_list)


class House:
    """The installed modules of fa_serve/ and server/, the scripts around them, and the documents for readers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for folder, package in (("fa_serve", "fa_serve"), ("server", "fa_serve.server")):
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root / folder).with_suffix("").parts
                name = ".".join([package, *(part for part in parts if part != "__init__")])
                self.modules[name] = Module(name, path)
        self.scripts = [
            Module(path.relative_to(root).as_posix(), path)
            for folder in ("tests", "examples", "benchmarks", "deploy")
            for path in sorted((root / folder).rglob("*.py"))
        ]
        # docs/log is a dated record of what was tried: it is kept as it was written
        self.documents = [
            path
            for path in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]
            if not path.relative_to(root).as_posix().startswith("docs/log")
        ]

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    @property
    def files(self) -> list[Module]:
        """The installed modules and the scripts."""
        return [*self, *self.scripts]

    def owner(self, name: str) -> str:
        """The installed module that a dotted name lives in: fa_serve.spec for fa_serve.spec.arch_of; "" for a foreign name."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def edges(self) -> Iterator[tuple[str, str]]:
        """(module, module that it imports), both ours."""
        for module in self:
            for target, _ in module.imports:
                if owner := self.owner(target):
                    yield module.name, owner


Rule = Callable[[House], Iterator[str]]
Planted = tuple[Rule, dict[str, str], str]
"""A rule, the files that break it, and a part of the complaint."""
Allowed = tuple[Rule, dict[str, str]]
"""A rule, and files that look like a violation and are none."""

CLEAN = {
    "pyproject.toml": """
        tool.setuptools.packages = [
            "fa_serve", "fa_serve.backends", "fa_serve.backends.triton", "fa_serve.backends.hopper", "fa_serve.ops",
            "fa_serve.engine", "fa_serve.engine.request", "fa_serve.engine.scheduler", "fa_serve.client", "fa_serve.server",
        ]
        project.version = "1.2.3"
        project.dependencies = ["torch>=2", "triton>=3; sys_platform == 'linux'", "transformers"]
        project.optional-dependencies.server = ["FastAPI[all]>=0.1", "httpx"]
    """,
    "README.md": "The README in plain English.",
    "docs/log.md": "A record of our own, which stays as it is.",
    "tests/backends/triton/test_tiles.py": '"""."""',
    "fa_serve/__init__.py": '"""."""\nfrom fa_serve.api import attention\n__version__ = "1.2.3"\n__all__ = ["attention"]',
    "fa_serve/spec.py": '"""."""\nimport torch',
    "fa_serve/testing.py": '"""."""\nfrom fa_serve.backends.reference import f',
    "fa_serve/backends/__init__.py": '"""."""\nfrom fa_serve.spec import AttentionSpec',
    "fa_serve/backends/reference.py": '"""."""\nimport torch',
    "fa_serve/backends/triton/__init__.py": '"""."""\nfrom . import tiles, primitives',
    "fa_serve/backends/triton/primitives.py": '"""."""\nimport triton',
    "fa_serve/backends/triton/tiles.py": '"""."""\n@triton.jit\ndef kernel():\n' + "    x = 1\n" * 500,
    "fa_serve/backends/hopper/__init__.py": '"""."""\nfrom fa_serve.backends.triton.primitives import f\nimport triton',
    "fa_serve/ops/__init__.py": '"""."""\nfrom fa_serve.backends import select_backend',
    "fa_serve/ops/norms.py": '"""."""\nimport triton',
    "fa_serve/api.py": '"""."""\nfrom .backends import select_backend',
    "fa_serve/hf.py": '"""."""\nimport transformers\nfrom fa_serve import api',
    "fa_serve/engine/__init__.py": '"""."""\nfrom ..api import attention_paged\n__all__ = ["attention_paged"]',
    "fa_serve/engine/engine.py": '"""."""\nfrom fa_serve.backends import MAX_KEYS_PER_TILE\nfrom fa_serve import ops',
    "fa_serve/engine/request/__init__.py": '"""."""',
    "fa_serve/engine/scheduler/__init__.py": '"""."""',
    "fa_serve/engine/request/request.py": '"""."""\nimport math',
    "fa_serve/engine/scheduler/scheduler.py": '"""."""\nfrom ..request.request import Request\nfrom collections import deque',
    "fa_serve/client/__init__.py": '"""."""\nimport asyncio\nimport httpx',
    "server/__init__.py": '"""."""\nfrom . import app',
    "server/errors.py": '"""."""',
    "server/app.py": '"""."""\nimport fastapi\nimport asyncio\nfrom fa_serve.engine import Engine\nfrom . import errors',
}
"""A small house that breaks no rule; a planted one is this with some files changed."""


def build(root: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return House(root)
