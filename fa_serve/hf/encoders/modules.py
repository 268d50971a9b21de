"""The modules after a transformer in a folder of sentence-transformers: pooling, dense layers, layer norms, normalisation.

    modules = load_modules(folder, dtype, device)
    vectors = pool(modules, hidden, inputs, skipped=None)           # (sequences, size)

Values are those of packed sequences: (total, size) before `Pooling`, and (sequences, size) after it. The formulas are those of
sentence-transformers 6.2 (`sentence_transformer/modules/pooling.py`, `sparse_encoder/modules/splade_pooling.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from fa_serve.hf.encoders.folder import EncoderFolder, EncoderModule
from fa_serve.hf.encoders.packed import Integers, PackedInputs, PackedModel
from fa_serve.spec import ParameterError

POOLING_MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_WITH_SETTINGS = ("Pooling", "Dense", "LayerNorm")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


class TokenPooling(nn.Module):
    """Computes one vector for each sequence. The vectors of several modes are concatenated.

    modes:          some of POOLING_MODES
    include_prompt: whether the tokens of the prompt are included
    """

    def __init__(self, modes: Sequence[str], include_prompt: bool) -> None:
        super().__init__()
        self.modes = tuple(modes)
        self.include_prompt = include_prompt

    def forward(self, hidden: Tensor, inputs: PackedInputs, skipped: Integers | None = None) -> Tensor:
        """hidden: (total, size) -> (sequences, size * number of modes). skipped: number of prompt tokens of each sequence"""
        prompts = None
        if skipped is not None and not self.include_prompt and skipped.any():
            prompts = _without_prompts(inputs, skipped, hidden.device)
        included = None
        vectors = []
        for mode in self.modes:
            if mode == "cls":
                vectors.append(hidden[inputs.first if prompts is None else inputs.first + prompts[0]])
            elif mode == "lasttoken":
                vectors.append(hidden[inputs.last])
            else:
                included = included or _included(hidden, inputs, prompts)  # launches that the modes above do not need
                vectors.append(_reduced(mode, *included))
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)


def _without_prompts(inputs: PackedInputs, skipped: Integers, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sequences,) int64: how many tokens of each sequence are left out, never its last one; and the rows of the other tokens.

    They are computed on the host. For a mask on the device, the host would wait for the layers before it knew how many rows
    remain.
    """
    lengths = np.array(inputs.lengths)
    skip = np.minimum(skipped, lengths - 1)
    places = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    kept = np.flatnonzero(places >= np.repeat(skip, lengths))
    numbers = torch.from_numpy(np.concatenate([skip, kept]))
    numbers = numbers.pin_memory() if device.type == "cuda" else numbers
    there = numbers.to(device, non_blocking=True)
    return there[: len(skip)], there[len(skip) :]


def _included(hidden: Tensor, inputs: PackedInputs, prompts: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """rows, places and lengths for `_reduced`. prompts: what `_without_prompts` returns; None if no token is left out"""
    lengths = inputs.cu_seqlens.diff().long()
    if prompts is None:
        return hidden, inputs.positions, lengths
    skip, kept = prompts
    return hidden[kept], inputs.positions[kept], lengths - skip


def _reduced(mode: str, rows: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """The vectors of a mode that reads all included tokens -> (sequences, size). rows, places, lengths: of these tokens"""
    if mode == "max":
        return torch.segment_reduce(rows, "max", lengths=lengths, axis=0, unsafe=True)
    values = rows.float() if rows.dtype.itemsize == 2 else rows
    count = lengths[:, None].to(values.dtype)
    if mode == "weightedmean":
        weights = (places + 1)[:, None].to(values.dtype)
        values = values * weights
        count = torch.segment_reduce(weights, "sum", lengths=lengths, axis=0, unsafe=True)
    elif mode == "mean_sqrt_len_tokens":
        count = count.sqrt()
    return (torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True) / count).to(rows.dtype)


class DenseLayer(nn.Module):
    """activation(x W + b). With `use_residual` in the config the input is added, projected if the sizes differ."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = positive_size(config, "in_features")
        out = positive_size(config, "out_features")
        self.linear = nn.Linear(size, out, bias=config.get("bias", True))
        self.activation = activation_of(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
        self.adds_input = bool(config.get("use_residual"))
        if self.adds_input and size != out:
            self.residual = nn.Linear(size, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.activation(self.linear(x))
        if self.adds_input:
            out = out + (self.residual(x) if hasattr(self, "residual") else x)
        return out


class UnitLength(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, p=2, dim=-1)


class LayerNormOfVector(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(positive_size(config, "dimension"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


def positive_size(config: dict[str, Any], name: str) -> int:
    """A size in the config of a module. Raises ParameterError unless it is a positive integer."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ParameterError("model", f"have a positive integer as {name} in the config of each Dense and LayerNorm", value)
    return value


def activation_of(name: Any) -> nn.Module:
    """An activation by the name of its class, as configs have it. Raises ParameterError for an unknown activation."""
    last = str(name).rpartition(".")[2]
    if last not in _ACTIVATIONS:
        raise ParameterError("model", f"have one of these activations: {', '.join(_ACTIVATIONS)}", name)
    return cast(nn.Module, getattr(nn, last)())


def load_modules(folder: EncoderFolder, dtype: torch.dtype, device: torch.device) -> list[nn.Module]:
    """The modules after the transformer, with their weights, except the pooling of a sparse encoder (`splade_weights`).

    Raises ParameterError for unknown settings and for weights that do not fit them, and OSError for a module
    without its weights or its config.
    """
    found: list[nn.Module] = []
    for module in folder.modules:
        if module.path and module.kind in _WITH_SETTINGS and not module.config:
            place = f"{folder.path}/{module.path}"
            raise OSError(
                f"the model's folder {place} must hold a config.json with settings, got none: copy all files of the model"
            )
        match module.kind:
            case "Pooling":
                found.append(TokenPooling(pooling_modes(module), module.config.get("include_prompt", True)))
            case "Normalize":
                found.append(UnitLength())
            case "Dense":
                found.append(_with_weights(DenseLayer(module.config), folder, module))
            case "LayerNorm":
                found.append(_with_weights(LayerNormOfVector(module.config), folder, module))
    return [each.to(device, dtype).eval().requires_grad_(False) for each in found]


def pooling_modes(module: EncoderModule) -> tuple[str, ...]:
    """The modes of a `Pooling`. Raises ParameterError for an unknown mode."""
    told = module.config.get("pooling_mode")
    if told is None:
        told = [mode for name, mode in _OLD_MODES.items() if module.config.get(name)] or ["mean"]
    modes = tuple(told) if isinstance(told, list) and told else (told,)
    for mode in modes:
        if mode not in POOLING_MODES:
            raise ParameterError("model", f"have one of these values of pooling_mode: {', '.join(POOLING_MODES)}", mode)
    return modes


def _with_weights(layer: nn.Module, folder: EncoderFolder, module: EncoderModule) -> nn.Module:
    for name in ("model.safetensors", "pytorch_model.bin"):
        file = cached_file(folder.path, f"{module.path}/{name}", _raise_exceptions_for_missing_entries=False)
        if file is not None:
            try:
                weights = load_file(file) if name.endswith("safetensors") else torch.load(file, "cpu", weights_only=True)
            except Exception as error:  # the libraries have no common type for files that they cannot read
                raise OSError(f"the model's file {file} cannot be read: {type(error).__name__}: {error}") from error
            _check_weights(weights, layer, folder.path, module.path)
            layer.load_state_dict(weights)
            return layer
    raise OSError(f"the model's folder {folder.path}/{module.path} must hold weights, got none: copy all files of the model")


def _check_weights(weights: Any, layer: nn.Module, path: str, place: str) -> None:
    """Raise ParameterError unless these are the layer's weights. PyTorch would take the numbers of integers and of float8 as
    they are, without their scales. path: the model's folder; place: the module's part of it"""
    wanted = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()} if isinstance(weights, dict) else {}
    if found != wanted:
        rule = f"have weights in {place} that fit the module's config, which asks for {wanted}; the file has {found}"
        raise ParameterError("model", rule, path)
    for name, tensor in weights.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            rule = f"have weights of 16, 32 or 64 bits in {place}, but {name} has the dtype {str(tensor.dtype)[6:]}"
            raise ParameterError("model", rule, path)


