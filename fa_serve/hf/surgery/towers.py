"""Modules of vision towers, replaced with forms that GPUs compute faster.

    speed_up_tower(model, beside=model.get_decoder())      # returns the number of modules that got another forward

- Towers like that of Qwen2-VL get each patch of an image as a row, and apply a convolution whose kernel is as large as the
  patch. The output has a single position, so it equals a product of the row with the weights. PyTorch treats it as a
  convolution over thousands of tiny images. Larger inputs are left to the convolution.
- The gated MLPs of Qwen2.5-VL's tower are 3420 wide. Rows of 6840 bytes do not begin at multiples of 16 bytes, which the fast
  products of a GPU need. The two matrices of the first product are merged, and their rows and the columns of the second matrix
  are padded with zeros to a multiple of ALIGNED. The parameters become views of the padded matrices, so new values that are
  written into them take effect.
- RMS norms are one kernel each, instead of six kernels in float32.
- Attention over packed images rotates queries and keys in one kernel (tower_attention.py).

Each form is proven (`proof.py`). Left out: the language model, whose layers `fuse` replaces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.surgery.fuse.parts import activation_of, norm_of
from fa_serve.hf.surgery.proof import NotReplacedError, check_untouched, float32_copy, functions_agree, replace_forwards
from fa_serve.hf.surgery.tower_attention import may_be_packed_attention, prove_attention

ALIGNED = 64
"""Widths are padded to a multiple of this: the number of 2-byte elements in 128 bytes."""
_FEWEST = 8
"""The number of 2-byte elements in 16 bytes. A width that is a multiple of this is not padded."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
Convolution = nn.Conv2d | nn.Conv3d
log = logging.getLogger("fa_serve.hf")


def speed_up_tower(model: nn.Module, beside: nn.Module | None = None) -> int:
    """Give modules of these kinds another forward, in place, if that is proven to compute the same. Returns how many got one.

    beside: a part of the model that is left out, such as the language model
    """

    def refuse(module: nn.Module, reason: str) -> None:
        log.info("a %s of the tower is not replaced: %s", type(module).__name__, reason)

    left_out = set() if beside is None else {*beside.modules()}
    modules = [module for module in model.modules() if module not in left_out and "forward" not in vars(module)]
    kinds: tuple[tuple[Callable[[Any], bool], Callable[[Any], Callable[[Any], Any]]], ...] = (
        (_covers_patches, _prove_patches),
        (_is_unaligned, _prove_mlp),
        (_may_be_norm, _prove_norm),
        (may_be_packed_attention, prove_attention),
    )
    return sum(replace_forwards(filter(takes, modules), prove, refuse) for takes, prove in kinds)


def _covers_patches(module: nn.Module) -> bool:
    if type(module) not in (nn.Conv2d, nn.Conv3d):
        return False
    assert isinstance(module, nn.Conv2d | nn.Conv3d)
    plain = module.groups == 1 and set(module.dilation) == {1} and module.padding_mode == "zeros"
    return plain and module.padding in ("valid", (0,) * len(module.kernel_size)) and module.stride == module.kernel_size


def _prove_patches(module: Convolution) -> Callable[[Convolution], Callable[[Tensor], Tensor]]:
    """Prove that a product replaces a convolution. Returns what makes the forward. Raises NotReplacedError."""
    own = float32_copy(module, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, module.in_channels, *module.kernel_size, generator=draw)
    with torch.no_grad():
        if not functions_agree(own, partial(_multiply, own), x):
            raise NotReplacedError("its product differs from its convolution")
    return lambda each: partial(_multiply, each)


def _multiply(module: Convolution, x: Tensor) -> Tensor:
    """Apply a convolution as a product. x: (n, in_channels, *size) -> (n, out_channels, *positions)"""
    if x.shape[2:] != module.kernel_size:
        return type(module).forward(cast(Any, module), x)
    rows = F.linear(x.flatten(1), module.weight.flatten(1), module.bias)
    return rows.view(len(x), module.out_channels, *(1 for _ in module.kernel_size))


def _is_unaligned(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in _PROJECTIONS]
    if not all(type(part) is nn.Linear for part in parts):
        return False
    down = cast(nn.Linear, parts[2])
    return down.in_features % _FEWEST > 0 and down.weight.element_size() == 2


