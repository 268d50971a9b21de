"""The backends of attention, fastest first, and the choice among them.

A backend is one class with the members of `Backend`: `supports(spec)` returns None if the backend serves the spec, else the
reason in words that a user can act on; `plan(...)` decides everything about calls that look alike and returns a function that
runs them (see `plan`). Backends are imported when they are first considered, so a machine without Triton never imports it. The
functions of `fa_serve.api` check what a call means (shapes, dtypes); a backend checks only what its kernels need, such as
strides.

`auto` takes the first backend that supports the spec. An explicit name never falls back to another backend. `reference` is
chosen only by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from fa_serve.backends.calls import AttentionOptions
from fa_serve.launching.plans import Run
from fa_serve.spec import AttentionSpec, UnsupportedError

MAX_KEYS_PER_TILE = 128
"""The most keys of a paged cache that any kernel loads at once. Keys that share a tile with a visible key are read, although
they are masked, so their pages must not be given to another sequence. The plans of the kernels assert this bound."""
TREE_KEYS = 64
"""Keys per block of the tree that all kernels of deterministic mode follow (see `triton.tree.plan`), for 16-bit heads of up to
256."""
GROUP_KEYS = 512
"""Keys per group of the tree. The groups of a single sequence may run as separate programs, so shorter groups would occupy
more of the GPU. Longer groups would cost prompts less, because each group ends with a fold, as much work as half a block."""


class Selectable(Protocol):
    """What a table needs of its backends: whether they can serve a spec."""

    def supports(self, spec: Any) -> str | None: ...


class Backend(Protocol):
    """A backend of attention. Shapes and conventions are those of `fa_serve.api`, which has validated every argument.

    name:       key of the backend in the table
    mixed_rows: rows (queries times query heads per KV head) up to which this backend's decoding kernel is the faster one for a
                sequence in a batch that mixes decoding with prompts; None if it serves no part of such batches (see `mixed`)
    differentiable: whether autograd differentiates the plans of this backend; if not, the op "backward" computes gradients,
                possibly by another backend
    """

    name: str
    mixed_rows: int | None
    differentiable: bool

    def supports(self, spec: AttentionSpec) -> str | None:
        """None if the backend serves the spec, else the reason."""
        ...

    def plan(self, spec: AttentionSpec, tensors: Any, options: AttentionOptions | None) -> Run:
        """Make the plan for calls that look like this one.

        For the ops "attention" and "decode", `tensors` is an `AttentionTensors` and the plan maps an `AttentionTensors` with
        the same facts to (out, lse or None). For "store_kv" it is a `StoreTensors`, there are no options, and the plan returns
        None. For "backward" it is a `BackwardTensors`, and the plan returns `Gradients`.

        A dense "decode" of one query per sequence is planned once for a cache that grows. Later calls of the same plan have
        other numbers of keys (of the same bit length) and the strides that follow from them, each a multiple of 16 and below
        2^31.
        """
        ...


B = TypeVar("B", bound=Selectable)


class BackendTable(Generic[B]):
    """Backends by name, imported when they are first considered.

    modules: name -> "module:Class"
    auto:    the names that `select` considers by itself, fastest first
    """

    def __init__(self, modules: Mapping[str, str], auto: Sequence[str]) -> None:
        self.modules = dict(modules)
        self.auto = tuple(auto)
        self._loaded: dict[str, B | str] = {}  # at most one entry for each name in `modules`

    def load(self, name: str) -> B | str:
        """The backend of that name, or the reason why it cannot be imported on this machine."""
        if name not in self._loaded:
            module, _, attribute = self.modules[name].partition(":")
            try:
                self._loaded[name] = getattr(importlib.import_module(module), attribute)()
            except ImportError as error:
                self._loaded[name] = f"cannot be imported: {error}"
        return self._loaded[name]

    def reason(self, name: str, spec: Any) -> str | None:
        """Why the backend does not serve the spec; None if it does."""
        backend = self.load(name)
        return backend if isinstance(backend, str) else backend.supports(spec)

    def explain(self, spec: Any) -> dict[str, str | None]:
        """For each backend that `auto` considers: None if it serves the spec, else its reason."""
        return {name: self.reason(name, spec) for name in self.auto}

    def select(self, spec: Any, name: str = "auto") -> B:
        """The backend for this spec.

        Raises ValueError for an unknown name, and UnsupportedError, with the reason of every backend that was considered, if
        none of them serves the spec.
        """
        if name != "auto" and name not in self.modules:
            raise ValueError(f"backend must be 'auto' or one of {sorted(self.modules)}, got {name!r}")
        reasons = []
        for candidate in self.auto if name == "auto" else (name,):
            backend = self.load(candidate)
            reason = backend if isinstance(backend, str) else backend.supports(spec)
            if not isinstance(backend, str) and reason is None:
                return backend
            reasons.append(f"  {candidate}: {reason}")
        raise UnsupportedError(f"no backend can serve {spec}\n" + "\n".join(reasons))


ATTENTION: BackendTable[Backend] = BackendTable(
    {
        "hopper": f"{__name__}.hopper:HopperBackend",
        "triton": f"{__name__}.triton:TritonBackend",
        "sdpa": f"{__name__}.sdpa:SdpaBackend",
        "reference": f"{__name__}.reference:ReferenceBackend",
    },
    auto=("hopper", "triton", "sdpa"),
)

load_backend = ATTENTION.load
explain = ATTENTION.explain
select_backend = ATTENTION.select

__all__ = [
    "ATTENTION",
    "GROUP_KEYS",
    "MAX_KEYS_PER_TILE",
    "TREE_KEYS",
    "Backend",
    "BackendTable",
    "Selectable",
    "explain",
    "load_backend",
    "select_backend",
]
