"""Models that hold a language model and towers: which class loads them, which parts fa_serve serves, and which part makes text.

    auto = auto_class(config)                               # AutoModelForImageTextToText, or AutoModelForCausalLM
    model = make_served(config, lambda own, parts: auto.from_config(own, attn_implementation=parts))
    text = text_model(model)                                # the model itself, or the causal model that it wraps

A composite model is loaded whole. Passing only its text config to `from_pretrained` would change the names of the weights, so
the weights of most types would silently stay random.

A tower may compute its attention itself, such as the tower of SAM. Then only the language model is served, and the tower keeps
the attention that transformers gives it. Left out: images (fa_serve.hf.images).
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from fa_serve.hf.adapter.gathered_keys import computes_attention
from fa_serve.hf.adapter.models import NAME, read_source
from fa_serve.spec import UnsupportedModelError

log = logging.getLogger("fa_serve.hf")

T = TypeVar("T")
IMAGE_TOKEN_NAMES = ("image_token_id", "image_token_index")
"""The config fields that name the token which holds the place of each embedding of an image."""
_BLANK_IMAGES = {"perceiver_embeddings", "image_encoder_embeddings", "image_attention_mask"}


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class of transformers that loads a model with this config, including its towers for images if it has any.

    Raises UnsupportedModelError if the config is not that of a causal language model, with or without images.
    """
    composite: Any = transformers.AutoModelForImageTextToText
    causal: Any = transformers.AutoModelForCausalLM
    for auto in (composite, causal):
        if type(config) in auto._model_mapping:
            return auto
    # transformers has two names for the config of Evolla, so its mapping says that it has no such key, but finds the class
    found = composite._model_mapping.get(type(config), None)
    if found is not None:
        composite._model_mapping._extra_content[type(config)] = found
        return composite
    raise UnsupportedModelError(
        f"{type(config).__name__} is not the config of a causal language model in transformers, with images or without"
    )


def text_key(config: PreTrainedConfig) -> str | None:
    """The name under which a config holds the config of its language model; None if it holds no such config."""
    text = config.get_text_config()
    return next((name for name in config.sub_configs if getattr(config, name, None) is text), None)


def make_served(config: PreTrainedConfig, make: Callable[[PreTrainedConfig, str | dict[str, str]], T]) -> T:
    """Call `make` with a copy of the config and the `attn_implementation` that serves as much of a model as possible.

    That is fa_serve for the whole model, or only for its language model if a tower cannot be served. A model that computes its
    attention itself keeps its own attention, if that is possible in the engine's forward. transformers checks each part before
    it reads any weight. Returns what `make` returns.

    Raises UnsupportedModelError if the language model cannot be served in any of these ways.
    """
    key = text_key(config)
    if _keeps_its_attention(config):
        return make(copy.deepcopy(config), "eager")
    try:
        return make(copy.deepcopy(config), NAME)
    except UnsupportedModelError as error:
        if key is None:
            raise
        log.info("fa_serve serves only the language model: %s", error)
    return make(copy.deepcopy(config), {key: NAME})


def _keeps_its_attention(config: PreTrainedConfig) -> bool:
    """Whether the language model of a config computes its attention itself, from keys and values that its cache returns."""
    try:
        auto = auto_class(config)
    except UnsupportedModelError:
        return False
    model_class = auto._model_mapping[type(config)]
    if isinstance(model_class, tuple) or not read_source(model_class).chooses_by_name:
        return False
    with torch.device("meta"):
        return computes_attention(text_model(auto.from_config(copy.deepcopy(config), attn_implementation="eager")))


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that generates text: the model itself, or the causal model that it wraps (BLIP-2, Kosmos).

    A wrapper is a model one of whose parts is the language model with a head, and whose own forward takes no position_ids or
    whose config names no image token.
    """
    sees = any(getattr(model.config, name, None) is not None for name in IMAGE_TOKEN_NAMES)
    if sees and "position_ids" in inspect.signature(model.forward).parameters:
        return model
    for part in model.children():
        if isinstance(part, PreTrainedModel) and part.can_generate() and is_text(part, model.config):
            return part
    return model


def blank_images(model: PreTrainedModel, num_tokens: int) -> dict[str, torch.Tensor]:
    """Arguments that stand for images in a model whose forward requires them (Idefics): one blank image that no token sees, as
    the model's processor makes for a text. An empty dict for other models.

    For a token that sees no image, the model closes the gate after its cross-attention layers. So their result does not matter,
    and `attention_forward` does not compute them.
    """
    if not _takes_blank_images(type(model).forward):
        return {}
    config: Any = model.config
    embeds = torch.zeros(1, 1, 1, config.vision_config.embed_dim, dtype=model.dtype, device=model.device)
    name = "perceiver_embeddings" if config.use_resampler else "image_encoder_embeddings"
    mask = torch.zeros(1, num_tokens, 1, dtype=torch.int64, device=model.device)
    return {name: embeds, "image_attention_mask": mask}


@functools.lru_cache(maxsize=64)
def _takes_blank_images(forward: Callable[..., Any]) -> bool:
    return inspect.signature(forward).parameters.keys() >= _BLANK_IMAGES


def is_text(part: torch.nn.Module, config: PreTrainedConfig) -> bool:
    """Whether a part of a model with this config is the language model, or wraps nothing but the language model."""
    return isinstance(part, PreTrainedModel) and part.config is config.get_text_config()
