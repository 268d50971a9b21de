"""Compile what a launcher would launch, for any GPU, on a machine without one.

    with compiling_for("sm90") as kernels:
        launch_forward(q, k, v, ...)          # CPU tensors; nothing runs, each launch is compiled and recorded
    assert kernels[0].spill_bytes == 0

Triton's driver is replaced by one that only names the target, and each launch becomes a warm-up: so the signature, the
specialisation and the tiles are the product's own, not a copy of them kept here. A test that reads an early form of a kernel,
or the names of the launches alone, compiles as far as that: `compiling_for("sm90", until="ttir")` or `until="launch"`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import triton
from registers_in_flight import written_in_flight
from sampled_cases import ALL
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import fa_serve.spec
from fa_serve.launching.plans import PLANS

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm86": GPUTarget("cuda", 86, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
UNLIKE = ("sm90", "sm80", "sm120", "gfx942")
"""The targets that differ in their tiles. sm86 and sm89 have the tiles and the shared memory of sm120 and multiply like sm80
and sm120, and sm100 has those of sm90 and multiplies by one more instruction: a few cases show that they compile."""
SHARED_BYTES = {
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm120": 99 << 10,
    "gfx942": 64 << 10,
}
"""Shared memory that one program may ask for."""
_NVIDIA_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
_INSTRUCTIONS = ("HGMMA", "HMMA", "UTMALDG", "UTMASTG", "LDGSTS", "LDL", "STL", "USETMAXREG", "MUFU.EX2", "WARPGROUP.DEPBAR")


T = TypeVar("T")


def with_targets(cases: Collection[T], everywhere: Container[T]) -> list[tuple[T, str]]:
    """Each case with each target of UNLIKE, and the cases in `everywhere` with every target.

    A sample has each case with one target, sm90 every second time.
    """
    in_turn = ("sm90", "sm80", "sm90", "sm120", "sm90", "gfx942")
    if not ALL:
        return [(case, in_turn[number % len(in_turn)]) for number, case in enumerate(cases)]
    return [(case, target) for target in TARGETS for case in cases if target in UNLIKE or case in everywhere]


def sm90_and(other: str) -> list[str]:
    """Every target. A sample has Hopper, for which most kernels have special tiles, and another one."""
    return list(TARGETS) if ALL else ["sm90", other]


@dataclass(frozen=True)
class Kernel:
    """One compiled launch and what its machine code says."""

    name: str
    target: str
    binary: Any
    ptxas_log: str = ""

    def _dissect(self, tool: str, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary.asm["cubin"])
            file.flush()
            return subprocess.run([_NVIDIA_BIN / tool, option, file.name], capture_output=True, text=True, check=True).stdout

    @cached_property
    def shared_bytes(self) -> int:
        return int(self.binary.metadata.shared)

    @property
    def programmatic(self) -> list[str]:
        """In their order: "launch_dependents", which lets the next kernel start, and "wait", for the kernel before this one."""
        return re.findall(r"griddepcontrol\.(\w+)", self.binary.asm.get("ptx", ""))

    @cached_property
    def sass(self) -> str:
        return self._dissect("nvdisasm", "-c")

    @cached_property
    def instructions(self) -> Counter[str]:
        return Counter({name: len(re.findall(rf"\b{re.escape(name)}", self.sass)) for name in _INSTRUCTIONS})

    @cached_property
    def hot_loop(self) -> Counter[str]:
        """Opcodes, without their suffixes, of the shortest loop that multiplies matrices."""
        code = list[str]()
        labels = dict[str, int]()
        loops = list[list[str]]()
        for line in self.sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label.group(1)] = len(code)
            elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(.*?);", line):
                code.append(instruction.group(1))
                target = re.search(r"BRA.*`\((\.L_x_\d+)\)", code[-1])
                if target and target.group(1) in labels:
                    loops.append(code[labels[target.group(1)] :])
        names = [Counter(re.split(r"[ .]", instruction)[0] for instruction in loop) for loop in loops]
        products = ("HMMA", "HGMMA", "QMMA", "QGMMA")
        return min((loop for loop in names if any(loop[name] for name in products)), key=Counter.total)

    @cached_property
    def registers(self) -> int:
        return self._usage(r"REG:(\d+)") if "cubin" in self.binary.asm else self._amd(r"\.vgpr_count:\s+(\d+)")

    @cached_property
    def spill_bytes(self) -> int:
        """Stack that the compiler took for spilled registers, per thread."""
        if "cubin" in self.binary.asm:
            return self._usage(r"STACK:(\d+)")
        return self._amd(r"\.private_segment_fixed_size:\s+(\d+)")

    @cached_property
    def ptxas_warnings(self) -> list[str]:
        """Kept beside Triton's cache, because ptxas takes seconds for a kernel that came from there."""
        source = f"{triton.__version__} {self.target} {self.binary.asm['ptx']}"
        kept = Path(knobs.cache.dir) / f"ptxas-{hashlib.sha256(source.encode()).hexdigest()}.log"
        if not kept.exists():
            said = self.ptxas_log or self._assemble()
            whole = kept.with_suffix(f".{os.getpid()}")  # tests run side by side
            whole.parent.mkdir(parents=True, exist_ok=True)
            whole.write_text(said)
            whole.replace(kept)
        return [line for line in kept.read_text().splitlines() if "warning" in line.lower() or "C75" in line]

    @cached_property
    def wgmma_faults(self) -> list[str]:
        """Warnings that wgmma is serialised or setmaxnreg is ignored, and writes to registers that wgmma may still read."""
        return [line for line in self.ptxas_warnings if "C75" in line] + written_in_flight(self.sass)

    def _assemble(self) -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(self.binary.asm["ptx"])
            file.flush()
            suffix = "a" if self.binary.metadata.target.arch >= 90 else ""
            name = f"sm_{self.binary.metadata.target.arch}{suffix}"
            done = subprocess.run(
                [_NVIDIA_BIN / "ptxas", "-v", "--gpu-name", name, file.name, "-o", "/dev/null"],
                capture_output=True,
                text=True,
                check=False,
            )
        return done.stdout + done.stderr

    @cached_property
    def _resources(self) -> str:
        return self._dissect("cuobjdump", "-res-usage")

    def _usage(self, pattern: str) -> int:
        return max(int(n) for n in re.findall(pattern, self._resources))

    def _amd(self, pattern: str) -> int:
        return int(re.search(pattern, self.binary.asm["amdgcn"]).group(1))  # type: ignore[union-attr]


