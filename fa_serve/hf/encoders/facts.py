"""Describes what an encoder computes, from its small files alone, for `fa-serve info`.

    facts = encoder_facts("BAAI/bge-small-en-v1.5", "embed")
    facts.size, facts.pooling, facts.packs             # 384, ("cls",), True

Whether sequences can be packed depends only on the model's code, not on its weights. So a model of one layer, with random
weights and a small vocabulary, is tried in the same way as the whole model is when it is loaded. Left out: the weights, and the
tokenizer.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from fa_serve.hf.encoders.folder import EncoderFolder, EncoderTask, read_folder
from fa_serve.hf.encoders.load import encoder_class, labels_of, with_its_attention
from fa_serve.hf.encoders.modules import pooling_modes
from fa_serve.hf.encoders.packed import PackedModel

_WORDS = 1024
"""The size of the vocabulary of the model with one layer that is tried."""


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What an encoder computes.

    size:       the number of elements of a vector, of word weights, or of labels
    pooling:    how the vectors of tokens become one vector; () if they do not
    normalizes: whether vectors have length 1
    labels:     names of the classes, by index
    activation: the name of the class that the folder names for logits; None for the usual activation
    prompts:    names of the texts that are put before an input
    max_tokens: the largest number of tokens of an input, as the folder says
    packs:      True if sequences are packed end to end, False if they are padded; None if the model with one layer cannot be
                made, and for a model with towers, of which no smaller one is made
    """

    task: EncoderTask
    size: int
    pooling: tuple[str, ...] = ()
    normalizes: bool = False
    labels: tuple[str, ...] = ()
    activation: str | None = None
    prompts: tuple[str, ...] = ()
    max_tokens: int | None = None
    packs: bool | None = None


def encoder_facts(path: str, task: EncoderTask) -> EncoderFacts:
    """Describe an encoder. Raises ParameterError for a folder that fa_serve does not compute, and errors of transformers."""
    folder = read_folder(path, task)
    config = AutoConfig.from_pretrained(path, **({"subfolder": folder.subfolder} if folder.subfolder else {}))
    return EncoderFacts(
        task,
        _size(folder, config),
        tuple(mode for module in folder.modules if module.kind == "Pooling" for mode in pooling_modes(module)),
        bool(folder.modules) and folder.modules[-1].kind == "Normalize",
        labels_of(config) if task in ("score", "classify") else (),
        folder.activation,
        tuple(folder.prompts),
        folder.max_tokens,
        _packs(*encoder_class(config, task)),
    )


def _size(folder: EncoderFolder, config: PreTrainedConfig) -> int:
    if folder.task in ("score", "classify"):
        return len(labels_of(config))
    text = config.get_text_config()
    if folder.task == "sparse":
        return int(text.vocab_size)
    size = int(text.hidden_size)
    for module in folder.modules:
        if module.kind == "Pooling":
            size *= len(pooling_modes(module))
        elif module.kind == "Dense":
            size = int(module.config["out_features"])
    return size


def _one_layer(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model with one layer and a small vocabulary. Raises the errors of configs whose sizes are fixed."""
    small: Any = copy.deepcopy(config)
    small.num_hidden_layers = 1
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    small.vocab_size = min(small.vocab_size, _WORDS)
    if (getattr(small, "pad_token_id", None) or 0) >= small.vocab_size:
        small.pad_token_id = 0
    return cast(PreTrainedConfig, small)


def _packs(config: PreTrainedConfig, auto: Any) -> bool | None:
    """As in `EncoderFacts`. auto: the class of transformers that makes the model"""
    if type(config.get_text_config()) is not type(config):
        return None

    def make(attention: str | None) -> nn.Module:
        own = {} if attention is None else {"attn_implementation": attention}
        model: nn.Module = auto.from_config(copy.deepcopy(small), dtype=torch.float32, **own)
        return model

    try:
        small = _one_layer(config)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model: Any = with_its_attention(make)[0].eval()
            for parameter in model.parameters():
                if parameter.dim() > 1:  # large enough that attention to a token of another sequence shows in the result
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            return PackedModel(model).packs
    except Exception:  # a model's code may raise anything for sizes that it does not expect
        return None
