"""The experts of a mixture: `experts_implementation="fa_serve"`, and how the engine takes over the experts of a model.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa_serve", experts_implementation="fa_serve")
    model.set_experts_implementation("fa_serve")      # for a model that is already loaded
    taken = take_experts(model)                       # only if this is proven to change nothing

transformers keeps the weights of a layer's experts in one module, which says how they are laid out (`has_gate`, `has_bias`,
`is_transposed`) and how they are gated (`_apply_gate`). The gate is identified by the values that `_apply_gate` computes, not
by the name of a class or an activation. Routers and shared experts stay the model's own. A call with gradients is computed by
transformers' `grouped_mm`, because the kernels have no backward pass.

Left out: quantised experts (quantised/experts.py), and experts without a gate.
"""

from __future__ import annotations

import copy
import logging
import math
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from fa_serve import ops
from fa_serve.hf.adapter.models import NAME
from fa_serve.hf.surgery.proof import FIT_TOLERANCE, functions_agree, kind_of, results_agree
from fa_serve.ops.moe.fallback import gated
from fa_serve.ops.moe.operator import call_operator
from fa_serve.spec import UnsupportedModelError

log = logging.getLogger("fa_serve.hf")

_GATE = "_fa_serve_gate"
"""The attribute in which a module of experts keeps its identified gate."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts implementation that transformers calls.

    hidden_states: (tokens, hidden)
    top_k_index:   (tokens, top_k); indices from num_experts on are experts of another process, and add nothing here
    top_k_weights: (tokens, top_k)

    Returns (tokens, hidden), in the dtype of hidden_states.

    Raises UnsupportedModelError with the reason for experts of a kind that fa_serve does not compute.
    """
    gate = gate_of(module)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (hidden_states, top_k_weights, *module.parameters())):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    weights = weights_of(module, gate)
    y = call_operator(hidden_states.to(cast(Any, module).down_proj.dtype), top_k_index, top_k_weights, weights)
    return y.to(hidden_states.dtype)


@torch.no_grad()
def take_experts(model: PreTrainedModel) -> int:
    """Let fa_serve compute the experts of a model if that changes nothing. Returns how many modules of experts it computes.

    Each kind of module is proven once: two of its experts are computed in float32 by the module's own code and by fa_serve. If
    this fails or the results differ, all experts of the model keep their implementation, and the log says why.
    """
    found = expert_modules(model)
    if not found:
        return 0
    device = found[0].down_proj.device
    if device.type != "cpu" and ops.select_ops(device).name == "torch":
        return 0  # the PyTorch path reads the router's choice back to the host, which is impossible in a CUDA graph
    kinds = {kind_of(module): module for module in reversed(found)}  # the first of each kind
    try:
        wrong = [type(module).__name__ for module in kinds.values() if not experts_agree(module)]
        reason = f"the output of {wrong[0]} would change" if wrong else None
    except Exception as error:  # raised here, by the model's code or by a kernel's compiler
        reason = str(error)
    if reason is not None:
        log.warning(
            "experts are computed by transformers (%s), not by fa_serve: %s", found[0].config._experts_implementation, reason
        )
        return 0
    # not `set_experts_implementation`: it skips a mixture whose class is a subclass defined in another file
    for module in found:
        module.config._experts_implementation = NAME
    log.info("%d modules of experts are computed by fa_serve", len(found))
    return len(found)


def expert_modules(model: nn.Module) -> list[Any]:
    """The modules of a model whose experts go through transformers' experts interface."""
    return [m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(type(m).forward, "__wrapped__")]


def first_experts(module: Any) -> Any:
    """A shallow copy of a module with a row of weights per expert. It has those of the first two experts, in float32."""
    few = copy.copy(module)
    few.num_experts = min(2, int(module.num_experts))
    own = module.named_parameters(recurse=False)
    few._parameters = dict(module._parameters) | {name: p[: few.num_experts].float() for name, p in own}
    return few


