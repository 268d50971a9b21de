"""Who may import whom: imports point down, foreign packages stay in their rooms, backends keep apart."""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterator

from house.source import House, Planted, inside

FLOORS = {
    "fa_serve.spec": 0,
    "fa_serve.nearest": 0,
    "fa_serve.named_files": 0,
    "fa_serve.gpu_names": 0,
    "fa_serve.environment": 0,
    "fa_serve.block_lists": 0,
    "fa_serve.index_functions": 0,
    "fa_serve.kept_values": 0,
    "fa_serve.score_mods": 0,
    "fa_serve.demo": 0,
    "fa_serve.sandbox": 0,
    "fa_serve.launching": 1,
    "fa_serve.backends": 1,
    "fa_serve.ops": 2,
    "fa_serve.argument_checks": 2,
    "fa_serve.value_checks": 2,
    "fa_serve.autograd": 2,
    "fa_serve.dispatch": 2,
    "fa_serve.operators": 2,
    "fa_serve.transforms": 2,
    "fa_serve.api": 2,
    "fa_serve.hf": 3,
    "fa_serve.flash_attn": 3,
    "fa_serve.adapters": 3,
    "fa_serve.vllm": 3,
    "fa_serve.sglang": 3,
    "fa_serve.diffusers": 3,
    "fa_serve": 3,  # the package itself, not the modules in it
    "fa_serve.engine": 4,
    "fa_serve.server": 5,
    "fa_serve.doctor": 5,
    "fa_serve.flags": 5,
    "fa_serve.info_tables": 5,
    "fa_serve.client": 5,
    "fa_serve.__main__": 5,
    "fa_serve.testing": 6,
}
"""A module imports from its floor and those below. `testing` stands above all: only tests import it."""

KERNEL_ROOMS = ("fa_serve.backends.triton", "fa_serve.backends.hopper")
GUESTS: dict[str, tuple[str, ...]] = {
    "triton": (*KERNEL_ROOMS, "fa_serve.launching", "fa_serve.ops"),
    "transformers": (
        "fa_serve.hf",
        "fa_serve.engine.runner.model_runner",
        "fa_serve.engine.engine",
        "fa_serve.engine.start.loading",
        "fa_serve.engine.start.new_weights",
        "fa_serve.engine.start.start_up",
        "fa_serve.engine.cache.tensors",
        "fa_serve.server.chat.template_process",
    ),
    "vllm": ("fa_serve.vllm",),
    "sglang": ("fa_serve.sglang",),
    "diffusers": ("fa_serve.diffusers",),
    "llguidance": ("fa_serve.engine.structured",),
    "fastapi": ("fa_serve.server",),
    "starlette": ("fa_serve.server",),
    "pydantic": ("fa_serve.server",),
    "pydantic_settings": ("fa_serve.server",),
    "prometheus_client": ("fa_serve.server",),
    "asyncio": (
        "fa_serve.engine.process.async_engine",
        "fa_serve.engine.process.mailbox",
        "fa_serve.server",
        "fa_serve.client",
        "fa_serve.__main__",
    ),
    "ray": ("fa_serve.server.ray",),
    "httpx": ("fa_serve.server", "fa_serve.client"),
    "server": (),  # the folder is installed as fa_serve.server and has no other name
}
"""The rooms that may import a package that is not ours, or that is slow to import (asyncio)."""

LAZY = {"triton": ("fa_serve.ops", "fa_serve.launching")}
"""Packages among those rooms whose `__init__` must not import the guest: they are imported where it is not installed."""

SHARED_MODULES = tuple(
    f"fa_serve.backends.triton.{name}"
    for name in ("primitives", "row_statistics", "float8_inputs", "latent.plan", "mask_blocks", "splits", "tiles")
)
"""What the Hopper kernels may import of the portable ones."""

BACKENDS = tuple(f"fa_serve.backends.{name}" for name in ("hopper", "triton", "sdpa", "reference"))

ADAPTERS = ("fa_serve.flash_attn", "fa_serve.vllm", "fa_serve.sglang", "fa_serve.diffusers")

