"""A backend that computes the reference's numbers without what autograd could follow, as kernels do: for tests of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from fa_serve.backends import ATTENTION
from fa_serve.backends.calls import AttentionOptions
from fa_serve.backends.reference import ReferenceBackend
from fa_serve.launching.plans import PLANS, Run
from fa_serve.spec import AttentionSpec


class Opaque:
    """The reference's numbers, without what autograd could follow.

    planned: the spec and the options of each plan
    """

    name = "triton"
    mixed_rows: int | None = None
    differentiable = False

    def __init__(self) -> None:
        self.planned: list[tuple[AttentionSpec, AttentionOptions]] = []

    def supports(self, spec: AttentionSpec) -> str | None:
        return "refuses gradients through pages" if spec.layout == "paged" and spec.needs_grad else None

    def plan(self, spec: AttentionSpec, tensors: Any, options: AttentionOptions) -> Run:
        self.planned.append((spec, options))
        run = ReferenceBackend().plan(spec, tensors, options)

        def without_history(t: Any) -> Any:
            with torch.no_grad():
                return run(t)

        return without_history


@contextmanager
def opaque_backend() -> Iterator[Opaque]:
    """Stands in for the portable kernels."""
    backend = Opaque()
    with mock.patch.dict(ATTENTION._loaded, {"triton": backend}):
        PLANS.clear()
        yield backend
    PLANS.clear()
