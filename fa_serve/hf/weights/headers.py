"""The safetensors files of a checkpoint, and the tensors that their headers name.

    for name, header in headers(weight_files(folder)):
        header.dtype, header.shape                       # ("BF16", (4096, 4096))

Left out: files of other kinds, and whether a tensor is right (expert_files.py, float_files.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open


class Header(NamedTuple):
    """dtype: its name in safetensors, such as BF16"""

    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads from this folder, in the order of their names."""
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    names: set[str] = set()
    with suppress(ValueError, KeyError, AttributeError, TypeError, OSError):  # the loader reports what is wrong with the index
        found = json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"].values()
        names = {name for name in found if isinstance(name, str)}
    return [folder / name for name in sorted(names) if (folder / name).is_file()]


def headers(files: Iterable[str | Path]) -> Iterator[tuple[str, Header]]:
    """The names of all tensors with their headers, file by file. Files that are not safetensors are passed over."""
    for file in files:
        if not str(file).endswith(".safetensors"):
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a dictionary
                part = tensors.get_slice(name)
                yield name, Header(part.get_dtype(), tuple(part.get_shape()))
