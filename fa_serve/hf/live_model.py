"""A model that is being trained in this process, as an engine borrows it: what is refused, and how it is given back.

    check_live(model)                        # raises UnsupportedModelError with the reason
    model = trained_model(model)             # the model inside a wrapper
    own = ModelState.of(model)
    ...                                      # attention is switched, layers are fused, dropout is off
    own.restore()                            # the trainer finds its model as it was

Weights are not copied: an optimizer's in-place step takes effect at once, also in merged weights, because the parameters are
views of these. `Addresses` shows when this no longer holds, because a parameter has moved to other memory. Left out: what is
done to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from fa_serve import ops
from fa_serve.spec import UnsupportedModelError

_PLAIN = frozenset({type(None), bool, int, float, str})
"""Types of most fields of a replaced forward; they hold no tensors."""
_DROPOUTS = (
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "residual_dropout",
    "attn_dropout_p",
    "attn_pdrop",
    "resid_dropout",
    "resid_pdrop",
    "layerdrop",
)
"""Attributes in which layers of transformers keep a dropout probability that they pass to a function."""
_SETTINGS = ("_attn_implementation_internal", "_experts_implementation_internal")
_COMPILED = "_compiled_call_impl"
"""The attribute in which `Module.compile` keeps what a call runs instead of the forward."""
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes of peft's layers that determine what their forward adds to that of the layer inside."""


def trained_model(model: nn.Module) -> PreTrainedModel:
    """The model of transformers inside a wrapper of DistributedDataParallel, torch.compile or peft; an unwrapped model itself.

    Raises UnsupportedModelError if there is none.
    """
    inner: Any = model
    for _ in range(8):
        if isinstance(inner, PreTrainedModel):
            return inner
        # torch.compile, DistributedDataParallel, and PeftModel, which passes on the attributes of its tuner
        wrapped = [getattr(inner, name, None) for name in ("_orig_mod", "module", "model", "base_model")]
        inner = next((each for each in wrapped if isinstance(each, nn.Module)), None)
    raise UnsupportedModelError(f"a model of transformers is needed, or a wrapper around one, got {type(model).__name__}")


def check_live(model: nn.Module) -> None:
    """Raise UnsupportedModelError, with the reason, if an engine cannot run this model's parameters where they are."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"a loaded model of transformers is needed, or a wrapper around one, got {name}")
    devices = set()
    for parameter in _tensors_in(modules_in(model), "_parameters"):
        found = _owner(parameter)
        if found is not None:
            raise UnsupportedModelError(
                f"the parameters of {name} must be whole tensors of this process, but {_name_of(model, parameter)} is divided "
                f"by {found}: give the engine another copy of the model, and call update(weights) with the gathered parameters"
            )
        if not parameter.is_floating_point():
            raise UnsupportedModelError(
                f"the parameters of {name} must be floats, but {_name_of(model, parameter)} is {parameter.dtype}: quantised "
                "weights are not trained, so load them into an Engine"
            )
        devices.add(parameter.device)
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        told = ", ".join(sorted(map(str, devices))) or "none"
        raise UnsupportedModelError(f"the parameters of {name} must be on one device, with memory, got {told}")


def modules_in(model: nn.Module) -> list[nn.Module]:
    """All modules, each once, in the order of `model.modules()`, whose nested generators take twenty times as long. The time
    matters, because each step of a trainer goes over all modules several times."""
    found: dict[nn.Module, None] = {}
    left = [model]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            left += [child for child in reversed(module._modules.values()) if child is not None]
    return [*found]


def parameters_in(model: nn.Module) -> list[Tensor]:
    """All parameters, each once, in the order of `model.parameters()`."""
    return [*{id(x): x for x in _tensors_in(modules_in(model), "_parameters")}.values()]


def active_dropout(model: nn.Module) -> tuple[str, float] | None:
    """The name of a module with dropout in the next forward, and its probability; None if there is none."""
    for module in modules_in(model):
        if not module.training:
            continue
        own = vars(module)
        for attribute in ("p",) if isinstance(module, _DropoutNd) else _DROPOUTS:
            share = own.get(attribute, 0.0)
            if isinstance(share, int | float) and share > 0.0:
                return next(name for name, each in model.named_modules() if each is module), share
    return None


def unwrap_calls(model: nn.Module) -> None:
    """Remove what runs instead of the forward of modules, until `ModelState.restore`: the autocast wrapper that
    `Accelerator.prepare` has put around a model's forward, and what `Module.compile` has compiled."""
    for module in modules_in(model):
        vars(module).pop(_COMPILED, None)
    before = vars(model).get("_original_forward")
    if getattr(before, "__func__", None) is type(model).forward:
        vars(model).pop("forward", None)
    elif before is not None:
        vars(model)["forward"] = before