def check_sizes(modules: Sequence[nn.Module], hidden_size: int, path: str) -> None:
    """Raise ParameterError unless each module takes vectors of the size that the previous one returns. path: of the model"""
    size = hidden_size
    for module in modules:
        wanted = size
        if isinstance(module, DenseLayer):
            wanted = module.linear.in_features
        elif isinstance(module, LayerNormOfVector):
            wanted = module.norm.normalized_shape[0]
        if wanted != size:
            kind = "Dense" if isinstance(module, DenseLayer) else "LayerNorm"
            raise ParameterError("model", f"have a {kind} for vectors of {size} numbers, but it takes {wanted}", path)
        size = output_size([module], size)


def pool(modules: Sequence[nn.Module], hidden: Tensor, inputs: PackedInputs, skipped: Integers | None = None) -> Tensor:
    """Apply the modules one after the other -> (sequences, size), or (total, size) without a pooling."""
    x = hidden
    for module in modules:
        x = module(x, inputs, skipped) if isinstance(module, TokenPooling) else module(x)
    return x


def splade_weights(model: PackedModel, hidden: Tensor, inputs: PackedInputs, config: dict[str, Any]) -> Tensor:
    """The weight of each word of the vocabulary (SPLADE: Formal et al. 2021) -> (sequences, vocabulary), 0 or above.

    config: has `pooling_strategy` over the tokens (max or sum), and `activation_function` (relu, or log1p_relu, which applies
    log1p twice)
    """
    total: Tensor | None = None
    takes_max = config.get("pooling_strategy", "max") == "max"
    twice = config.get("activation_function") == "log1p_relu"
    ends = [0]
    for length in inputs.lengths:
        ends.append(ends[-1] + length)
    for begin, logits in model.token_logits(hidden):
        values = logits.float().relu_().log1p_()
        values = values.log1p_() if twice else values
        if total is None:
            total = torch.zeros((len(inputs.lengths), values.shape[1]), device=values.device)
        for number, (first, last) in enumerate(pairwise(ends)):
            rows = values[max(first - begin, 0) : max(last - begin, 0)]
            if len(rows):
                total[number] = torch.maximum(total[number], rows.amax(0)) if takes_max else total[number] + rows.sum(0)
    assert total is not None
    return total


def output_size(modules: Sequence[nn.Module], hidden_size: int) -> int:
    """The size of a vector after these modules."""
    size = hidden_size
    for module in modules:
        if isinstance(module, TokenPooling):
            size *= len(module.modes)
        elif isinstance(module, DenseLayer):
            size = module.linear.out_features
    return size


def is_unit_length(modules: Sequence[nn.Module]) -> bool:
    """Whether the vectors have length 1."""
    return bool(modules) and isinstance(modules[-1], UnitLength)


def check_finite(values: Tensor) -> Tensor:
    """(rows,) bool: whether all numbers of a row are finite."""
    return torch.isfinite(values).flatten(1).all(1) if math.prod(values.shape) else torch.ones(len(values), dtype=torch.bool)
