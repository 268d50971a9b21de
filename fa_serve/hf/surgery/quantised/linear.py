"""Linear layers with quantised weights, and the quantizer that puts them into a model of transformers.

    config = AutoConfig.from_pretrained(path)
    with_quantized_linears(config, None)                   # now transformers' loader will create these layers
    model, report = AutoModelForCausalLM.from_pretrained(path, config=config, output_loading_info=True)
    check_report(report)
    finish_weights(model.to(device))                       # converts tensors of the checkpoint to weights of fa_serve.ops

transformers asks a quantizer to replace layers before it loads weights, and then loads the tensors that have the names of the
new layers' parameters. Our quantizer is registered under the name "fa_serve" and replaces the checkpoint's own, so no other
package is needed. Layers are converted on their device one after the other, so at most one layer is in memory in both forms at
a time. For a checkpoint of floats, the quantizer rounds each weight to float8 when it is read. Left out: which layers are
quantised (quantization_plan.py), modules of experts (experts.py), the meaning of tensors (weights/formats.py), and products
(fa_serve.ops).
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightTransform, build_glob_alternation
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fa_serve import ops
from fa_serve.hf.adapter.models import NAME
from fa_serve.hf.surgery.experts.mixtures import expert_modules
from fa_serve.hf.surgery.proof import kind_of
from fa_serve.hf.surgery.quantised.experts import (
    PROJECTIONS,
    QuantizedExperts,
    prove_experts,
    quantize_experts,
    rules_for_experts,
    rules_for_scales,
)
from fa_serve.hf.weights.expert_files import TOP_K, check_expert_files
from fa_serve.hf.weights.file_names import names_in_files
from fa_serve.hf.weights.formats import Rounded, Scheme, check_loaded
from fa_serve.hf.weights.quantization_plan import FIELD, QuantizationPlan, is_ours, method_of, read_config
from fa_serve.ops.products.problem import Product, compiles_gluon
from fa_serve.ops.products.quantised.weight import quantize_float8
from fa_serve.ops.products.table import kernels_by_tokens, kernels_of_experts
from fa_serve.spec import OpSpec, ParameterError, UnsupportedModelError, dtype_name

log = logging.getLogger("fa_serve.hf")

_ROUNDED = Rounded()


class QuantizedLinear(nn.Module):
    """A linear layer with a QuantizedWeight. Before `finish`, it has the tensors of its checkpoint as parameters instead.

    scheme:    how the checkpoint stores the weights
    weight:    (out_features, in_features), after `finish`
    bias:      (out_features,) or None
    invariant: whether the bits of a row of the result must not depend on the number of rows; slower
    """

    weight: ops.QuantizedWeight
    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear, scheme: Scheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.description = scheme.description
        self.scheme = scheme
        self.invariant = False
        self.expected = scheme.tensors(self.out_features, self.in_features, dtype)
        for name, tensor in self.expected.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", linear.bias)
        if "weight" not in self.expected:
            # some models draw numbers for the weights of their layers before files are read, unless a tensor is marked so
            placeholder: Any = torch.empty(0, device="meta")
            placeholder._is_hf_initialized = True
            self.weight = placeholder

    @property
    def is_finished(self) -> bool:
        """Whether `weight` is a QuantizedWeight."""
        return isinstance(vars(self).get("weight"), ops.QuantizedWeight)

    def finish(self, layer: str) -> None:
        """Convert the loaded tensors to `weight`. Raises ParameterError, which names a tensor that does not fit."""
        data = check_loaded(self, self.expected, layer)
        try:
            self.weight = self.scheme.read(data, self.out_features, self.in_features)
        except ParameterError as error:
            raise ParameterError(f"{layer}.{error.field}", error.rule, error.value) from None

    def forward(self, x: Tensor) -> Tensor:
        if self.invariant:
            return ops.invariant_linear(x, self.weight, self.bias)
        rows = x.reshape(-1, self.in_features).contiguous()
        return ops.linear(rows, self.weight, self.bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.description}"


def source_config(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """The quantization_config of a checkpoint or of its text model; None for a checkpoint of floats."""
    for each in (config, config.get_text_config(decoder=True)):
        found = getattr(each, FIELD, None)
        if found is not None:
            return found if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def with_quantized_linears(config: PreTrainedConfig, quantization: str | None) -> PreTrainedConfig:
    """Change a config in place so that fa_serve loads its quantised weights. Configs without such weights are not changed.

    quantization: "fp8" rounds a checkpoint of floats while it is loaded; None loads a checkpoint in its own format

    Raises ParameterError for a format or an option that fa_serve does not know.
    """
    source = source_config(config)
    if source is None:
        if quantization is not None:
            setattr(config, FIELD, {"quant_method": NAME, "source": None})
        return config
    if quantization is not None:
        raise ParameterError(
            "quantization", f"be None for a checkpoint that is quantised already ({method_of(source)})", quantization
        )
    if is_ours(source):
        read_config(source)
        setattr(config, FIELD, {"quant_method": NAME, "source": dict(source)})
    return config


def quantized_elsewhere(config: PreTrainedConfig) -> str | None:
    """The format of a quantised checkpoint that transformers loads into its own modules; None for other checkpoints."""
    source = source_config(config)
    if source is None or source.get("quant_method") == NAME or is_ours(source):
        return None
    return method_of(source)


@register_quantization_config(NAME)
class SourceConfig(QuantizationConfigMixin):
    """transformers' record of a quantised model. source: the checkpoint's quantization_config, or None for floats."""

    def __init__(self, source: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.quant_method: Any = NAME
        self.source = source


@register_quantizer(NAME)
class Quantizer(HfQuantizer):
    """The hooks that transformers' loader calls while it builds a model and reads its weights."""

    quantization_config: SourceConfig

    def __init__(self, quantization_config: SourceConfig, **kwargs: Any) -> None:
        # if a checkpoint is "not pre-quantised", transformers reads tensors one after the other and calls `_Round` for each
        super().__init__(quantization_config, **kwargs | {"pre_quantized": quantization_config.source is not None})

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        source = self.quantization_config.source
        plan = _rounding(model) if source is None else read_config(source)
        self.dtype = dtype or torch.get_default_dtype()
        replace_layers(model, plan, self.dtype)
        own = {f"{layer}.{name}" for layer, module in model.named_modules() for name in getattr(module, "expected", ())}
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name not in own}
        self.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items() if name not in own}
        if source is not None:
            check_expert_files(checkpoint_files or (), model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Check the shapes of biases, norms and embeddings, and convert their dtypes.

        transformers does not check shapes in a quantised model. It does not convert the tensors of a quantised checkpoint that
        have other names in the model, such as routers of Mixtral and all tensors of many image-text models.

        Raises ParameterError that names the first parameter of another shape.
        """
        for name, parameter in model.named_parameters():
            if (expected := self.shapes.get(name, parameter.shape)) != parameter.shape:
                raise ParameterError(name, f"have the shape {list(expected)}", list(parameter.shape))
        precise = model._get_dtype_plan(self.dtype)
        in_float32 = build_glob_alternation(list(precise))[0].search if precise else lambda name: None
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in self.dtypes and tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32 if in_float32(name) else self.dtypes[name])
        return model

    def update_weight_conversions(
        self, weight_conversions: list[WeightTransform], *model: PreTrainedModel
    ) -> list[WeightTransform]:
        """transformers' rules for stacking tensors, and ours. model: passed since transformers 5.18, not used"""
        source = self.quantization_config.source
        schemes = [] if source is None else [scheme for _, scheme in read_config(source).schemes]
        of_experts = [scheme.of_experts() for scheme in schemes]
        rules = rules_for_experts(weight_conversions, [scheme for scheme in of_experts if scheme is not None])
        return [*rules, *rules_for_scales(schemes)]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        layer, _, name = param_name.rpartition(".")
        module = model.get_submodule(layer)
        if isinstance(module, QuantizedExperts):
            return name in PROJECTIONS
        return name == "weight" and isinstance(module, QuantizedLinear)

    def get_quantize_ops(self) -> ConversionOps:
        return _Round()

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Round(ConversionOps):
    """Rounds one weight to float8, or the weights of all experts one by one."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, list[Tensor]]:
        (value,) = input_dict.values()
        tensor: Tensor = value[0] if isinstance(value, list) else value
        name: str = kwargs["full_layer_name"]
        module = kwargs["model"].get_submodule(name.rpartition(".")[0])
        if isinstance(module, QuantizedExperts):
            rounded = [quantize_float8(matrix.t() if module.is_transposed else matrix) for matrix in tensor]
            return {
                name: [torch.stack([weight.data for weight in rounded])],
                f"{name}_scale": [torch.stack([weight.scales for weight in rounded])],
            }
        weight = quantize_float8(tensor)
        return {name: [weight.data], f"{name}_scale": [weight.scales]}


def _rounding(model: PreTrainedModel) -> QuantizationPlan:
    """The plan to round all linear layers and experts inside layers, but not more sensitive ones: the head and routers."""
    layers = {id(linear) for m in model.modules() if isinstance(m, nn.ModuleList) for linear in m.modules()}
    layers -= {id(router) for router in _routers(model)}
    return QuantizationPlan("fp8", [(lambda names, module: ".experts." in names[0] or id(module) in layers, _ROUNDED)])


def _routers(model: nn.Module) -> list[nn.Module]:
    """The linear layers beside the experts of a mixture that compute a number for each expert."""
    experts = set(expert_modules(model))
    found: list[nn.Module] = []
    for parent in model.modules():
        counts = {getattr(child, "num_experts", None) for child in parent.children() if child in experts}
        if counts:
            beside = [each for child in parent.children() if child not in experts for each in child.modules()]
            found += [each for each in beside if isinstance(each, nn.Linear) and each.out_features in counts]
    return found


def replace_layers(model: nn.Module, plan: QuantizationPlan, dtype: torch.dtype) -> None:
    """Replace each linear layer and each module of experts that the plan names with a module for quantised weights.

    model: on the device "meta"

    Raises ParameterError if the plan names none of them, and UnsupportedModelError for experts that fa_serve does not compute.
    """
    plan = plan.with_names(names_in_files(model))
    made: dict[str, nn.Module] = {}
    proven: set[str] = set()
    left_out = _outside_of_text(model) if plan.of_text and isinstance(model, PreTrainedModel) else set()
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in left_out:
            scheme = plan.scheme_of(name, module)
            if scheme is not None:
                made[name] = QuantizedLinear(module, scheme, dtype)
    experts = set(expert_modules(model))
    for name, module in model.named_modules():
        scheme = plan.scheme_of_experts(name) if module in experts else None
        if scheme is None:
            continue
        try:
            made[name] = quantize_experts(module, scheme, dtype)
            kind = kind_of(module)
            if kind not in proven:
                prove_experts(module)
                proven.add(kind)
        except UnsupportedModelError as error:
            if scheme is not _ROUNDED:
                raise
            made.pop(name, None)
            log.warning("%s is not quantised: %s", name, error)
    for name, module in made.items():
        model.set_submodule(name, module)
    if not made:
        raise ParameterError("model", f"have layers that its {FIELD} ({plan.format}) names", type(model).__name__)


def _outside_of_text(model: PreTrainedModel) -> set[nn.Module]:
    """The modules of towers and projectors: all but those of the text model and its head."""
    untyped: Any = model
    return set(model.modules()) - set(untyped.get_decoder().modules()) - {untyped.get_output_embeddings()}


def check_report(report: Mapping[str, Any]) -> None:
    """Check that a checkpoint was complete.

    report: transformers' report about loading, with the names of missing parameters, and (name, shape, expected shape) of
            parameters with a wrong shape

    Raises ParameterError, which names the first tensor that is missing or has a wrong shape.
    """
    missing = report["missing_keys"]
    if missing:
        raise ParameterError("model", f"have the tensor {min(missing)} in its files", f"{len(missing)} missing tensors")
    for name, shape, expected in sorted(report["mismatched_keys"])[:1]:
        raise ParameterError(name, f"have the shape {list(expected)}", list(shape))


def finish_weights(model: nn.Module, path: str = "") -> None:
    """Convert the tensors of every quantised layer of a model or of one of its modules, which must be on its final device.

    path: the name of the module in the model. Layers that have already been converted are skipped

    Raises ParameterError, which names the first tensor with a wrong shape.
    """
    for layer, module in model.named_modules(prefix=path):
        if isinstance(module, QuantizedLinear | QuantizedExperts) and not module.is_finished:
            module.finish(layer)


def quantize_layers(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Replace the layers of a model on the device "meta", as loading a checkpoint with this config would do."""
    source = source_config(config)
    if source is not None and is_ours(source):
        replace_layers(model, read_config(source), model.dtype)


def product_of(scheme: Scheme, n: int, k: int, dtype: torch.dtype, device: str, arch: int) -> Product:
    """The product of one token with a weight (n, k) in this scheme. Callers replace `tokens` for other numbers of tokens.

    device, arch: as in `describe_weights`
    """
    scales = {"int4": dtype, "float4": torch.uint8, "float8": torch.float32}[scheme.values]
    return Product(
        values=scheme.values,
        n=n,
        k=k,
        tokens=1,
        dtype=dtype,
        group=scheme.columns_of_group or k,
        scales=scales,
        arch=arch,
        triton=ops.TABLE.select(OpSpec(device, arch)).name == "triton",
        gluon=compiles_gluon(),
    )


def products_of_experts(
    experts: QuantizedExperts, top_k: int, dtype: torch.dtype, device: str, arch: int
) -> tuple[Product, Product]:
    """Both products of quantised experts, for one token. top_k: number of experts chosen for it"""
    found = []
    for projection, matrices in PROJECTIONS.items():
        n, k = experts.sizes(projection)
        product = product_of(experts.scheme, matrices * n, k, dtype, device, arch)
        found.append(replace(product, num_experts=experts.num_experts, top_k=top_k, gated=matrices > 1))
    first, second = found
    return first, second


def top_k_of(config: PreTrainedConfig) -> int:
    """The number of experts chosen for a token, according to the config; 1 if the config has none of the names in TOP_K."""
    text = config.get_text_config(decoder=True)
    return next((int(count) for name in TOP_K if (count := getattr(text, name, None))), 1)


def describe_weights(config: PreTrainedConfig, device: str, arch: int) -> dict[str, str]:
    """Describe how weights of linear layers are stored and which kernels compute them -> the layers for each such description.

    Each layer is described separately, although the engine merges layers with the same input into one product.

    config:       the config of a causal language model. No weights are needed
    device, arch: where the model would run: a torch device type, and 10 * major + minor of a CUDA device

    Raises ParameterError for a format or an option that fa_serve does not know.
    """
    dtype: Any = config.dtype or torch.bfloat16
    source = source_config(config)
    if source is None:
        return {dtype_name(dtype): "all layers"}
    if elsewhere := quantized_elsewhere(config):
        return {f"{elsewhere}, computed by transformers' own modules in layers that are not fused": "see the format's config"}
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(copy.deepcopy(config), dtype=dtype)
        quantize_layers(model, config)
    layers: dict[str, Counter[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            product = product_of(module.scheme, module.out_features, module.in_features, dtype, device, arch)
            kept = f"{module.description}, computed by {kernels_by_tokens(product)}"
        elif isinstance(module, QuantizedExperts):
            products = products_of_experts(module, top_k_of(config), dtype, device, arch)
            kept = f"{module.description}, computed by {kernels_of_experts(products)}"
        elif type(module) is nn.Linear:
            kept = dtype_name(dtype)
        else:
            continue
        layers.setdefault(kept, Counter())[re.sub(r"\.\d+\.", ".*.", name)] += 1
    return {
        kept: ", ".join(f"{name} ({count})" if count > 1 else name for name, count in names.items())
        for kept, names in layers.items()
    }
