"""The compute capability of a GPU in every spelling that people use: `find_arch("9.0") == find_arch("H100") == 90`.

Numbers are those of CUDA ("9.0", "90", "9", "sm_90", "sm90a", "compute_90"), names are those of cards and architectures. AMD's
GPUs have no compute capability: the AMD GPUs for which kernels are compiled are 0, as in spec.py:arch_of. Left out: the
capability of the GPU of this machine, which the driver reports (spec.py:arch_of).
Source: https://developer.nvidia.com/cuda-gpus
"""

from __future__ import annotations

import re

from fa_serve.nearest import nearest_name

ARCHITECTURES = {
    "volta": 70,
    "turing": 75,
    "ampere": 80,
    "ada": 89,
    "adalovelace": 89,
    "lovelace": 89,
    "hopper": 90,
    "blackwell": 100,
}
"""The compute capability of each architecture. If its cards have several, it is the one of the data-centre cards."""
CARDS = {
    "v100": 70,
    "titanv": 70,
    "t4": 75,
    "a100": 80,
    "a30": 80,
    "a800": 80,
    "a2": 86,
    "a10": 86,
    "a10g": 86,
    "a16": 86,
    "a40": 86,
    "a6000": 86,
    "l4": 89,
    "l20": 89,
    "l40": 89,
    "l40s": 89,
    "h20": 90,
    "h100": 90,
    "h200": 90,
    "h800": 90,
    "gh200": 90,
    "b100": 100,
    "b200": 100,
    "gb200": 100,
    "b300": 103,
    "gb300": 103,
    "gb10": 121,
    "dgxspark": 121,
    "rtxa6000": 86,
    "rtx6000ada": 89,
    "rtxpro6000": 120,
    **{f"rtx{name}": 75 for name in (2060, 2070, 2080)},
    **{f"rtx{name}": 86 for name in (3050, 3060, 3070, 3080, 3090)},
    **{f"rtx{name}": 89 for name in (4050, 4060, 4070, 4080, 4090)},
    **{f"rtx{name}": 120 for name in (5060, 5070, 5080, 5090)},
}
GFX942 = dict.fromkeys(("gfx942", "cdna3", "mi300", "mi300a", "mi300x", "mi325x"), 0)
"""AMD's GPUs for which the tests compile the kernels."""
CAPABILITIES = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
NUMBER = re.compile(r"(?:sm|compute|cc)?([1-9]\d?)\.?(\d)?[af]?")
NOISE = re.compile(r"nvidia|amd|instinct|tesla|geforce|pcie|sxm\d?|nvl|hbm\d\w?|\d+gb|ti|super")
"""Words of a card's full name that do not change its capability, as in "NVIDIA H100 80GB HBM3"."""


def find_arch(name: str) -> int:
    """10 * major + minor of the GPU or architecture of this name, 0 for an AMD GPU.

    Raises ValueError for a name that is not known, or a number that is no compute capability from 7.0 on.
    """
    words = re.split(r"[\s_-]+", name.lower())
    number = NUMBER.fullmatch("".join(words))
    if number is not None:
        return _capability(name, number[1], number[2])
    plain = re.sub(r"(?<=\d)(ti|super)$", "", "".join(word for word in words if not NOISE.fullmatch(word)))
    known = ARCHITECTURES | CARDS | GFX942
    for spelling in (plain, f"rtx{plain}"):
        if spelling in known:
            return known[spelling]
    nearest = nearest_name(plain, known)
    remedy = f"did you mean {nearest}?" if nearest else "give its compute capability, such as 9.0"
    raise ValueError(f"--arch must be a compute capability such as 9.0 or sm_90, or a GPU such as H100, got {name!r}: {remedy}")


def _capability(name: str, first: str, last: str | None) -> int:
    """10 * major + minor from "9.0", "90" or "9"."""
    arch = int(first + (last or ""))
    if last is None and arch not in CAPABILITIES:
        arch *= 10
    if arch not in CAPABILITIES:
        listed = ", ".join(str(each / 10) for each in CAPABILITIES)
        raise ValueError(f"--arch must be one of {listed}, or the name of a GPU, got {name!r}")
    return arch