def main_loops(sass: str, count: int, instruction: str = "MUFU.EX2") -> list[list[str]]:
    """The instructions of each warpgroup's main loop in a Hopper kernel, which is known by its number of exponentials, or of
    another instruction."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := re.fullmatch(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*);", line):
            instructions.append(found[1])
            target = re.match(r"BRA.*`\((\.L_x_\d+)\)", found[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(instructions)))
    # the slow path of a wait stands far away and jumps back, which looks like a long loop: shorter loops come first
    found_loops: list[tuple[int, int]] = []
    for a, b in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        right = sum(instruction in i for i in instructions[a:b]) == count
        if right and all(b <= c or d <= a for c, d in found_loops):
            found_loops.append((a, b))
    return [instructions[a:b] for a, b in found_loops]


class NamingDriver:
    """As much of a Triton driver as compiling needs; the device number is the target's, so that caches stay apart."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target.arch)

    def get_current_stream(self, device: object) -> int:
        return 0


class _Reached(Exception):
    """The compiler has made the last form of a kernel that is asked for, which is the argument."""


def _add_stages_until(last: str, add_stages: Callable[..., None]) -> Callable[..., None]:
    """A backend's list of stages, of which the one behind `last` ends the compilation."""

    def reached(form: object, metadata: object) -> None:
        raise _Reached(str(form))

    def add(self: object, stages: dict[str, Any], *given: Any) -> None:
        add_stages(self, stages, *given)
        names = list(stages)
        stages[names[names.index(last) + 1]] = reached

    return add


@contextlib.contextmanager
def compiling_for(target: str, until: str | None = None, only: str = "") -> Iterator[list[Kernel]]:
    """Every Triton or Gluon launch inside the block is compiled for `target` and recorded instead of run.

    Plans are made again inside the block, because they depend on the architecture, and forgotten after it.

    until: the last form that is needed, as `Kernel.binary.asm` names it, which saves the rest of the compilation; "launch" if
    the names of the kernels are all
    only: a part of the names of the kernels that are compiled; of the others the launches are recorded
    """
    gpu = TARGETS[target]
    kernels: list[Kernel] = []
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        binary: Any = None
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                if until != "launch" and only in self.fn.__name__:
                    binary = run(self, *args, grid=grid, warmup=True, **options)
            except _Reached as reached:
                binary = SimpleNamespace(asm={until: str(reached)})
        kernels.append(Kernel(self.fn.__name__, target, binary, said.getvalue()))
        return binary

    with pytest.MonkeyPatch.context() as patch:
        if until not in (None, "launch"):
            backend = type(make_backend(gpu))
            patch.setattr(backend, "add_stages", _add_stages_until(until, backend.add_stages))
        patch.setattr(driver, "_active", NamingDriver(gpu))
        patch.setattr(JITFunction, "run", record)
        patch.setattr(knobs.nvidia, "dump_ptxas_log", True, raising=False)
        # a program that watches compilations, as vLLM does, has Triton describe every kernel in JSON
        patch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **_: None)
        patch.setattr(fa_serve.spec, "arch_of", lambda device: gpu.arch if gpu.backend == "cuda" else 0)
        PLANS.clear()
        yield kernels
        PLANS.clear()
