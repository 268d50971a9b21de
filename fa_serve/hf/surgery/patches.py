"""Convolutions over exactly one patch each, as products of matrices.

    multiply_patches(model)      # returns how many convolutions are products now

Towers of Qwen2-VL and those like it get each patch of an image as a row, and multiply it with a convolution whose kernel is as
large as the patch. The result has one place, so it is a product of the row with the weights. PyTorch treats it as a convolution
of thousands of tiny images, which is slow on a GPU. Larger inputs are left to the convolution.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_serve.hf.surgery.proof import NotReplacedError, float32_copy, functions_agree, replace_forwards

log = logging.getLogger("fa_serve.hf")
Convolution = nn.Conv2d | nn.Conv3d


def multiply_patches(model: nn.Module) -> int:
    """Let convolutions that are not padded, grouped or dilated compute inputs of their kernel's size by a product, where that
    is proven to come to the same. In place; returns their number."""
    found = [module for module in model.modules() if type(module) in (nn.Conv2d, nn.Conv3d) and _covers_patches(module)]
    return replace_forwards(found, _prove, lambda module, reason: log.info("a %s stays: %s", type(module).__name__, reason))


def _covers_patches(module: Convolution) -> bool:
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    return plain and module.padding in ("valid", (0,) * len(module.kernel_size)) and module.stride == module.kernel_size


def _prove(module: Convolution) -> Callable[[Convolution], Callable[[Tensor], Tensor]]:
    """Raises NotReplacedError."""
    own = float32_copy(module, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, module.in_channels, *module.kernel_size, generator=draw)
    with torch.no_grad():
        if not functions_agree(own, partial(_multiply, own), x):
            raise NotReplacedError("its product differs from its convolution")
    return lambda each: partial(_multiply, each)


def _multiply(module: Convolution, x: Tensor) -> Tensor:
    """x: (n, in_channels, *size) -> (n, out_channels, *places)"""
    if x.shape[2:] != module.kernel_size:
        return type(module).forward(module, x)  # type: ignore[arg-type]
    rows = F.linear(x.flatten(1), module.weight.flatten(1), module.bias)
    return rows.unflatten(1, (module.out_channels, *(1 for _ in module.kernel_size)))
