"""The rules of the house, read off its source: who may import whom, what a file may be called, how long it may grow.

A rule is a function from a `House` to its complaints. Each is run on this repository, where it must find nothing, and on a
small house with a violation planted in it, which it must find.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

# Imports point down only: a module may import from its own floor and those below. Nothing but tests stands above `testing`.
FLOORS = {
    "fa_serve.spec": 0,
    "fa_serve.demo": 0,
    "fa_serve.backends": 1,
    "fa_serve.api": 2,
    "fa_serve.ops": 2,
    "fa_serve.hf": 3,
    "fa_serve": 3,  # the package itself, not what is in it
    "fa_serve.engine": 4,
    "fa_serve.client": 5,
    "fa_serve.info_tables": 5,
    "fa_serve.server": 5,
    "fa_serve.__main__": 5,
    "fa_serve.testing": 6,
}
# Who may import what is not ours (and what is dear even though it is Python's).
GUESTS = {
    "triton": ("fa_serve.backends.triton", "fa_serve.backends.hopper", "fa_serve.backends.launch"),
    "transformers": (
        "fa_serve.hf",
        "fa_serve.engine.model_runner",
        "fa_serve.engine.engine",
        "fa_serve.engine.loading",
        "fa_serve.engine.kv_cache",
        "fa_serve.engine.fusion",
    ),
    "llguidance": ("fa_serve.engine.structured",),
    "fastapi": ("fa_serve.server",),
    "starlette": ("fa_serve.server",),
    "pydantic": ("fa_serve.server",),
    "pydantic_settings": ("fa_serve.server",),
    "prometheus_client": ("fa_serve.server",),
    "asyncio": ("fa_serve.engine.async_engine", "fa_serve.client", "fa_serve.server", "fa_serve.__main__"),
    "server": (),  # our folder is installed as fa_serve.server and has no other name
}
COMES_WITH = {"starlette": "fastapi", "pydantic_core": "pydantic", "opentelemetry": "opentelemetry_sdk"}
WITH_EXTRAS = ("fa_serve.client", "fa_serve.server", "fa_serve.info_tables", "fa_serve.__main__")  # need the extra [server]
BACKENDS = tuple(f"fa_serve.backends.{name}" for name in ("hopper", "triton", "sdpa", "reference"))
KERNELS = ("fa_serve.backends.triton", "fa_serve.backends.hopper")
KERNEL_MODULE_LINES = 800
MODULE_LINES = 520
FUNCTION_LINES = 220


def inside(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[tuple[str, bool]]:
        """(dotted name, relative?) of everything imported anywhere in the file; `from a import b` is a.b."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(alias.name, False) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = self.name.split(".")
                    keep = len(parts) - node.level + (self.path.name == "__init__.py")
                    base = ".".join([*parts[:keep], *([node.module] if node.module else [])])
                found += [(f"{base}.{alias.name}", bool(node.level)) for alias in node.names]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
                found += [(a.value, False) for a in node.args[:1] if isinstance(a, ast.Constant)]
        return found


class House:
    """The modules under fa_serve/ and server/ by dotted name, and the scripts around them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for folder, package in (("fa_serve", "fa_serve"), ("server", "fa_serve.server")):
            for path in sorted((root / folder).rglob("*.py")):
                parts = path.relative_to(root / folder).with_suffix("").parts
                name = ".".join([package, *(part for part in parts if part != "__init__")])
                self.modules[name] = Module(name, path)
        self.scripts = [
            path for folder in ("tests", "examples", "benchmarks") for path in sorted((root / folder).rglob("*.py"))
        ]

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules.values())

    def owner(self, name: str) -> str:
        """The module of ours that a dotted name lives in: fa_serve.spec.arch_of is in fa_serve.spec; "" if not ours."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    def edges(self) -> Iterator[tuple[str, str]]:
        for module in self:
            for target, _ in module.imports:
                if owner := self.owner(target):
                    yield module.name, owner


def floor(name: str) -> int | None:
    if name == "fa_serve":
        return FLOORS[name]
    return next((level for room, level in FLOORS.items() if room != "fa_serve" and inside(name, room)), None)


