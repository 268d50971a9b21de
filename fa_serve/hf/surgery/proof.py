"""Proves that a replacement computes the same as the module that it replaces.

    inputs = observe_inputs(model, layers, batch)      # the inputs of each layer in a forward of a few tokens
    original = float32_copy(layer)                     # the module's own code, with weights in float32
    functions_agree(original, replacement, x)          # for several tokens, and for one token, which uses other kernels
    replace_forwards(layers, prove, refuse)            # proves each kind once; modules that are not proven stay as they are

Decoder layers, routers, shared experts, experts (also quantised ones) and divided layers are all replaced by this rule. No
module is recognised by the name of its class. Instead, the module's own code and the replacement compute the same input in
float32. The results may differ by TOLERANCE, which allows another order of summation and nothing more. Modules are of one kind
if they differ only in the values of their weights (`kind_of`).

Left out: how a replacement is built, and the inputs on which a difference would show. Each module of this package has its own.
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
"""Largest allowed difference in float32, relative to the largest number. It allows another order of summation, nothing more."""
FIT_TOLERANCE = 1e-5
"""The same where a function of one number is identified among candidates: two forms of GELU differ by less than TOLERANCE."""

POSITIONS = (0, 1, 2, 13, 5, 30, 31)
"""The positions of the tokens in the forward that observes inputs. They are not in order, so a layer that counts positions
itself gives another result."""
_UNTOLD = {*vars(nn.Module()).keys() - {"training"}, "layer_idx", "forward"}
"""Attributes that are no settings: `kind_of` compares tensors, submodules, hooks and replaced forwards in other ways, and the
number of the layer does not matter."""

M = TypeVar("M", bound=nn.Module)


class NotReplacedError(Exception):
    """Why a module keeps its own code."""


class AttentionRecorder:
    """A substitute for a PagedBatch: records each module's call of attention and returns the values of each token, repeated for
    the query heads, as the result.
    """

    def __init__(self) -> None:
        self.calls: dict[nn.Module, LayerCall] = {}

    def attend(self, call: LayerCall) -> Tensor:
        self.calls[call.module] = call
        return repeat_heads(call.value[0].transpose(0, 1), call.query.shape[1])[None]

    def attend_biased(self, call: LayerCall) -> Tensor:
        return self.attend(call)

    def gather(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value: there are no earlier keys."""
        return key, value

    def visible(self) -> Tensor:
        """Every token sees every key."""
        return torch.ones(1, 1, dtype=torch.bool)

    def places(self) -> None:
        """None: every key belongs to one of these tokens."""

    def choose(self, call: IndexCall) -> Tensor:
        """A dummy result, which `attend` does not read."""
        return call.key.new_zeros(1, len(call.key), 1, dtype=torch.int32)