def experts_agree(module: nn.Module) -> bool:
    """Whether the module's own code computes the same as fa_serve. Raises UnsupportedModelError as `gate_of`."""
    few = first_experts(module)
    weights = weights_of(few, gate_of(module))
    _, hidden, _ = weights.down.shape
    x = torch.sin(torch.arange(5 * hidden, device=weights.down.device).float()).view(5, hidden)
    index = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]], device=x.device) % few.num_experts
    scores = torch.linspace(0.1, 1.0, 10, device=x.device).view(5, 2)
    own: Any = type(module).forward

    def ours(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        return ops.experts(x, index, scores, weights)

    return functions_agree(partial(own.__wrapped__, few), ours, x, index, scores)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def gate_of(module: nn.Module) -> ops.Gate:
    """The gate of a module of experts, identified at the first call.

    Raises UnsupportedModelError with the reason for experts that fa_serve does not compute.
    """
    gate = vars(module).get(_GATE)
    if gate is None:
        gate = _read_gate(module)
        setattr(module, _GATE, gate)
    return cast(ops.Gate, gate)


def _read_gate(module: Any) -> ops.Gate:
    """Check a module of experts and identify the gate that it computes."""
    name = type(module).__name__
    if not module.has_gate:
        raise UnsupportedModelError(f"{name} has experts without a gate, which fa_serve does not compute")
    for weight in (module.gate_up_proj, module.down_proj):
        if weight.dim() != 3 or weight.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"the weights of {name} must be floats of 3 dimensions, got {weight.dtype} of shape {tuple(weight.shape)}"
            )

    def own(gate: Tensor, up: Tensor) -> Tensor:
        pairs = torch.cat([gate, up]) if module.is_concatenated else torch.stack([gate, up], dim=1).flatten()
        return cast(Tensor, module._apply_gate(pairs[None])[0])

    found = fit_gate(own, interleaved=not module.is_concatenated)
    if found is None:
        raise UnsupportedModelError(f"{name} gates its experts in a way that fa_serve does not compute")
    return found


def fit_gate(own: Any, *, interleaved: bool) -> ops.Gate | None:
    """The gate that computes the same values as `own`, a function of gate and up values (n,); None if there is none.

    For a gate value of 1 the result is linear in up until a limit. This gives the offset and the limit, and the factor of up
    gives the slope of the activation.
    """
    large = 1e6
    up = torch.tensor([0.0, 1.0, large], dtype=torch.float64, device="cpu")
    at_0, at_1, at_large = own(torch.ones_like(up), up).tolist()
    factor = at_1 - at_0
    if not 0.0 < factor < 1.0:
        return None
    offset = round(at_0 / factor, 6)
    limit = round(at_large / factor - offset, 6)
    limit = math.inf if limit > large / 2 else limit
    slope = round(math.log(factor / (1.0 - factor)), 6)
    span = 3.0 * limit if limit < math.inf else 12.0
    gates, ups = torch.meshgrid(*[torch.linspace(-span, span, 65, dtype=torch.float64, device="cpu")] * 2, indexing="ij")
    expected = own(gates.flatten(), ups.flatten())
    for activation in ops.ACTIVATIONS:
        gate = ops.Gate(activation, interleaved, slope if activation == "silu" else 1.0, limit, offset)
        values = gated(torch.cat([gates.flatten(), ups.flatten()])[None], gate._replace(interleaved=False))[0]
        if results_agree(values, expected, FIT_TOLERANCE):
            return gate
    return None


def weights_of(module: Any, gate: ops.Gate) -> ops.ExpertWeights:
    """The weights of a module of experts, as views of its parameters."""
    gate_up = module.gate_up_proj
    down = module.down_proj
    if module.is_transposed:
        gate_up = gate_up.transpose(1, 2)
        down = down.transpose(1, 2)
    gate_up_bias = module.gate_up_proj_bias if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None
    return ops.ExpertWeights(gate_up, gate_up_bias, down, down_bias, gate)