CLOSED = {
    **{room: ("fa_serve.backends", "fa_serve.hf", *(other for other in ADAPTERS if other != room)) for room in ADAPTERS},
    "fa_serve.engine": ("fa_serve.backends", *ADAPTERS),
    "fa_serve.server": ("fa_serve.backends", "fa_serve.api", "fa_serve.ops", "fa_serve.hf"),
    "fa_serve.client": (
        "fa_serve.backends",
        "fa_serve.api",
        "fa_serve.ops",
        "fa_serve.hf",
        "fa_serve.engine",
        "fa_serve.server",
    ),
}
"""Rooms, and the rooms below them that they may not reach into."""


DECIDED_BY = {
    "fa_serve.ops.products.conditions": ("fa_serve.ops.products.table",),
    "fa_serve.ops.products.crossovers": ("fa_serve.ops.products.conditions",),
}
"""The modules that hold why a kernel does not compute a product, and who reads them."""


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


def no_module_imports_itself(house: House) -> Iterator[str]:
    """By no way round: imports inside functions count, and so do those for types, because a reader follows them too.

    A package is its `__init__`. What an `__init__` imports of its own room is no way round for the modules in the room.
    """
    needs: defaultdict[str, set[str]] = defaultdict(set)
    for name, target in house.edges():
        if name != target:
            needs[name].add(target)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        yield "a circle of imports: " + " <- ".join(error.args[1])


def guests_stay_in_their_rooms(house: House) -> Iterator[str]:
    for module in house:
        for target, _ in module.imports:
            guest = target.partition(".")[0]
            rooms = GUESTS.get(guest)
            if rooms is None:
                continue
            if not inside(module.name, *rooms) or module.name in LAZY.get(guest, ()):
                yield f"{module.name} imports {target}"


def backends_keep_apart(house: House) -> Iterator[str]:
    for name, target in house.edges():
        mine, theirs = (next((room for room in BACKENDS if inside(x, room)), None) for x in (name, target))
        if theirs == "fa_serve.backends.reference" and name not in ("fa_serve.backends.reference", "fa_serve.testing"):
            yield f"{name} imports the oracle"
        elif mine and theirs and mine != theirs and not (mine == BACKENDS[0] and inside(target, *SHARED_MODULES)):
            yield f"{name} imports another backend, {target}"


def rooms_are_reached_through_their_doors(house: House) -> Iterator[str]:
    """The engine reaches kernels through `api` and `ops`, the client knows HTTP only, and so on.

    Facts of kernels are an exception: any room may import an UPPER_CASE number from the package `fa_serve.backends`.
    """
    for module in house:
        for target, _ in module.imports:
            fact = target.rpartition(".")[0] == "fa_serve.backends" and target.rpartition(".")[2].isupper()
            for room, doors in CLOSED.items():
                if inside(module.name, room) and inside(house.owner(target), *doors) and not fact:
                    yield f"{module.name} imports {target}"


def the_service_and_its_clients_keep_apart(house: House) -> Iterator[str]:
    """Only the command line imports the client: it speaks to a server that may run anywhere."""
    for name, target in house.edges():
        if inside(target, "fa_serve.client") and not inside(name, "fa_serve.client", "fa_serve.__main__"):
            yield f"{name} imports {target}"


def one_place_decides(house: House) -> Iterator[str]:
    """Which kernel computes a product is decided by `select_kernel`. Nobody else reads what it decides by."""
    for name, target in house.edges():
        readers = DECIDED_BY.get(target)
        if readers is not None and name not in readers:
            yield f"{name} imports {target}, which {' and '.join(readers)} reads"


def server_imports_itself_relatively(house: House) -> Iterator[str]:
    for module in house:
        for target, relative in module.imports:
            if inside(module.name, "fa_serve.server") and not relative and inside(target, "fa_serve.server"):
                yield f"{module.name} imports {target} by its full name"


def scheduling_needs_no_torch(house: House) -> Iterator[str]:
    """`pages` and `scheduler` import no torch, and neither do the modules of the engine that they import."""
    for start in ("fa_serve.engine.cache.pages", "fa_serve.engine.scheduler.scheduler"):
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