def imports_point_down(house: House) -> Iterator[str]:
    for name in house.modules:
        if floor(name) is None:
            yield f"{name} stands on no floor"
    for name, target in house.edges():
        here = floor(name)
        there = floor(target)
        if here is not None and there is not None and there > here:
            yield f"{name} (floor {here}) imports {target} (floor {there})"


def guests_stay_in_their_rooms(house: House) -> Iterator[str]:
    for module in house:
        for target, _ in module.imports:
            rooms = GUESTS.get(target.partition(".")[0])
            if rooms is not None and not inside(module.name, *rooms):
                yield f"{module.name} imports {target}"


def backends_keep_apart(house: House) -> Iterator[str]:
    for name, target in house.edges():
        mine, theirs = (next((room for room in BACKENDS if inside(x, room)), None) for x in (name, target))
        if theirs == "fa_serve.backends.reference" and name not in ("fa_serve.backends.reference", "fa_serve.testing"):
            yield f"{name} imports the oracle"
        elif mine and theirs and mine != theirs and (mine, target) != (BACKENDS[0], "fa_serve.backends.triton.primitives"):
            yield f"{name} imports another backend, {target}"


def kernels_are_reached_through_the_api(house: House) -> Iterator[str]:
    closed = {
        "fa_serve.engine": ("fa_serve.backends",),
        "fa_serve.server": ("fa_serve.backends", "fa_serve.api", "fa_serve.hf"),
    }
    for name, target in house.edges():
        for room, doors in closed.items():
            if inside(name, room) and inside(target, *doors):
                yield f"{name} imports {target}"


def server_imports_itself_relatively(house: House) -> Iterator[str]:
    for module in house:
        for target, relative in module.imports:
            if inside(module.name, "fa_serve.server") and not relative and inside(target, "fa_serve.server"):
                yield f"{module.name} imports {target} by its full name"


def scheduling_needs_no_torch(house: House) -> Iterator[str]:
    """Nor does what pages and scheduler import from the engine."""
    for start in ("fa_serve.engine.pages", "fa_serve.engine.scheduler"):
        seen = set()
        queue = [start] if start in house.modules else []
        while queue:
            name = queue.pop()
            seen.add(name)
            for target, _ in house.modules[name].imports:
                if inside(target, "torch"):
                    yield f"{start} gets torch from {name}"
                owner = house.owner(target)
                if inside(owner, "fa_serve.engine") and owner not in seen:
                    queue.append(owner)


def files_open_with_a_docstring(house: House) -> Iterator[str]:
    for module in house:
        if not ast.get_docstring(module.tree):
            yield f"{module.name} says nothing about itself"
    for folder in {path.parent for module in house for path in module.path.parent.glob("*.py")}:
        if not (folder / "__init__.py").exists():
            yield f"{folder.relative_to(house.root)} has no __init__.py"


def names_say_something(house: House) -> Iterator[str]:
    for path in [*(module.path for module in house), *house.scripts]:
        if path.stem in ("utils", "util", "common", "helpers", "misc"):
            yield f"{path.relative_to(house.root)} could hold anything"


def comments_promise_nothing(house: House) -> Iterator[str]:
    for path in [*(module.path for module in house), *house.scripts]:
        with tokenize.open(path) as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type == tokenize.COMMENT and any(word in token.string for word in ("TODO", "FIXME", "XXX", "HACK")):
                    yield f"{path.relative_to(house.root)}:{token.start[0]}: {token.string}"


def sizes_stay_readable(house: House) -> Iterator[str]:
    for module in house:
        lines = len(module.text.splitlines())
        budget = KERNEL_MODULE_LINES if inside(module.name, *KERNELS) else MODULE_LINES
        if lines > budget:
            yield f"{module.name} has {lines} lines, its budget is {budget}"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield f"{module.name}.{node.name} has {length} lines, its budget is {FUNCTION_LINES}"


