"""Finds mixtures whose shared expert has a gate (Qwen2-MoE, Qwen3-Next, Qwen3.5), and adds their parts in one launch.

    found = fuse_mixtures(model)     # the number of fused layers whose mixture is added like this

Such a mixture computes

    experts(x) + sigmoid(x @ gate) * shared(x)

where the gate is a linear layer with one row. Its own code launches five kernels for the gate, its sigmoid, the product and the
two sums, the second of which adds to the residual stream. In a step of few tokens each of them takes longer than its work.

No mixture is recognised by the name of its class. The code of a mixture in a fused layer that has these four parts runs in
float32 on random rows, with a stand-in for its experts that needs little memory. The mixture is fused if the sum of the parts
is the same. The parts keep their forwards, which are often fused as well (router.py, unit.py). Left out: gradients,
deterministic mode, gates with an adapter, and mixtures that are divided between ranks, for which the mixture's own code runs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.surgery.fuse.layer import FusedLayer
from fa_serve.hf.surgery.fuse.parts import beside_experts
from fa_serve.hf.surgery.proof import NotReplacedError, check_untouched, float32_copy, functions_agree, replace_forwards

log = logging.getLogger("fa_serve.hf")

_ROWS = 64


@dataclass(frozen=True, slots=True)
class FusedMixture:
    """The parts of a mixture whose shared expert has a gate.

    router:  x -> logits, weights and indices of the chosen experts
    experts: (x, indices, weights) -> the sum over the chosen experts
    shared:  the expert that computes every token
    gate:    a linear layer with one row and without a bias
    """

    router: nn.Module
    experts: nn.Module
    shared: nn.Module
    gate: nn.Linear

    @property
    def adds_parts(self) -> bool:
        """Whether `add` computes what the mixture does: its gate may have an adapter, whose forward would be left out."""
        return "forward" not in vars(self.gate) and not torch.is_grad_enabled()

    def add(self, x: Tensor, h: Tensor, alpha: float) -> Tensor:
        """Add alpha times the output for h to x, in place. x, h: (total, hidden). Returns x."""
        shared = self.shared(h)
        _, weights, chosen = self.router(h)
        return ops.add_gated(x, self.experts(h, chosen, weights), shared, h, self.gate.weight[0], alpha=alpha)


@torch.no_grad()
def fuse_mixtures(model: nn.Module) -> int:
    """Let fused layers of a model add the parts of their mixture if that changes nothing. Returns how many do so."""
    layers = [m for m in model.modules() if isinstance(vars(m).get("forward"), FusedLayer)]
    found = [layer for layer in layers if _parts_of(layer.mlp) is not None]  # type: ignore[arg-type]
    fused = replace_forwards(found, _prove, _refuse)
    if found:
        log.info("%d of %d mixtures with a gated shared expert are fused", fused, len(found))
    return fused


def _refuse(layer: nn.Module, reason: str) -> None:
    log.info("the mixture of %s is not fused: %s", type(layer).__name__, reason)


def _parts_of(mixture: nn.Module) -> FusedMixture | None:
    """The parts of a mixture, found by their sizes; None for a module with other parts."""
    pairs = [(experts, child) for experts, child in beside_experts(mixture) if child in set(mixture.children())]
    children = [child for _, child in pairs]
    if len(children) != 3:
        return None
    experts: Any = pairs[0][0]
    gates = [child for child in children if type(child) is nn.Linear and child.out_features == 1 and child.bias is None]
    units = [child for child in children if hasattr(child, "down_proj")]
    others = [child for child in children if child not in gates and child not in units]
    if not len(gates) == len(units) == len(others) == 1:
        return None
    return FusedMixture(others[0], experts, units[0], gates[0])


class _AnyExperts(nn.Module):
    """Stands for experts, whose copy in float32 may take gigabytes: a function of all that experts are called with."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts = experts.num_experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        scales = torch.sin(1.0 + chosen.to(x.dtype)) * weights.to(x.dtype)
        return x * scales.sum(dim=-1, keepdim=True)


def _prove(layer: Any) -> Callable[[Any], FusedLayer]:
    """Compare a mixture, with a stand-in for its experts, with the sum of its parts.

    Returns the function that makes the forward of a layer. Raises NotReplacedError.
    """
    mixture = layer.mlp
    parts = _parts_of(mixture)
    assert parts is not None
    check_untouched(mixture)
    if layer.forward.after_mlp is not None:
        raise NotReplacedError("its output is normalised before it is added")
    original = copy.copy(mixture)
    stand_in = _AnyExperts(parts.experts)
    original._modules = {
        name: stand_in if child is parts.experts else float32_copy(child) for name, child in mixture._modules.items()
    }
    place = {child: name for name, child in mixture._modules.items()}
    few = FusedMixture(*(original._modules[place[part]] for part in (parts.router, parts.experts, parts.shared, parts.gate)))
    x = torch.randn(_ROWS, parts.gate.in_features, generator=torch.Generator().manual_seed(0)).to(parts.gate.weight.device)

    def own(x: Tensor) -> Tensor:
        found = original(x[None])
        output: Tensor = found[0] if isinstance(found, tuple) else found
        return x + 0.5 * output.view(x.shape)

    if not functions_agree(own, lambda x: few.add(x.clone(), x, 0.5), x):
        raise NotReplacedError("its output would change")
    return _with_mixture


def _with_mixture(layer: Any) -> FusedLayer:
    """The forward of a fused layer that adds the parts of its mixture."""
    fused: FusedLayer = layer.forward
    return replace(fused, mixture=_parts_of(layer.mlp))
