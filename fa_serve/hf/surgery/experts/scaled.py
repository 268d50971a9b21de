"""Mixtures that scale the inputs of their experts instead of the outputs (Llama 4): computes only the chosen experts.

    taken = take_scaled_experts(model)        # the number of mixtures; the others run their own code

In such a mixture, transformers computes every expert for every token, with a scale of 0 for the experts that were not chosen.
Here each pair of a token and a chosen expert becomes a row of `ops.experts`, which is scaled before and has a weight of 1. A
mixture is recognised by its parts (`router`, `experts`, `shared_expert`). It is replaced only if the result for two of its
experts agrees with that of the module's own code in float32.

Left out: gradients, for which the mixture's own code runs.
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
from fa_serve.hf.surgery.experts.mixtures import first_experts, fit_gate
from fa_serve.hf.surgery.proof import NotReplacedError, check_untouched, float32_copy, functions_agree, replace_forwards
from fa_serve.ops.moe.operator import call_operator

log = logging.getLogger("fa_serve.hf")


@dataclass(frozen=True, slots=True)
class ScaledExperts:
    """Replaces the `forward` of a mixture.

    original: the mixture's own forward
    router:   hidden_states (tokens, hidden) -> scales (tokens, num_experts), 0 where an expert is not chosen, and logits
    shared:   the shared expert, which computes every token
    top_k:    number of experts that are chosen for a token
    weights:  weights of the experts among which the router chooses
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
        # the bits of a sum over a dimension other than the last do not depend on the number of rows
        return self.shared(x) + routed.sum(dim=1), logits


@torch.no_grad()
def take_scaled_experts(model: nn.Module) -> int:
    """Give mixtures of a model the forward of `ScaledExperts` if that changes nothing. Returns how many mixtures got it."""

    def refuse(mixture: nn.Module, reason: str) -> None:
        log.warning("%s computes all of its experts, not only the chosen ones: %s", type(mixture).__name__, reason)

    found = [m for m in model.modules() if {"router", "experts", "shared_expert"} <= dict(m.named_children()).keys()]
    taken = replace_forwards([mixture for mixture in found if _has_parts(mixture)], _prove, refuse)
    if found:
        log.info("%d of %d mixtures compute only the chosen experts", taken, len(found))
    return taken


def _has_parts(mixture: Any) -> bool:
    """Whether the weights of a mixture's experts are two tensors, in a module that `take_experts` does not handle."""
    weights: list[Any] = [getattr(mixture.experts, name, None) for name in ("gate_up_proj", "down_proj")]
    if hasattr(mixture.experts, "_apply_gate") or not all(isinstance(w, Tensor) and w.dim() == 3 for w in weights):
        return False
    device = weights[0].device
    # the PyTorch path reads the router's choice back to the host, which is impossible in a CUDA graph
    return device.type == "cpu" or ops.select_ops(device).name != "torch"


def _build(mixture: Any) -> ScaledExperts:
    experts = mixture.experts
    gate = fit_gate(lambda gate, up: up * experts.act_fn(gate), interleaved=False)
    if gate is None:
        raise NotReplacedError("it gates its experts in a way that fa_serve does not compute")
    gate_up = experts.gate_up_proj.transpose(1, 2)
    weights = ops.ExpertWeights(gate_up, None, experts.down_proj.transpose(1, 2), None, gate)
    own = partial(type(mixture).forward, mixture)
    return ScaledExperts(own, mixture.router, mixture.shared_expert, int(mixture.top_k), weights)


def _prove(mixture: Any) -> Callable[[Any], ScaledExperts]:
    """Compare a copy with two experts in float32 with its other form. Returns `_build`. Raises NotReplacedError."""
    check_untouched(mixture)
    few = copy.copy(mixture)
    few._modules = {
        **mixture._modules,
        "experts": first_experts(mixture.experts),
        "router": first_experts(mixture.router),
        "shared_expert": float32_copy(mixture.shared_expert),
    }
    few.num_experts = few.experts.num_experts
    few.top_k = few.router.top_k = min(few.num_experts, few.top_k)
    built = _build(few)
    hidden = few.router.weight.shape[1]
    x = torch.sin(torch.arange(5 * hidden, device=few.router.weight.device).float()).view(5, hidden)
    if not functions_agree(lambda x: built.original(x)[0], lambda x: built(x)[0], x):
        raise NotReplacedError("its output would change")
    return _build
