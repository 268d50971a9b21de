"""Plans: what was decided for calls that look alike, so that it is decided only once.

Before a kernel runs, its arguments are checked, a backend is selected, tiles are chosen and the arguments of the launch are
computed. All of this follows from shapes, strides, dtypes, devices and options, which the layers of a model repeat at every
step. A plan is the outcome: a function `run(tensors)` for tensors that have the same facts as those it was made for.

    key = ("rms_norm", *facts(x, weight), eps)
    run = PLANS.get(key)
    if run is None:
        run = PLANS.add(key, decide(x, weight, eps))
    out = run((x, weight))

This module owns the form of the keys (`facts`) and the bound (`MAX_PLANS`). The functions of `fa_serve.api` and the kernels of
`fa_serve.ops` keep their plans in the one table `PLANS`. This module leaves out what a plan decides, which is up to the
backends, and the tensors of an attention call (`fa_serve.backends.calls`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_PLANS = 4096

Run = Callable[..., Any]
"""What a plan is: it takes the tensors of one call, in the form that the plan's maker defines, and computes."""


class PlanTable(dict[tuple[Any, ...], Run]):
    """Plans by key. A full table is cleared: the calls in use are planned again, which costs each of them some 100 us.

    Reading is `dict.get`, which costs no Python call. Threads may share the table: two threads that plan the same call at once
    both get the plan that was added first.
    """

    def __init__(self, max_plans: int = MAX_PLANS) -> None:
        super().__init__()
        self.max_plans = max_plans

    def add(self, key: tuple[Any, ...], run: Run) -> Run:
        """Store the plan unless the key has one, and return the stored one."""
        if len(self) >= self.max_plans:
            self.clear()
        return self.setdefault(key, run)


PLANS = PlanTable()


def facts(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What checks and kernels may depend on, for each tensor: shape, strides, dtype, device, whether it needs a gradient."""
    grad = torch.is_grad_enabled()
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad) for x in tensors])