def _prove_mlp(module: Any) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    """Prove `PaddedMlp`. Returns what makes the forward. Raises NotReplacedError, or an error of the module's code."""
    check_untouched(module)
    activation = activation_of(module)
    own = float32_copy(module, torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(5, own.gate_proj.in_features, generator=draw)
    with torch.no_grad():
        padded = PaddedMlp(float32_copy(module, torch.device("cpu")), activation)
        if not functions_agree(own, padded, x):
            raise NotReplacedError("it is not a gated MLP")
    return lambda each: PaddedMlp(each, activation)


class PaddedMlp:
    """The forward of a gated MLP over padded copies of its weights. Its parameters become views of these copies.

    The parameter objects are kept, because an optimizer may hold them. The module's own code runs while autograd records, and
    after a parameter has moved to other memory.
    """

    @torch.no_grad()
    def __init__(self, mlp: Any, activation: str) -> None:
        gate, up, down = (getattr(mlp, name) for name in _PROJECTIONS)
        width = down.in_features
        padded = -(-width // ALIGNED) * ALIGNED
        self._mlp = mlp
        self._activation = activation
        self._first = gate.weight.new_zeros(2, padded, gate.in_features)
        self._second = down.weight.new_zeros(down.out_features, padded)
        self._bias = None if gate.bias is None and up.bias is None else gate.weight.new_zeros(2, padded)
        for number, part in enumerate((gate, up)):
            self._first[number, :width] = part.weight
            part.weight.data = self._first[number, :width]
            if self._bias is not None and part.bias is not None:
                self._bias[number, :width] = part.bias
                part.bias.data = self._bias[number, :width]
        self._second[:, :width] = down.weight
        down.weight.data = self._second[:, :width]

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., in_features)"""
        if torch.is_grad_enabled() or self._is_stale():
            own: Tensor = type(self._mlp).forward(self._mlp, x)
            return own
        both = F.linear(x.flatten(0, -2), self._first.flatten(0, 1), None if self._bias is None else self._bias.flatten())
        rows = F.linear(ops.act_and_mul(both, self._activation), self._second, self._mlp.down_proj.bias)
        return rows.view(*x.shape[:-1], rows.shape[-1])

    def _is_stale(self) -> bool:
        """Whether a parameter is no longer a view of the padded weights."""
        mlp = self._mlp
        pairs = [
            (mlp.gate_proj.weight, self._first[0]),
            (mlp.up_proj.weight, self._first[1]),
            (mlp.down_proj.weight, self._second),
        ]
        if self._bias is not None:
            parts = enumerate((mlp.gate_proj, mlp.up_proj))
            pairs += [(part.bias, self._bias[number]) for number, part in parts if part.bias is not None]
        return any(parameter.data_ptr() != memory.data_ptr() for parameter, memory in pairs)


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module has one vector of weights and an epsilon, and no submodules."""
    weights = dict(module.named_parameters())
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return has_eps and [*weights] == ["weight"] and weights["weight"].ndim == 1 and not [*module.children()]


def _prove_norm(module: nn.Module) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    """Prove that `ops.rms_norm` replaces a norm. Returns what makes the forward. Raises NotReplacedError."""
    check_untouched(module)
    own: Any = float32_copy(module, torch.device("cpu"))
    norm = norm_of(own.requires_grad_(False))
    x = torch.randn(5, len(norm.weight), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if not functions_agree(own, partial(_normalise, own, norm.eps, norm.offset), x):
            raise NotReplacedError("it is not an RMS norm")
    return lambda each: partial(_normalise, each, norm.eps, norm.offset)


def _normalise(module: Any, eps: float, offset: float, x: Tensor) -> Tensor:
    """Apply an RMS norm. x: (..., width). The module's own code runs while autograd records."""
    if torch.is_grad_enabled():
        own: Tensor = type(module).forward(module, x)
        return own
    # kernels read contiguous rows, but Gemma 3 normalises a transposed tensor
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return ops.rms_norm(rows, ops.Norm(module.weight, eps, offset)).view(x.shape)
