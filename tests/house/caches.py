"""What grows by calls has a bound.

Checked are decorators of functools, and the containers that outlive a call: those of a module, those of a class body, and
classes of ours that are containers themselves. A container may grow in a function that compares its length with something,
as `PlanTable.add` does, or when it is a `deque` with `maxlen`, or when it is weak: its entries then live as long as what they
describe. Not checked are the attributes of an object, which end with it, and what a caller does with what it was given.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from house.source import Allowed, Function, House, Module, Planted, inside

CONTAINERS = ("dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "UserDict", "UserList")
GROWING = ("append", "appendleft", "add", "extend", "insert", "setdefault", "update")

UNBOUNDED: dict[str, str] = {}
"""module.name of a container or function, and why it needs no bound."""


def caches_of_functools_are_bounded(house: House) -> Iterator[str]:
    """`lru_cache` states a positive maxsize; `cache` is for functions without arguments, which keep one value."""
    for module in house:
        decorators = set()
        for function in module.functions:
            for decorator in function.decorator_list:
                decorators.add(decorator)
                kept = ast.unparse(decorator)
                takes = function.args
                arguments = [*takes.posonlyargs, *takes.args, *takes.kwonlyargs, takes.vararg, takes.kwarg]
                no_bound = _is_functools(kept, "cache") and any(arguments)
                no_bound |= _is_functools(kept, "lru_cache")
                no_bound |= isinstance(decorator, ast.Call) and not _states_a_size(decorator)
                if no_bound and f"{module.name}.{function.name}" not in UNBOUNDED:
                    yield f"{module.name}.{function.name} has @{kept}, which keeps any number of values"
        for node in module.nodes:
            if isinstance(node, ast.Call) and node not in decorators:
                if _is_functools(ast.unparse(node.func), "cache") and "functools.cache" in dict(module.imports):
                    yield f"{module.name}:{node.lineno} keeps any number of values: {ast.unparse(node)}"
                elif not _states_a_size(node):
                    yield f"{module.name}:{node.lineno} states no maxsize: {ast.unparse(node)}"


def _is_functools(name: str, function: str) -> bool:
    return name in (function, f"functools.{function}")


def _states_a_size(call: ast.Call) -> bool:
    """Whether a call is none of `lru_cache`, or gives it a number, or the name of one in capitals."""
    if not _is_functools(ast.unparse(call.func), "lru_cache"):
        return True
    sizes = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "maxsize")]
    if not sizes:
        return False
    size = sizes[0]
    if isinstance(size, ast.Constant):
        return isinstance(size.value, int) and size.value > 0
    return ast.unparse(size).rpartition(".")[2].isupper()


@dataclass(frozen=True)
class Growth:
    """A place where a function makes something longer."""

    receiver: str  # as it is written: TABLE, self.table, plan.TABLE
    node: ast.AST
    functions: tuple[Function, ...]  # around it, the outermost first
    class_: ast.ClassDef | None  # around it


def _growths(module: Module) -> Iterator[Growth]:
    classes = [node for node in module.nodes if isinstance(node, ast.ClassDef)]
    for node in module.nodes:
        for receiver in _grown(node):
            functions = tuple(function for function in module.functions if _is_around(function, node))
            if functions:
                around = [class_ for class_ in classes if _is_around(class_, node)]
                yield Growth(ast.unparse(receiver), node, functions, around[-1] if around else None)


def _is_around(block: Function | ast.ClassDef, node: ast.AST) -> bool:
    """By lines, since nodes do not know what they are in. To walk down each tree again would take twice as long."""
    return block.lineno <= node.lineno <= (block.end_lineno or 0)  # type: ignore[attr-defined]


def _grown(node: ast.AST) -> Iterator[ast.expr]:
    """What the node makes longer: TABLE in TABLE[key] = x, TABLE.append(x), TABLE += x."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROWING:
        yield node.func.value
    if isinstance(node, ast.AugAssign) and not isinstance(node.target, ast.Subscript):
        yield node.target
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for element in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(element, ast.Subscript) and not isinstance(element.slice, ast.Slice):
                    yield element.value


def _container_classes(house: House) -> dict[str, ast.ClassDef]:
    """The classes of ours that are containers, by name."""
    found = {}
    for module in house:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and any(_plain_name(base) in CONTAINERS for base in node.bases):
                found[node.name] = node
    return found


