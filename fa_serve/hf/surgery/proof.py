"""The one proof that a replacement computes the same as the module that it replaces.

    given = observe_inputs(model, layers, batch)       # what each layer is given in a forward of a few tokens
    original = float32_copy(layer)                     # the module's own code, on weights of float32
    functions_agree(original, replacement, x)      # for several tokens, and for one, which takes other kernels
    replace_forwards(layers, prove, refuse)            # each kind is proven once, and what is not proven stays as it is

Decoder layers, routers, shared experts, experts (also quantised ones) and divided layers are all replaced by this rule: no
module is recognised by the name of its class. Its own code and the replacement compute the same numbers in float32, and the
results may differ by TOLERANCE, which is another order of summation and nothing more. Modules are of one kind if they differ
in nothing but the values of their weights (`kind_of`).

Left out: what a replacement is made of, and on which inputs a difference would show. Each module of this room knows its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig, PreTrainedModel

from fa_serve.hf.adapter.attention import riding
from fa_serve.hf.adapter.indexers import IndexCall
from fa_serve.hf.adapter.paged import paged_output
from fa_serve.hf.adapter.translate import AttendsBatch, LayerCall

TOLERANCE = 1e-4
"""Largest allowed difference in float32, relative to the largest number: another order of summation, and nothing more."""
FIT_TOLERANCE = 1e-5
"""The same for a function of one number that is chosen among candidates. Two forms of GELU differ by less than TOLERANCE."""

POSITIONS = (0, 1, 2, 13, 5, 30, 31)
"""Of the tokens in the forward whose inputs are observed. They are not in order, so a layer that counts them itself differs."""
_UNTOLD = {*vars(nn.Module()).keys() - {"training"}, "layer_idx", "forward"}
"""Attributes that are told apart in another way: tensors, submodules and hooks of a module, and the number of its layer."""

M = TypeVar("M", bound=nn.Module)


class NotReplacedError(Exception):
    """Why a module keeps its own code."""


class AttentionRecorder:
    """Takes the place of a PagedBatch: keeps each module's call of attention and returns the values, repeated for each query
    head.
    """

    def __init__(self) -> None:
        self.calls: dict[nn.Module, LayerCall] = {}

    def attend(self, call: LayerCall) -> Tensor:
        self.calls[call.module] = call
        return repeat_heads(call.value[0].transpose(0, 1), call.query.shape[1])[None]

    def attend_biased(self, call: LayerCall) -> Tensor:
        return self.attend(call)

    def gather(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys of these tokens are all there are."""
        return key, value

    def visible(self) -> Tensor:
        """Every token sees every key."""
        return torch.ones(1, 1, dtype=torch.bool)

    def places(self) -> None:
        """There are no other tokens."""

    def choose(self, call: IndexCall) -> Tensor:
        """What `attend` does not read."""
        return call.key.new_zeros(1, len(call.key), 1, dtype=torch.int32)


