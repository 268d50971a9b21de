"""Checks the experts of a model in a checkpoint's config and in the headers of its files.

    require_enough_experts(config)         # before the model is made
    check_expert_files(files, model)       # quantised experts, before any weight is read; names a tensor in a ParameterError
    check_experts_agree(headers(files))    # experts of floats, when their tensors could not be stacked

transformers' loader stacks the tensors of all experts. If a tensor is missing or differs from the others, it says only that it
could not stack them. Left out: files other than safetensors, and the form of stacked tensors (surgery/quantised/experts.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.weights.headers import Header, headers
from fa_serve.spec import ParameterError

_QUANTISED = {"qweight", "weight_g_idx", "weight_packed", "weight_scale", "weight_scale_inv"}
"""Names of tensors that mark a quantised matrix, each in some layout."""
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configs use for the number of experts that are chosen from."""
TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""Names that configs use for the number of experts that are chosen for a token."""


def require_enough_experts(known: Any) -> None:
    """Raise ParameterError if a config of a mixture chooses no expert for a token, or more than there are.

    No forward can compute more. With none, transformers adds nothing for the experts, and the tokens have no meaning.
    """
    config = known.get_text_config()
    counts = [getattr(config, name, None) for name in EXPERT_COUNTS]
    most = max((count for count in counts if isinstance(count, int)), default=0)
    for name in TOP_K:
        chosen = getattr(config, name, None)
        if isinstance(chosen, int) and most > 0 and not 1 <= chosen <= most:
            raise ParameterError(name, f"be between 1 and {most}, the number of experts in the model's config.json", chosen)


def check_expert_files(files: Sequence[str], model: nn.Module) -> None:
    """Check that the tensors of experts have a layout that can be loaded, and that all experts have the same tensors.

    files: the files of the checkpoint
    model: the model, in which quantised experts are already QuantizedExperts

    Raises ParameterError that names the first tensor that is wrong or missing.
    """
    modules = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    known = {name for module in modules for name in module.scheme.tensors(256, 256, torch.float32)}
    refused = tuple(f".{name}" for name in _QUANTISED - known)
    found = [*headers(files)]
    for key, _ in found:
        if ".experts." in key and key.endswith(refused):
            rule = f"have no experts with quantised weights in this layout, but its files have {key}"
            raise ParameterError("model", rule, type(model).__name__)
    if modules:
        check_experts_agree(found, max(module.num_experts for module in modules))


def check_experts_agree(tensors: Iterable[tuple[str, Header]], num_experts: int = 0) -> None:
    """Raise ParameterError that names a tensor of one expert if it is missing, or differs from those of other experts.

    tensors:     the headers of a checkpoint's tensors
    num_experts: least number of experts in each layer; a layer has more if its files name more
    """
    groups: dict[tuple[str, str], dict[int, Header]] = {}
    counts: Counter[str] = Counter()
    for key, kind in tensors:
        if found := _OF_EXPERT.fullmatch(key):
            groups.setdefault((found[1], found[3]), {})[int(found[2])] = kind
            counts[found[1]] = max(counts[found[1]], num_experts, int(found[2]) + 1)
    for (experts, name), kinds in groups.items():
        ((dtype, shape), _), *_ = Counter(kinds.values()).most_common(1)
        for expert in range(counts[experts]):
            key = f"{experts}.{expert}.{name}"
            if expert not in kinds:
                raise ParameterError("model", f"have the tensor {key} in its files", "a missing tensor")
            if kinds[expert] != (dtype, shape):
                rule = f"have the dtype {dtype} and the shape {list(shape)} of other experts"
                raise ParameterError(key, rule, f"{kinds[expert][0]} {list(kinds[expert][1])}")
