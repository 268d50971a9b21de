"""What a model asks of attention and experts, and which backend would serve it, from a config alone: `fa-serve info MODEL`.

    description = describe("Qwen/Qwen3-0.6B", device="cuda", arch=90)
    for layer, calls in description.parts[0].kinds(): ...

The model is made on the meta device, where tensors have shapes but no memory. One forward of the model's code runs there, and
each attention call is recorded instead of computed. A model whose code reads values runs with zeros as weights.

Left out: towers whose inputs do not follow from a config (towers of Qwen2-VL take a grid for each image). Their source is
checked like the source of every part, and they are reported as untried.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel

from fa_serve import ops
from fa_serve.hf.adapter.composites import auto_class, make_served, text_key
from fa_serve.hf.adapter.models import NAME, check_class, prepare_model
from fa_serve.hf.adapter.probe import model_layers, run_without_weights
from fa_serve.hf.adapter.short_choices import find_short_choices
from fa_serve.hf.adapter.translate import spec_of, translate
from fa_serve.hf.encoders.facts import EncoderFacts, encoder_facts
from fa_serve.hf.encoders.folder import EncoderTask, recognise_task
from fa_serve.hf.encoders.load import encoder_class
from fa_serve.hf.encoders.packed import require_text
from fa_serve.hf.images import ImageReader
from fa_serve.hf.latent_layers import LatentSizes, latent_sizes, latent_spec
from fa_serve.hf.model_location import find_model, find_snapshot
from fa_serve.hf.surgery.divide.plan import plan_division
from fa_serve.hf.surgery.divide.sections import Cut
from fa_serve.hf.surgery.experts.mixtures import expert_modules, gate_of, weights_of
from fa_serve.hf.surgery.quantised.experts import PROJECTIONS, QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear, describe_weights, quantize_layers, top_k_of
from fa_serve.named_files import CONFIG
from fa_serve.ops import StateSpec
from fa_serve.ops.products.problem import products_with_experts
from fa_serve.ops.products.table import kernels_of_experts
from fa_serve.spec import AttentionSpec, OpSpec, ParameterError, UnsupportedModelError


@dataclass(frozen=True)
class Layer:
    """One attention call: the class of the module that makes it, and its spec, as a dense prefill.

    latent: the sizes of its latent attention; None for other attention. The engine caches latent keys if it can prove the layer
    """

    module: str
    spec: AttentionSpec
    latent: LatentSizes | None = None


@dataclass
class Part:
    """A model that has a config: the whole model, its text model, or a tower.

    refused: why fa_serve does not serve it, or None
    untried: why its layers are not known, or None
    layers:  the attention calls of one forward, in order
    experts: for each class of experts, which kernels compute them with experts_implementation="fa_serve", by the number of
             tokens, or why fa_serve does not compute them
    """

    name: str
    model: str
    refused: str | None = None
    untried: str | None = None
    layers: list[Layer] = field(default_factory=list)
    experts: dict[str, str] = field(default_factory=dict)

    def kinds(self) -> list[tuple[Layer, str]]:
        """The distinct layers, each with the indices of the calls in the forward that are equal to it: "0-4, 6-10"."""
        found: dict[Layer, list[list[int]]] = {}
        for i, layer in enumerate(self.layers):
            spans = found.setdefault(layer, [])
            if spans and spans[-1][1] == i - 1:
                spans[-1][1] = i
            else:
                spans.append([i, i])
        return [(k, ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)) for k, spans in found.items()]


@dataclass(frozen=True)
class RankShare:
    """What each rank of tensor parallelism holds.

    divided, whole: bytes of a rank's parts of divided weights, and of weights that every rank keeps whole
    total:          bytes of all weights of the model
    layers:         the spec of each attention layer on a rank
    """

    size: int
    divided: int
    whole: int
    total: int
    layers: list[AttentionSpec]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        return sum(x.cached_bytes for x in self.layers)


@dataclass(frozen=True)
class Description:
    """The parts of a model, and why the engine cannot run it (None: it can).

    share: what each rank of tensor parallelism holds, or why the model cannot be divided; None for one rank
    weights: the formats of the weights of linear layers and experts, each with the layers that have it and the kernels that
             compute it; empty if the engine does not run the model; a str says why its quantised weights are refused
    states:  what each recurrence or convolution keeps of a sequence, if the engine runs the model
    images:  why a model that generates takes no images, or None
    limit:   the largest number of tokens of a sequence, apart from the limits of memory and positions; None: no such limit
    encoder: what an encoder computes, or why fa_serve refuses its folder; None for a model that generates
    """

    parts: list[Part]
    engine: str | None
    weights: dict[str, str] | str = field(default_factory=dict)
    share: RankShare | str | None = None
    states: list[StateSpec] = field(default_factory=list)
    images: str | None = None
    limit: int | None = None
    encoder: EncoderFacts | str | None = None


def describe(
    model_or_config: str | PreTrainedConfig,
    device: str = "cpu",
    arch: int = 0,
    tensor_parallel: int = 1,
    revision: str | None = None,
) -> Description:
    """What the layers of a model ask for, and, if fa_serve or its engine refuses the model, the reason.

    model_or_config: a hub name, a folder, the path of a config.json, or a config
    tensor_parallel: number of ranks that the model would be divided between
    device, arch:    where the layers would run: a torch device type, and 10 * major + minor of a CUDA device (90 for an H200)
    revision:        a commit, a tag or a branch of a model of the hub

    Raises OSError or ValueError, with transformers' message, for a name that belongs to no model, and UnsupportedModelError for
    a config from which transformers makes no model.
    """
    if revision is not None:
        if not isinstance(model_or_config, str):
            raise ParameterError("revision", "be None for a config", revision)
        model_or_config = find_snapshot(model_or_config, revision, weights=False)
    if isinstance(model_or_config, str) and not Path(model_or_config).is_file():
        find_model(model_or_config)
    loaded = AutoConfig.from_pretrained(model_or_config) if isinstance(model_or_config, str) else model_or_config
    config = copy.deepcopy(loaded)
    for each in _configs(config):
        each._experts_implementation = "batched_mm"  # see model_layers
    folder = _folder_of(model_or_config)
    task = "generate" if folder is None else recognise_task(folder)
    auto: Any = transformers.AutoModel
    if task != "generate":
        config, auto = encoder_class(config, cast(EncoderTask, task))
    whole = _make_without_weights(config, auto)
    parts = {part.name: part for part in (_examine(*each, device, arch) for each in _models(whole))}
    if folder is not None and task != "generate":
        return _describe_encoder(folder, cast(EncoderTask, task), whole, list(parts.values()), tensor_parallel)
    weights: dict[str, str] | str = {}
    engine = None
    states: list[StateSpec] = []
    try:
        states = list(model_layers(loaded).states.values())
    except UnsupportedModelError as error:
        engine = str(error)
    else:
        try:
            weights = describe_weights(loaded, device, arch)
        except (UnsupportedModelError, ParameterError) as error:
            engine = weights = str(error)
    share: RankShare | str | None = None
    if engine is None and tensor_parallel > 1:
        try:
            share = _rank_share(loaded, tensor_parallel)
        except UnsupportedModelError as error:
            share = str(error)
    limit = min((kind.limit(module) for module, kind in find_short_choices(whole)), default=None)
    return Description(list(parts.values()), engine, weights, share, states, _why_no_images(loaded), limit)


def _make_without_weights(config: PreTrainedConfig, auto: Any) -> PreTrainedModel:
    """auto: the class of transformers that makes the model"""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto.from_config(config, attn_implementation="eager", dtype=config.dtype or torch.bfloat16)
    except (ImportError, OSError, ValueError):
        raise  # transformers says what is missing
    except Exception as error:  # the code of a model may raise anything for a config that lacks something
        told = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnsupportedModelError(f"transformers cannot make a model from this {type(config).__name__}: {told}") from error
    return model


def _folder_of(model_or_config: str | PreTrainedConfig) -> str | None:
    """The folder or hub name whose files show the model's task; None for a config alone, which does not show all modules."""
    if not isinstance(model_or_config, str):
        return None
    file = Path(model_or_config)
    if not file.is_file():
        return model_or_config
    return str(file.parent) if file.name == CONFIG else None


