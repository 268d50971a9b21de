"""Models that hold a language model beside towers: what loads them, which parts fa_serve serves, and which part writes text.

    auto = auto_class(config)                               # AutoModelForImageTextToText, or AutoModelForCausalLM
    model = make_served(config, lambda own, parts: auto.from_config(own, attn_implementation=parts))
    text = text_model(model)                                # the model itself, or the causal model that it wraps

A composite model is loaded as it is. Its text config alone is not passed to `from_pretrained`, because the names of the weights
then differ and most types would silently stay random.

A tower may compute its attention itself, such as that of SAM. Then the language model alone is served, and the tower keeps the
attention that transformers gives it. Left out: images (fa_serve.hf.images).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.adapter.models import NAME
from fa_serve.spec import UnsupportedModelError

log = logging.getLogger("fa_serve.hf")

T = TypeVar("T")
IMAGE_TOKEN_NAMES = ("image_token_id", "image_token_index")
"""What configs call the token that stands in the place of each embedding of an image."""


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a model with this config: with its towers, if it has any that see images.

    Raises UnsupportedModelError if the config is neither that of a causal language model nor of one that sees images.
    """
    composite: Any = transformers.AutoModelForImageTextToText
    causal: Any = transformers.AutoModelForCausalLM
    for auto in (composite, causal):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedModelError(
        f"{type(config).__name__} is not the config of a causal language model in transformers, with images or without"
    )


def text_key(config: PreTrainedConfig) -> str | None:
    """The name under which a config holds that of its language model; None if it has no such part."""
    text = config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), None)


def make_served(config: PreTrainedConfig, make: Callable[[PreTrainedConfig, str | dict[str, str]], T]) -> T:
    """What `make` returns for a copy of the config and the `attn_implementation` that serves as much of a model as possible.

    That is fa_serve for the whole model, or for its language model alone if a tower cannot be served. transformers checks each
    part before it reads any weight.

    Raises UnsupportedModelError if the language model cannot be served either.
    """
    key = text_key(config)
    try:
        return make(copy.deepcopy(config), NAME)
    except UnsupportedModelError as error:
        if key is None:
            raise
        log.info("fa_serve serves the language model alone: %s", error)
    return make(copy.deepcopy(config), {key: NAME})


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that computes text: the model itself, or the causal model that it wraps (BLIP-2, Kosmos).

    A wrapper has a part with a head. Its forward takes no position_ids, or its config has no token that stands for an image.
    """
    sees = any(getattr(model.config, name, None) is not None for name in IMAGE_TOKEN_NAMES)
    if sees and "position_ids" in inspect.signature(model.forward).parameters:
        return model
    for part in model.children():
        if isinstance(part, PreTrainedModel) and part.can_generate() and is_text(part, model.config):
            return part
    return model


def is_text(part: torch.nn.Module, config: PreTrainedConfig) -> bool:
    """Whether a part of a model with this config is the language model, or holds it alone."""
    return isinstance(part, PreTrainedModel) and part.config is config.get_text_config()
