"""Finds the shared experts of mixtures, gated units that compute every token, and gives them a forward of two launches.

    fused = fuse_units(model)        # the number of fused units; the others run their own code

Such a unit has the same parent module as the experts that a router chooses from. It is not recognised by its name: a module
next to the experts that has the projections of a gated unit runs in float32 on random rows, and is fused if two products
compute the same. Its gate and up projections are merged, as in a fused layer (parts.py).

Left out: the gate by which some models multiply a unit's output (mixture.py), and units that are divided between ranks, which
run their own code. `model.generate` also runs fused units.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve.hf.lora.product import project
from fa_serve.hf.surgery.fuse.parts import FusedProduct, beside_experts, gated_unit, runs_original
from fa_serve.hf.surgery.proof import NotReplacedError, check_untouched, float32_copy, functions_agree, replace_forwards

log = logging.getLogger("fa_serve.hf")

_ROWS = 64


@dataclass(frozen=True, slots=True)
class FusedUnit:
    """Replaces the `forward` of a gated unit. Under torch.compile, and with gradients outside of `fa_serve.exact`, the unit's
    own code runs.

    original:   the unit's own forward
    gate_up:    the merged projection
    activation: activation of the gate
    """

    original: Callable[[Tensor], Tensor]
    gate_up: FusedProduct
    down: FusedProduct
    activation: str

    def __call__(self, x: Tensor) -> Tensor:
        if runs_original():
            return self.original(x)
        return self.compute(x.reshape(-1, x.shape[-1])).view(x.shape)

    def compute(self, x: Tensor) -> Tensor:
        """The unit's output. x: (total, hidden)"""
        h = project(self.gate_up, x, activation=self.activation, next_weight=self.down.weight)
        out: Tensor = project(self.down, h)
        return out


@torch.no_grad()
def fuse_units(model: nn.Module) -> int:
    """Give units of a model the forward of `FusedUnit` if that changes nothing. Returns how many units got it."""

    def refuse(unit: nn.Module, reason: str) -> None:
        log.info("%s is not fused: %s", type(unit).__name__, reason)

    found = [module for _, module in beside_experts(model) if hasattr(module, "down_proj")]
    fused = replace_forwards(found, _prove, refuse)
    if found:
        log.info("%d of %d shared experts are fused", fused, len(found))
    return fused


def _build(module: Any) -> FusedUnit:
    parts = gated_unit(module)
    if parts is None:
        raise NotReplacedError("its projections are not those of a gated unit")
    if parts.gate_up.all_reduce is not None or parts.down.all_reduce is not None:
        raise NotReplacedError("it is divided between ranks")
    return FusedUnit(partial(type(module).forward, module), *parts)


def _prove(module: nn.Module) -> Callable[[Any], FusedUnit]:
    """Compare a float32 copy of a unit with its fused form. Returns the function that builds it. Raises NotReplacedError."""
    check_untouched(module)
    original = float32_copy(module)
    unit = _build(original)
    x = torch.randn(_ROWS, unit.gate_up.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(unit.down.weight.device)
    if not functions_agree(original, unit.compute, x):
        raise NotReplacedError("its output would change")
    return _build
