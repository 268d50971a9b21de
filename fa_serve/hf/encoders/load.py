"""Loads an encoder: the transformer with its head, the modules after it, its labels and its limit of positions.

    loaded = load_encoder(folder, dtype="auto", device=torch.device("cpu"))
    loaded.model.hidden(inputs)

Left out: the tokenizer itself, which another process may need as well (fa_serve.engine.start.loading).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from fa_serve.hf.adapter.models import NAME
from fa_serve.hf.encoders.folder import EncoderFolder, EncoderTask
from fa_serve.hf.encoders.modules import check_sizes, load_modules
from fa_serve.hf.encoders.packed import PackedModel
from fa_serve.hf.weights.expert_files import require_enough_experts
from fa_serve.hf.weights.float_files import check_float_files
from fa_serve.spec import ParameterError, UnsupportedModelError

log = logging.getLogger("fa_serve.engine")
T = TypeVar("T")

_CLASSES: dict[EncoderTask, Any] = {
    "embed": AutoModel,
    "token_embed": AutoModel,
    "sparse": AutoModelForMaskedLM,
    "score": AutoModelForSequenceClassification,
    "classify": AutoModelForSequenceClassification,
}


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """model: the transformer with its head; modules: the modules after the transformer

    labels: names of the logits of a score or of classes, by index, else (); max_positions: see `_max_positions`
    """

    model: PackedModel
    modules: list[nn.Module]
    labels: tuple[str, ...]
    max_positions: int | None


def load_encoder(folder: EncoderFolder, *, dtype: str, device: torch.device, trust_remote_code: bool = False) -> LoadedEncoder:
    """Load what the folder asks for. fa_serve computes the attention if the model's attention can be replaced.

    Raises ParameterError for a folder that fa_serve does not compute, for a mixture that chooses more experts than it has, for
    weights of the transformer or its head that are missing or quantised without a quantization_config, and for weights of a
    module after it that do not fit, and OSError for a module without its files. Errors of transformers propagate.
    """
    found = _load(folder, dtype, device, trust_remote_code)
    model = cast(PreTrainedModel, cast(nn.Module, found).to(device).eval().requires_grad_(False))
    packed = PackedModel(model)
    if not packed.packs:
        how = "batches are padded" if packed.batches == "padded" else "inputs are computed one by one"
        log.warning("%s does not support packed sequences: its %s", type(model).__name__, how)
    labels = labels_of(model.config) if folder.task in ("score", "classify") else ()
    modules = load_modules(folder, model.dtype, device)
    if folder.task in ("embed", "token_embed"):
        check_sizes(modules, packed.base.config.hidden_size, folder.path)
    return LoadedEncoder(packed, modules, labels, _max_positions(packed))


def _load(folder: EncoderFolder, dtype: str, device: torch.device, trust_remote_code: bool) -> PreTrainedModel:
    words: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if folder.subfolder:
        words["subfolder"] = folder.subfolder
    known = AutoConfig.from_pretrained(folder.path, **words)
    require_enough_experts(known)
    config, kind = encoder_class(known, folder.task)

    def load(attention: str | None) -> PreTrainedModel:
        own: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
        own["use_kernels"] = False  # transformers 5.25 would download kernels for norms, which fused layers replace
        model, report = kind.from_pretrained(folder.path, config=config, dtype=dtype, output_loading_info=True, **own, **words)
        _require_head(folder, report)
        if getattr(config, "quantization_config", None) is None:
            place = f"{folder.subfolder}/config.json" if folder.subfolder else "config.json"
            check_float_files(Path(str(cached_file(folder.path, place))).parent, model)
        loaded: PreTrainedModel = model
        return loaded

    model, own = with_its_attention(load)
    if own is not None:
        log.warning("fa_serve cannot replace the attention of this model: %s", own)
    return model


def encoder_class(config: PreTrainedConfig, task: EncoderTask) -> tuple[PreTrainedConfig, Any]:
    """The class of transformers that makes the model of a task, and the config that it takes.

    For embeddings, T5 and its relatives are made without their decoder, as sentence-transformers makes them. Their class alone
    says that they have one: a T5EncoderModel that was saved has `is_encoder_decoder=False` in its config.
    """
    makes_encoder = type(config).is_encoder_decoder and type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    if not makes_encoder or task not in ("embed", "token_embed"):
        return config, _CLASSES[task]
    own = copy.deepcopy(config)
    own.is_encoder_decoder = False
    return own, AutoModelForTextEncoding


def with_its_attention(make: Callable[[str | None], T]) -> tuple[T, UnsupportedModelError | None]:
    """What `make` returns for fa_serve as `attn_implementation`, and None. If the model's attention cannot be replaced: what
    `make` returns for None, and the reason."""
    try:
        return make(NAME), None
    except UnsupportedModelError as error:
        return make(None), error


def labels_of(config: Any) -> tuple[str, ...]:
    """The names of the labels of a model for sequence classification, by index."""
    names: dict[int, str] = config.id2label
    return tuple(str(names[index]) for index in sorted(names))


def _require_head(folder: EncoderFolder, report: Any) -> None:
    """Raise ParameterError for missing weights, because a head without weights would answer with random numbers.

    The pooler may be missing for tasks that do not use it.
    """
    missing = sorted(name for name in report["missing_keys"] if "pooler." not in name or folder.task in ("score", "classify"))
    if missing:
        rule = f"have all weights of a model for the task {folder.task} (--task), but {', '.join(missing[:3])} are missing"
        raise ParameterError("model", rule, folder.path)


def _max_positions(packed: PackedModel) -> int | None:
    """The number of tokens of the longest sequence that the model was made for; None if its config does not say."""
    limit = getattr(packed.base.config, "max_position_embeddings", None)
    if limit is None or limit < 0:
        return None
    return int(limit) - packed.first_position
