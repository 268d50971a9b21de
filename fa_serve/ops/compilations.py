"""Which kernels Triton compiles in this process, and which process compiles a kernel when several do so at once.

    watch()
    ...
    num_compilations()                       # Compilations(loaded=112, compiled=3): since `watch`

    claim_kernels(folder)                    # of the processes that share this folder, one compiles each kernel

A kernel that a launch needs for the first time is compiled, which takes a second, or loaded from Triton's cache on disk, which
takes milliseconds. Either way the launch waits. Left out: which kernels a model needs, which the engine finds out by running
steps (engine/warm_up.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

WAIT_SECONDS = 60.0
"""How long a process waits at most for a kernel that another process compiles."""


class Compilations(NamedTuple):
    """Kernels that launches have waited for. loaded: from the cache on disk; compiled: that were not there."""

    loaded: int = 0
    compiled: int = 0


class _Counter:
    """Triton's listener: it is called when a kernel has been compiled or loaded. An earlier listener is called as well."""

    def __init__(self, earlier: Callable[..., Any] | None) -> None:
        self._earlier = earlier
        self.counted = Compilations()

    def __call__(self, *, cache_hit: bool, **described: Any) -> None:
        loaded, compiled = self.counted
        self.counted = Compilations(loaded + cache_hit, compiled + (not cache_hit))
        if self._earlier is not None:
            self._earlier(cache_hit=cache_hit, **described)


def watch() -> None:
    """Count from now on. Without Triton there is nothing to count. A second call changes nothing."""
    try:
        from triton import knobs
    except ImportError:
        return
    if not isinstance(knobs.compilation.listener, _Counter):
        knobs.compilation.listener = _Counter(knobs.compilation.listener)


def num_compilations() -> Compilations:
    """How many kernels have been loaded and compiled since `watch`, which must have been called for anything but zeros."""
    try:
        from triton import knobs
    except ImportError:
        return Compilations()
    listener = knobs.compilation.listener
    return listener.counted if isinstance(listener, _Counter) else Compilations()


class KernelClaims:
    """Decides which of several processes compiles a kernel: the first that asks for it.

    folder:   has a file for each kernel that is being compiled, and another one when it is in the cache on disk
    launches: kernels are launched as well. A launch then waits until another process has compiled its kernel. Without launches
              the results of all kernels are undefined
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[str] = set()  # what this process need not ask for again; as many as there are kernels
        self.launches = True

    def begin(self, description: str) -> bool:
        """Whether this process is to compile the kernel."""
        if description in self._known:
            return False
        self._known.add(description)
        claim = self._claim(description)
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            limit = time.monotonic() + WAIT_SECONDS
            while self.launches and not claim.with_suffix(".done").exists() and time.monotonic() < limit:
                time.sleep(0.005)
            return False
        return True

    def end(self, description: str) -> None:
        """The kernel is in the cache on disk."""
        self._claim(description).with_suffix(".done").touch()

    def _claim(self, description: str) -> Path:
        return self._folder / hashlib.sha256(description.encode()).hexdigest()


def claim_kernels(folder: Path) -> KernelClaims:
    """Compile only kernels that no other process with the same folder compiles, from now on and until this process ends."""
    from fa_serve.backends import launch

    launch.CLAIMS = claims = KernelClaims(folder)
    return claims
