"""The names that the files of a checkpoint have for a model's weights, where transformers renames them while it loads.

    names = names_in_files(model)
    names["model.visual.blocks.0.attn.qkv"]                    # "visual.blocks.0.attn.qkv": a layer of Qwen2.5-VL
    names["model.layers.0.mlp.experts.down_proj"]              # "model.layers.0.block_sparse_moe.experts.0.w2": of Mixtral

A quantization_config was written with the names of the model's code at that time, which are the names in the files. Left out:
checkpoints whose names lack a prefix such as "model.", because patterns for layers do not need it.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key


def names_in_files(model: nn.Module) -> dict[str, str]:
    """The names of layers and of stacked weights in the files, for those that the model names otherwise.

    Stacked weights of experts have the name of one matrix of expert 0.
    """
    rules = get_model_conversion_mapping(cast(Any, model))
    undone: list[Any] = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, PrefixChange)]
    renamings = [rule for rule in undone if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in undone if isinstance(rule, WeightConverter)]
    found = {}
    for name in model.state_dict():
        named, _ = rename_source_key(name, renamings, converters, reverse=True)
        if named != name:
            found[name.removesuffix(".weight")] = named.removesuffix(".weight").replace(".*.", ".0.")
    return found