def _tensors_in(modules: Iterable[nn.Module], *kinds: str) -> list[Tensor]:
    """The tensors of these modules; a shared tensor occurs repeatedly. kinds: "_parameters" and "_buffers", a module's dicts"""
    return [x for module in modules for kind in kinds for x in vars(module)[kind].values() if x is not None]


def _name_of(model: nn.Module, parameter: Tensor) -> str:
    return next(name for name, each in model.named_parameters() if each is parameter)


def _owner(parameter: Tensor) -> str | None:
    """The library that keeps a parameter in parts or elsewhere; None if the parameter is a plain tensor."""
    if type(parameter) is nn.Parameter and not vars(parameter):
        return None  # a shortcut: searching for attributes that are not there takes most of the time
    if hasattr(parameter, "ds_id"):
        return "DeepSpeed's ZeRO-3"
    if hasattr(parameter, "full_tensor"):
        return "DTensor (FSDP2 or tensor parallelism)"
    if type(parameter).__name__ == "FlatParameter":
        return "FSDP's flat parameters"
    return None


class ModelState(NamedTuple):
    """What an engine changes in a model, apart from the places of weights in memory.

    modules:  (module, whether it is in training mode, the forward that replaces its own or None, its compiled call or None)
    settings: (config, name of an attribute, value)
    """

    model: PreTrainedModel
    modules: list[tuple[nn.Module, bool, Callable[..., Any] | None, Callable[..., Any] | None]]
    settings: list[tuple[Any, str, Any]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelState:
        """The current state of a model."""
        found = modules_in(model)
        modules = [(each, each.training, vars(each).get("forward"), vars(each).get(_COMPILED)) for each in found]
        kept = (vars(module).get("config") for module in found)
        configs = {id(config): config for config in kept if isinstance(config, PreTrainedConfig)}
        settings = [(each, name, vars(each)[name]) for each in configs.values() for name in _SETTINGS if name in vars(each)]
        return cls(model, modules, settings)

    def restore(self, *, modes: bool = True) -> None:
        """Give the model this state again. modes: whether to restore the training mode of modules too"""
        for module, training, *calls in self.modules:
            own = vars(module)
            if modes:
                own["training"] = training
            for name, call in zip(("forward", _COMPILED), calls, strict=True):
                if call is not None:
                    own[name] = call
                else:
                    own.pop(name, None)
        self._set(self.settings)

    @contextmanager
    def with_settings(self) -> Iterator[None]:
        """Inside, configs have the settings of this state: the implementations of attention and of experts."""
        own = [(config, name, vars(config)[name]) for config, name, _ in self.settings]
        self._set(self.settings)
        try:
            yield
        finally:
            self._set(own)

    @staticmethod
    def _set(settings: list[tuple[Any, str, Any]]) -> None:
        for config, name, value in settings:
            vars(config)[name] = value


class Addresses(NamedTuple):
    """The addresses of a model's parameters and buffers, in the order of modules: equal as long as none of them has moved."""

    places: list[tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module) -> Addresses:
        return cls([(id(x), x.data_ptr()) for x in _tensors_in(modules_in(model), "_parameters", "_buffers")])


def adapter_switches(model: nn.Module) -> list[object]:
    """What peft's layers compute, apart from their weights: equal until an adapter is chosen, merged, scaled or disabled."""
    layers = [module for module in modules_in(model) if "_disable_adapters" in vars(module)]
    return [copy(getattr(layer, name, None)) for layer in layers for name in _SWITCHES]


def forwards_with_copies(model: nn.Module) -> list[nn.Module]:
    """The modules whose replaced forward holds float tensors outside the memory of parameters and buffers: an optimizer's step
    does not change these."""
    modules = modules_in(model)
    live = {x.untyped_storage().data_ptr() for x in _tensors_in(modules, "_parameters", "_buffers")}
    return [
        module
        for module in modules
        if is_dataclass(replaced := vars(module).get("forward"))
        and any(x.is_floating_point() and x.untyped_storage().data_ptr() not in live for x in _tensors(replaced))
    ]


def _tensors(replaced: Any) -> list[Tensor]:
    """The tensors in the fields of a replaced forward, at any depth. Tensors of modules are left out."""
    found = []
    left = [replaced]
    while left:
        value = left.pop()
        if type(value) in _PLAIN:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            left += value
        elif isinstance(value, dict):
            left += value.values()
        else:
            kind: Any = type(value)
            left += [getattr(value, name) for name in _field_names(kind)]
    return found


@lru_cache(maxsize=256)
def _field_names(kind: type) -> tuple[str, ...]:
    """The fields in which values of this type may have tensors: those of a dataclass, except quantised weights."""
    if not is_dataclass(kind) or issubclass(kind, ops.QuantizedWeight):
        return ()
    return tuple(field.name for field in fields(kind))
