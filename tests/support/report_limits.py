"""What a "yes" of the page about models leaves out: models with nothing to replace, and models that are served up to a length.

without_attention(results["census"])        # ["bit", "convnext", ...]: fa_serve takes them, and replaces nothing
length_limits(["llama", "glm5_next"])       # {"glm5_next": 2048}
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import Any

# The table of transformers that the modules with attention take their function from.
_TABLE = "ALL_ATTENTION_FUNCTIONS"


def without_attention(census: dict[str, str]) -> list[str]:
    """The types whose model fa_serve takes, and in which it has nothing to replace: no module calls transformers' attention.

    A module of transformers that names the table of attention functions is taken to call it. Otherwise the model is made on
    the meta device, from its default config, and its modules decide. One that cannot be made counts as one with attention.
    """
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    found = []
    for model_type in (name for name, reason in census.items() if not reason):
        config_class = CONFIG_MAPPING[model_type]
        classes = MODEL_MAPPING[config_class]
        for model_class in classes if isinstance(classes, tuple) else (classes,):
            if _TABLE in inspect.getsource(sys.modules[model_class.__module__]):
                break
            try:
                with torch.device("meta"):
                    modules = {type(module) for module in model_class._from_config(config_class()).modules()}
            except (ImportError, TypeError, ValueError):  # needs a package, or has no default config
                break
            if any(_TABLE in inspect.getsource(each) for each in modules if _is_of_transformers(each)):
                break
        else:
            found.append(model_type)
    return sorted(found)


def _is_of_transformers(module_class: type) -> bool:
    """Whether a class stands in a file of transformers. Those that PyTorch makes for normalised weights stand in none."""
    name = module_class.__module__
    return name.startswith("transformers.") and getattr(sys.modules[name], module_class.__name__, None) is module_class


def length_limits(served: Collection[str]) -> dict[str, int]:
    """For each type that the engine serves up to a length alone: the tokens, by the sizes of its config.

    A tiny model says whether its queries choose. A default config has the sizes of the published one, but may choose nowhere.
    """
    from every_type import tiny_model
    from transformers import AutoConfig

    from fa_serve.hf.adapter.composites import auto_class
    from fa_serve.hf.adapter.short_choices import find_short_choices

    texts: dict[type, int] = {}
    configs = {name: AutoConfig.for_model(name) for name in served}
    for name, config in configs.items():
        model_class = auto_class(config)._model_mapping[type(config)]
        # the name begins that of each method by which modules that choose keep their keys
        if ".update_index" not in inspect.getsource(sys.modules[model_class.__module__]):
            continue
        if any(find_short_choices(tiny_model(name))):
            text: Any = config.get_text_config()
            blocks = getattr(text, "index_topk_blocks", None)
            texts[type(text)] = text.index_topk if blocks is None else blocks * text.index_block_size
    kinds = {name: type(config.get_text_config()) for name, config in configs.items()}
    return {name: texts[kind] for name, kind in kinds.items() if kind in texts}