def _describe_encoder(
    path: str, task: EncoderTask, model: PreTrainedModel, parts: list[Part], tensor_parallel: int
) -> Description:
    """The description of an encoder. Its layers have the layout "varlen" if the encoder packs sequences."""
    facts: EncoderFacts | str
    try:
        require_text(model)
        facts = encoder_facts(path, task)
    except (ParameterError, UnsupportedModelError) as error:
        facts = str(error)
    if isinstance(facts, EncoderFacts) and facts.packs:
        for part in parts:
            part.layers = [replace(layer, spec=replace(layer.spec, layout="varlen")) for layer in part.layers]
    share = None if tensor_parallel == 1 else "an encoder runs on one rank"
    return Description(parts, None, share=share, encoder=facts)


def _why_no_images(config: PreTrainedConfig) -> str | None:
    """Why a model takes no images; None if it takes images."""
    if text_key(config) is None:
        return "it has no towers"
    try:
        with torch.device("meta"):
            model = make_served(
                config,
                lambda own, attention: auto_class(own).from_config(own, attn_implementation=attention, dtype=torch.bfloat16),
            )
        ImageReader(model, speeds_up=False)
    except UnsupportedModelError as error:
        return str(error)
    return None


def _rank_share(config: PreTrainedConfig, size: int) -> RankShare:
    """Plan the division of a model that has no weights."""
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, attn_implementation=NAME, dtype=config.dtype or torch.bfloat16)
        quantize_layers(model, config)
    division = plan_division(model, size)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    divided = saved = 0
    for path, layer in division.layers.items():
        for name, cut in layer.cuts.items():
            inside, _, last = name.rpartition(".")
            module = model.get_submodule(f"{path}.{inside}")
            if isinstance(module, QuantizedExperts) or (isinstance(module, QuantizedLinear) and last == "weight"):
                kept, num_bytes = _quantized_bytes(module, last, cut, size, model.dtype)
            elif last not in module._parameters:
                continue  # a buffer is no weight
            else:
                parameter = model.get_parameter(f"{path}.{name}")
                kept = sum(part.numel() for part in cut.kept(parameter, 0, size)) * parameter.element_size()
                num_bytes = parameter.numel() * parameter.element_size()
            divided += kept
            saved += num_bytes - kept
    if division.vocabulary is not None:
        whole: Any = model
        parts = {id(m.weight): m.weight for m in (whole.get_input_embeddings(), whole.get_output_embeddings())}
        for weight in parts.values():
            num_bytes = weight.numel() * weight.element_size()
            divided += num_bytes // size
            saved += num_bytes - num_bytes // size
    specs = []
    asked = model_layers(config)
    # layers with a state have no attention spec, but are divided too
    divided_layers = {int(path.rpartition(".")[2]): (path, layer) for path, layer in division.layers.items()}
    numbers = asked.attention if asked.states else divided_layers
    several = len(asked.attention) // max(len(numbers), 1)  # LongCat's layers have two modules of attention each
    modules = [(number, part) for number in numbers for part in range(several)]
    for (number, part), spec in zip(modules, asked.attention.values(), strict=True):
        path, layer = divided_layers[number]
        heads = next(iter(layer.attention.values()), (spec.num_heads, spec.num_kv_heads))
        own = replace(spec, num_heads=heads[0], num_kv_heads=heads[1], dtype=model.dtype, kv_dtype=model.dtype)
        attention = getattr(model.get_submodule(path), "self_attn", None)
        attention = attention[part] if isinstance(attention, nn.ModuleList) else attention
        sizes = None if attention is None else latent_sizes(attention, spec.num_heads, spec.head_dim)
        specs.append(own if sizes is None else latent_spec(own, sizes))
    return RankShare(size, divided, total - saved - divided, total, specs)


