"""The mixer of a fused layer that keeps a state: the gated delta rule in few launches, or the mixer's own code.

    mixer, output = build_mixer(layer, call)      # output: the output projection; None if the mixer's own code includes it

A layer of a hybrid model has either attention or a mixer with a recurrence. Its norms, its MLP and its additions to the
residual stream are fused in either case (layer.py). `DeltaMixer` takes about seven more launches: one product for all inputs,
the convolution, the gates, the recurrence, and the norm with its gate. transformers repeats the keys of a group of heads for
each head. `DeltaMixer` reads them once, so it also keeps less per token (`DeltaMixer.kept`). Any other mixer is an `OwnMixer`,
which calls the `PatchedMixer` unchanged.

Left out: the proof (fusion.py), how a recurrence reaches its kernel (adapter/state_modules.py), and states (fa_serve.ops).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.adapter.state_modules import PatchedMixer
from fa_serve.hf.adapter.step_cache import CONVOLUTION, DELTA_RULE, ComputesStates, StateCall, StateKey, StepCache
from fa_serve.hf.lora.product import project
from fa_serve.hf.surgery.fuse.parts import FusedProduct, merge_products, product_of
from fa_serve.hf.surgery.proof import NotReplacedError

IN_PROJECTIONS = (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba"))
"""The projections of a gated delta net. Their outputs are in the order in which they are used (Qwen 3.5), or grouped by key
head (Qwen3-Next)."""


class StateStep(NamedTuple):
    """The arguments of a step for a mixer with a state.

    states: computes its recurrences
    given:  the arguments of the layer's call, by name
    """

    states: ComputesStates
    given: Mapping[str, Any]


class MixerCall(NamedTuple):
    """How a layer calls its mixer.

    name:  attribute of the layer that holds the mixer
    given: the arguments except the hidden states, by name. Tensors among them are arguments that the layer passes on unchanged
    """

    name: str
    given: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OwnMixer:
    """A mixer that runs its own code, output projection included. call: how its layer calls it"""

    module: nn.Module
    call: MixerCall

    def compute(self, x: Tensor, norm: ops.Norm | None, step: StateStep) -> Tensor:
        """(total, hidden) -> (total, hidden)."""
        given = {name: _argument(name, value, step) for name, value in self.call.given.items()}
        out = self.module((x if norm is None else ops.rms_norm(x, norm))[None], **given)
        mixed: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return mixed


def _argument(name: str, observed: Any, step: StateStep) -> Any:
    return state_cache(step.given) if isinstance(observed, StepCache) else step.given.get(name, observed)


def state_cache(given: Mapping[str, Any]) -> StepCache:
    """The argument of a layer's call that replaces its cache."""
    return next(value for value in given.values() if isinstance(value, StepCache))


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """A gated delta net (Yang et al. 2024, arXiv:2412.06464), without its output projection.

    number:  index of the module in `find_state_modules`
    heads:   the heads of queries, keys and values
    inputs:  the merged projection to queries, keys, values, the gate of the output, b and a
    grouped: whether the columns of the projection are grouped by key head
    weight, bias, activation: of the convolution; weight is (channels, width)
    norm:    norm of each head of the output, before its gate
    """

    number: int
    heads: ops.DeltaHeads
    inputs: FusedProduct
    grouped: bool
    weight: Tensor
    bias: Tensor | None
    activation: str
    norm: ops.Norm
    a_log: Tensor
    dt_bias: Tensor

    def compute(self, x: Tensor, norm: ops.Norm | None, step: StateStep) -> Tensor:
        """(total, hidden) -> (total, values * dim)."""
        heads = self.heads
        queries = heads.keys * heads.key_dim
        values = heads.values * heads.dim
        mixed = project(self.inputs, x, norm=norm)
        if self.grouped:
            qkv, z, g, beta = ops.ungroup_delta_inputs(mixed, heads, self.a_log, self.dt_bias)
        else:
            qkv, z, b, a = torch.split_with_sizes(mixed, [2 * queries + values, values, heads.values, heads.values], dim=1)
            g, beta = ops.delta_gates(a, b, self.a_log, self.dt_bias)
        fixed = {"weight": self.weight, "bias": self.bias, "activation": self.activation}
        qkv = step.states.compute(StateKey(self.number, 0), StateCall(CONVOLUTION, {"x": qkv[None]}, fixed))
        q, k, v = torch.split_with_sizes(qkv, [queries, queries, values], dim=2)
        total = len(x)
        rows = {
            "q": q.view(1, total, heads.keys, heads.key_dim),
            "k": k.view(1, total, heads.keys, heads.key_dim),
            "v": v.view(1, total, heads.values, heads.dim),
            "g": g[None],
            "beta": beta[None],
        }
        out = step.states.compute(StateKey(self.number, 1), StateCall(DELTA_RULE, rows, {"use_qk_l2norm": True}))[0]
        gate = z.view(total, heads.values, heads.dim)
        return ops.gate_heads(out, gate, "silu", norm=self.norm).flatten(1)

    def kept(self, states: Mapping[StateKey, ops.StateSpec]) -> dict[StateKey, ops.StateSpec]:
        """What the recurrence keeps of a sequence: the keys of each group of heads once. states: what the own code keeps"""
        key = StateKey(self.number, 1)
        found = states[key]
        tail = tuple(
            row._replace(shape=(self.heads.keys, self.heads.key_dim)) if row.name == "k" else row for row in found.tail
        )
        return {key: replace(found, tail=tail)}


def build_mixer(layer: Any, call: MixerCall) -> tuple[DeltaMixer | OwnMixer, FusedProduct | None]:
    """Build the mixer of a layer and merge its projections -> the mixer and its output projection. Raises NotReplacedError."""
    module = getattr(layer, call.name)
    names = next((names for names in IN_PROJECTIONS if all(hasattr(module, name) for name in names)), None)
    if names is None:
        return OwnMixer(module, call), None
    patched = vars(module).get("forward")
    if not isinstance(patched, PatchedMixer):
        raise NotReplacedError("its mixer keeps a state that fa_serve has not taken over")
    mixer = DeltaMixer(
        number=patched.number,
        heads=ops.DeltaHeads(module.num_k_heads, module.head_k_dim, module.num_v_heads, module.head_v_dim),
        inputs=merge_products(module, *names),
        grouped=names is not IN_PROJECTIONS[0],
        weight=module.conv1d.weight.detach().squeeze(1),
        bias=None if module.conv1d.bias is None else module.conv1d.bias.detach(),
        activation=module.activation,
        norm=ops.Norm(module.norm.weight, float(module.norm.variance_epsilon)),
        a_log=module.A_log.detach(),
        dt_bias=module.dt_bias.detach(),
    )
    return mixer, product_of(module.out_proj)


def find_mixer(layer: nn.Module) -> str | None:
    """The attribute of a layer that holds a `PatchedMixer` module; None for a layer with none or several."""
    names = [name for name, child in layer.named_children() if isinstance(vars(child).get("forward"), PatchedMixer)]
    return names[0] if len(names) == 1 else None
