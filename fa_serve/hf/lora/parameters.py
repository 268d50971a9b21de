"""Adapters of parameters that are not weights of linear layers: the experts of mixtures and their routers.

    modules = ParameterModules(model, holder)
    parts = modules.pack(adapter)            # by the name of the module; on the host
    modules.write(slot, parts)

peft stacks the matrices of all experts in one tensor. They are many times as large as those of a linear layer, so they are kept
as separate tensors and not in pages, and PyTorch computes the experts for the tokens of each adapter in turn. For a router, the
adapter is merged into a copy of the whole weights. A step with such an adapter runs without a CUDA graph. Left out: quantised
experts, and routers that are not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fa_serve.hf.lora.divided import part_of_experts
from fa_serve.hf.lora.format import LoraAdapter
from fa_serve.hf.lora.product import StepHolder
from fa_serve.hf.surgery.divide.sections import rank_part
from fa_serve.hf.surgery.divide.weights import PartOfSum
from fa_serve.hf.surgery.experts.mixtures import expert_modules, gate_of, weights_of
from fa_serve.hf.surgery.fuse.router import FusedRouter
from fa_serve.ops.moe.fallback import LowRankExperts, torch_adapted_experts
from fa_serve.spec import ParameterError

Part = dict[str, LowRankExperts]
"""What an adapter adds to the parameters of a module: "gate_up_proj" and "down_proj" of experts, "weight" of a router."""


class ParameterModules:
    """Replaces the forwards of a model's experts and routers, and owns the matrices that adapters in memory have for them."""

    def __init__(self, model: nn.Module, holder: StepHolder) -> None:
        self._holder = holder
        self._slots: dict[int, Mapping[str, Part]] = {}
        self._routers: dict[tuple[int, str], FusedRouter] = {}
        self._experts: dict[str, Any] = {}
        self._fused: dict[str, FusedRouter] = {}
        self.attach(model)
        # found now: while `sleep` has freed the weights, they have no sizes
        self._shapes = {name: self._find_shapes(name) for name in (*self._experts, *self._fused)}

    def attach(self, model: nn.Module) -> None:
        """Replace the forwards, also again after the model has been fused anew. Adapters stay in memory."""
        names = {module: name for name, module in model.named_modules()}
        self._experts = {names[module]: module for module in expert_modules(model)}
        self._fused = {}
        for name, module in self._experts.items():
            replaced = vars(module).get("forward")
            if replaced is None:
                module.forward = AdaptedExperts(partial(type(module).forward, module), module, name, self)
            elif isinstance(replaced, PartOfSum):
                module.forward = replace(replaced, partial=AdaptedExperts(replaced.partial, module, name, self))
        modules: dict[str, Any] = {name: module for module, name in names.items()}
        for name, module in modules.items():
            router = vars(module).get("forward")
            if isinstance(router, FusedRouter):
                self._fused[name] = router
                module.forward = AdaptedRouter(router, name, self)

    def pack(self, adapter: LoraAdapter) -> dict[str, Part]:
        """This rank's part of the matrices of an adapter, on the host. Raises ParameterError for matrices that do not fit."""
        found = {}
        for name, pairs in adapter.parameters.items():
            if name not in self._shapes:
                rule = "name only unquantised experts and fused routers of the model"
                raise ParameterError("target_parameters", rule, name[:128])
            shapes = self._shapes[name]
            part: Part = {}
            for a, b in pairs:
                parameter = next((key for key, shape in shapes.items() if shape[1:] == (len(b), a.shape[1])), None)
                count = 0 if parameter is None else shapes[parameter][0]
                rank = adapter.config.rank_of(f"{name}.{parameter}")
                if parameter is None or parameter in part or not len(a) == b.shape[1] == count * rank:
                    sizes = {key: list(shape) for key, shape in shapes.items()}
                    rule = f"have matrices of rank {rank} for parameters of the sizes {sizes}"
                    raise ParameterError(name[:128], rule, [list(a.shape), list(b.shape)])
                rows = b.view(len(b), rank, count).permute(2, 0, 1).contiguous()
                scale = adapter.config.scale_of(f"{name}.{parameter}")
                low = LowRankExperts(a.view(count, rank, -1), rows, scale)
                part[parameter] = part_of_experts(low, self._experts[name], parameter) if name in self._experts else low
            found[name] = part
        return found

    def write(self, slot: int, parts: Mapping[str, Part] | None) -> None:
        """Copy the matrices of the adapter in this slot to the device. parts: None removes those of an earlier adapter"""
        self._slots.pop(slot, None)
        self._routers = {key: router for key, router in self._routers.items() if key[0] != slot}
        if not parts:
            return
        kept: dict[str, Part] = {}
        for name, part in parts.items():
            if name in self._fused:
                fused = self._fused[name]
                if not fused.weight.numel():
                    continue  # `sleep` has freed the weights; the adapter is written again when they are back
                a, b, scale = part["weight"]
                delta = (b[0].float() @ a[0].float() * scale).to(fused.weight.device)
                self._routers[slot, name] = replace(fused, weight=(fused.weight.float() + delta).to(fused.weight.dtype))
            else:
                like = self._experts[name].down_proj
                kept[name] = {key: low._replace(a=low.a.to(like), b=low.b.to(like)) for key, low in part.items()}
        self._slots[slot] = kept

    def experts(self, name: str, module: Any, x: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Apply the adapters of the step. x: (tokens, hidden); out: the output of the base for x, overwritten"""
        for slot, tokens in self._served(len(x)):
            part = self._slots.get(slot, {}).get(name)
            if part:
                own = weights_of(module, gate_of(module))
                given = (x[tokens].to(module.down_proj.dtype), index[tokens], weights[tokens])
                out[tokens] = torch_adapted_experts(*given, own, part.get("gate_up_proj"), part.get("down_proj")).to(out.dtype)
        return out

    def route(self, name: str, x: Tensor, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Apply the adapters of the step. x: (..., hidden); out: the result of the base router for x, overwritten"""
        flat = x.reshape(-1, x.shape[-1])
        for slot, tokens in self._served(len(flat)):
            router = self._routers.get((slot, name))
            if router is not None:
                for whole, rows in zip(out, router(flat[tokens]), strict=True):
                    whole[tokens] = rows
        return out

    def _served(self, rows: int) -> list[tuple[int, Tensor]]:
        """(slot, tokens) of the step's adapters that have parts not kept in pages. rows: of the module's input"""
        step = self._holder.step
        if step is None or not step.outer:
            return []
        if rows != len(step.tokens.rows):
            raise RuntimeError(f"a mixture was given {rows} rows in a step of {len(step.tokens.rows)} tokens")
        return [(slot, tokens) for slot, tokens, _ in step.outer]

    def _find_shapes(self, name: str) -> dict[str, tuple[int, int, int]]:
        """(matrices, rows, columns) of each parameter of a module that an adapter may change, before division between ranks."""
        if name in self._fused:
            rows, columns = self._fused[name].weight.shape
            return {"weight": (1, rows, columns)}
        module = self._experts[name]
        count, hidden, width = weights_of(module, gate_of(module)).sizes
        divided = rank_part(module, "down_proj")
        if divided is not None:
            width = divided.whole
        return {"gate_up_proj": (count, 2 * width, hidden), "down_proj": (count, hidden, width)}


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """Replaces the `forward` of a module of experts."""

    original: Callable[..., Tensor]
    module: nn.Module
    name: str
    owner: ParameterModules

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = self.original(hidden_states, top_k_index, top_k_weights)
        return self.owner.experts(self.name, self.module, hidden_states, top_k_index, top_k_weights, out)


@dataclass(frozen=True, slots=True)
class AdaptedRouter:
    """Replaces the `forward` of a fused router."""

    original: FusedRouter
    name: str
    owner: ParameterModules

    def __call__(self, hidden_states: Tensor) -> Any:
        out = self.original(hidden_states)
        return self.owner.route(self.name, hidden_states, out)


def bytes_of(parts: Mapping[str, Part]) -> int:
    """Memory on the device."""
    return sum(low.a.nbytes + low.b.nbytes for part in parts.values() for low in part.values())


def mapped_parts(parts: Mapping[str, Part], change: Callable[[Tensor], Tensor]) -> dict[str, Part]:
    """A copy with `change` applied to each tensor."""
    return {
        name: {key: low._replace(a=change(low.a), b=change(low.b)) for key, low in part.items()} for name, part in parts.items()
    }
