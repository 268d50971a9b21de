"""What a checkpoint's quantization_config says: which linear layers and experts are quantised, and how.

    plan = read_config(config.quantization_config)                    # a dictionary
    plan = plan.with_names(names_in_files(model))
    scheme = plan.scheme_of("model.layers.0.mlp.up_proj", linear)     # None: this layer is not quantised

A config may name a layer as the model does or as the checkpoint's files do. An option that fa_serve does not know is refused by
name, because ignoring it would give wrong results. Left out: the meaning of a layer's tensors (formats.py), and the names in
files (file_names.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fa_serve.hf.weights.formats import Awq, Float8, Gptq, Mxfp4, PackQuantized, Scheme
from fa_serve.ops.products.quantised.weight import RUN
from fa_serve.spec import ParameterError

FIELD = "quantization_config"
PASSED_ON = ("bitsandbytes", "torchao")
"""Formats that transformers itself loads, into modules that run unchanged."""

Chooses = Callable[[Sequence[str], nn.Module], bool]
"""Whether a layer is chosen. It gets all names of the layer."""


@dataclass(frozen=True)
class QuantizationPlan:
    """Which linear layers of a checkpoint are quantised, and how.

    schemes: pairs of a function and a scheme; a layer has the first scheme whose function returns True for it
    names:   the names of layers and of stacked weights in the files, where these differ from the model's
    of_text: whether only the layers and the head of the text model are quantised, whatever the functions return for others
    """

    format: str
    schemes: Sequence[tuple[Chooses, Scheme]]
    names: Mapping[str, str] = field(default_factory=dict)
    of_text: bool = False

    def with_names(self, names: Mapping[str, str]) -> QuantizationPlan:
        """The same plan for a model whose layers have these names in the files."""
        return replace(self, names=names)

    def scheme_of(self, name: str, module: nn.Module) -> Scheme | None:
        """The scheme of a linear layer by its name in the model; None if the layer is not quantised."""
        return self._first_scheme([name, self.names.get(name, name)], module)

    def _first_scheme(self, names: Sequence[str], module: nn.Module) -> Scheme | None:
        return next((scheme for chooses, scheme in self.schemes if chooses(names, module)), None)

    def scheme_of_experts(self, name: str) -> Scheme | None:
        """The scheme of a module of experts by its name in the model; None if the experts are not quantised.

        A config names the linear layers of each expert. Raises ParameterError if these layers have different schemes, or a
        scheme with which fa_serve does not compute experts.
        """
        linear = nn.Linear(1, 1, device="meta")
        stacked = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
        found = set()
        for projection, weight in stacked.items():
            own = f"{name}.0.{projection}"
            found.add(self._first_scheme([own, self.names.get(f"{name}.{weight}", own)], linear))
        if len(found) > 1:
            kinds = sorted("not quantised" if scheme is None else scheme.description for scheme in found)
            raise ParameterError(FIELD, f"name one format for all products of {name}", kinds)
        scheme = found.pop()
        if scheme is None:
            return None
        if (of_experts := scheme.of_experts()) is None:
            raise ParameterError(FIELD, f"have no act-order for the experts of {name}", scheme.description)
        return of_experts


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether fa_serve reads this quantization_config. Raises ParameterError for a format that is not in PASSED_ON either."""
    method = method_of(config)
    if method not in _FORMATS and method not in PASSED_ON:
        raise ParameterError(f"{FIELD}.quant_method", f"be one of {', '.join(sorted([*_FORMATS, *PASSED_ON]))}", method)
    return method in _FORMATS


def read_config(config: Mapping[str, Any]) -> QuantizationPlan:
    """What a checkpoint's quantization_config says. Raises ParameterError for an option that fa_serve does not know."""
    return _FORMATS[method_of(config)](config)


def method_of(config: Mapping[str, Any]) -> str:
    """The name of the format that a quantization_config describes."""
    if config.get("load_in_8bit") or config.get("load_in_4bit"):
        return "bitsandbytes"
    return str(config.get("quant_method"))


