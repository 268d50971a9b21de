"""How to make a model use fa_serve: by the name of the implementation when it is loaded, or by `patch` afterwards.

model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa_serve")
model = fa_serve.patch(model)      # a model that is loaded already
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from fa_serve.hf.adapter.attention import attention_forward
from fa_serve.hf.adapter.composites import is_text, text_key, text_model
from fa_serve.hf.adapter.continuous import enable, paged_attention
from fa_serve.hf.adapter.flash_branches import PAGED_NAME, read_in_one_call
from fa_serve.hf.adapter.gathered_keys import computes_attention
from fa_serve.hf.adapter.masks import mask_forward
from fa_serve.hf.adapter.models import NAME, check_class, prepare_model, read_source
from fa_serve.hf.adapter.packed_forwards import unwatch_packs, watched_modules
from fa_serve.hf.surgery.experts.mixtures import experts_forward
from fa_serve.hf.surgery.states import patch_states
from fa_serve.spec import UnsupportedModelError

log = logging.getLogger("fa_serve.hf")


def patch(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a loaded model to fa_serve, in place, and return it.

    Modules that keep recurrent states then compute them by `fa_serve.ops` if a proof shows that the results stay the same.
    Otherwise they stay as they are, and the log says why.

    To switch only some parts of a model, call `model.set_attn_implementation({"text_config": "fa_serve"})` instead.

    Raises UnsupportedModelError, and changes nothing, if fa_serve cannot serve a part of the model; TypeError for an object
    that is no model of transformers.
    """
    if not hasattr(model, "set_attn_implementation"):  # wrappers of other libraries pass this method on to their model
        rule = "model must be a model of transformers, as from_pretrained returns it (PreTrainedModel)"
        got = f"{type(model).__module__}.{type(model).__qualname__}"
        raise TypeError(
            f"{rule}, got {got}: patch the model inside it, such as pipeline.model, or wrapper.module of DataParallel"
        )
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        check_class(type(part))
    model.set_attn_implementation(NAME)
    try:
        patch_states(model)
    except UnsupportedModelError as error:
        log.warning("recurrences are left to transformers: %s", error)
    return model


def patch_parts(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a loaded model to fa_serve, in place: all of it, or only its language model if a tower cannot be served. A model
    that computes its attention itself, in a way that the engine can serve, stays as it is.

    Raises UnsupportedModelError if the language model cannot be served in any of these ways.
    """
    key = text_key(model.config)
    if computes_attention(text_model(model)):
        return model
    try:
        return patch(model)
    except UnsupportedModelError as error:
        if key is None:
            raise
        text = next((part for part in model.modules() if is_text(part, model.config)), None)
        if text is None:
            raise
        for part in text.modules():
            if isinstance(part, PreTrainedModel):
                check_class(type(part))
        log.info("fa_serve serves only the language model: %s", error)
    model.set_attn_implementation({key: NAME})
    return model


def register() -> None:
    """Make `attn_implementation="fa_serve"` and `experts_implementation="fa_serve"` known to transformers. `import fa_serve`
    calls this; calling it again is harmless."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionInterface.register(PAGED_NAME, paged_attention)
    AttentionMaskInterface.register(NAME, mask_forward)
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if not getattr(PreTrainedModel.get_correct_attn_implementation, "asks_fa_serve", False):
        _wrap_methods()


def _wrap_methods() -> None:
    """Wrap two methods of transformers' models, so that they call fa_serve first."""
    original: Any = PreTrainedModel.get_correct_attn_implementation
    switch: Any = PreTrainedModel.set_attn_implementation

    # transformers calls this method for every model, or part of a model, that it makes or switches, and would accept a
    # registered name for all of them, although some cannot use fa_serve
    @functools.wraps(original)
    def get_correct_attn_implementation(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested in (NAME, PAGED_NAME):
            prepare_model(self)
            read_in_one_call(type(self))
            enable()
        return original(self, requested, *args, **kwargs)

    # If the source of a class cannot be read, transformers does not switch the model, unless a base class keeps an answer. So
    # `read_source` first lets the base classes answer
    @functools.wraps(switch)
    def set_attn_implementation(self: PreTrainedModel, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        asked = attn_implementation.values() if isinstance(attn_implementation, dict) else (attn_implementation,)
        names = {NAME, PAGED_NAME} & set(asked)
        for part in self.modules() if names else ():
            if isinstance(part, PreTrainedModel):
                with contextlib.suppress(UnsupportedModelError):
                    read_source(type(part))
        before = [(config, config._attn_implementation) for config, _ in _configs(self)]
        try:
            result = switch(self, attn_implementation, *args, **kwargs)
            if isinstance(attn_implementation, str):
                _switch_copies(self)
            if names and all(config._attn_implementation not in names for config, _ in _configs(self)):
                check_class(type(self))  # transformers has only warned, and switched no part
        except UnsupportedModelError:
            # transformers has switched the parts before the one that is refused, and marked them as done
            for config, implementation in before:
                _set(config, implementation)
                vars(config).pop("_attn_was_changed", None)
            raise
        finally:
            _unwatch(self)
        return result

    get_correct_attn_implementation.__dict__["asks_fa_serve"] = True
    setattr(PreTrainedModel, original.__name__, get_correct_attn_implementation)
    setattr(PreTrainedModel, switch.__name__, set_attn_implementation)


def _configs(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, list[PreTrainedModel]]]:
    """Each config that a module of a model holds, once, and the parts whose config it is. If it is that of no part, such as the
    copy that the decoder of ViTMAE holds, the parts are the one that has the module."""
    owned: dict[int, tuple[PreTrainedConfig, list[PreTrainedModel]]] = {}
    copies: dict[int, tuple[PreTrainedConfig, list[PreTrainedModel]]] = {}
    inside = {"": model}
    for name, module in model.named_modules():
        outer = inside[name.rpartition(".")[0]]
        inside[name] = module if isinstance(module, PreTrainedModel) else outer
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig):
            continue
        if isinstance(module, PreTrainedModel):
            owned.setdefault(id(config), (config, []))[1].append(module)
        else:
            copies.setdefault(id(config), (config, [outer]))
    return list((copies | owned).values())


def _set(config: PreTrainedConfig, implementation: str | None) -> None:
    """Set the implementation of a config, and not of the configs inside it."""
    config._attn_implementation = {"": implementation}


def _switch_copies(model: PreTrainedModel) -> None:
    """Switch what transformers leaves out when it switches a whole model to fa_serve or back: configs that are copies, such as
    those of the two stacks of T5.

    Raises UnsupportedModelError if fa_serve does not serve such a part.
    """
    asked = model.config._attn_implementation
    ours = (NAME, PAGED_NAME)
    for config, parts in _configs(model):
        current = config._attn_implementation
        if current == asked or not {current, asked} & set(ours):
            continue
        if not all(part._can_set_attn_implementation() for part in parts):  # transformers warns, and leaves them as they are
            continue
        for part in parts if asked in ours else ():
            prepare_model(part)
            read_in_one_call(type(part))
        _set(config, asked)


def _unwatch(model: PreTrainedModel) -> None:
    """Undo what `prepare_model` has done to the parts of a model that have another attention now."""
    watched = watched_modules(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part in watched]
    unwatch_packs(part for part in parts if part.config._attn_implementation not in (NAME, PAGED_NAME))