def _plain_name(node: ast.expr) -> str:
    """OrderedDict of collections.OrderedDict[str, int]."""
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def _values(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """The values that the statements of a module or class give to names."""
    found = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            found |= {target.id: statement.value for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            found[statement.target.id] = statement.value
    return found


def _is_container(value: ast.expr | None, ours: dict[str, ast.ClassDef]) -> bool:
    if isinstance(value, ast.Call):
        name = _plain_name(value.func)
        if name == "deque" and any(keyword.arg == "maxlen" for keyword in value.keywords):
            return False
        return name in CONTAINERS or name in ours
    return isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp)


@cache
def _local_names(function: Function) -> set[str]:
    """Names that belong to the function: its parameters, and what it assigns without `global`."""
    takes = function.args
    names = {a.arg for a in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs, takes.vararg, takes.kwarg) if a is not None}
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    return names | (stored - shared)


def _lasting_value(growth: Growth, module: Module, house: House) -> ast.expr | None:
    """The value of a module or of a class body that grows, None if it is neither."""
    base, _, attribute = growth.receiver.partition(".")
    if not base.isidentifier() or (attribute and not attribute.isidentifier()):
        return None
    if attribute:
        if growth.class_ is not None and base in ("self", "cls", growth.class_.name):
            return _values(growth.class_.body).get(attribute)
        classes = {node.name: node for node in module.tree.body if isinstance(node, ast.ClassDef)}
        if base in classes:
            return _values(classes[base].body).get(attribute)
    elif any(base in _local_names(function) for function in growth.functions):
        return None
    else:
        here = _values(module.tree.body)
        if base in here:
            return here[base]
    for target, _ in module.imports:  # from fa_serve.backends.calls import PLANS, or `plan`
        if target.rpartition(".")[2] == base:
            owner = house.owner(target)
            name = attribute or base
            if owner and inside(target, owner):
                return _values(house.modules[owner].tree.body).get(name)
    return None


