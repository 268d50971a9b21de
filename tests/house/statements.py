"""Sizes and layout of code: a function that a reader holds in the head, and one statement a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from house.source import Allowed, House, Planted, is_kernel

MODULE_LINES = 500
KERNEL_MODULE_LINES = 650
SCRIPT_LINES = 500
FUNCTION_LINES = 80
FORMATTER_SKIPS = 25
"""Tables that the formatter leaves alone, in the whole repository."""

LONG_MODULES = {
    "tests/support/hopper_emulator.py": (550, "one machine: its memory, barriers, copies and products share their state"),
}
"""A module, its own budget, and the reason why it is not split. A module is split because it has two subjects."""

LONG_FUNCTIONS: dict[str, str] = {}
"""module.function, and the reason why it is not split."""


def sizes_stay_readable(house: House) -> Iterator[str]:
    """Kernels are exempt from the length of a function: what they share is not easily passed on."""
    for module in house.files:
        lines = len(module.text.splitlines())
        budget = KERNEL_MODULE_LINES if module.has_kernels else MODULE_LINES
        if module.name not in house.modules:
            budget = SCRIPT_LINES
        budget, _ = LONG_MODULES.get(module.name, (budget, ""))
        if lines > budget:
            yield f"{module.name} has {lines} lines, its budget is {budget}"
        for function in module.functions:
            length = (function.end_lineno or 0) - function.lineno + 1
            name = f"{module.name}.{function.name}"
            if length > FUNCTION_LINES and not is_kernel(function) and name not in LONG_FUNCTIONS:
                yield f"{name} has {length} lines, its budget is {FUNCTION_LINES}"


def a_table_is_what_the_formatter_skips(house: House) -> Iterator[str]:
    found = []
    for module in house.files:
        for token in module.comments("fmt: skip", "fmt: off"):
            if "fmt: skip" in token.string:
                found.append(f"{module.name}:{token.start[0]}")
            if "fmt: off" in token.string:
                yield f"{module.name}:{token.start[0]} turns the formatter off"
    if len(found) > FORMATTER_SKIPS:
        yield f"{len(found)} lines are kept from the formatter, {FORMATTER_SKIPS} may be: {' '.join(found)}"


def _unpacks_a_literal(statement: ast.stmt) -> bool:
    """Whether it is `a, b = x, y` where two assignments would do: the right side reads nothing that the left side sets."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Tuple):
        return False
    targets = [target for target in statement.targets if isinstance(target, ast.Tuple)]
    if not targets or any(isinstance(element, ast.Starred) for element in statement.value.elts):
        return False
    assigned = {ast.unparse(element) for target in targets for element in target.elts}
    read = {ast.unparse(node) for node in ast.walk(statement.value) if isinstance(node, ast.expr)}
    return not assigned & read


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the statements inside it."""
    nodes = [child for child in ast.iter_child_nodes(statement) if not isinstance(child, ast.stmt)]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def one_statement_a_line(house: House) -> Iterator[str]:
    """A stub, `def f(self) -> int: ...`, stands on one line; nothing else shares its line with another statement."""
    for module in house.files:
        last = 0
        for statement in module.statements:
            place = f"{module.name}:{statement.lineno}"
            if statement.lineno == last and ast.unparse(statement) != "...":
                yield f"{place} has a second statement"
            last = statement.lineno
            if _unpacks_a_literal(statement):
                yield f"{place} assigns several values: {ast.unparse(statement)}"


def a_statement_names_one_value(house: House) -> Iterator[str]:
    """At most one `:=` in a statement; what it names is then plain to see."""
    for module in house.files:
        for statement in module.statements if module.text.count(":=") > 1 else ():
            count = sum(isinstance(node, ast.NamedExpr) for node in _own_nodes(statement))
            if count > 1:
                yield f"{module.name}:{statement.lineno} has {count} :="


def comments_promise_nothing(house: House) -> Iterator[str]:
    for module in house.files:
        for token in module.comments("TODO", "FIXME", "XXX", "HACK"):
            yield f"{module.name}:{token.start[0]}: {token.string}"


PLANTED: list[Planted] = [
    (sizes_stay_readable, {"fa_serve/api.py": "\n" * 501}, "fa_serve.api has 501 lines, its budget is 500"),
    (sizes_stay_readable, {"fa_serve/backends/triton/pages.py": "\n" * 501}, "pages has 501 lines"),
    (
        sizes_stay_readable,
        {"fa_serve/ops/norms.py": "@triton.jit(debug=True)\ndef f(): ...\n" + "\n" * 649},
        "fa_serve.ops.norms has 651 lines, its budget is 650",
    ),
    (sizes_stay_readable, {"benchmarks/a.py": "\n" * 501}, "benchmarks/a.py has 501 lines"),
    (sizes_stay_readable, {"fa_serve/hf.py": "def f():\n" + "    x = 1\n" * 80}, "fa_serve.hf.f has 81 lines"),
    (sizes_stay_readable, {"tests/a.py": "async def f():\n" + "    x = 1\n" * 80}, "tests/a.py.f has 81 lines"),
    (
        a_table_is_what_the_formatter_skips,
        {"fa_serve/api.py": "x = 1  # fmt: skip\n" * 20, "tests/a.py": "x = 1  # fmt: skip\n" * 6},
        "26 lines are kept from the formatter, 25 may be",
    ),
    (a_table_is_what_the_formatter_skips, {"examples/a.py": "# fmt: off"}, "examples/a.py:1 turns the formatter off"),
    (one_statement_a_line, {"fa_serve/api.py": "x = 1; y = 2"}, "fa_serve.api:1 has a second statement"),
    (one_statement_a_line, {"fa_serve/api.py": "def f(x):\n    if x: return"}, "fa_serve.api:2 has a second statement"),
    (one_statement_a_line, {"fa_serve/api.py": "\na, b = 1, f(2)"}, "fa_serve.api:2 assigns several values: a, b"),
    (one_statement_a_line, {"fa_serve/api.py": "self.a, b[0] = c, self.d"}, "fa_serve.api:1 assigns several"),
    (
        a_statement_names_one_value,
        {"fa_serve/api.py": "def f():\n    if (a := g()) and (b := h(a)):\n        return b"},
        "fa_serve.api:2 has 2 :=",
    ),
    (comments_promise_nothing, {"fa_serve/api.py": "x = 1  # TODO: y"}, "fa_serve.api:1"),
    (comments_promise_nothing, {"examples/a.py": "\n# FIXME\n"}, "examples/a.py:2"),
]

ALLOWED: list[Allowed] = [
    (sizes_stay_readable, {"fa_serve/ops/norms.py": "@gluon.jit\ndef f():\n" + "    x = 1\n" * 500}),
    (one_statement_a_line, {"fa_serve/api.py": "a, b = b, a\nself.n, x[i] = x[i], self.n + 1\na, b = a[0], 1\nq, k = f(x)"}),
    (one_statement_a_line, {"fa_serve/api.py": "class A(Protocol):\n    def f(self) -> int: ...\n"}),
    (a_statement_names_one_value, {"fa_serve/api.py": "if a := f():\n    if b := g(a):\n        x = (c := b) + c"}),
]
