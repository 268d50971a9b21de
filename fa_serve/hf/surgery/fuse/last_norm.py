"""Gives the norm behind the last decoder layer a forward of one launch. Its own code launches about eight kernels.

    fused = fuse_last_norms(model)   # the number of fused norms

Such a norm has the same parent module as fused layers. It is not recognised by its name: a module next to the list of layers
that has weights and an epsilon runs in float32 on random rows, and is fused if `ops.rms_norm` computes the same. The norms
inside of fused layers are parts of these (layer.py). Left out: the head, a product that the model computes itself, and
deterministic mode, in which a training forward computes the norm by the model's own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.surgery.fuse.layer import beside_fused_layers
from fa_serve.hf.surgery.fuse.parts import norm_of, runs_original
from fa_serve.hf.surgery.proof import NotReplacedError, check_untouched, float32_copy, functions_agree, replace_forwards

log = logging.getLogger("fa_serve.hf")

_ROWS = 64


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """Replaces the `forward` of a norm. Under torch.compile, and with gradients, the norm's own code runs.

    original: the norm's own forward
    """

    original: Callable[[Tensor], Tensor]
    norm: ops.Norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        if runs_original() or hidden_states.dtype != self.norm.weight.dtype:
            return self.original(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return ops.rms_norm(rows, self.norm).view(hidden_states.shape)


@torch.no_grad()
def fuse_last_norms(model: nn.Module) -> int:
    """Give norms of a model that follow fused layers the forward of `FusedNorm` if that changes nothing. Returns how many."""

    def refuse(norm: nn.Module, reason: str) -> None:
        log.info("%s is not fused: %s", type(norm).__name__, reason)

    return replace_forwards(_last_norms(model), _prove, refuse)


def _last_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Modules next to fused layers that have one row of weights."""
    for module in beside_fused_layers(model):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 1:
            yield module


def _build(module: Any) -> FusedNorm:
    return FusedNorm(partial(type(module).forward, module), norm_of(module))


def _prove(module: Any) -> Callable[[Any], FusedNorm]:
    """Compare a float32 copy of a norm with its fused form. Returns the function that builds it. Raises NotReplacedError."""
    check_untouched(module)
    original = float32_copy(module)
    norm = norm_of(original)
    x = torch.randn(_ROWS, len(norm.weight), generator=torch.Generator().manual_seed(0)).to(norm.weight.device)
    if not functions_agree(original, lambda x: ops.rms_norm(x, norm), x):
        raise NotReplacedError("its output would change")
    return _build