def repeat_heads(v: Tensor, num_heads: int) -> Tensor:
    """Repeat keys or values (total, num_kv_heads, dim) so that each of `num_heads` query heads has its own."""
    return v.repeat_interleave(num_heads // v.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The arguments of a decoder layer. hidden: (1, total, hidden); args, kwargs: all others except `fa_serve_batch`"""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def in_float32(self, device: torch.device | None = None) -> LayerInputs:
        """Copies with floats in float32 and complex numbers in complex64. device: None for the device of each tensor"""

        def converted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = torch.float32 if value.is_floating_point() else torch.complex64 if value.is_complex() else value.dtype
            return value.to(device or value.device, dtype)

        return LayerInputs(converted(self.hidden), tree_map(converted, self.args), tree_map(converted, self.kwargs))

    def run(self, layer: nn.Module, batch: AttendsBatch) -> Any:
        """What the layer returns. batch: computes its attention"""
        with riding(batch):
            return layer(self.hidden.clone(), *self.args, **self.kwargs, fa_serve_batch=batch)


class _TensorOrTuple(Tensor):
    """The result of a layer that does not compute. A model can use it as a tensor, or as a tuple that begins with one."""

    # results of operations on it are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.as_subclass(Tensor), None))

    def __getitem__(self, index: Any) -> Any:
        return self.as_subclass(Tensor) if index == 0 else None


def observe_inputs(
    model: PreTrainedModel, layers: Iterable[nn.Module], batch: AttendsBatch, *, computing: bool = True
) -> dict[nn.Module, LayerInputs]:
    """Run one forward of a few tokens and record the inputs of each layer. Layers that are not called are left out.

    batch:     computes the attention of every layer
    computing: False if the layers must not compute, for example because their weights are not on a device yet. Each layer then
               returns its hidden states unchanged
    """
    layers = [*layers]
    if computing:
        return _observe(model, layers, batch, None)
    try:
        return _observe(model, layers, batch, _TensorOrTuple)
    except (TypeError, AttributeError):  # the model indexes the tensor in another way, as Gemma 3n does
        return _observe(model, layers, batch, Tensor)


def _observe(
    model: PreTrainedModel, layers: Iterable[nn.Module], batch: AttendsBatch, returned: type[Tensor] | None
) -> dict[nn.Module, LayerInputs]:
    """See `observe_inputs`. returned: the type as which each layer returns its hidden states unchanged; None: layers compute"""
    inputs: dict[nn.Module, LayerInputs] = {}

    def observe(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "fa_serve_batch")}
        hidden = cast(Tensor, args[0] if args else kwargs["hidden_states"])
        inputs[layer] = LayerInputs(hidden.clone(), args[1:], others)

    def pass_on(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        observe(layer, args, kwargs)
        return cast(Tensor, args[0] if args else kwargs["hidden_states"]).as_subclass(returned or Tensor)

    undo: list[Callable[[], None]] = []
    try:
        for layer in layers:
            if returned is None:
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
    """A text that is equal for modules that differ only in the values of their weights.

    It contains the type of every submodule, its settings, its hooks, the name of what replaces its forward, and the shapes and
    dtypes of its tensors. facts: other values that distinguish modules, such as the options of a layer's attention
    """
    configs: list[PreTrainedConfig] = []
    parts = [
        (name, _name_of(type(part)), _described(_settings_of(part), configs), _hooks_of(part), _forward_of(part))
        for name, part in module.named_modules(remove_duplicate=False)
    ]
    own = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    tensors = [(name, tuple(x.shape), x.dtype) for name, x in own]
    told = _described(facts, configs)
    # describing a config may append further configs to the list, which this loop then reaches
    return repr((parts, tensors, told, [_described(vars(config), configs) for config in configs]))


def _settings_of(part: nn.Module) -> dict[str, Any]:
    """The attributes of a module, without the number of its layer, its weights, and attributes that fa_serve has set."""
    return {name: x for name, x in vars(part).items() if name not in _UNTOLD and not name.startswith("_fa_serve")}


def _hooks_of(part: nn.Module) -> list[str]:
    hooks: list[Any] = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
    return [_name_of(hook) for hook in [*hooks, *([part._hf_hook] if hasattr(part, "_hf_hook") else [])]]


def _forward_of(part: nn.Module) -> str | None:
    """The name of the object that replaces the forward of a module; None if the module has the forward of its class."""
    return _name_of(vars(part)["forward"]) if "forward" in vars(part) else None


def _described(value: Any, configs: list[PreTrainedConfig]) -> Any:
    """A value as plain data. configs: the configs found so far; a value that is a config becomes an index into this list"""
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
    """Raise NotReplacedError if a module contains hooks or replaced forwards, because a replacement would not call them.

    forwards: False skips the check for replaced forwards, because the replacement handles or refuses them itself
    called:   types of replaced forwards that are allowed, because the replacement runs the module's own code, which calls them
    """
    for part in module.modules():
        if hooks := _hooks_of(part):
            raise NotReplacedError(f"its {type(part).__name__} has hooks, which would not be called ({', '.join(hooks)})")
        if forwards and not isinstance(vars(part).get("forward"), called) and (forward := _forward_of(part)):
            raise NotReplacedError(f"the forward of its {type(part).__name__} is replaced by {forward}")


def float32_copy(module: M, device: torch.device | None = None) -> M:
    """A copy of a module that computes in float32. device: None for the device of the module"""
    return copy.deepcopy(module).to(device).float()


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference between two results, relative to the largest expected number; inf if their shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    error = (actual - expected).abs().max()
    return 0.0 if not error else float(error / expected.abs().max())


def results_agree(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether a replacement has computed the same as the module's own code. Numbers that are not finite never agree."""
    return largest_difference(actual, expected) <= tolerance


def functions_agree(own: Callable[..., Tensor], ours: Callable[..., Tensor], *inputs: Tensor) -> bool:
    """Whether two functions of rows compute the same for all rows, and for only the first row, which uses other kernels."""
    expected = own(*inputs)
    return all(results_agree(ours(*(x[:rows] for x in inputs)), expected[:rows]) for rows in (len(expected), 1))


def replace_forwards(
    found: Iterable[M],
    prove: Callable[[M], Callable[[M], Callable[..., Any]]],
    refuse: Callable[[M, str], None],
    *,
    kind: Callable[[M], str] = kind_of,
) -> int:
    """Give each module another forward if that is proven to change nothing. Returns how many modules got one.

    prove:  proves the first module of a kind. Returns the function that makes the forward of any module of this kind
    refuse: called with a module that keeps its own forward and the reason, once for each reason

    After one module of a kind could not be replaced, further modules of this kind are not tried.
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
