"""Adapters of the embedding and of the head: low-rank matrices, and whole weights that replace those of the base.

    outer = OuterModules(model, holder)
    weights = outer.pack(adapter)            # on the host; None for an adapter that changes neither
    outer.write(slot, weights)

Such weights are as large as those of the base, and few adapters have them. So they are kept as separate tensors and not in
pages, and PyTorch computes the tokens of each adapter in turn. A step with such an adapter runs without a CUDA graph. If the
vocabulary is divided between ranks, each rank keeps the rows of its tokens. Left out: other modules in `modules_to_save`, which
are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from fa_serve.hf.lora.divided import part_of_matrix, whole_sizes
from fa_serve.hf.lora.format import LoraAdapter, LowRank
from fa_serve.hf.lora.parameters import ParameterModules, Part, bytes_of, mapped_parts
from fa_serve.hf.lora.product import StepHolder
from fa_serve.hf.surgery.divide.weights import PartOfEmbeddings, PartOfLogits
from fa_serve.spec import ParameterError


class OuterPart(NamedTuple):
    """An adapter of the embedding or of the head.

    saved: whole weights that replace those of the base, or None
    low:   low-rank matrices that add to the base's or the saved weights, or None
    """

    saved: Tensor | None
    low: LowRank | None

    def tensors(self) -> list[Tensor]:
        """The weights that take memory."""
        return [
            x for x in (self.saved, *(() if self.low is None else (self.low.a, self.low.b, self.low.bias))) if x is not None
        ]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> OuterPart:
        """A copy with `change` applied to each tensor."""
        low = self.low
        if low is not None:
            low = LowRank(change(low.a), change(low.b), low.scale, None if low.bias is None else change(low.bias))
        return OuterPart(None if self.saved is None else change(self.saved), low)


NO_PART = OuterPart(None, None)


@dataclass(frozen=True, slots=True)
class OuterWeights:
    """The parts of an adapter for the embedding and the head, and for experts and routers (parameters.py)."""

    embedding: OuterPart
    head: OuterPart
    parameters: Mapping[str, Part] = field(default_factory=dict)

    @property
    def changes_routers(self) -> bool:
        """Whether it is merged into copies of routers' weights (parameters.py)."""
        return any("weight" in part for part in self.parameters.values())

    @property
    def num_bytes(self) -> int:
        own = sum(x.nbytes for part in (self.embedding, self.head) for x in part.tensors())
        return own + bytes_of(self.parameters)

    def cloned(self) -> OuterWeights:
        """A copy that shares no memory with this one."""
        return OuterWeights(
            self.embedding.mapped(torch.clone), self.head.mapped(torch.clone), mapped_parts(self.parameters, torch.clone)
        )


_NO_WEIGHTS = OuterWeights(NO_PART, NO_PART)


