"""Reads an adapter in the format of peft, strictly: fields and tensors that this module does not know are refused by name.

    adapter = read_adapter("adapters/french", max_bytes=1 << 30)
    adapter.modules["model.layers.0.self_attn.q_proj"].a           # (rank, in_features)

A folder holds adapter_config.json and adapter_model.safetensors. It may come from an untrusted source: the sizes of files and
headers are checked before they are read, pickles are never opened, every tensor must be named as peft names it, and numbers
must be finite. Settings that only matter in training are not read. Left out: whether the adapter fits a model (memory.py).

Sources: peft 0.21 (tuners/lora/config.py, layer.py, dora.py); rank-stabilised scales are from Kalajdzievski (2023,
arXiv:2312.03732), DoRA from Liu et al. (2024, arXiv:2402.09353).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fa_serve.named_files import ADAPTER_FILES
from fa_serve.spec import ParameterError

CONFIG_FILE, WEIGHTS_FILE = ADAPTER_FILES
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
"""The largest size of the header of adapter_model.safetensors, which needs about 150 bytes for each tensor."""
MAX_RANK = 4096
PREFIX = "base_model.model."
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_qalora": (False,),
    "velora_config": (None,),
}
"""Fields that can change what is computed, with the values that do not change it. Other initialisations change base weights."""
_UNREAD = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields about training, and fields that repeat what the names of the tensors say. They are not read."""
_READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "use_dora",
        "lora_bias",
        "ensure_weight_tying",
        "fan_in_fan_out",
        "target_modules",
        "target_parameters",
    }
)
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*?)"
    r"\.(?P<kind>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_magnitude_vector|lora_embedding_A|lora_embedding_B"
    r"|base_layer\.weight|weight)"
)
_WHOLE = ("weight", "base_layer.weight")
"""Kinds of tensors that are whole weights."""
_INNER = re.compile(r"(\.base_layer)+$")
_PATTERN = re.compile(r"[A-Za-z0-9_.^$|()\[\]?:\\*+-]{1,256}")
_MAX_QUANTIFIERS = 2


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one module: scale * (x A^T) B^T + scale * bias, in the dtype of the adapter.

    a:         (rank, in_features); for an embedding, (rank, num_embeddings)
    b:         (out_features, rank)
    bias:      (out_features,) or None
    magnitude: (out_features,), the magnitudes of DoRA; None without DoRA
    """

    a: Tensor
    b: Tensor
    scale: float
    bias: Tensor | None = None
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return len(self.a)

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.a, self.b, self.bias, self.magnitude) if x is not None)

    def cloned(self) -> LowRank:
        """A copy that shares no memory with this one."""
        bias, magnitude = (None if x is None else x.clone() for x in (self.bias, self.magnitude))
        return LowRank(self.a.clone(), self.b.clone(), self.scale, bias, magnitude)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales by the name of a module or a parameter of the model.

    parameters: whether the adapter has target_parameters: matrices for parameters, such as those of experts
    targets:    the ends of the names of linear layers, or a regular expression for whole names
    tying:      whether an adapter of the embedding also applies to the head, if the model ties them
    """

    rank: int = 8
    alpha: float = 8.0
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    bias: bool = False
    parameters: bool = False
    targets: tuple[str, ...] | str = ()
    tying: bool = False

    def rank_of(self, name: str) -> int:
        return next((rank for pattern, rank in self.ranks.items() if _matches(pattern, name)), self.rank)

    def scale_of(self, name: str) -> float:
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, name)), self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def is_parameter(self, module: str) -> bool:
        """Whether the matrices of a module belong to its parameters, and not to a linear layer."""
        if not self.parameters:
            return False
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is None
        return not any(module == target or module.endswith(f".{target}") for target in self.targets)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter as it was read. Modules are named as in the model.

    modules:    matrices of linear layers
    embeddings: matrices of embeddings, whose tensors peft names differently
    saved:      whole weights that replace those of the base: (out_features, in_features)
    parameters: (A, B) of each parameter of a module that target_parameters names, such as experts, in any order
    config:     ranks and scales
    """

    modules: Mapping[str, LowRank] = field(default_factory=dict)
    embeddings: Mapping[str, LowRank] = field(default_factory=dict)
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: Mapping[str, Sequence[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    config: AdapterConfig = field(default_factory=AdapterConfig)

    @property
    def rank(self) -> int:
        """The largest rank of a linear layer."""
        return max((each.rank for each in self.modules.values()), default=0)

    def with_weights_as_modules(self, linear: Container[str]) -> LoraAdapter:
        """A copy in which parameters that are weights of modules in `linear` are moved from `parameters` to `modules`."""
        found = {name: self._weight(name, pairs) for name, pairs in self.parameters.items() if name in linear}
        others = {name: pairs for name, pairs in self.parameters.items() if name not in found}
        return replace(self, modules={**self.modules, **found}, parameters=others)

    def _weight(self, name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> LowRank:
        a, b = pairs[0]
        rank = self.config.rank_of(f"{name}.weight")
        if len(pairs) > 1 or not len(a) == b.shape[1] == rank:
            raise ParameterError(name[:128], f"have two matrices of rank {rank} for its weight", [list(a.shape), list(b.shape)])
        return LowRank(a, b, self.config.scale_of(f"{name}.weight"))


def read_adapter(folder: str | Path, max_bytes: int = 1 << 40) -> LoraAdapter:
    """Read an adapter. max_bytes: the largest size of its file of weights, the engine's lora_host_bytes

    Raises ParameterError for an adapter that is broken or that fa_serve does not compute; its field is a field of
    adapter_config.json or the name of a tensor. Raises OSError for files that cannot be read.
    """
    config = check_adapter(folder, max_bytes)
    return _assemble(config, _read_tensors(Path(folder) / WEIGHTS_FILE))


def check_adapter(folder: str | Path, max_bytes: int = 1 << 40) -> AdapterConfig:
    """The config of an adapter, without reading its weights. Raises the errors of `read_adapter` that need no weights."""
    if not isinstance(folder, str | Path):
        raise ParameterError("adapter", "be the path of a folder", folder)
    folder = Path(folder)
    if not folder.is_dir():
        raise ParameterError("adapter", "be an existing folder", str(folder)[:256])
    config = _read_config(folder / CONFIG_FILE)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        found = [
            path.name[:64] for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")
        ][:4]
        rule = f"hold {WEIGHTS_FILE}; pickles are not read: save the adapter with safe_serialization=True"
        raise ParameterError("adapter", rule, found or "no such file")
    _check_header(weights, max_bytes)
    return config


def file_facts(folder: str | Path) -> tuple[tuple[int, int], ...]:
    """Size and modification time of each file of an adapter, to detect replaced files. Raises OSError for a missing file."""
    states = [(Path(folder) / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    return tuple((state.st_size, state.st_mtime_ns) for state in states)


def _read_config(path: Path) -> AdapterConfig:
    if not path.is_file():
        raise ParameterError("adapter", f"hold {CONFIG_FILE}", "no such file")
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ParameterError(CONFIG_FILE, f"have at most {MAX_CONFIG_BYTES} bytes", size)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ParameterError(CONFIG_FILE, "be JSON", f"{type(error).__name__}: {str(error)[:128]}") from None
    if not isinstance(given, dict):
        raise ParameterError(CONFIG_FILE, "be an object", type(given).__name__)
    if given.get("peft_type") != "LORA":
        raise ParameterError("peft_type", "be LORA", _shown(given.get("peft_type")))
    for name, value in given.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            allowed = " or ".join(map(repr, _NEUTRAL[name]))
            raise ParameterError(name, f"be {allowed}: fa_serve computes no other adapters", _shown(value))
        if name not in _NEUTRAL and name not in _UNREAD | _READ and value not in (None, False, [], {}):
            raise ParameterError(str(name)[:64], "be left out, because fa_serve does not know this field", _shown(value))
    return AdapterConfig(
        rank=_rank("r", given.get("r", 8)),
        alpha=_number("lora_alpha", given.get("lora_alpha", 8)),
        ranks={key: _rank("rank_pattern", value) for key, value in _pattern(given, "rank_pattern").items()},
        alphas={key: _number("alpha_pattern", value) for key, value in _pattern(given, "alpha_pattern").items()},
        rslora=_flag(given, "use_rslora"),
        dora=_flag(given, "use_dora"),
        bias=_flag(given, "lora_bias"),
        parameters=bool(_names("target_parameters", given.get("target_parameters"))),
        targets=_targets(given),
        tying=_flag(given, "ensure_weight_tying"),
    )


def _names(name: str, value: object) -> tuple[str, ...]:
    value = value or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ParameterError(name, "be a list of names", _shown(value))
    return tuple(value)


def _targets(given: Mapping[str, Any]) -> tuple[str, ...] | str:
    """The targets of an `AdapterConfig`. They are needed only if there are target_parameters too."""
    value = given.get("target_modules")
    if not isinstance(value, str):
        return _names("target_modules", value)
    if given.get("target_parameters") and not _is_simple(value):
        rule = f"be a list of names, or a simple regular expression with at most {_MAX_QUANTIFIERS} of * and +"
        raise ParameterError("target_modules", rule, _shown(value))
    return value


def _pattern(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The patterns of ranks or alphas, whose keys are regular expressions. Limits them so that matching is fast."""
    found = given.get(name) or {}
    if not isinstance(found, dict) or len(found) > 4096:
        raise ParameterError(name, "be an object of at most 4096 patterns", _shown(found))
    for key in found:
        if not _is_simple(key):
            rule = f"have names of modules, or simple regular expressions with at most {_MAX_QUANTIFIERS} of * and +, as keys"
            raise ParameterError(name, rule, _shown(key))
    return found


