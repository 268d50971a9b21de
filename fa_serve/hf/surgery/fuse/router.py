"""Finds routers of mixtures by what they compute, and gives them a forward of two launches.

    fused = fuse_routers(model)      # the number of fused routers; the others run their own code

A router has the same parent module as the experts that it chooses from. It has a row of weights for each expert, and returns
logits, weights and indices of experts. No router is recognised by the name of its class. Instead, the router runs in float32,
and a description (`ops.Router`) is searched for that gives the same choice and the same weights for every row.

Left out: routers with noise, with several layers, or with an argument besides the hidden states, which run their own code.
`model.generate` also runs fused routers, because a router cannot tell which forward called it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fa_serve import ops
from fa_serve.hf.surgery.fuse.parts import beside_experts, runs_original
from fa_serve.hf.surgery.proof import (
    TOLERANCE,
    NotReplacedError,
    check_untouched,
    float32_copy,
    functions_agree,
    replace_forwards,
    results_agree,
)

log = logging.getLogger("fa_serve.hf")

_ROWS = 512


@dataclass(frozen=True, slots=True)
class Routed:
    """The result of a router. order: the positions of logits, weights and index in the tuple that it returns"""

    logits: Tensor
    weights: Tensor
    index: Tensor
    order: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FusedRouter:
    """Replaces the `forward` of a router. Under torch.compile, and with gradients outside of `fa_serve.exact`, the router's own
    code runs.

    original:   the router's own forward
    weight:     (num_experts, hidden), in the dtype in which the router multiplies
    bias:       (num_experts,) added to the logits, or None
    correction: (num_experts,) added to the scores only for the choice, or None
    router:     how logits become weights and indices
    dtype:      dtype of the weights that it returns
    order:      the positions of logits, weights and indices in the result
    """

    original: Callable[[Tensor], Any]
    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    router: ops.Router
    dtype: torch.dtype
    order: tuple[int, int, int]

    def __call__(self, hidden_states: Tensor) -> Any:
        if runs_original():
            return self.original(hidden_states)
        x = hidden_states.reshape(-1, self.weight.shape[1]).to(self.weight.dtype)
        logits = ops.linear(x, self.weight, self.bias)
        found = (logits, *ops.route(logits, self.correction, self.router, self.dtype))
        return tuple(found[self.order.index(place)] for place in range(3))


@torch.no_grad()
def fuse_routers(model: nn.Module, *, live: bool = False) -> int:
    """Give routers of a model the forward of `FusedRouter` if that changes nothing. Returns how many routers got it.

    live: leave out routers whose fused form needs copies of their parameters, because an optimizer step does not update copies
    """
    known: dict[ops.Router, None] = {}

    def build(router: nn.Module) -> FusedRouter:
        """Prove and build one router. Each one is proven by itself, because the proof reads its correction from its weights."""
        built = _prove(router, list(known))
        own = {x.data_ptr() for x in (*router.parameters(), *router.buffers())}
        if live and any(x is not None and x.data_ptr() not in own for x in (built.weight, built.bias, built.correction)):
            raise NotReplacedError("it would need copies of its weights in another dtype")
        known[built.router] = None
        return built

    def refuse(router: nn.Module, reason: str) -> None:
        log.info("%s is not fused: %s", type(router).__name__, reason)

    found = list(_routers(model))
    fused = replace_forwards(found, lambda router: build, refuse)
    if found:
        log.info("%d of %d routers are fused", fused, len(found))
    return fused


def _routers(model: nn.Module) -> Iterator[Any]:
    """The modules next to a module of experts that have a row of weights for each expert."""
    for experts, module in beside_experts(model):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) == experts.num_experts:
            yield module


def _prove(module: Any, known: Sequence[ops.Router]) -> FusedRouter:
    """Build the fused form of a router and compare it with a float32 copy. known: tried first. Raises NotReplacedError."""
    check_untouched(module)
    weight = module.weight
    if not weight.is_contiguous():
        raise NotReplacedError(f"its weights must be contiguous, got strides {weight.stride()}")
    x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    exact = _routed(float32_copy(module)(x), len(weight))
    here = _routed(module(x.to(weight.dtype)), len(weight))
    own = [t for t in (*module.parameters(), *module.buffers()) if t.numel() == len(weight)]
    # the bias of the logits is the parameter itself, which gets gradients in an exact forward
    tensors = [t if t.dim() == 1 else t.detach().reshape(-1) for t in own]
    biases = [None, *tensors]
    wide = weight.float()
    matching = [bias for bias in biases if results_agree(linear(x, wide, _wide(bias)), exact.logits)]
    found = _fit(exact, biases, known)
    if not matching or found is None:
        raise NotReplacedError("no known routing formula reproduces its logits, choice and weights")
    bias = matching[0]
    correction, router = found

    def logits(x: Tensor) -> Tensor:
        return ops.linear(x, wide, _wide(bias))

    # the search ran on the host: check the kernels of the device
    chosen = ops.route(exact.logits, correction, router, torch.float32)
    if not functions_agree(lambda x: exact.logits, logits, x) or not _same_choice(*chosen, exact):
        raise NotReplacedError("its logits or its choice of experts would change")
    narrow = linear(x.to(weight.dtype), weight, bias).to(here.logits.dtype)
    if not torch.equal(narrow, here.logits):
        weight = wide  # the router multiplies in float32, whatever the dtype of its weights
        bias = _wide(bias)
    original = partial(type(module).forward, module)
    return FusedRouter(original, weight, bias, correction, router, here.weights.dtype, here.order)


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _routed(result: Any, num_experts: int) -> Routed:
    """The parts of a router's result. Raises NotReplacedError if they are not logits, weights and indices of experts."""
    if not isinstance(result, tuple) or len(result) != 3 or not all(isinstance(x, Tensor) and x.dim() == 2 for x in result):
        raise NotReplacedError("it does not return three matrices")
    kinds = [0 if x.shape[1] == num_experts else 1 if x.is_floating_point() else 2 for x in result]
    if sorted(kinds) != [0, 1, 2] or result[kinds.index(1)].shape != result[kinds.index(2)].shape:
        raise NotReplacedError("it does not return logits, weights and indices of experts")
    order = (kinds.index(0), kinds.index(1), kinds.index(2))
    logits, weights, index = (result[place] for place in order)
    return Routed(logits, weights, index, order)