class OuterModules:
    """Replaces the forwards of a model's embedding and head, and owns the weights that adapters in memory have for them."""

    def __init__(self, model: Any, holder: StepHolder) -> None:
        self._holder = holder
        self._slots: dict[int, OuterWeights] = {}
        self._parameters = ParameterModules(model, holder)
        names = {module: name for name, module in model.named_modules()}
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self.names = (names[self._embedding], names[self._head])
        # of whole weights, now: while `sleep` has freed the weights, they have no sizes
        self._sizes = {module: whole_sizes(module, *module.weight.shape) for module in (self._embedding, self._head)}
        configs = (model.config, model.config.get_text_config())
        self._tied = any(getattr(config, "tie_word_embeddings", False) for config in configs)
        self._attach_outer()

    def attach(self, model: nn.Module) -> None:
        """Replace the forwards again after `detach_adapters`, when the model has been fused anew. Adapters stay in memory."""
        self._parameters.attach(model)
        self._attach_outer()

    def _attach_outer(self) -> None:
        for module, kind in ((self._embedding, AdaptedEmbedding), (self._head, AdaptedHead)):
            replaced = vars(module).get("forward")
            if replaced is None:
                module.forward = kind(partial(type(module).forward, module), module, self)
            elif isinstance(replaced, PartOfEmbeddings | PartOfLogits):
                module.forward = replace(replaced, own=kind(replaced.own, module, self))

    def pack(self, adapter: LoraAdapter) -> OuterWeights | None:
        """The weights of an adapter that are not kept in pages, on the host; None if there are none.

        Raises ParameterError for an adapter that does not fit.
        """
        embedding_name, head_name = self.names
        parts = OuterWeights(
            OuterPart(
                self._saved(adapter, self._embedding, embedding_name), self._low(adapter.embeddings, embedding_name, (1, 0))
            ),
            OuterPart(self._saved(adapter, self._head, head_name), self._low(adapter.modules, head_name, (0, 1))),
        )
        if unknown := [name for name in (*adapter.saved, *adapter.embeddings) if name not in self.names]:
            rule = f"name only {' and '.join(self.names)}: other modules can have no whole weights and no embedding adapters"
            raise ParameterError("modules_to_save", rule, unknown[0][:128])
        if parts.head.low is not None and parts.head.low.magnitude is not None:
            raise ParameterError("use_dora", f"be false for an adapter of {head_name}", True)
        if self._tied and adapter.config.tying and (parts.embedding, parts.head) != (NO_PART, NO_PART):
            rule = f"be false for an adapter of {embedding_name} or {head_name}, which this model ties"
            raise ParameterError("ensure_weight_tying", rule, True)
        if (parts.embedding, parts.head) == (NO_PART, NO_PART) and not adapter.parameters:
            return None
        return replace(parts, parameters=self._parameters.pack(adapter))

    def write(self, slot: int, weights: OuterWeights | None) -> None:
        """Copy the weights of the adapter in this slot to the device. weights: None removes those of an earlier adapter"""
        self._slots.pop(slot, None)
        self._parameters.write(slot, None if weights is None else weights.parameters)
        if weights is not None:
            like: Any = self._embedding.weight

            def change(x: Tensor) -> Tensor:
                return x.to(device=like.device, dtype=like.dtype)

            self._slots[slot] = OuterWeights(weights.embedding.mapped(change), weights.head.mapped(change))

    def embed(self, module: Any, ids: Tensor, out: Tensor) -> Tensor:
        """Apply the step's adapters -> (..., tokens, hidden). ids: (..., tokens); out: embeddings of the base, overwritten"""
        scale = getattr(module, "embed_scale", 1.0)
        flat = out.reshape(-1, out.shape[-1])
        for slot, tokens, _ in () if self._holder.step is None else self._holder.step.outer:
            part = self._part(slot).embedding
            taken = ids.reshape(-1)[tokens]
            if part.saved is not None:
                flat[tokens] = (embedding(taken, part.saved) * scale).to(flat.dtype)
            if part.low is not None:
                delta = (embedding(taken, part.low.a.t()) @ part.low.b.t()) * (part.low.scale * scale)
                flat[tokens] += delta.to(flat.dtype)
        return flat.view(out.shape)

    def logits(self, module: Any, x: Tensor, out: Tensor) -> Tensor:
        """Apply the step's adapters -> (..., rows, vocab). x: (..., rows, hidden); out: logits of the base, overwritten"""
        flat = out.reshape(-1, out.shape[-1])
        for slot, _, rows in () if self._holder.step is None else self._holder.step.outer:
            part = self._part(slot).head
            taken = x.reshape(-1, x.shape[-1])[rows]
            if part.saved is not None:
                flat[rows] = linear(taken, part.saved, module.bias)
            if part.low is not None:
                flat[rows] += linear(taken @ part.low.a.t(), part.low.b, part.low.bias) * part.low.scale
        return flat.view(out.shape)

    def _part(self, slot: int) -> OuterWeights:
        """The weights of the adapter in a slot; none if it changes nothing here: its weights may differ only on other ranks."""
        return self._slots.get(slot, _NO_WEIGHTS)

    def _saved(self, adapter: LoraAdapter, module: Any, name: str) -> Tensor | None:
        """This rank's part of saved weights; None if they equal those of the base: peft may save these with an adapter."""
        saved = adapter.saved.get(name)
        if saved is None:
            return None
        whole = self._sizes[module]
        if saved.shape != whole:
            raise ParameterError(f"{name}.weight", f"have the shape {list(whole)}", list(saved.shape))
        saved = part_of_matrix(saved, module)
        return None if torch.equal(saved.to(module.weight.dtype), module.weight.detach().cpu()) else saved

    def _low(self, given: Any, name: str, order: tuple[int, int]) -> LowRank | None:
        """This rank's part of the low-rank matrices of a module. order: the dimensions of the weight that b and a belong to"""
        low: LowRank | None = given.get(name)
        if low is None:
            return None
        module: Any = self._embedding if order == (1, 0) else self._head
        whole = self._sizes[module]
        rows, columns = (whole[i] for i in order)
        if (len(low.b), low.a.shape[1]) != (rows, columns):
            rule = f"have matrices of {columns} columns and {rows} rows, as the model has"
            raise ParameterError(name, rule, [list(low.a.shape), list(low.b.shape)])
        if order == (1, 0):
            return replace(low, a=part_of_matrix(low.a, module, 1))
        bias = None if low.bias is None else part_of_matrix(low.bias, module)
        return replace(low, b=part_of_matrix(low.b, module), bias=bias)


@dataclass(frozen=True, slots=True)
class AdaptedEmbedding:
    """Replaces the `forward` of the embedding."""

    original: Callable[..., Tensor]
    module: nn.Module
    outer: OuterModules

    def __call__(self, ids: Tensor) -> Tensor:
        return self.outer.embed(self.module, ids, self.original(ids))


@dataclass(frozen=True, slots=True)
class AdaptedHead:
    """Replaces the `forward` of the head."""

    original: Callable[..., Tensor]
    module: nn.Module
    outer: OuterModules

    def __call__(self, x: Tensor) -> Tensor:
        return self.outer.logits(self.module, x, self.original(x))