def _quantized_bytes(
    module: QuantizedLinear | QuantizedExperts, projection: str, cut: Cut, size: int, dtype: torch.dtype
) -> tuple[int, int]:
    """The bytes of a linear layer's or an expert projection's quantised weights: those that a rank keeps, and all of them."""
    if isinstance(module, QuantizedExperts):
        n, k = module.sizes(projection)
        matrices = module.num_experts * PROJECTIONS[projection]
        by_rows = cut.dim == 1
    else:
        n = module.out_features
        k = module.in_features
        matrices = 1
        by_rows = cut.dim == 0
    share = sum(count for _, count in cut.ranges(0, size)) / sum(section.size for section in cut.sections)
    kept = (round(n * share), k) if by_rows else (n, round(k * share))
    found = [sum(x.nbytes for x in module.scheme.tensors(*shape, dtype).values()) for shape in (kept, (n, k))]
    return matrices * found[0], matrices * found[1]


def decoding(layer: Layer) -> AttentionSpec:
    """The spec of a layer in the engine's decoding: one token of each sequence, keys and values in pages of 16."""
    spec = layer.spec if layer.latent is None else latent_spec(layer.spec, layer.latent)
    return replace(spec, layout="paged", page_size=16, op="decode")


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A config and all configs inside it."""
    found = [config]
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        if isinstance(sub, PreTrainedConfig):
            found += _configs(sub)
    return found


def _models(whole: PreTrainedModel) -> list[tuple[str, PreTrainedModel]]:
    """(name, model) for each model inside `whole` whose config differs in name or class from the others, outermost first."""
    names = {id(getattr(whole.config, name, None)): name for name in whole.config.sub_configs}
    first: dict[object, tuple[str, PreTrainedModel]] = {}
    for model in whole.modules():
        if isinstance(model, PreTrainedModel):
            name = names.get(id(model.config))
            first.setdefault(name or type(model.config), (name or "model", model))
    return list(first.values())


def _examine(name: str, model: PreTrainedModel, device: str, arch: int) -> Part:
    """Check one part, and run its forward without weights if it computes attention itself and not only through inner parts."""
    part = Part(name, type(model).__name__)
    within = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    try:
        for each in within:
            check_class(type(each))
    except UnsupportedModelError as error:
        part.refused = str(error)
        return part
    if len({type(m.config) for m in within}) > 1:
        return part  # its inner parts compute the attention, and are examined one by one
    part.experts = _examine_experts(model, OpSpec(device, arch))
    for each in within:
        prepare_model(each)
        each.config._attn_implementation = NAME
    recorder = _Recorder(device, arch, model.dtype)
    registered: dict[str, Any] = AttentionInterface._global_mapping
    known = registered[NAME]
    registered[NAME] = recorder
    try:
        run_without_weights(model, lambda: _record(model, recorder))
    except Exception as error:  # a model's code may raise anything for inputs that it does not expect
        part.untried = f"its forward without weights failed with {type(error).__name__}: {str(error)[:200]}"
    finally:
        registered[NAME] = known
    part.layers = recorder.layers
    if not part.layers and part.untried is None:
        part.untried = "its forward calls no attention"
    return part


def _record(model: PreTrainedModel, recorder: _Recorder) -> None:
    """Run one forward, whose attention calls `recorder` records."""
    recorder.layers.clear()
    with torch.no_grad():
        model.train(False)(**_inputs(model))


def _examine_experts(model: PreTrainedModel, spec: OpSpec) -> dict[str, str]:
    found = {}
    triton = ops.TABLE.select(spec).name == "triton"
    top_k = top_k_of(model.config)
    for module in expert_modules(model):
        try:
            weights = weights_of(module, gate_of(module))
            products = products_with_experts(
                weights, tokens=1, top_k=top_k, dtype=module.down_proj.dtype, arch=spec.arch, triton=triton
            )
            found[type(module).__name__] = kernels_of_experts(products)
        except UnsupportedModelError as error:
            found[type(module).__name__] = f"refused: {error}"
    return found


class _Recorder:
    """Replaces the attention function: it records each call, and computes nothing."""

    def __init__(self, device: str, arch: int, dtype: torch.dtype) -> None:
        self.layers: list[Layer] = []
        self.device = device
        self.arch = arch
        self.dtype = dtype

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **words: Any
    ) -> tuple[Tensor, None]:
        call = translate(module, query, key, value, attention_mask, **words)
        spec = replace(spec_of(call, "dense"), device=self.device, arch=self.arch, dtype=self.dtype, kv_dtype=self.dtype)
        self.layers.append(Layer(type(module).__name__, spec, latent_sizes(module, spec.num_heads, spec.head_dim)))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """The smallest inputs of a forward that can be made from the config alone."""
    config: Any = model.config
    ids = torch.zeros((1, 2), dtype=torch.int64)
    makers: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: ids,
        "pixel_values": lambda: torch.zeros((1, config.num_channels, *_square(config.image_size)), dtype=model.dtype),
        "input_features": lambda: torch.zeros((1, config.num_mel_bins, 2 * config.max_source_positions), dtype=model.dtype),
    }
    if model.main_input_name not in makers:
        raise UnsupportedModelError(f"the main input must be one of {sorted(makers)}, got {model.main_input_name!r}")
    inputs = {model.main_input_name: makers[model.main_input_name]()}
    if model.main_input_name == "input_ids":
        inputs["attention_mask"] = torch.ones_like(ids)  # see `_probe` in probe.py
    return inputs | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _square(size: Any) -> tuple[int, ...]:
    return tuple(size) if isinstance(size, list | tuple) else (size, size)
