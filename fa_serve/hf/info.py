"""What a config asks of attention and who would serve it, told without weights: behind `fa-serve info MODEL`.

The model is made on the meta device, where tensors have shapes and no memory, and asked for one forward of its own code, in
which each call of attention is written down and none is computed. Left out: towers whose inputs a config alone does not tell
(those of Qwen2-VL take a grid for each image); they are checked by their source like every part, and named as not tried out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel

from fa_serve.hf.masks import Implicit
from fa_serve.hf.models import NAME, admit, check_class
from fa_serve.hf.paged import check_model
from fa_serve.spec import AttentionSpec, UnsupportedModelError


@dataclass(frozen=True)
class Layer:
    """One call of attention: the class of its module, and what the call is, as a dense prefill."""

    module: str
    spec: AttentionSpec


@dataclass
class Part:
    """A model with a config of its own: the whole, or the text or a tower of it.

    refused: why fa_serve does not take it, or None; untried: why its layers are not known, or None
    """

    name: str
    model: str
    refused: str | None = None
    untried: str | None = None
    layers: list[Layer] = field(default_factory=list)

    def kinds(self) -> list[tuple[Layer, str]]:
        """Layers that ask for the same, and which of the calls of a forward they are: "0-4, 6-10"."""
        found: dict[Layer, list[list[int]]] = {}
        for i, layer in enumerate(self.layers):
            spans = found.setdefault(layer, [])
            if spans and spans[-1][1] == i - 1:
                spans[-1][1] = i
            else:
                spans.append([i, i])
        return [(k, ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)) for k, spans in found.items()]


@dataclass(frozen=True)
class Description:
    """The parts of a model, and why the engine cannot run it (None: it can)."""

    parts: list[Part]
    engine: str | None


def describe(model_or_config: str | PreTrainedConfig, device: str = "cpu", arch: int = 0) -> Description:
    """What a hub name, a folder or a config needs, and whether each of its layers is served, for a device of that kind.

    Raises OSError or ValueError, in transformers' words, for a name that is no model's.
    """
    loaded = AutoConfig.from_pretrained(model_or_config) if isinstance(model_or_config, str) else model_or_config
    config = copy.deepcopy(loaded)
    for each in _configs(config):
        each._experts_implementation = "batched_mm"  # see attention_layers
    auto: Any = transformers.AutoModel
    with torch.device("meta"):
        whole: PreTrainedModel = auto.from_config(config, attn_implementation="eager", dtype=config.dtype or torch.bfloat16)
    parts = {part.name: part for part in (_examine(*each, device, arch) for each in _models(whole))}
    try:
        check_model(loaded)
        engine = None
    except UnsupportedModelError as error:
        engine = str(error)
    return Description(list(parts.values()), engine)


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    found = [config]
    for name in config.sub_configs:
        if isinstance(sub := getattr(config, name, None), PreTrainedConfig):
            found += _configs(sub)
    return found


def _models(whole: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """By their names, the models within a model whose configs have names of their own or another class, outermost first."""
    names = {id(getattr(whole.config, name, None)): name for name in whole.config.sub_configs}
    first: dict[object, tuple[str, PreTrainedModel]] = {}
    for model in whole.modules():
        if isinstance(model, PreTrainedModel):
            name = names.get(id(model.config))
            first.setdefault(name or type(model.config), (name or "model", model))
    return list(first.values())


def _examine(name: str, model: PreTrainedModel, device: str, arch: int) -> Part:
    part = Part(name, type(model).__name__)
    within = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    try:
        for each in within:
            check_class(type(each))
    except UnsupportedModelError as error:
        part.refused = str(error)
        return part
    if len({type(m.config) for m in within}) > 1:
        return part  # its parts attend, not itself
    for each in within:
        admit(each)
        each.config._attn_implementation = NAME
    recorder = _Recorder(device, arch, model.dtype)
    registered: dict[str, Any] = AttentionInterface._global_mapping
    known = registered[NAME]
    registered[NAME] = recorder
    try:
        with torch.no_grad(), torch.device("meta"):
            model.train(False)(**_inputs(model))
    except Exception as error:  # whatever a model of any kind does with inputs that are not quite its own
        part.untried = f"a forward of its own on the meta device ended in {type(error).__name__}: {str(error)[:200]}"
    finally:
        registered[NAME] = known
    part.layers = recorder.layers
    if not part.layers and part.untried is None:
        part.untried = "a forward of it calls no attention"
    return part


class _Recorder:
    """In the place of the attention function: writes down and computes nothing."""

    def __init__(self, device: str, arch: int, dtype: torch.dtype) -> None:
        self.layers: list[Layer] = []
        self.here: dict[str, Any] = {"layout": "dense", "device": device, "arch": arch, "dtype": dtype, "kv_dtype": dtype}

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Implicit | None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        own = getattr(module, "is_causal", False) and query.shape[2] == key.shape[2]
        left = -1 if sliding_window is None else sliding_window - 1
        window = (left, 0 if (own if is_causal is None else is_causal) else left)
        if isinstance(attention_mask, Implicit):
            window = attention_mask.window_size
        explicit: Literal["bool", "float"] | None = None if position_bias is None else "float"
        if isinstance(attention_mask, Tensor):
            window = (-1, -1)
            explicit = explicit or ("bool" if attention_mask.dtype == torch.bool else "float")
        spec = AttentionSpec(
            **self.here,
            head_dim=query.shape[-1],
            head_dim_v=value.shape[-1],
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            window_size=window,
            softcap=bool(softcap),
            sinks=s_aux is not None,
            mask=explicit,
        )
        self.layers.append(Layer(type(module).__name__, spec))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """The smallest inputs of a forward that the config tells."""
    config: Any = model.config
    ids = torch.zeros((1, 2), dtype=torch.int64)
    makers: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: ids,
        "pixel_values": lambda: torch.zeros((1, config.num_channels, *_square(config.image_size)), dtype=model.dtype),
        "input_features": lambda: torch.zeros((1, config.num_mel_bins, 2 * config.max_source_positions), dtype=model.dtype),
    }
    if model.main_input_name not in makers:
        raise UnsupportedModelError(f"no inputs are known that are called {model.main_input_name}")
    inputs = {model.main_input_name: makers[model.main_input_name]()}
    if model.main_input_name == "input_ids":
        inputs["attention_mask"] = torch.ones_like(ids)  # see _probe in paged.py
    return inputs | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _square(size: Any) -> tuple[int, ...]:
    return tuple(size) if isinstance(size, list | tuple) else (size, size)


def decoding(spec: AttentionSpec) -> AttentionSpec:
    """The same layer in the engine: one token of each sequence, keys and values in pages of 16."""
    return replace(spec, layout="paged", page_size=16, few_queries=True)