PLANTED: list[Planted] = [
    (
        one_place_decides,
        {
            "fa_serve/ops/products/conditions.py": "def refuses(): ...",
            "fa_serve/ops/norms.py": "import triton\ndef f():\n    from fa_serve.ops.products.conditions import refuses",
        },
        "fa_serve.ops.norms imports fa_serve.ops.products.conditions",
    ),
    (
        imports_point_down,
        {"fa_serve/spec.py": "from fa_serve.api import attention"},
        "fa_serve.spec (floor 0) imports fa_serve.api",
    ),
    (imports_point_down, {"fa_serve/hf.py": "def f():\n    from .engine import Engine"}, "fa_serve.hf (floor 3) imports"),
    (imports_point_down, {"fa_serve/engine/__init__.py": "from ..server import app"}, "fa_serve.engine (floor 4) imports"),
    (
        imports_point_down,
        {"fa_serve/backends/sdpa.py": "from fa_serve import ops"},
        "sdpa (floor 1) imports fa_serve.ops (floor 2)",
    ),
    (imports_point_down, {"fa_serve/api.py": "import fa_serve"}, "fa_serve.api (floor 2) imports fa_serve (floor 3)"),
    (imports_point_down, {"fa_serve/hf.py": "from fa_serve.testing import make_qkv"}, "fa_serve.hf (floor 3) imports"),
    (imports_point_down, {"fa_serve/attic.py": ""}, "fa_serve.attic stands on no floor"),
    (
        no_module_imports_itself,
        {
            "fa_serve/engine/scheduler/scheduler.py": "def f():\n    from fa_serve.engine.engine import Engine",
            "fa_serve/engine/engine.py": "from fa_serve.engine.scheduler.scheduler import Scheduler",
        },
        "a circle of imports: fa_serve.engine.",
    ),
    (guests_stay_in_their_rooms, {"fa_serve/api.py": "import triton.language as tl"}, "fa_serve.api imports triton.language"),
    (guests_stay_in_their_rooms, {"fa_serve/ops/__init__.py": "import triton"}, "fa_serve.ops imports triton"),
    (guests_stay_in_their_rooms, {"fa_serve/api.py": "from vllm import x"}, "fa_serve.api imports vllm.x"),
    (
        guests_stay_in_their_rooms,
        {"fa_serve/hf.py": "from diffusers.models import x"},
        "fa_serve.hf imports diffusers.models.x",
    ),
    (
        guests_stay_in_their_rooms,
        {"fa_serve/engine/cache/pages.py": "from transformers import x"},
        "pages imports transformers.x",
    ),
    (guests_stay_in_their_rooms, {"fa_serve/__main__.py": "from fastapi import FastAPI"}, "__main__ imports fastapi.FastAPI"),
    (guests_stay_in_their_rooms, {"fa_serve/client/chat.py": "import pydantic"}, "client.chat imports pydantic"),
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
        {"fa_serve/backends/hopper/__init__.py": "from fa_serve.backends.triton.store_kv import t"},
        "hopper imports another",
    ),
    (backends_keep_apart, {"fa_serve/hf.py": "from fa_serve.backends.reference import f"}, "fa_serve.hf imports the oracle"),
    (
        rooms_are_reached_through_their_doors,
        {"fa_serve/engine/runner/model_runner.py": "import fa_serve.backends"},
        "model_runner imports",
    ),
    (
        rooms_are_reached_through_their_doors,
        {"fa_serve/engine/runner/model_runner.py": "from fa_serve.backends import select_backend"},
        "model_runner imports fa_serve.backends.select_backend",
    ),
    (
        rooms_are_reached_through_their_doors,
        {"server/app.py": "from fa_serve import hf"},
        "fa_serve.server.app imports fa_serve.hf",
    ),
    (
        rooms_are_reached_through_their_doors,
        {"fa_serve/client/bench.py": "from fa_serve.engine import Engine"},
        "fa_serve.client.bench imports fa_serve.engine.Engine",
    ),
    (
        rooms_are_reached_through_their_doors,
        {"fa_serve/flash_attn/__init__.py": "from fa_serve.backends.calls import PLANS"},
        "fa_serve.flash_attn imports fa_serve.backends.calls.PLANS",
    ),
    (the_service_and_its_clients_keep_apart, {"server/app.py": "from fa_serve.client import x"}, "server.app imports"),
    (server_imports_itself_relatively, {"server/app.py": "from fa_serve.server import errors"}, "by its full name"),
    (scheduling_needs_no_torch, {"fa_serve/engine/cache/pages.py": "from torch import Tensor"}, "pages gets torch from"),
    (
        scheduling_needs_no_torch,
        {
            "fa_serve/engine/scheduler/scheduler.py": "from ..request.request import Request",
            "fa_serve/engine/request/request.py": "import torch",
        },
        "fa_serve.engine.scheduler.scheduler gets torch from fa_serve.engine.request.request",
    ),
]
