"""Finds gated units inside of mixtures, the experts that every token takes, and gives them a forward of two launches.

    fused = fuse_units(model)        # how many; the others run as they are

Such a unit stands beside the experts that a router chooses among. It is not recognised by its name: a module beside them that
has the projections of a gated unit is run in float32 on random rows, and is fused if two products compute the same. Its gate
and up projections are merged as those of a fused layer are (parts.py).

Left out: the gate that some models multiply a unit's output with, which is the model's own code, and units that are divided
between ranks, which run as they are. `model.generate` runs fused units as well.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.surgery.fuse.layer import Product
from fa_serve.hf.surgery.fuse.parts import NotFusedError, agree, beside_experts, gated_unit

log = logging.getLogger("fa_serve.engine")

_ROWS = 64


@dataclass(frozen=True, slots=True)
class FusedUnit:
    """Replaces the `forward` of a gated unit. A call that records gradients or a graph runs the unit's own code.

    original:   the unit's own forward
    gate_up:    the merged projection
    activation: of the gate
    """

    original: Callable[[Tensor], Tensor]
    gate_up: Product
    down: Product
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.original(x)
        return self.compute(x.reshape(-1, x.shape[-1])).view(x.shape)

    def compute(self, x: Tensor) -> Tensor:
        """The unit's output. x: (total, hidden)"""
        down = self.down.weight
        h = ops.linear(x, self.gate_up.weight, self.gate_up.bias, activation=self.activation, next_weight=down)
        return ops.linear(h, down, self.down.bias)


@torch.no_grad()
def fuse_units(model: nn.Module) -> int:
    """Give units of a model the forward of `FusedUnit`, where that changes nothing. Returns how many."""
    found = [module for _, module in beside_experts(model) if hasattr(module, "down_proj")]
    fused = 0
    refused: set[type[nn.Module]] = set()
    for module in found:
        kind = type(module)
        if kind in refused:
            continue
        try:
            _prove(module)
            module.forward = _build(module)
            fused += 1
        except Exception as error:  # raised here, by the model's code or by a kernel's compiler
            log.info("%s is not fused: %s", kind.__name__, error)
            refused.add(kind)
    if found:
        log.info("%d of %d experts that every token takes are fused", fused, len(found))
    return fused


def _build(module: Any) -> FusedUnit:
    parts = gated_unit(module)
    if parts is None:
        raise NotFusedError("its projections are not those of a gated unit")
    if parts.gate_up.all_reduce is not None or parts.down.all_reduce is not None:
        raise NotFusedError("it is divided between ranks")
    return FusedUnit(partial(type(module).forward, module), *parts)


def _prove(module: nn.Module) -> None:
    """Compare a float32 copy of a unit with its fused form, for several tokens and for one. Raises NotFusedError."""
    for part in module.modules():
        if "forward" in vars(part) or hasattr(part, "_hf_hook") or part._forward_hooks or part._forward_pre_hooks:
            raise NotFusedError(f"the forward of its {type(part).__name__} is replaced or has hooks")
    original = copy.deepcopy(module).float()
    unit = _build(original)
    x = torch.randn(_ROWS, unit.gate_up.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(unit.down.weight.device)
    expected = original(x)
    for rows in (_ROWS, 1):
        if not agree(unit.compute(x[:rows]), expected[:rows]):
            raise NotFusedError("its output would change")
