"""The table of backends, fastest first, and the choice among them.

A backend is one class with `supports(spec) -> str | None` (None: yes; else the reason, in words a user can act on) and the
four calls of `Backend` below. Backends are imported when they are first considered: a machine without Triton never imports
it. Checks of meaning (shapes, dtypes) are the API's; a backend checks only what is its own, such as strides.

`auto` takes the first that supports the spec. An explicit name never falls back. Left out: `reference`, which is chosen by
name only.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

from torch import Tensor

from fa_serve.spec import AttentionSpec, UnsupportedError

BACKENDS = {
    "hopper": "fa_serve.backends.hopper:HopperBackend",
    "triton": "fa_serve.backends.triton:TritonBackend",
    "sdpa": "fa_serve.backends.sdpa:SdpaBackend",
    "reference": "fa_serve.backends.reference:ReferenceBackend",
}
AUTO = ("hopper", "triton", "sdpa")


class Backend(Protocol):
    """Shapes and conventions are those of `fa_serve.api`; every argument has been validated there.

    `window_size` already holds causality (right == 0). `out` may be None: then the backend allocates. Each forward returns
    (out, lse); lse is None unless `return_lse`. A backend with a true attribute `plans` gets `memo`, a dictionary, empty at
    first, for what it works out from shapes, strides, dtypes and options: calls that share it differ in addresses and contents
    alone. One with `step` makes short ways for such calls, of dense tensors (see `hf.ops`). Two backends may share a mixed
    paged batch, see `mixed`: the one that serves few queries then takes `lse` too, and leaves sequences with more than
    `max_seqlen_q` queries alone; the other takes `lse` and `skip_q`.
    """

    name: str

    def supports(self, spec: AttentionSpec) -> str | None: ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float,
        window_size: tuple[int, int],
        softcap: float,
        sinks: Tensor | None,
        mask: Tensor | None,
        out: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]: ...

    def forward_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_size: tuple[int, int],
        softcap: float,
        sinks: Tensor | None,
        out: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]: ...

    def forward_paged(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        block_table: Tensor,
        seqused_k: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        window_size: tuple[int, int],
        softcap: float,
        sinks: Tensor | None,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
        num_splits: int,
        out: Tensor | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]: ...

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_descale: Tensor | None,
        v_descale: Tensor | None,
    ) -> None: ...


@cache
def load_backend(name: str) -> Backend | str:
    """The backend of that name, or the reason why it cannot be imported on this machine."""
    module, _, attribute = BACKENDS[name].partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)()
    except ImportError as error:
        return f"cannot be imported: {error}"
    return backend


def explain(spec: AttentionSpec) -> dict[str, str | None]:
    """For each backend that `auto` considers: None if it serves the spec, else its reason."""
    reasons: dict[str, str | None] = {}
    for name in AUTO:
        backend = load_backend(name)
        reasons[name] = backend if isinstance(backend, str) else backend.supports(spec)
    return reasons


@lru_cache(maxsize=4096)
def select_backend(spec: AttentionSpec, name: str = "auto") -> Backend:
    """The backend for this spec.

    Raises ValueError for an unknown name, UnsupportedError with every reason when none (or not the one named) can.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {sorted(BACKENDS)}, got {name!r}")
    reasons = []
    for candidate in AUTO if name == "auto" else (name,):
        backend = load_backend(candidate)
        reason = backend if isinstance(backend, str) else backend.supports(spec)
        if not isinstance(backend, str) and reason is None:
            return backend
        reasons.append(f"  {candidate}: {reason}")
    raise UnsupportedError(f"no backend can serve {spec}\n" + "\n".join(reasons))


class BackendTable:
    """Backends by name, each imported when it is first considered, and the choice among them.

    modules: "module:Class" by name; auto: the names that `auto` considers, fastest first
    """

    def __init__(self, modules: dict[str, str], auto: Sequence[str]) -> None:
        self.modules = modules
        self.auto = tuple(auto)
        self._loaded: dict[str, Any] = {}  # at most one for each name of `modules`

    def load(self, name: str) -> Any:
        """The backend of that name, or the reason why it cannot be imported on this machine."""
        if name not in self._loaded:
            module, _, attribute = self.modules[name].partition(":")
            try:
                self._loaded[name] = getattr(importlib.import_module(module), attribute)()
            except ImportError as error:
                self._loaded[name] = f"cannot be imported: {error}"
        return self._loaded[name]

    def explain(self, spec: Any) -> dict[str, str | None]:
        """For each backend that `auto` considers: None if it serves the spec, else the reason."""
        backends = {name: self.load(name) for name in self.auto}
        return {name: x if isinstance(x, str) else x.supports(spec) for name, x in backends.items()}

    def select(self, spec: Any, name: str = "auto") -> Any:
        """The first backend of `auto` that serves the spec, or the named one.

        Raises ValueError for an unknown name, and UnsupportedError with every reason if no backend serves the spec.
        """
        if name != "auto" and name not in self.modules:
            raise ValueError(f"backend must be 'auto' or one of {sorted(self.modules)}, got {name!r}")
        reasons = []
        for candidate in self.auto if name == "auto" else (name,):
            backend = self.load(candidate)
            reason = backend if isinstance(backend, str) else backend.supports(spec)
            if reason is None:
                return backend
            reasons.append(f"  {candidate}: {reason}")
        raise UnsupportedError(f"no backend can serve {spec}\n" + "\n".join(reasons))
