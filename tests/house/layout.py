"""Files and names: what a file is called, what a package exports and installs, and where the test of a module stands."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator

from house.source import Allowed, House, Module, Planted, inside

SMALL = 80
"""Lines. A module up to this size may be tested through the modules that use it."""

TEST_FOLDERS = {"flash_attn": "flash_attention", "vllm": "vllm_plugin", "sglang": "sglang_plugin"}
"""Packages whose tests are in a folder of another name. tests/ is on the path, so `import vllm` would find tests/vllm."""

COMMANDS = ("fa_serve.doctor", "fa_serve.flags", "fa_serve.info_tables", "fa_serve.__main__")
"""The modules of the command line, which the server extra installs."""
TESTED_BY = {
    "fa_serve": ("tests/test_import.py", "the tests start fresh interpreters, which is what importing is about"),
    "fa_serve.__main__": ("tests/test_cli.py", "the commands are run as a user runs them"),
    "fa_serve.flags": ("tests/test_cli.py", "flags are given, and help is read, as a user does"),
    "fa_serve.backends.triton.primitives": (
        "tests/backends/triton/prefill/test_plan_interpreted.py",
        "device functions run inside of a kernel only",
    ),
    "fa_serve.backends.triton.backward.kernels": (
        "tests/backends/triton/backward/test_plan_interpreted.py",
        "the plans beside them launch them",
    ),
    "fa_serve.ops.linear_attention.channel_gradients": (
        "tests/ops/linear_attention/test_pieces_backward_interpreted.py",
        "gates by channel and by head have the same cases",
    ),
    "fa_serve.ops.linear_attention.tails": (
        "tests/ops/linear_attention/test_few_rows_interpreted.py",
        "the kernel of few rows calls its device functions",
    ),
    "fa_serve.backends.triton.prefill.kernel": (
        "tests/backends/triton/prefill/test_plan_interpreted.py",
        "the plans beside it launch it",
    ),
    "fa_serve.backends.triton.tree.kernel": (
        "tests/backends/triton/tree/test_plan_interpreted.py",
        "the module tree.plan launches its kernels",
    ),
    "fa_serve.backends.triton.decode.kernel": (
        "tests/backends/triton/decode/test_plan_interpreted.py",
        "the plans beside it launch it",
    ),
    "fa_serve.backends.triton.latent.kernel": (
        "tests/backends/triton/latent/test_plan_interpreted.py",
        "the plans beside it launch it",
    ),
    "fa_serve.backends.triton.block_sparse.kernel": (
        "tests/backends/triton/block_sparse/test_plan_interpreted.py",
        "the plans beside it launch it",
    ),
    "fa_serve.backends.triton.row_statistics": (
        "tests/backends/triton/backward/test_plan_interpreted.py",
        "every backward pass begins with them",
    ),
    "fa_serve.backends.triton.splits": (
        "tests/backends/triton/decode/test_plan_interpreted.py",
        "device functions run inside of a kernel only, and splits are combined after decoding only",
    ),
    "fa_serve.engine.process.child": (
        "tests/engine/process/test_parent.py",
        "it runs in the process that its parent starts, and ends it",
    ),
    "fa_serve.ops.collectives.primitives": (
        "tests/ops/collectives/test_one_shot_interpreted.py",
        "device functions run inside of a kernel only",
    ),
    "fa_serve.ops.moe.primitives": (
        "tests/ops/moe/test_run_interpreted.py",
        "device functions run inside of a kernel only, and its other functions describe weights to these kernels",
    ),
    "fa_serve.ops.moe.rows": (
        "tests/ops/moe/test_run_interpreted.py",
        "both of its kernels compute the experts of a call, as those of many tokens do",
    ),
    "fa_serve.ops.products.quantised.primitives": (
        "tests/ops/products/quantised/test_unpack_interpreted.py",
        "device functions run inside of a kernel only, and its other functions describe weights to these kernels",
    ),
    "fa_serve.sandbox.trial_process": (
        "tests/sandbox/test_trials.py",
        "it is a script that only trials starts, and its limits end its process",
    ),
    "fa_serve.server.ray.cluster": ("tests/server/test_ray.py", "a cluster takes seconds to start, so all tests share one"),
    "fa_serve.backends.hopper.backward.types": (
        "tests/backends/hopper/backward/test_plan.py",
        "the types of arguments exist inside of a kernel only",
    ),
    "fa_serve.backends.hopper.backward.wide.types": (
        "tests/backends/hopper/backward/wide/test_kernel.py",
        "the types of arguments exist inside of a kernel only",
    ),
    "fa_serve.backends.hopper.latent.types": (
        "tests/backends/hopper/latent/test_plan.py",
        "the types of arguments exist inside of a kernel only",
    ),
    "fa_serve.backends.hopper.forward.types": (
        "tests/backends/hopper/forward/test_plan.py",
        "the types of arguments exist inside of a kernel only",
    ),
}
"""Modules whose test has another name: (its path, the reason)."""

ADAPTERS = {
    "diffusers": "fa_serve.diffusers",
    "ray": "fa_serve.server.ray",
    "sglang": "fa_serve.sglang",
    "vllm": "fa_serve.vllm",
}
"""Packages with an extra of their name, and the room that may import them."""

COMES_WITH = {"PIL": "pillow", "starlette": "fastapi", "pydantic_core": "pydantic", "opentelemetry": "opentelemetry_sdk"}
"""Import names, and the declared dependency that installs them."""


def files_open_with_a_docstring(house: House) -> Iterator[str]:
    for module in house.files:
        if not ast.get_docstring(module.tree):
            yield f"{module.name} has no docstring"
    for folder in {path.parent for module in house for path in module.path.parent.glob("*.py")}:
        if not (folder / "__init__.py").exists():
            yield f"{folder.relative_to(house.root)} has no __init__.py"


def names_say_something(house: House) -> Iterator[str]:
    for module in house.files:
        if module.path.stem in ("utils", "util", "common", "helpers", "misc"):
            yield f"{module.path.relative_to(house.root)} could hold anything"


def _has_logic(module: Module) -> bool:
    lines = len(module.text.splitlines())
    return lines > SMALL and bool(module.functions)


def tests_mirror_the_source(house: House) -> Iterator[str]:
    """The test of fa_serve/hf/info.py is tests/hf/test_info.py or tests/hf/test_info_*.py; of a package, test_<package>."""
    for module in house:
        if not _has_logic(module):
            continue
        if module.name in TESTED_BY:
            path, _ = TESTED_BY[module.name]
            if not (house.root / path).exists():
                yield f"{module.name} has no {path}"
            continue
        *rooms, name = module.name.split(".")[1:]
        rooms = [TEST_FOLDERS.get(room, room) for room in rooms]
        folders = [house.root.joinpath("tests", *rooms)]
        if module.is_package:
            folders.append(house.root.joinpath("tests", *rooms, TEST_FOLDERS.get(name, name)))
        tests = [path for folder in folders for path in folder.glob(f"test_{name}*.py")]
        if not any(re.fullmatch(rf"test_{name}(_\w+)?", path.stem) for path in tests):
            yield f"{module.name} has no {folders[0].relative_to(house.root).as_posix()}/test_{name}.py"


def _bound_names(module: Module) -> tuple[set[str], list[str] | None]:
    """The names that a module defines or imports from us at its top level, and its __all__."""
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
    return bound, exported


def exports_are_exact(house: House) -> Iterator[str]:
    """An __all__ names what exists, once. fa_serve and its engine have one, with every public name that they bind."""
    for module in house:
        bound, exported = _bound_names(module)
        if module.name in ("fa_serve", "fa_serve.engine"):
            if exported is None:
                yield f"{module.name} has no __all__"
                continue
            public = {name for name in bound if not name.startswith("_")}
            yield from (f"{module.name} binds {name}, which is not in __all__" for name in sorted(public - set(exported)))
        for name, count in Counter(exported or ()).items():
            if count > 1:
                yield f"{module.name} exports {name} more than once"
            if name not in bound:
                yield f"{module.name} exports {name}, which it does not bind"


def packages_are_installed(house: House) -> Iterator[str]:
    listed = set(tomllib.loads((house.root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {module.name for module in house if module.is_package}
    yield from (f"{name} is not in pyproject's packages" for name in sorted(present - listed))
    yield from (f"{name} is in pyproject's packages only" for name in sorted(listed - present))


def versions_agree(house: House) -> Iterator[str]:
    """The version in pyproject.toml is `fa_serve.__version__`."""
    declared = tomllib.loads((house.root / "pyproject.toml").read_text())["project"]["version"]
    found = re.search(r'^__version__ = "(.+)"$', house.modules["fa_serve"].text, re.MULTILINE)
    if found is None or found[1] != declared:
        yield f"pyproject.toml says version {declared}, fa_serve.__version__ is {found and found[1]}"


def imports_are_declared(house: House) -> Iterator[str]:
    """In pyproject's dependencies; those of the server, the client and the command line may be in its extras."""
    project = tomllib.loads((house.root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    plain, extra = (
        {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in lines}
        for lines in (project["dependencies"], extras["server"] + extras.get("otel", []))
    )
    for module in house:
        declared = plain
        if inside(module.name, "fa_serve.server", "fa_serve.client", *COMMANDS):
            declared = plain | extra
        declared |= {host for host, room in ADAPTERS.items() if host in extras and inside(module.name, room)}
        for target, relative in module.imports:
            name = target.partition(".")[0]
            ours = relative or name == "fa_serve" or name in sys.stdlib_module_names
            if not ours and COMES_WITH.get(name, name).lower() not in declared:
                yield f"{module.name} imports {name}, which pyproject does not declare for it"


def configuration_is_read(house: House) -> Iterator[str]:
    """Each field of a *Config, *Params or Settings class is read as an attribute somewhere."""
    nodes = [(module, node) for module in house for node in module.nodes]
    read = {node.attr for _, node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    for module, node in nodes:
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Params", "Settings")):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id not in read:
                    yield f"nothing reads {module.name}.{node.name}.{field.target.id}"


def abstractions_have_children(house: House) -> Iterator[str]:
    classes = [(module.name, node) for module in house for node in module.nodes if isinstance(node, ast.ClassDef)]
    bases = Counter(ast.unparse(base).rpartition(".")[2] for _, node in classes for base in node.bases)
    for name, node in classes:
        abstract = any(ast.unparse(base) in ("ABC", "abc.ABC") for base in node.bases)
        if abstract and bases[node.name] < 2:
            yield f"{name}.{node.name} is abstract and has {bases[node.name]} children"


KERNEL_ROOMS = ("fa_serve.backends", "fa_serve.launching", "fa_serve.ops")
SAME_EVERYWHERE = {"log": "the logger of its module"}
"""Identifiers that may be defined in several modules, each with its meaning."""


def _defined_names(module: Module) -> Iterator[str]:
    """The public names that a module defines at its top level; names that it imports are another module's."""
    for node in module.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in dict.fromkeys(names) if not name.startswith("_"))


def identifiers_of_kernel_rooms_are_unique(house: House) -> Iterator[str]:
    """A public identifier that is defined in a kernel room is defined nowhere else, so a search finds one meaning."""
    found: dict[str, list[str]] = {}
    for module in house:
        for name in set(_defined_names(module)) - set(SAME_EVERYWHERE):
            found.setdefault(name, []).append(module.name)
    for name, modules in sorted(found.items()):
        if len(modules) > 1 and any(inside(module, room) for module in modules for room in KERNEL_ROOMS):
            yield f"{name} is defined in {', '.join(sorted(modules))}"


LONG = '"""."""\ndef f():\n    return 1\n' + "x = 1\n" * SMALL

ALLOWED: list[Allowed] = [
    (identifiers_of_kernel_rooms_are_unique, {"fa_serve/ops/a.py": "log = 1\n_f = 2", "fa_serve/ops/b.py": "log = 1\n_f = 2"}),
    (
        identifiers_of_kernel_rooms_are_unique,
        {"fa_serve/ops/a.py": "from fa_serve.ops.b import f", "fa_serve/ops/b.py": "def f(): ..."},
    ),
    (identifiers_of_kernel_rooms_are_unique, {"fa_serve/engine/a.py": "F = 1", "server/b.py": "F = 2"}),
]
PLANTED: list[Planted] = [
    (files_open_with_a_docstring, {"fa_serve/engine/__init__.py": "import math"}, "fa_serve.engine has no docstring"),
    (files_open_with_a_docstring, {"benchmarks/a.py": "import math"}, "benchmarks/a.py has no docstring"),
    (files_open_with_a_docstring, {"fa_serve/lost/a.py": '"""A."""'}, "fa_serve/lost has no __init__.py"),
    (names_say_something, {"fa_serve/engine/utils.py": ""}, "fa_serve/engine/utils.py"),
    (names_say_something, {"benchmarks/common.py": ""}, "benchmarks/common.py"),
    (tests_mirror_the_source, {"fa_serve/hf.py": LONG}, "fa_serve.hf has no tests/test_hf.py"),
    (tests_mirror_the_source, {"fa_serve/engine/cache/pages.py": LONG}, "pages has no tests/engine/cache/test_pages.py"),
    (
        tests_mirror_the_source,
        {"fa_serve/flash_attn/rotary.py": LONG, "tests/flash_attn/test_rotary.py": ""},
        "fa_serve.flash_attn.rotary has no tests/flash_attention/test_rotary.py",
    ),
    (
        tests_mirror_the_source,
        {"server/app.py": LONG, "tests/server/test_application.py": ""},
        "app has no tests/server/test_app.py",
    ),
    (tests_mirror_the_source, {"fa_serve/ops/__init__.py": LONG}, "fa_serve.ops has no tests/test_ops.py"),
    (tests_mirror_the_source, {"fa_serve/__main__.py": LONG}, "fa_serve.__main__ has no tests/test_cli.py"),
    (exports_are_exact, {"fa_serve/__init__.py": "from fa_serve.spec import a, b\n__all__ = ['a']"}, "binds b"),
    (exports_are_exact, {"fa_serve/__init__.py": "a = 1\n__all__ = ['a', 'a']"}, "a more than once"),
    (exports_are_exact, {"fa_serve/engine/__init__.py": "a = 1"}, "fa_serve.engine has no __all__"),
    (
        exports_are_exact,
        {"fa_serve/ops/__init__.py": "a = 1\n__all__ = ['b']"},
        "fa_serve.ops exports b, which it does not bind",
    ),
    (packages_are_installed, {"fa_serve/new/__init__.py": ""}, "fa_serve.new is not in pyproject's packages"),
    (packages_are_installed, {"pyproject.toml": "tool.setuptools.packages = ['fa_serve.gone']"}, "fa_serve.gone is in"),
    (versions_agree, {"fa_serve/__init__.py": '__version__ = "1.2.4"'}, "version 1.2.3, fa_serve.__version__ is 1.2.4"),
    (versions_agree, {"fa_serve/__init__.py": ""}, "fa_serve.__version__ is None"),
    (imports_are_declared, {"fa_serve/api.py": "import fastapi"}, "fa_serve.api imports fastapi"),
    (imports_are_declared, {"fa_serve/engine/engine.py": "import httpx"}, "engine.engine imports httpx"),
    (imports_are_declared, {"fa_serve/vllm/__init__.py": "import vllm"}, "fa_serve.vllm imports vllm"),
    (imports_are_declared, {"server/app.py": "from numpy.typing import NDArray"}, "fa_serve.server.app imports numpy"),
    (
        configuration_is_read,
        {"fa_serve/engine/config.py": "class EngineConfig:\n    a: int\n    b: int\ndef f(c):\n    c.a = c.b"},
        "nothing reads fa_serve.engine.config.EngineConfig.a",
    ),
    (
        identifiers_of_kernel_rooms_are_unique,
        {"fa_serve/backends/triton/rows.py": "def tile(): ...", "fa_serve/ops/rows.py": "class tile: ..."},
        "tile is defined in fa_serve.backends.triton.rows, fa_serve.ops.rows",
    ),
    (
        identifiers_of_kernel_rooms_are_unique,
        {"fa_serve/ops/rows.py": "MOST = 1", "server/app.py": "MOST: int = 2"},
        "MOST is defined in fa_serve.ops.rows, fa_serve.server.app",
    ),
    (abstractions_have_children, {"server/app.py": "class A(ABC): ...\nclass B(A): ..."}, "app.A is abstract and has 1"),
]
