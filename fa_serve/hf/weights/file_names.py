"""The names that the files of a checkpoint have for a model's weights, where transformers renames them while it loads.

    names = names_in_files(model)
    names["model.visual.blocks.0.attn.qkv"]                    # "visual.blocks.0.attn.qkv": a layer of Qwen2.5-VL
    names["model.layers.0.mlp.experts.down_proj"]              # "model.layers.0.block_sparse_moe.experts.0.w2": of Mixtral
    names_in_model(model, ["visual.blocks.0.attn.qkv.weight"]) # {"visual...": "model.visual.blocks.0.attn.qkv.weight"}

A quantization_config was written with the names of the model's code at that time, which are the names in the files. Often no
files are there to look at, so its names are found from those of the model. Several names in files can become one name in the
model. So what a tensor in a file becomes is asked in the other direction. Left out: names in a quantization_config that lack a
prefix such as "model.", because patterns for layers do not need it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


def names_in_files(model: nn.Module) -> dict[str, str]:
    """The names of layers and of stacked weights in the files, for those that the model names otherwise.

    These are the names with which transformers saves the model. It also loads names that older releases wrote, but for these
    the model's names do not show whether the files have them. Stacked weights of experts have the name of one matrix of
    expert 0.
    """
    rules = get_model_conversion_mapping(cast(Any, model), add_legacy=False)
    undone: list[Any] = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, PrefixChange)]
    renamings, converters = _by_kind(undone)
    found = {}
    for name in model.state_dict():
        named, _ = rename_source_key(name, renamings, converters, reverse=True)
        if named != name:
            found[name.removesuffix(".weight")] = named.removesuffix(".weight").replace(".*.", ".0.")
    return found


def names_in_model(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """For the name of each tensor in the files, the name of the parameter or buffer that transformers makes of it.

    A tensor that becomes nothing in the model has any other name. A tensor that becomes several parameters has the name of one.
    """
    renamings, converters = _by_kind(get_model_conversion_mapping(cast(Any, model)))
    known = model.state_dict()
    prefix = cast(str, getattr(model, "base_model_prefix", ""))
    found = {}
    for name in sorted(names, key=dot_natural_key):  # some rules look at the names before, in the order of transformers
        named, _ = rename_source_key(name, renamings, converters, prefix, known)
        if named not in known and name in known:
            named, _ = rename_source_key(name, [], [], prefix, known)
        found[name] = named
    return found


def _by_kind(rules: Iterable[Any]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    found = [*rules]
    renamings = [rule for rule in found if isinstance(rule, WeightRenaming)]
    return renamings, [rule for rule in found if isinstance(rule, WeightConverter)]
