"""install(): makes `import flash_attn` import this package, for code that cannot be changed.

    import fa_serve.flash_attn
    fa_serve.flash_attn.install()
    from transformers import AutoModelForCausalLM        # attn_implementation="flash_attention_2" is available now

Other packages look for flash-attn in three ways, and install() makes all of them work: by importing it, by
`importlib.util.find_spec`, and by `importlib.metadata`. Nothing is written to disk, and other processes are not affected.

Left out: modules of flash-attn that are not attention. Importing one raises ModuleNotFoundError.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from fa_serve.spec import FaServeError

log = logging.getLogger(__name__)

VERSION = "2.8.3"
"""The release of flash-attn whose signatures this package has."""

VERSION_4 = "4.0.0b36"
"""The release of flash-attn-4 whose signatures `cute` has."""

MODULES = {
    "flash_attn": ".",
    "flash_attn.bert_padding": ".bert_padding",
    "flash_attn.cute": ".cute",
    "flash_attn.cute.interface": ".cute",
    "flash_attn.flash_attn_interface": ".flash_attn_interface",
    "flash_attn.layers.rotary": ".rotary",
    "flash_attn.ops.triton.rotary": ".rotary",
    "flash_attn_interface": ".interface",
    "flash_attn_3": ".interface",
}
"""Names that others import, and the modules of this package that they get."""

PACKAGES = ("flash_attn.layers", "flash_attn.ops", "flash_attn.ops.triton")
"""Packages that hold nothing but one of MODULES, or each other."""

DISTRIBUTIONS = {
    "flash-attn": (VERSION, ("flash_attn",)),
    "flash-attn-3": ("3.0.0", ("flash_attn_interface", "flash_attn_3")),
    "flash-attn-4": (VERSION_4, ("flash_attn",)),
}
"""The packages that `importlib.metadata` reports as installed: version, and the names that are imported."""


def install() -> None:
    """Make `flash_attn`, `flash_attn_interface` and `flash_attn_3` names of this package's modules, in this process.

    A repeated call changes nothing. transformers reads the list of installed packages once, when it is imported: call install()
    before.

    Raises FaServeError if another flash-attn has been imported already.
    """
    modules = {name: importlib.import_module(target, __package__) for name, target in MODULES.items()}
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in (*modules, *PACKAGES):
        present = sys.modules.get(name)
        if present is not None:
            raise FaServeError(
                f"install() must be called before another flash-attn is imported, but {name} was imported from "
                f"{getattr(present, '__file__', None)}"
            )
    if "transformers" in sys.modules:
        log.warning("transformers was imported before install(), so it will not find flash-attn; call install() first")
    for name in PACKAGES:
        package = modules[name] = ModuleType(name, "Stands in for a package of flash-attn; only its `rotary` exists.")
        package.__path__ = []
        package.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.meta_path.insert(0, _Finder())


class _Distribution(importlib.metadata.Distribution):
    """One entry of DISTRIBUTIONS."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        version, packages = DISTRIBUTIONS[self._name]
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {version}\n"
        return "\n".join(packages) if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent.joinpath(path)


class _Finder(importlib.metadata.DistributionFinder):
    """Reports DISTRIBUTIONS to `importlib.metadata`. It finds no module."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        wanted = None if context is None or context.name is None else _normalized(context.name)
        for name in DISTRIBUTIONS:
            if wanted in (None, _normalized(name)):
                yield _Distribution(name)


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
