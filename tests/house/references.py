"""Docstrings and comments lead to what exists: a dotted name in backquotes is a module, or what a module defines."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from house.source import Allowed, House, Module, Planted

NAMED = re.compile(r"(?<!`)`([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")
FOREIGN = frozenset(
    [
        "loop.create_server",  # of asyncio
        "layers.rotary",  # of flash-attn
        "mma.sync",  # an instruction
        "model.generate",  # of transformers
        "ops.triton.rotary",  # of flash-attn
    ]
)


def references_resolve(house: House) -> Iterator[str]:
    """`decode.kernel.DecodeVariant` is found, whatever is moved or renamed. The first part may be a variable of the file."""
    scripts = {Path(script.name).stem for script in house.scripts}
    foreign = sys.stdlib_module_names | {name.split(".")[0] for module in house for name, _ in module.imports}
    for module in house:
        for match in NAMED.finditer(module.text):
            name = match[1]
            first, _, rest = name.partition(".")
            is_ours = first == "fa_serve" or first not in foreign
            if not is_ours or name in FOREIGN or rest in ("py", "md", "json") or first in scripts:
                continue
            if first not in _identifiers(module) and not _resolves(name, house):
                line = module.text.count("\n", 0, match.start()) + 1
                yield f"{module.name}:{line} names `{name}`, which is no module and is defined in none"


@cache
def _identifiers(module: Module) -> frozenset[str]:
    """The variables and parameters of a file, whose attributes its comments name."""
    names = [node.id for node in module.nodes if isinstance(node, ast.Name)]
    names += [node.arg for node in module.nodes if isinstance(node, ast.arg)]
    names += [node.attr for node in module.nodes if isinstance(node, ast.Attribute)]
    return frozenset(names)


@cache
def _defined(module: Module) -> frozenset[str]:
    """What a module defines or imports: its names, and the names of its classes' members after a dot."""
    names: list[str] = []
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        if isinstance(node, ast.ClassDef):
            names += [f"{node.name}.{member}" for member in _members(node)]
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return frozenset(names)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name
        elif isinstance(child, ast.AnnAssign | ast.Assign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
            yield from (target.attr for target in targets if isinstance(target, ast.Attribute))


def _resolves(name: str, house: House) -> bool:
    """Whether the name is a module, with as many of its packages as are named, or something that such a module defines."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        prefix = ".".join(parts[:count])
        rest = ".".join(parts[count:])
        for module in house:
            if ("." + module.name).endswith("." + prefix) and (not rest or rest in _defined(module)):
                return True
    return False


PLANTED: list[Planted] = [
    (
        references_resolve,
        {"fa_serve/backends/triton/tiles.py": '"""See `prefill_kernel.attn_fwd`."""'},
        "fa_serve.backends.triton.tiles:1 names `prefill_kernel.attn_fwd`",
    ),
    (
        references_resolve,
        {"fa_serve/spec.py": "x = 1\n# as in `triton.primitives.f`\ny = 2\n# as in `primitives.gone`"},
        "fa_serve.spec:4 names `primitives.gone`",
    ),
    (
        references_resolve,
        {"fa_serve/api.py": '"""`spec.Spec.gone` says."""', "fa_serve/spec.py": "class Spec:\n    layout: str"},
        "fa_serve.api:1 names `spec.Spec.gone`",
    ),
]

ALLOWED: list[Allowed] = [
    (
        references_resolve,
        {
            "fa_serve/api.py": '"""`spec.Spec.layout`, `fa_serve.spec`, `spec.py`, `torch.compile`."""',
            "fa_serve/hf.py": "def f(given):\n    # `given.x` is an attribute\n    import transformers",
            "fa_serve/spec.py": "class Spec:\n    layout: str",
        },
    ),
]