def _require(config: Mapping[str, Any], field: str, allowed: Sequence[Any], default: Any = None, where: str = FIELD) -> Any:
    value = config.get(field, default)
    if value not in allowed:
        raise ParameterError(f"{where}.{field}", f"be {' or '.join(str(x) for x in allowed)}", value)
    return value


def _object(config: Mapping[str, Any], name: str, where: str = FIELD) -> Mapping[str, Any]:
    """An object in a config; an empty one if it is not given."""
    found = config.get(name) or {}
    if not isinstance(found, Mapping):
        raise ParameterError(f"{where}.{name}", "be an object with fields", found)
    return found


def _group_size(value: Any, where: str) -> int:
    if value == -1 or (isinstance(value, int) and value > 0 and value % RUN == 0):
        return int(value)
    raise ParameterError(f"{where}.group_size", f"be -1 or a multiple of {RUN}", value)


def _list_of_names(config: Mapping[str, Any], name: str, where: str = FIELD) -> list[str]:
    """A list of names and patterns in a config; an empty one if it is not given."""
    found = config.get(name) or []
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise ParameterError(f"{where}.{name}", "be a list of names of layers", found)
    for each in found:
        try:
            re.compile(each.removeprefix("re:"))
        except re.error as error:
            raise ParameterError(f"{where}.{name}", f"hold regular expressions that Python can read ({error})", each) from None
    return list(found)


def _without(skipped: Sequence[str]) -> Chooses:
    """Accepts all layers except the head and layers whose names begin or end with one of these patterns, as in transformers."""
    patterns = [*skipped, "lm_head"]

    def chooses(names: Sequence[str], module: nn.Module) -> bool:
        return not any(re.match(pattern, name) or name.endswith(pattern) for pattern in patterns for name in names)

    return chooses


def _awq(config: Mapping[str, Any]) -> QuantizationPlan:
    _require(config, "bits", (4,))
    version = config.get("version", "gemm")
    # transformers writes it in lower case, and other tools in upper case
    _require({"version": version.lower() if isinstance(version, str) else version}, "version", ("gemm",))
    _require(config, "zero_point", (True,), True)
    scheme = Awq(_group_size(config.get("group_size", 128), FIELD))
    return QuantizationPlan("awq", [(_without(_list_of_names(config, "modules_to_not_convert")), scheme)])


def _gptq(config: Mapping[str, Any]) -> QuantizationPlan:
    _require(config, "bits", (4,))
    _require(config, "dynamic", (None, {}))
    _require(config, "pack_dtype", (None, "int32"))
    _require(config, "is_marlin_format", (None, False))
    layout = _require(config, "checkpoint_format", ("gptq", "gptq_v2"), config.get("format", "gptq"))
    size = _group_size(config.get("group_size", 128), FIELD)
    scheme = Gptq(size, layout == "gptq", bool(config.get("desc_act")) and size != -1)
    blocks = config.get("modules_in_block_to_quantize") or []
    if isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
        blocks = [name for block in blocks for name in block]
    inside = _list_of_names({"modules_in_block_to_quantize": blocks}, "modules_in_block_to_quantize")
    every = (lambda names, module: True) if config.get("lm_head") else _without([])

    def chooses(names: Sequence[str], module: nn.Module) -> bool:
        return every(names, module) and (not inside or any(name.endswith(f".{each}") for each in inside for name in names))

    # its tools quantise the layers of the text model, and have no list of what they leave out
    return QuantizationPlan("gptq", [(chooses, scheme)], of_text=True)


