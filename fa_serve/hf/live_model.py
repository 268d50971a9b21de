"""A model that is being trained in this process, as an engine borrows it: what is refused, and how it is given back.

    check_live(model)                        # raises UnsupportedModelError with the reason
    model = trained_model(model)             # what a wrapper holds
    own = ModelState.of(model)
    ...                                      # attention is switched, layers are fused, dropout is off
    own.restore()                            # the trainer finds its model as it was

Weights are not copied: an optimizer's step in place is seen at once, also by merged weights, of which the parameters are views.
`Addresses` tells when that has ended, because a parameter has got other memory. Left out: what is done to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from fa_serve import ops
from fa_serve.spec import UnsupportedModelError

_SETTINGS = ("_attn_implementation_internal", "_experts_implementation_internal")


def trained_model(model: nn.Module) -> PreTrainedModel:
    """The model of transformers that DistributedDataParallel, torch.compile or peft have wrapped; another one as it is.

    Raises UnsupportedModelError if there is none.
    """
    inner: Any = model
    for _ in range(8):
        if isinstance(inner, PreTrainedModel):
            return inner
        # torch.compile, DistributedDataParallel, and PeftModel, which hands down the attributes of the tuner that it holds
        wrapped = [getattr(inner, name, None) for name in ("_orig_mod", "module", "model", "base_model")]
        inner = next((each for each in wrapped if isinstance(each, nn.Module)), None)
    raise UnsupportedModelError(f"a model of transformers is needed, or a wrapper around one, got {type(model).__name__}")


def check_live(model: nn.Module) -> None:
    """Raise UnsupportedModelError, with the reason, if an engine cannot run this model's parameters where they are."""
    name = type(model).__name__
    devices = set()
    for parameter_name, parameter in model.named_parameters():
        found = _owner(parameter)
        if found is not None:
            raise UnsupportedModelError(
                f"the parameters of {name} must be whole tensors of this process, and {parameter_name} is divided by {found}: "
                "give the engine another copy of the model, and call update(weights) with the gathered parameters"
            )
        if not parameter.is_floating_point():
            raise UnsupportedModelError(
                f"the parameters of {name} must be floats, and {parameter_name} is {parameter.dtype}: quantised weights are "
                "not trained, so load them into an Engine"
            )
        devices.add(parameter.device)
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        told = ", ".join(sorted(map(str, devices))) or "none"
        raise UnsupportedModelError(f"the parameters of {name} must be on one device, with memory, got {told}")


def _owner(parameter: Tensor) -> str | None:
    """Who keeps a parameter in parts, or elsewhere; None if it is a plain tensor."""
    if hasattr(parameter, "ds_id"):
        return "DeepSpeed's ZeRO-3"
    if hasattr(parameter, "full_tensor"):
        return "DTensor (FSDP2 or tensor parallelism)"
    if type(parameter).__name__ == "FlatParameter":
        return "FSDP's flat parameters"
    return None


class ModelState(NamedTuple):
    """What an engine changes of a model beside its weights' places in memory.

    modules:  (module, its mode of training, the forward that replaces its own or None)
    settings: (config, name of an attribute, value)
    """

    model: PreTrainedModel
    modules: list[tuple[nn.Module, bool, Callable[..., Any] | None]]
    settings: list[tuple[Any, str, Any]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelState:
        """As the model is now."""
        modules = [(module, module.training, vars(module).get("forward")) for module in model.modules()]
        configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
        settings = [(each, name, vars(each)[name]) for each in configs.values() for name in _SETTINGS if name in vars(each)]
        return cls(model, modules, settings)

    def restore(self, *, modes: bool = True) -> None:
        """Make the model so again. modes: whether modules are in the same mode of training as well"""
        for module, training, forward in self.modules:
            own = vars(module)
            if modes:
                own["training"] = training
            if forward is not None:
                own["forward"] = forward
            else:
                own.pop("forward", None)
        self._set(self.settings)

    @contextmanager
    def with_settings(self) -> Iterator[None]:
        """Inside, configs have the settings that they had then: the implementations of attention and of experts."""
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
    """Where parameters and buffers of a model lie, by name: equal as long as nothing has got other memory."""

    by_name: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, model: nn.Module) -> Addresses:
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        return cls({name: (id(x), x.data_ptr()) for name, x in tensors})


def forwards_with_copies(model: nn.Module) -> list[nn.Module]:
    """The modules whose replaced forward holds numbers that are no memory of a parameter: a step does not reach them."""
    live = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    return [
        module
        for module in model.modules()
        if is_dataclass(replaced := vars(module).get("forward"))
        and any(x.is_floating_point() and x.untyped_storage().data_ptr() not in live for x in _tensors(replaced))
    ]


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in the fields of a replaced forward, however deep. Modules keep their own."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, ops.QuantizedWeight):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
