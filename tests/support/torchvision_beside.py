"""torchvision for a process of tests, from a folder that only this process sees.

    add_torchvision()          # from what `make .venv/images/.installed` gets

Its wheel on PyPI is for a torch with CUDA. Beside a CPU build its compiled operators cannot be loaded, which fails its import
and with it that of every processor, so it is not in the environment of the tests. Processors need none of these operators, and
the module that describes them is left out here.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

FOLDER = Path(sys.prefix) / "images"
_OF_OPERATORS = "torchvision._meta_registrations"


def has_torchvision() -> bool:
    """Whether `add_torchvision` finds one: in the environment, or in the folder."""
    return importlib.util.find_spec("torchvision") is not None or (FOLDER / "torchvision").is_dir()


def add_torchvision() -> None:
    """Make torchvision importable in this process. To be called before transformers is imported."""
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(FOLDER))
    try:
        import torchvision
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules[_OF_OPERATORS] = types.ModuleType(_OF_OPERATORS)
        import torchvision  # noqa: F401