def exports_are_exact(house: House) -> Iterator[str]:
    """Every public name that a package defines, or imports from us, is in its __all__; fa_serve and its engine have one."""
    for module in house:
        exported = None
        bound = set()
        nodes = list(module.tree.body)
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.If | ast.Try):  # such as `if TYPE_CHECKING`
                nodes += node.body
            elif isinstance(node, ast.ImportFrom) and (node.level or inside(node.module or "", "fa_serve")):
                bound |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                bound.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if ast.unparse(target) == "__all__":
                        exported = [ast.literal_eval(item) for item in node.value.elts]  # type: ignore[union-attr]
                    elif isinstance(target, ast.Name):
                        bound.add(target.id)
        if exported is None:
            if module.name in ("fa_serve", "fa_serve.engine"):
                yield f"{module.name} has no __all__"
            continue
        public = {name for name in bound if not name.startswith("_")}
        yield from (f"{module.name} binds {name}, which is not in __all__" for name in sorted(public - set(exported)))
        yield from (f"{module.name} exports {name} more than once" for name, n in Counter(exported).items() if n > 1)


def packages_are_installed(house: House) -> Iterator[str]:
    listed = set(tomllib.loads((house.root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {module.name for module in house if module.path.name == "__init__.py"}
    yield from (f"{name} is not in pyproject's packages" for name in sorted(present - listed))
    yield from (f"{name} is in pyproject's packages only" for name in sorted(listed - present))


def imports_are_declared(house: House) -> Iterator[str]:
    """In pyproject's dependencies; those of the server and the command line may be in its extras [server] and [otel]."""
    project = tomllib.loads((house.root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    plain, extra = (
        {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in lines}
        for lines in (project["dependencies"], extras["server"] + extras.get("otel", []))
    )
    for module in house:
        declared = plain | extra if inside(module.name, *WITH_EXTRAS) else plain
        for target, relative in module.imports:
            name = target.partition(".")[0]
            ours = relative or name == "fa_serve" or name in sys.stdlib_module_names
            if not ours and COMES_WITH.get(name, name).lower() not in declared:
                yield f"{module.name} imports {name}, which pyproject does not declare for it"


def configuration_is_read(house: House) -> Iterator[str]:
    """Each field of a *Config, *Params or Settings class is read as an attribute somewhere."""
    nodes = [(module, node) for module in house for node in ast.walk(module.tree)]
    read = {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    for module, node in nodes:
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Params", "Settings")):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id not in read:
                    yield f"nothing reads {module.name}.{node.name}.{field.target.id}"


def abstractions_have_children(house: House) -> Iterator[str]:
    classes = [(module.name, node) for module in house for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    bases = Counter(ast.unparse(base).rpartition(".")[2] for _, node in classes for base in node.bases)
    for name, node in classes:
        abstract = any(ast.unparse(base) in ("ABC", "abc.ABC") for base in node.bases)
        if abstract and bases[node.name] < 2:
            yield f"{name}.{node.name} is abstract and has {bases[node.name]} children"


Rule = Callable[[House], Iterator[str]]
PLANTED: list[tuple[Rule, dict[str, str], str]] = [
    (
        imports_point_down,
        {"fa_serve/spec.py": "from fa_serve.api import attention"},
        "fa_serve.spec (floor 0) imports fa_serve.api",
    ),
    (imports_point_down, {"fa_serve/hf.py": "def f():\n    from .engine import Engine"}, "fa_serve.hf (floor 3) imports"),
    (imports_point_down, {"fa_serve/engine/__init__.py": "from ..server import app"}, "fa_serve.engine (floor 4) imports"),
    (imports_point_down, {"fa_serve/api.py": "import fa_serve"}, "fa_serve.api (floor 2) imports fa_serve (floor 3)"),
    (imports_point_down, {"fa_serve/hf.py": "from fa_serve.testing import make_qkv"}, "fa_serve.hf (floor 3) imports"),
    (imports_point_down, {"fa_serve/attic.py": ""}, "fa_serve.attic stands on no floor"),
    (guests_stay_in_their_rooms, {"fa_serve/api.py": "import triton.language as tl"}, "fa_serve.api imports triton.language"),
    (guests_stay_in_their_rooms, {"fa_serve/engine/pages.py": "from transformers import x"}, "pages imports transformers.x"),
    (guests_stay_in_their_rooms, {"fa_serve/__main__.py": "from fastapi import FastAPI"}, "__main__ imports fastapi.FastAPI"),
    (guests_stay_in_their_rooms, {"fa_serve/engine/engine.py": "import asyncio"}, "engine.engine imports asyncio"),
    (guests_stay_in_their_rooms, {"fa_serve/__main__.py": "from server import app"}, "__main__ imports server.app"),
    (
        guests_stay_in_their_rooms,
        {"fa_serve/hf.py": "import importlib\nm = importlib.import_module('triton')"},
        "fa_serve.hf imports triton",
    ),
    (backends_keep_apart, {"fa_serve/backends/sdpa.py": "from .triton import tiles"}, "sdpa imports another backend"),
    (
        backends_keep_apart,
        {"fa_serve/backends/hopper/__init__.py": "from fa_serve.backends.triton.tiles import t"},
        "hopper imports another",
    ),
    (backends_keep_apart, {"fa_serve/hf.py": "from fa_serve.backends.reference import f"}, "fa_serve.hf imports the oracle"),
    (
        kernels_are_reached_through_the_api,
        {"fa_serve/engine/model_runner.py": "import fa_serve.backends"},
        "model_runner imports",
    ),
    (
        kernels_are_reached_through_the_api,
        {"server/app.py": "from fa_serve import hf"},
        "fa_serve.server.app imports fa_serve.hf",
    ),
    (server_imports_itself_relatively, {"server/app.py": "from fa_serve.server import errors"}, "by its full name"),
    (scheduling_needs_no_torch, {"fa_serve/engine/pages.py": "from torch import Tensor"}, "pages gets torch from"),
    (
        scheduling_needs_no_torch,
        {"fa_serve/engine/scheduler.py": "from .request import Request", "fa_serve/engine/request.py": "import torch"},
        "fa_serve.engine.scheduler gets torch from fa_serve.engine.request",
    ),
    (files_open_with_a_docstring, {"fa_serve/engine/__init__.py": "import math"}, "fa_serve.engine says nothing"),
    (files_open_with_a_docstring, {"fa_serve/lost/a.py": '"""A."""'}, "fa_serve/lost has no __init__.py"),
    (names_say_something, {"fa_serve/engine/utils.py": ""}, "fa_serve/engine/utils.py"),
    (names_say_something, {"benchmarks/common.py": ""}, "benchmarks/common.py"),
    (comments_promise_nothing, {"fa_serve/api.py": "x = 1  # TODO: y"}, "fa_serve/api.py:1"),
    (comments_promise_nothing, {"examples/a.py": "\n# FIXME\n"}, "examples/a.py:2"),
    (sizes_stay_readable, {"fa_serve/api.py": "\n" * 521}, "fa_serve.api has 521 lines"),
    (sizes_stay_readable, {"fa_serve/backends/triton/tiles.py": "\n" * 801}, "tiles has 801 lines"),
    (sizes_stay_readable, {"fa_serve/hf.py": "def f():\n" + "    x = 1\n" * 220}, "fa_serve.hf.f has 221 lines"),
    (exports_are_exact, {"fa_serve/__init__.py": "from fa_serve.spec import a, b\n__all__ = ['a']"}, "binds b"),
    (exports_are_exact, {"fa_serve/__init__.py": "a = 1\n__all__ = ['a', 'a']"}, "a more than once"),
    (exports_are_exact, {"fa_serve/engine/__init__.py": "a = 1"}, "fa_serve.engine has no __all__"),
    (packages_are_installed, {"fa_serve/new/__init__.py": ""}, "fa_serve.new is not in pyproject's packages"),
    (packages_are_installed, {"pyproject.toml": "tool.setuptools.packages = ['fa_serve.gone']"}, "fa_serve.gone is in"),
    (imports_are_declared, {"fa_serve/api.py": "import fastapi"}, "fa_serve.api imports fastapi"),
    (imports_are_declared, {"server/app.py": "from numpy.typing import NDArray"}, "fa_serve.server.app imports numpy"),
    (
        configuration_is_read,
        {"fa_serve/engine/config.py": "class EngineConfig:\n    a: int\n    b: int\ndef f(c):\n    c.a = c.b"},
        "nothing reads fa_serve.engine.config.EngineConfig.a",
    ),
    (abstractions_have_children, {"server/app.py": "class A(ABC): ...\nclass B(A): ..."}, "app.A is abstract and has 1"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in PLANTED))
CLEAN = {
    "pyproject.toml": """
        tool.setuptools.packages = [
            "fa_serve", "fa_serve.backends", "fa_serve.backends.triton", "fa_serve.backends.hopper", "fa_serve.engine",
            "fa_serve.server",
        ]
        project.dependencies = ["torch>=2", "triton>=3; sys_platform == 'linux'", "transformers"]
        project.optional-dependencies.server = ["FastAPI[all]>=0.1"]
    """,
    "fa_serve/__init__.py": '"""."""\nfrom fa_serve.api import attention\n__all__ = ["attention"]',
    "fa_serve/spec.py": '"""."""\nimport torch',
    "fa_serve/testing.py": '"""."""\nfrom fa_serve.backends.reference import f',
    "fa_serve/backends/__init__.py": '"""."""\nfrom fa_serve.spec import AttentionSpec',
    "fa_serve/backends/reference.py": '"""."""\nimport torch',
    "fa_serve/backends/triton/__init__.py": '"""."""\nfrom . import tiles, primitives',
    "fa_serve/backends/triton/primitives.py": '"""."""\nimport triton',
    "fa_serve/backends/triton/tiles.py": '"""."""\n' + "\n" * 500,
    "fa_serve/backends/hopper/__init__.py": '"""."""\nfrom fa_serve.backends.triton.primitives import f\nimport triton',
    "fa_serve/api.py": '"""."""\nfrom .backends import select_backend',
    "fa_serve/hf.py": '"""."""\nimport transformers\nfrom fa_serve import api',
    "fa_serve/engine/__init__.py": '"""."""\nfrom ..api import attention_paged\n__all__ = ["attention_paged"]',
    "fa_serve/engine/request.py": '"""."""\nimport math',
    "fa_serve/engine/scheduler.py": '"""."""\nfrom .request import Request\nfrom collections import deque',
    "server/__init__.py": '"""."""\nfrom . import app',
    "server/app.py": '"""."""\nimport fastapi\nimport asyncio\nfrom fa_serve.engine import Engine\nfrom . import errors',
}


def build(root: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(root)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_holds(rule: Rule) -> None:
    assert list(rule(House(ROOT))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clean_house_is_not_blamed(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(build(tmp_path, CLEAN))) == []


@pytest.mark.parametrize(("rule", "files", "complaint"), PLANTED, ids=[f"{rule.__name__}-{what}" for rule, _, what in PLANTED])
def test_a_planted_violation_is_found(rule: Rule, files: dict[str, str], complaint: str, tmp_path: Path) -> None:
    complaints = list(rule(build(tmp_path, CLEAN | files)))
    assert any(complaint in line for line in complaints), complaints


def test_exported_names_exist() -> None:
    for name in ("fa_serve", "fa_serve.engine"):
        module = importlib.import_module(name)
        assert [export for export in module.__all__ if not hasattr(module, export)] == []


def test_fresh_memory_is_poisoned() -> None:
    """By the fixture of conftest.py, which every test gets."""
    assert torch.empty(3).isnan().all()
    assert torch.empty(3, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


ALONE = """
import sys
for name in ("triton", "fastapi", "starlette", "pydantic", "pydantic_settings", "prometheus_client", "uvicorn", "typer"):
    sys.modules[name] = None            # importing it raises ImportError, as if it were not installed
import torch, fa_serve, fa_serve.engine
from fa_serve.backends import load_backend
q, k, v = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
exact = fa_serve.attention(q, k, v, causal=True, backend="reference")
torch.testing.assert_close(fa_serve.attention(q, k, v, causal=True), exact)
print(load_backend("triton"))
"""


def test_a_machine_without_triton_or_the_server_extra_is_served() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "cannot be imported" in done.stdout
