"""Mixtures that scale what goes into an expert instead of what comes out (Llama 4): only the chosen experts are computed.

    taken = take_scaled_experts(model)        # how many mixtures; the others run as they are

transformers computes every expert for every token of such a mixture, with a scale of 0 for the experts that were not chosen. A
token at one of its experts becomes a row of `ops.experts`, scaled before and with a weight of 1. A mixture is recognised by its
parts (`router`, `experts`, `shared_expert`) and is taken only if two of its experts agree with its own code in float32.

Left out: gradients, which the mixture's own code computes.
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
from fa_serve.hf.surgery.experts.mixtures import TOLERANCE, fit_gate
from fa_serve.ops.experts.operator import call_operator

log = logging.getLogger("fa_serve.hf")


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """Replaces the `forward` of a mixture.

    original: the mixture's own forward
    router:   hidden_states (tokens, hidden) -> scales (tokens, num_experts), 0 where an expert is not chosen, and logits
    shared:   the expert that every token has
    top_k:    chosen experts of a token
    """

    original: Callable[[Tensor], Any]
    router: nn.Module
    shared: nn.Module
    top_k: int
    weights: ops.ExpertWeights

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            own: tuple[Tensor, Tensor] = self.original(hidden_states)
            return own
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        scales, index = scores.topk(self.top_k, dim=1)
        rows = (x[:, None] * scales[..., None]).flatten(0, 1)
        ones = torch.ones_like(scales).view(-1, 1)
        routed = call_operator(rows, index.view(-1, 1), ones, self.weights).view(len(x), self.top_k, -1)
        # a sum over a dimension other than the last does not depend on the number of rows
        return self.shared(x) + routed.sum(dim=1), logits


@torch.no_grad()
def take_scaled_experts(model: nn.Module) -> int:
    """Give mixtures of a model the forward of `ScaledExperts`, where that changes nothing. Returns how many."""
    found = [m for m in model.modules() if {"router", "experts", "shared_expert"} <= dict(m.named_children()).keys()]
    taken = 0
    for mixture in found:
        try:
            built = _build(mixture)
            if built is None or (not taken and not _agrees(mixture)):
                break
        except Exception as error:  # raised by the model's code or by a kernel's compiler
            log.warning("%s computes all of its experts: %s", type(mixture).__name__, error)
            break
        mixture.forward = built
        taken += 1
    if found:
        log.info("%d of %d mixtures compute the chosen experts only", taken, len(found))
    return taken


def _build(mixture: Any) -> ScaledExperts | None:
    """The other form of a mixture, or None if its experts are of another kind."""
    experts = mixture.experts
    gate_up = getattr(experts, "gate_up_proj", None)
    down = getattr(experts, "down_proj", None)
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or gate_up.dim() != 3 or hasattr(experts, "_apply_gate"):
        return None
    if gate_up.device.type != "cpu" and ops.select_ops(gate_up.device).name == "torch":
        return None  # PyTorch reads the router's choice back, which a CUDA graph cannot
    gate = fit_gate(lambda gate, up: up * experts.act_fn(gate), interleaved=False)
    if gate is None:
        return None
    weights = ops.ExpertWeights(gate_up.transpose(1, 2), None, down.transpose(1, 2), None, gate)
    own = partial(type(mixture).forward, mixture)
    return ScaledExperts(own, mixture.router, mixture.shared_expert, int(mixture.top_k), weights)


def _agrees(mixture: Any) -> bool:
    """Whether two experts, in float32, give the same by the mixture's own code and by ours, for several tokens and for one."""
    few = copy.copy(mixture)
    few._modules = {name: copy.copy(module) for name, module in mixture._modules.items()}
    few.shared_expert = copy.deepcopy(mixture.shared_expert).float()
    for part in (few.experts, few.router):
        part._parameters = {name: None if p is None else p[:2].float() for name, p in part._parameters.items()}
    few.num_experts = few.experts.num_experts = few.router.num_experts = 2
    few.top_k = few.router.top_k = min(2, few.top_k)
    built = _build(few)
    assert built is not None
    hidden = few.router.weight.shape[1]
    x = torch.sin(torch.arange(5 * hidden, device=few.router.weight.device).float()).view(5, hidden)
    for rows in (5, 1):
        expected, _ = built.original(x[:rows])
        found, _ = built(x[:rows])
        if (found - expected).abs().max() > TOLERANCE * expected.abs().max():
            log.warning("%s computes all of its experts: its output would change", type(mixture).__name__)
            return False
    return True