def repeat_heads(v: Tensor, num_heads: int) -> Tensor:
    """Keys or values (total, num_kv_heads, dim), one for each of `num_heads` query heads."""
    return v.repeat_interleave(num_heads // v.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What a decoder layer is given: (1, total, hidden), and its other arguments without the batch that rides along."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def in_float32(self, device: torch.device | None = None) -> LayerInputs:
        """Copies with floats in float32 and complex numbers of twice 32 bits. device: None stays where the tensors are"""

        def converted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = torch.float32 if value.is_floating_point() else torch.complex64 if value.is_complex() else value.dtype
            return value.to(device or value.device, dtype)

        return LayerInputs(converted(self.hidden), tree_map(converted, self.args), tree_map(converted, self.kwargs))

    def run(self, layer: nn.Module, batch: AttendsBatch) -> Any:
        """What the layer returns. batch: answers for its attention"""
        with riding(batch):
            return layer(self.hidden.clone(), *self.args, **self.kwargs, fa_serve_batch=batch)


class _TensorOrTuple(Tensor):
    """What a layer returns that does not compute: a model takes it for a tensor, or for a tuple that begins with one."""

    # what is computed from it is a plain tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.as_subclass(Tensor), None))

    def __getitem__(self, index: Any) -> Any:
        return self.as_subclass(Tensor) if index == 0 else None


def observe_inputs(
    model: PreTrainedModel, layers: Iterable[nn.Module], batch: AttendsBatch, *, computing: bool = True
) -> dict[nn.Module, LayerInputs]:
    """Run one forward of a few tokens and note what each layer is given. Layers that are not called are missing.

    batch:     answers for the attention of every layer
    computing: False if no layer computes, as when their weights are not on a device yet: each returns what it is given
    """
    inputs: dict[nn.Module, LayerInputs] = {}

    def observe(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "fa_serve_batch")}
        hidden = cast(Tensor, args[0] if args else kwargs["hidden_states"])
        inputs[layer] = LayerInputs(hidden.clone(), args[1:], others)

    def pass_on(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        observe(layer, args, kwargs)
        return cast(Tensor, args[0] if args else kwargs["hidden_states"]).as_subclass(_TensorOrTuple)

    undo: list[Callable[[], None]] = []
    try:
        for layer in layers:
            if computing:
                undo.append(layer.register_forward_pre_hook(observe, with_kwargs=True).remove)
                continue
            own = vars(layer).get("forward")
            undo.append(partial(delattr, layer, "forward") if own is None else partial(setattr, layer, "forward", own))
            layer.forward = partial(pass_on, layer)
        embeddings: Any = model.get_input_embeddings()
        positions = torch.tensor(POSITIONS, device=model.device)
        ids = torch.arange(1, 1 + len(positions), device=model.device) % len(embeddings.weight)
        paged_output(model, ids, positions, batch, ids[:1] * 0)
    finally:
        for each in undo:
            each()
    return inputs


def kind_of(module: nn.Module, *facts: object) -> str:
    """A text that is equal for modules which differ in nothing but the values of their weights.

    It has the type of every submodule, its settings, its hooks, what its forward is replaced by, and the shapes and dtypes of
    its tensors. facts: what else tells modules apart, such as what a layer asks of attention
    """
    configs: list[PreTrainedConfig] = []
    parts = [
        (name, _name_of(type(part)), _described(_settings_of(part), configs), _hooks_of(part), _forward_of(part))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    own = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    tensors = [(name, tuple(x.shape), x.dtype) for name, x in own]
    told = _described(facts, configs)
    # a config may hold other configs, which then stand behind it in the list
    return repr((parts, tensors, told, [_described(vars(config), configs) for config in configs]))


def _settings_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are neither its number, nor its weights, nor what fa_serve keeps in it."""
    return {name: x for name, x in vars(part).items() if name not in _UNTOLD and not name.startswith("_fa_serve")}


def _hooks_of(part: nn.Module) -> list[str]:
    hooks: list[Any] = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return [_name_of(hook) for hook in [*hooks, *([part._hf_hook] if hasattr(part, "_hf_hook") else [])]]


def _forward_of(part: nn.Module) -> str | None:
    """The name of what the forward of a module is replaced by, None if it is that of its class."""
    return _name_of(vars(part)["forward"]) if "forward" in vars(part) else None


def _described(value: Any, configs: list[PreTrainedConfig]) -> Any:
    """A value as plain data. configs: those that were met, which are described once"""
    if isinstance(value, bool | int | float | str | None | torch.dtype):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return sorted((str(name), _described(x, configs)) for name, x in value.items())
    if isinstance(value, list | tuple):
        return [_described(x, configs) for x in value]
    if isinstance(value, PreTrainedConfig):
        if not any(config is value for config in configs):
            configs.append(value)
        return f"config {next(i for i, config in enumerate(configs) if config is value)}"
    if is_dataclass(value) and not isinstance(value, type):
        return _name_of(value), [(field.name, _described(getattr(value, field.name), configs)) for field in fields(value)]
    return _name_of(value)


def _name_of(value: Any) -> str:
    value = value.func if isinstance(value, partial) else value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def check_untouched(module: nn.Module, *, forwards: bool = True, called: tuple[type, ...] = ()) -> None:
    """Raise NotReplacedError for hooks inside of a module, and for replaced forwards, which a replacement would not call.

    forwards: False if the replacement reads replaced forwards itself, or refuses them where it needs to
    called:   types of forwards that the replacement calls, because it runs the module's own code
    """
    for part in module.modules():
        if hooks := _hooks_of(part):
            raise NotReplacedError(f"its {type(part).__name__} has hooks, which would not be called ({', '.join(hooks)})")
        if forwards and not isinstance(vars(part).get("forward"), called) and (forward := _forward_of(part)):
            raise NotReplacedError(f"the forward of its {type(part).__name__} is replaced by {forward}")


def float32_copy(module: M, device: torch.device | None = None) -> M:
    """A copy of a module that computes in float32. device: None stays where the module is"""
    return copy.deepcopy(module).to(device).float()


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of two results, relative to the largest number that is expected; inf for other shapes."""
    if actual.shape != expected.shape:
        return math.inf
    error = (actual - expected).abs().max()
    return 0.0 if not error else float(error / expected.abs().max())


def results_agree(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether a replacement has computed what the module's own code has. Numbers that are not finite agree with nothing."""
    return largest_difference(actual, expected) <= tolerance


def functions_agree(own: Callable[..., Tensor], ours: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Whether two functions of rows compute the same for all rows, and for the first alone, which takes other kernels."""
    expected = own(*inputs)
    return all(results_agree(ours(*(x[:rows] for x in inputs)), expected[:rows]) for rows in (len(expected), 1))


def replace_forwards(
    found: Iterable[M],
    prove: Callable[[M], Callable[[M], Callable[..., Any]]],
    refuse: Callable[[M, str], None],
    *,
    kind: Callable[[M], str] = kind_of,
) -> int:
    """Give each module another forward where that is proven to change nothing. Returns how many have one.

    prove:  proves the first module of a kind. Returns the function that makes the forward of any module of this kind
    refuse: is told of a module that keeps its own forward, and why, once for each reason

    A kind of which a module cannot be replaced is not tried again.
    """
    proofs: dict[str, Callable[[M], Callable[..., Any]] | str] = {}
    replaced = 0
    for module in found:
        own = kind(module)
        try:
            proof = proofs[own] if own in proofs else prove(module)
            if isinstance(proof, str):
                continue
            proofs[own] = proof
            module.forward = proof(module)
            replaced += 1
        except Exception as error:  # raised here, by the model's code or by a kernel's compiler
            reason = str(error)
            if reason not in proofs.values():
                refuse(module, reason)
            proofs[own] = reason
    return replaced