def _fp8(config: Mapping[str, Any]) -> QuantizationPlan:
    """transformers' own float8: DeepSeek-V3, Qwen3-FP8."""
    static = _require(config, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    _require(config, "fmt", ("e4m3", None))
    _require(config, "scale_fmt", ("float", None))
    block = config.get("weight_block_size")
    shared = _block(block, f"{FIELD}.weight_block_size") if block else (0, 0)
    scheme = Float8("weight_scale_inv", shared, "activation_scale" if static else None)
    return QuantizationPlan("fp8", [(_without(_list_of_names(config, "modules_to_not_convert")), scheme)])


def _mxfp4(config: Mapping[str, Any]) -> QuantizationPlan:
    """gpt-oss: experts only."""
    _require(config, "dequantize", (None, False))
    chooses = _without(_list_of_names(config, "modules_to_not_convert"))
    return QuantizationPlan("mxfp4", [(lambda names, module: ".experts." in names[0] and chooses(names, module), Mxfp4())])


def _block(value: Any, field: str) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(size, int) and size > 0 for size in value):
        rows, columns = value
        if columns % RUN == 0:
            return rows, columns
    raise ParameterError(field, f"be two sizes, the second a multiple of {RUN}", value)


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationPlan:
    _require(config, "quantization_status", ("compressed", "frozen", None))
    _require(config, "transform_config", (None, {}))
    if sparsity := (config.get("sparsity_config") or {}).get("format"):
        _require({"format": sparsity}, "format", ("dense",), where=f"{FIELD}.sparsity_config")
    ignored = _names(_list_of_names(config, "ignore"))
    targets: dict[str, Scheme] = {}
    for name, group in _object(config, "config_groups").items():
        group = _object({name: group}, name, f"{FIELD}.config_groups")
        layout = group.get("format") or config.get("format")
        scheme = _compressed_scheme(group, layout, f"{FIELD}.config_groups.{name}")
        targets |= dict.fromkeys(_list_of_names(group, "targets", f"{FIELD}.config_groups.{name}"), scheme)
    # the library's order: a layer's own name counts before patterns, and these before the name of its class
    ordered = sorted(targets, key=lambda target: (target.startswith("re:"), target))
    schemes: list[tuple[Chooses, Scheme]] = []
    for match in (_match_name, _match_class):
        for target in ordered:

            def chooses(names: Sequence[str], module: nn.Module, match: Any = match, target: str = target) -> bool:
                return match(names, module, target) and not ignored(names, module)

            schemes.append((chooses, targets[target]))
    return QuantizationPlan("compressed-tensors", schemes)


def _names(targets: Sequence[str]) -> Chooses:
    """Accepts layers by their name, by a regular expression for the name ("re:..."), or by the name of their class."""

    def chooses(names: Sequence[str], module: nn.Module) -> bool:
        return any(_match_name(names, module, target) or _match_class(names, module, target) for target in targets)

    return chooses


def _match_name(names: Sequence[str], module: nn.Module, target: str) -> bool:
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in names)
    return target in names


def _match_class(names: Sequence[str], module: nn.Module, target: str) -> bool:
    return target == type(module).__name__


def _compressed_scheme(group: Mapping[str, Any], layout: str | None, where: str) -> Scheme:
    weights = _object(group, "weights", where)
    kind = _require({"format": layout}, "format", ("pack-quantized", "float-quantized", "naive-quantized"), where=where)
    inputs = _object(group, "input_activations", where)
    _require(group, "output_activations", (None,), where=where)
    where = f"{where}.weights"
    if kind == "pack-quantized":
        _require(group, "input_activations", (None, {}), where=where.removesuffix(".weights"))
        _require(weights, "num_bits", (4,), where=where)
        _require(weights, "type", ("int",), where=where)
        strategy = _require(weights, "strategy", ("group", "channel"), where=where)
        order = _require(weights, "actorder", (None, False, "weight", "static", "group"), where=where)
        size = _group_size(weights.get("group_size"), where) if strategy == "group" else -1
        return PackQuantized(size, bool(weights.get("symmetric", True)), order == "group")
    _require(weights, "num_bits", (8,), where=where)
    _require(weights, "type", ("float",), where=where)
    _require(weights, "symmetric", (True,), True, where=where)
    strategy = _require(weights, "strategy", ("tensor", "channel", "block"), where=where)
    static = bool(inputs) and inputs.get("dynamic") is False
    if static:
        _require(inputs, "strategy", ("tensor",), where=where.replace(".weights", ".input_activations"))
    block = (0, 0) if strategy == "tensor" else (1, 0)
    if strategy == "block":
        block = _block(weights.get("block_structure"), f"{where}.block_structure")
    return Float8("weight_scale", block, "input_scale" if static else None)


_FORMATS: dict[str, Callable[[Mapping[str, Any]], QuantizationPlan]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