def _fit(exact: Routed, biases: list[Tensor | None], known: Sequence[ops.Router]) -> tuple[Tensor | None, ops.Router] | None:
    """The correction and the `ops.Router` that choose as `exact` does, or None. Runs on the host, so no kernels are compiled.

    known: routers that are tried first
    """
    here = Routed(exact.logits.cpu(), exact.weights.cpu(), exact.index.cpu(), exact.order)
    possible = [
        ops.Router(here.index.shape[1], uses_sigmoid, renormalise, 1.0, *groups)
        for groups in _groups(here)
        for uses_sigmoid in (False, True)
        for renormalise in (False, True)
    ]
    for router, correction in itertools.product([*known, *possible], biases):
        host = None if correction is None else correction.float().cpu()
        weights, index = ops.route(here.logits, host, router._replace(scale=1.0), torch.float32)
        scale = round(float(here.weights.sum() / weights.sum()), 6)
        if _same_choice(weights * scale, index, here):
            return None if correction is None else correction.detach().float(), router._replace(scale=scale)
    return None


def _groups(exact: Routed) -> list[tuple[int, int]]:
    """Possible (num_groups, top_groups): first no groups, then powers of two. No row has experts in more than top_groups."""
    num_experts = exact.logits.shape[1]
    found = [(1, 1)]
    for num_groups in (2, 4, 8, 16):
        if num_experts & (num_experts - 1) or num_experts < 2 * num_groups:
            break
        groups = exact.index // (num_experts // num_groups)
        met = int(torch.nn.functional.one_hot(groups, num_groups).amax(1).sum(1).max())
        found += [(num_groups, top_groups) for top_groups in range(met, num_groups)]
    return found


def _same_choice(weights: Tensor, index: Tensor, exact: Routed) -> bool:
    """Whether rows have the same experts with the same weights, in any order. One row may differ, as rounding decides ties."""
    ours = index.argsort(-1)
    own = exact.index.argsort(-1)
    same = (index.gather(1, ours) == exact.index.gather(1, own)).all(1)
    error = (weights.gather(1, ours) - exact.weights.gather(1, own)).abs().amax(1)
    same &= error <= TOLERANCE * exact.weights.abs().max()
    return int(same.sum()) >= len(same) - 1
