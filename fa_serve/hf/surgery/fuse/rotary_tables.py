"""Gives the rotary embedding of a model a forward of one launch. Its own code launches about nine kernels in each step.

    fused = fuse_rotary_tables(model)    # the number of fused modules

Such a module has the same parent module as fused layers, and a vector `inv_freq`. It is not recognised by its name: a copy
gets positions near and far, also beyond those that the model was trained for, and the module is fused if cos and sin agree
with those of `ops.rotary_tables`. So frequencies that depend on the length of the sequence (dynamic scaling, LongRoPE), on the
layer, or on positions of three dimensions are left to the model's own code. Left out: deterministic mode, and gradients.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.surgery.fuse.layer import beside_fused_layers
from fa_serve.hf.surgery.fuse.parts import runs_original
from fa_serve.hf.surgery.proof import NotReplacedError, check_untouched, replace_forwards, results_agree

log = logging.getLogger("fa_serve.hf")

_POSITIONS = (0, 1, 2, 3, 17, 100, 1000, 4095, 8192, 40_000, 131_071, 262_143, 1 << 20)


@dataclass(frozen=True, slots=True)
class FusedRotaryTables:
    """Replaces the `forward` of a rotary embedding. Under torch.compile, and with gradients, its own code runs.

    original: the module's own forward
    module:   has the frequencies, and the factor of cos and sin
    repeats:  how often a row of cos or sin contains each angle
    """

    original: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    module: Any
    repeats: int

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        if runs_original() or position_ids.dim() != 2 or position_ids.is_floating_point():
            return self.original(x, position_ids)
        cos, sin = self.compute(x.dtype, position_ids.reshape(-1))
        return cos.view(*position_ids.shape, -1), sin.view(*position_ids.shape, -1)

    def compute(self, dtype: torch.dtype, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (total, repeats * angles) each. positions: (total,)"""
        scale = float(getattr(self.module, "attention_scaling", 1.0))
        return ops.rotary_tables(positions, self.module.inv_freq, scale, dtype, self.repeats)


@torch.no_grad()
def fuse_rotary_tables(model: nn.Module) -> int:
    """Give rotary embeddings of a model the forward of `FusedRotaryTables` if that changes nothing. Returns how many got it."""

    def refuse(module: nn.Module, reason: str) -> None:
        log.info("%s is not fused: %s", type(module).__name__, reason)

    return replace_forwards(_embeddings(model), _prove, refuse)


def _embeddings(model: nn.Module) -> Iterator[nn.Module]:
    for module in beside_fused_layers(model):
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, Tensor) and frequencies.dim() == 1:
            yield module


def _build(module: Any, repeats: int) -> FusedRotaryTables:
    return FusedRotaryTables(partial(type(module).forward, module), module, repeats)


def _prove(module: Any) -> Callable[[Any], FusedRotaryTables]:
    """Compare a copy of a module with its fused form. Returns the function that builds it. Raises NotReplacedError."""
    check_untouched(module)
    frequencies = module.inv_freq
    positions = torch.tensor(_POSITIONS, device=frequencies.device)
    x = torch.zeros(1, len(positions), 1, device=frequencies.device)
    # another copy for each call: frequencies that depend on the length may be kept from one call for the next one
    found = copy.deepcopy(module)(x, positions[None])
    if not isinstance(found, tuple) or len(found) != 2 or found[0].dim() != 3:
        raise NotReplacedError("it returns other things than cos and sin")
    repeats = found[0].shape[2] // len(frequencies)
    built = _build(copy.deepcopy(module), repeats)
    for count in (len(positions), 1):
        own = copy.deepcopy(module)(x[:, :count], positions[None, :count])
        ours = built.compute(x.dtype, positions[:count])
        if not all(results_agree(actual, wanted[0]) for actual, wanted in zip(ours, own, strict=True)):
            raise NotReplacedError("cos or sin would change")
    return partial(_build, repeats=repeats)