def _is_simple(pattern: str) -> bool:
    """Whether a text is a valid regular expression that matches names in a short time."""
    quantifiers = len(re.findall(r"(?<!\\)[*+]", pattern))
    if _PATTERN.fullmatch(pattern) is None or quantifiers > _MAX_QUANTIFIERS or ")*" in pattern or ")+" in pattern:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _matches(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        raise ParameterError(name, f"be an integer from 1 to {MAX_RANK}", _shown(value))
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ParameterError(name, "be a finite number", _shown(value))
    return float(value)


def _flag(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise ParameterError(name, "be true or false", _shown(value))
    return value


def _check_header(path: Path, max_bytes: int) -> None:
    """Refuse a file that is too large, or whose header is too large, before it is loaded into memory."""
    size = path.stat().st_size
    if size > max_bytes:
        raise ParameterError(WEIGHTS_FILE, f"have at most {max_bytes} bytes, as lora_host_bytes (--lora-host-bytes) says", size)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        rule = f"have a header of at most {MAX_HEADER_BYTES} bytes that fits into the file's {size} bytes"
        raise ParameterError(WEIGHTS_FILE, rule, length)


def _read_tensors(path: Path) -> dict[tuple[str, str], Tensor]:
    """The tensors by (module, kind). They are finite, and views of the file, which is mapped into memory."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.offset_keys()
            slices = [file.get_slice(name) for name in names]
            forms = [(each.get_dtype(), each.get_shape()) for each in slices]
    except SafetensorError as error:
        raise ParameterError(WEIGHTS_FILE, "be a safetensors file", str(error)[:128]) from None
    found = {}
    for name, (dtype, _) in zip(names, forms, strict=True):
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ParameterError(
                "tensor", f"have a name that peft gives to tensors of LoRA, such as {PREFIX}MODULE.lora_A.weight", _shown(name)
            )
        if dtype not in DTYPES:
            raise ParameterError(_shown(name), f"have one of the dtypes {', '.join(DTYPES)}", dtype)
        found[match["module"], match["kind"]] = name
    unnamed = iter(names)
    tensors: dict[str, Tensor] = {}
    for flat, own in _map_tensors(path, forms):
        named = {name: tensor for tensor, name in zip(own, unnamed, strict=False)}
        if not is_finite(flat):
            name = next(name for name, tensor in named.items() if not is_finite(tensor))
            raise ParameterError(_shown(name), "hold finite numbers", "NaN or an infinity")
        tensors |= named
    return {key: tensors[name] for key, name in found.items()}


def _map_tensors(path: Path, forms: Sequence[tuple[str, Sequence[int]]]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Tensors of these dtypes and shapes, which fill the end of a file in this order: for each run of one dtype, all of its
    numbers and its tensors.

    `safe_open` has checked that no byte lies between them. Its `get_tensor` takes five times as long for the hundreds of small
    tensors of an adapter, because it makes a storage for each of them. Runs are checked as a whole for a similar reason: each
    call of PyTorch needs the interpreter, and the engine's steps wait for it.
    """
    size = path.stat().st_size
    begin = size - sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in forms)
    if begin < 8:
        raise ParameterError(WEIGHTS_FILE, "not change while it is read: try again", f"{size} bytes")
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    for dtype, run in groupby(forms, key=itemgetter(0)):
        shapes = [torch.Size(shape) for _, shape in run]
        lengths = [shape.numel() for shape in shapes]
        end = begin + sum(lengths) * DTYPES[dtype].itemsize
        flat = data[begin:end]
        if begin % DTYPES[dtype].itemsize:  # other writers may not align tensors, and PyTorch views aligned memory only
            flat = flat.clone()
        flat = flat.view(DTYPES[dtype])
        yield flat, [own.view(shape) for own, shape in zip(flat.split_with_sizes(lengths), shapes, strict=True)]
        begin = end


def is_finite(x: Tensor) -> bool:
    """Whether no number of x is a NaN or an infinity. The smallest and the largest number are NaN if any number is.

    On one CPU core this is at least 17 times as fast as `isfinite`, and it allocates nothing.
    """
    return x.numel() == 0 or all(math.isfinite(float(each)) for each in torch.aminmax(x))


def _assemble(config: AdapterConfig, tensors: Mapping[tuple[str, str], Tensor]) -> LoraAdapter:
    kinds: dict[str, dict[str, Tensor]] = {}
    parameters: dict[str, dict[str, dict[str, Tensor]]] = {}
    for (module, kind), tensor in tensors.items():
        owner = _INNER.sub("", module)  # peft wraps a module with several parameters once for each of them
        if kind not in _WHOLE and config.is_parameter(owner):
            parameters.setdefault(owner, {}).setdefault(module, {})[kind] = tensor
        else:
            kinds.setdefault(module, {})[kind] = tensor
    modules = {}
    embeddings = {}
    saved = {}
    for module, given in kinds.items():
        for kind in [each for each in _WHOLE if each in given][:1]:
            saved[module] = given.pop(kind)
            if saved[module].dim() != 2:
                rule = "be a matrix, because modules_to_save may name only the embedding and the head"
                raise ParameterError(_shown(f"{module}.{kind}"), rule, list(saved[module].shape))
        if not given:
            continue
        if "lora_embedding_A" in given or "lora_embedding_B" in given:
            embeddings[module] = _low_rank(config, module, given, "lora_embedding_A", "lora_embedding_B")
        else:
            modules[module] = _low_rank(config, module, given, "lora_A.weight", "lora_B.weight")
    if not tensors:
        raise ParameterError(WEIGHTS_FILE, "hold at least one tensor", 0)
    pairs = {owner: [_pair(name, each) for name, each in found.items()] for owner, found in parameters.items()}
    return LoraAdapter(modules, embeddings, saved, pairs, config)


def _pair(name: str, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A and B of a parameter, which has neither a bias nor DoRA."""
    if given.keys() != {"lora_A.weight", "lora_B.weight"}:
        raise ParameterError(_shown(name), "have the tensors lora_A.weight and lora_B.weight", sorted(given))
    return _matrix(f"{name}.lora_A.weight", given["lora_A.weight"]), _matrix(f"{name}.lora_B.weight", given["lora_B.weight"])


def _low_rank(config: AdapterConfig, module: str, given: Mapping[str, Tensor], a_name: str, b_name: str) -> LowRank:
    needed = {a_name, b_name}
    if config.bias and a_name == "lora_A.weight":
        needed.add("lora_B.bias")
    if config.dora:
        needed.add("lora_magnitude_vector")
    if needed != given.keys():
        rule = f"have the tensors {', '.join(sorted(needed))}, as use_dora and lora_bias say"
        raise ParameterError(_shown(module), rule, sorted(given))
    if config.dora and a_name != "lora_A.weight":
        raise ParameterError("use_dora", "be false for an adapter of an embedding", True)
    a = _matrix(f"{module}.{a_name}", given[a_name])
    b = _matrix(f"{module}.{b_name}", given[b_name])
    rank = config.rank_of(module)
    if len(a) != rank or b.shape[1] != rank:
        rule = f"have the rank {rank}, as r and rank_pattern say, in both matrices"
        raise ParameterError(_shown(module), rule, [list(a.shape), list(b.shape)])
    for name in ("lora_B.bias", "lora_magnitude_vector"):
        if name in given and given[name].shape != (len(b),):
            raise ParameterError(_shown(f"{module}.{name}"), f"have the shape [{len(b)}]", list(given[name].shape))
    return LowRank(a, b, config.scale_of(module), given.get("lora_B.bias"), given.get("lora_magnitude_vector"))


def _matrix(name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() != 2 or 0 in tensor.shape:
        raise ParameterError(_shown(name), "be a matrix", list(tensor.shape))
    return tensor


def _shown(value: object) -> Any:
    """A value in a form that is short enough for a message, because it may come from an untrusted source."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 128 else text[:125] + "..."