@cache
def _compared_lengths(function: Function) -> frozenset[str]:
    """The lengths that the function compares, such as `len(TABLE)`. A function that makes many things longer is read once."""
    comparisons = [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
    parts = [part for node in comparisons for part in (node.left, *node.comparators) if isinstance(part, ast.Call)]
    return frozenset(ast.unparse(part) for part in parts if isinstance(part.func, ast.Name) and part.func.id == "len")


def containers_have_bounds(house: House) -> Iterator[str]:
    ours = _container_classes(house)
    for module in house:
        for growth in _growths(module):
            if any(f"len({growth.receiver})" in _compared_lengths(function) for function in growth.functions):
                continue
            method = growth.node.func.attr if isinstance(growth.node, ast.Call) else "__setitem__"  # type: ignore[attr-defined]
            if growth.receiver in ("self", "super()"):
                lasting = growth.class_ is not None and growth.class_.name in ours
            else:
                value = _lasting_value(growth, module, house)
                lasting = _is_container(value, ours)
                if lasting and isinstance(value, ast.Call) and _plain_name(value.func) in ours:
                    methods = {node.name for node in ours[_plain_name(value.func)].body if isinstance(node, Function)}
                    lasting = method not in methods  # its own methods are checked where they stand
            if lasting and f"{module.name}.{growth.receiver}" not in UNBOUNDED:
                yield f"{module.name}:{growth.node.lineno} lets {growth.receiver} grow without a bound"  # type: ignore[attr-defined]


PLANTED: list[Planted] = [
    (
        caches_of_functools_are_bounded,
        {"fa_serve/api.py": "from functools import cache\n@cache\ndef f(x): ..."},
        "fa_serve.api.f has @cache",
    ),
    (
        caches_of_functools_are_bounded,
        {"fa_serve/api.py": "import functools\n@functools.lru_cache\ndef f(): ..."},
        "f has @functools.lru_cache",
    ),
    (
        caches_of_functools_are_bounded,
        {"server/app.py": "@lru_cache(maxsize=None)\ndef f(x): ..."},
        "f has @lru_cache(maxsize=None)",
    ),
    (caches_of_functools_are_bounded, {"server/app.py": "@lru_cache()\ndef f(x): ..."}, "f has @lru_cache()"),
    (
        caches_of_functools_are_bounded,
        {"fa_serve/api.py": "from functools import cache\nplan = cache(decide)"},
        "fa_serve.api:2 keeps any number of values: cache(decide)",
    ),
    (
        caches_of_functools_are_bounded,
        {"fa_serve/api.py": "plan = lru_cache(None)(decide)"},
        "fa_serve.api:1 states no maxsize",
    ),
    (containers_have_bounds, {"fa_serve/api.py": "SEEN = {}\ndef f(x):\n    SEEN[x] = 1"}, "fa_serve.api:3 lets SEEN grow"),
    (containers_have_bounds, {"fa_serve/api.py": "SEEN: list[int] = []\ndef f(x):\n    SEEN.append(x)"}, "lets SEEN grow"),
    (containers_have_bounds, {"fa_serve/api.py": "SEEN = set[int]()\ndef f(x):\n    SEEN.add(x)"}, "lets SEEN grow"),
    (containers_have_bounds, {"fa_serve/api.py": "SEEN = {}\ndef f(x):\n    SEEN.setdefault(x, 1)"}, "lets SEEN grow"),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "SEEN = []\ndef f(x):\n    def g():\n        SEEN.extend(x)\n    return g"},
        "fa_serve.api:4 lets SEEN grow",
    ),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "SEEN = ()\ndef f(x):\n    global SEEN2\n    SEEN2 += [x]\nSEEN2 = []"},
        "fa_serve.api:4 lets SEEN2 grow",
    ),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "class A:\n    seen = {}\n    def f(self, x):\n        self.seen[x] = 1"},
        "lets self.seen grow",
    ),
    (
        containers_have_bounds,
        {"fa_serve/spec.py": "SEEN = {}", "fa_serve/api.py": "from .spec import SEEN\ndef f(x):\n    SEEN[x] = 1"},
        "fa_serve.api:3 lets SEEN grow",
    ),
    (
        containers_have_bounds,
        {"fa_serve/spec.py": "SEEN = {}", "fa_serve/api.py": "from fa_serve import spec\ndef f(x):\n    spec.SEEN[x] = 1"},
        "fa_serve.api:3 lets spec.SEEN grow",
    ),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "class Table(dict[str, int]):\n    def keep(self, x):\n        return self.setdefault(x, 1)"},
        "fa_serve.api:3 lets self grow",
    ),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "class Table(dict[str, int]): ...\nTABLE = Table()\ndef f(x):\n    TABLE[x] = 1"},
        "fa_serve.api:4 lets TABLE grow",
    ),
]

ALLOWED: list[Allowed] = [
    (caches_of_functools_are_bounded, {"fa_serve/api.py": "from functools import cache\n@cache\ndef f(): ..."}),
    (caches_of_functools_are_bounded, {"fa_serve/api.py": "@lru_cache(maxsize=64)\ndef f(x): ..."}),
    (caches_of_functools_are_bounded, {"fa_serve/api.py": "@functools.lru_cache(spec.MAX_PLANS)\ndef f(x): ..."}),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "A = {}\ndef f(x):\n    if len(A) >= 9:\n        A.clear()\n    A[x] = 1\n    x['a'] = 2"},
    ),
    (containers_have_bounds, {"fa_serve/api.py": "A = []\ndef f(A, x):\n    A.append(x)\ndef g(x):\n    A = {}\n    A[x] = 1"}),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "A = deque(maxlen=9)\nB = WeakSet()\ndef f(x):\n    A.append(x)\n    B.add(x)"},
    ),
    (containers_have_bounds, {"fa_serve/api.py": "A = {}\nfor x in range(9):\n    A[x] = 1"}),
    (
        containers_have_bounds,
        {
            "fa_serve/backends/calls.py": "class Table(dict[int, int]):\n    def add(self, x):\n        if len(self) > 9:\n"
            "            self.clear()\n        self[x] = 1\nTABLE = Table()",
            "fa_serve/api.py": "from fa_serve.backends.calls import TABLE\ndef f(x):\n    TABLE.add(x)",
        },
    ),
    (
        containers_have_bounds,
        {"fa_serve/api.py": "class A:\n    def __init__(self):\n        self.a = {}\n    def f(self):\n        self.a[1] = 1"},
    ),
]
