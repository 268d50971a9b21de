"""Gives modules their own code again where transformers has put kernels of the Hub in its place.

    restore_own_forwards(model)        # before modules of the model are compared with what replaces them

From 5.25 on, `from_pretrained` does so by default: each norm and activation function gets the forward of a kernel that it
downloads, or its own forward once more if there is none for the device. A proof (surgery/proof.py) refuses modules whose
forward was replaced, because it cannot know what else a replacement does. So no layer of such a model would be fused.

Left out: functions that such kernels replace in all models at once, such as the rotary embedding. A proof computes them as they
are.
"""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

log = logging.getLogger("fa_serve.hf")


def restore_own_forwards(model: nn.Module) -> None:
    """Remove the forwards that the package `kernels` has given to modules, and keep transformers from giving them again."""
    found = [module for module in model.modules() if has_hub_forward(module)]
    for module in found:
        del module.forward
    for part in model.modules():
        # otherwise `model.train()` would replace forwards again, also those that fa_serve has given to modules since
        if isinstance(part, PreTrainedModel) and vars(part).get("_use_kernels"):
            part._use_kernels = False
    if found:
        log.info("%d modules compute with their own code again, not with kernels of the Hub", len(found))


def has_hub_forward(module: nn.Module) -> bool:
    """Whether `kernels` has replaced the forward of a module: by that of its class, or by that of a layer of the Hub.

    Such a layer is a class without a constructor, which `kernels` requires of it. The forward of any other class was put there
    by somebody else.
    """
    forward = vars(module).get("forward")
    if not hasattr(type(module), "kernel_layer_name") or not isinstance(forward, MethodType) or forward.__self__ is not module:
        return False
    function: Any = forward.__func__
    if function is type(module).forward:
        return True
    layer = getattr(function, "__globals__", {}).get(function.__qualname__.split(".")[0])
    return isinstance(layer, type) and issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
