"""The parts of modules in the form of `fa_serve.ops`: merged projections, norms, gated units.

    qkv = merge_products(attention, "q_proj", "k_proj", "v_proj")     # raises NotReplacedError for what no op computes
    norm = norm_of(layer.input_layernorm)

Modules are found by their names, and what they compute is guessed from their weights and settings. The proof of the replacement
finds wrong guesses (surgery/proof.py). Merged weights take no additional memory: the separate weights become views of the
merged weights. Left out: how the parts are used (layer.py, latent.py, unit.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fa_serve import ops
from fa_serve.hf.lora.product import LoraSite
from fa_serve.hf.surgery.divide.weights import PartOfSum
from fa_serve.hf.surgery.experts.mixtures import expert_modules
from fa_serve.hf.surgery.proof import FIT_TOLERANCE, NotReplacedError, results_agree
from fa_serve.hf.surgery.quantised.experts import QuantizedExperts
from fa_serve.hf.surgery.quantised.linear import QuantizedLinear
from fa_serve.ops.collectives.all_reduce import AllReduce
from fa_serve.ops.modes import has_gradients


class FusedProduct(NamedTuple):
    """A linear projection: x @ weight.T + bias. If `all_reduce` is not None, it adds the results of the ranks up.

    modules: the linear layers that are merged into it, in the order of its rows
    site:    the adapters that add to it; None without adapters
    """

    weight: ops.Weight
    bias: Tensor | None
    all_reduce: AllReduce | None = None
    modules: tuple[nn.Module, ...] = ()
    site: LoraSite | None = None


class GatedUnit(NamedTuple):
    """The projections of a gated unit, and the activation of its gate."""

    gate_up: FusedProduct
    down: FusedProduct
    activation: str


def gated_unit(mlp: Any) -> GatedUnit | None:
    """The parts of a gated unit, after merging its gate and up projections; None for a module that is no gated unit."""
    if not isinstance(getattr(mlp, "down_proj", None), nn.Linear | QuantizedLinear):
        return None
    down = product_of(mlp.down_proj)
    gate_up = (
        merge_products(mlp, "gate_up_proj") if hasattr(mlp, "gate_up_proj") else merge_products(mlp, "gate_proj", "up_proj")
    )
    return GatedUnit(gate_up, down, activation_of(mlp))


def product_of(linear: Any) -> FusedProduct:
    """The projection of a linear layer with float or quantised weights. Its forward may be replaced by a PartOfSum."""
    replaced = vars(linear).get("forward")
    if replaced is not None and not isinstance(replaced, PartOfSum):
        raise NotReplacedError(f"the forward of a projection is replaced by {type(replaced).__name__}")
    all_reduce = None if replaced is None else replaced.all_reduce
    if isinstance(linear, QuantizedLinear):
        return FusedProduct(linear.weight, linear.bias, all_reduce, (linear,))
    # a subclass of Parameter may store its values in another way, as torchao does
    if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter or not linear.weight.is_floating_point():
        kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
        raise NotReplacedError(f"a projection must be a plain torch.nn.Linear of floats, got {kind}")
    if not linear.weight.is_contiguous():
        raise NotReplacedError(f"the weights of a projection must be contiguous, got strides {linear.weight.stride()}")
    return FusedProduct(linear.weight, linear.bias, all_reduce, (linear,))


def merge_products(module: nn.Module, *names: str) -> FusedProduct:
    """Merge the rows of several projections into one. The weights of each become a view of the merged ones."""
    linears = [getattr(module, name) for name in names]
    parts = [product_of(linear) for linear in linears]
    if len(parts) == 1:
        return parts[0]
    biases = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)):
        raise NotReplacedError(f"all or none of {names} must have a bias")
    weight = _concatenate([part.weight for part in parts])
    bias = _merge_rows([x.detach() for x in biases]) if biases else None
    start = 0
    for linear, part in zip(linears, parts, strict=True):
        stop = start + part.weight.shape[0]
        # keep the parameter object, because an optimizer may hold it
        if isinstance(weight, Tensor):
            linear.weight.data = weight[start:stop]
        else:
            linear.weight = weight.rows(start, stop)
        if bias is not None:
            linear.bias.data = bias[start:stop]
        start = stop
    return FusedProduct(weight, bias, modules=tuple(linears))


def _concatenate(weights: Sequence[ops.Weight]) -> ops.Weight:
    """The rows of several weights as one weight. Raises NotReplacedError for weights of different forms."""
    plain = [weight.detach() for weight in weights if isinstance(weight, Tensor)]
    quantized = [weight for weight in weights if isinstance(weight, ops.QuantizedWeight)]
    if plain and quantized:
        raise NotReplacedError("all or none of the projections that are merged must be quantised")
    try:
        return _merge_rows(plain) if plain else ops.merge_rows(quantized)
    except ValueError as error:
        raise NotReplacedError(str(error)) from None


def _merge_rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several contiguous tensors as one tensor. If they already are neighbours in one memory, the result is a view.

    So if an engine and a training forward both merge the weights of a model, they share one memory.
    """
    first = parts[0]
    storage = first.untyped_storage().data_ptr()
    ends = [part.data_ptr() + part.nbytes for part in parts]
    if all(
        part.untyped_storage().data_ptr() == storage and part.dtype == first.dtype and part.data_ptr() == end
        for part, end in zip(parts[1:], ends, strict=False)
    ):
        rows = sum(len(part) for part in parts)
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    return torch.cat(list(parts))


def norm_of(module: Any) -> ops.Norm:
    """The RMS norm that a module computes. Some modules add 1 to their weights: the variant whose results fit better is taken.

    The proof of the layer finds a wrong guess.
    """
    if "forward" in vars(module):
        raise NotReplacedError(f"the forward of a norm is replaced by {type(module.forward).__name__}")
    weight = module.weight
    eps = float(getattr(module, "variance_epsilon", None) or module.eps)
    x = torch.linspace(-1.0, 2.0, weight.shape[0], dtype=weight.dtype, device=weight.device)[None]
    expected = module(x).float()
    tried = [ops.Norm(weight, eps, offset) for offset in (0.0, 1.0)]
    return min(tried, key=lambda norm: float((ops.rms_norm(x, norm).float() - expected).abs().max()))


def activation_of(mlp: Any) -> str:
    """The name in ops.ACTIVATIONS of a gated unit's activation."""
    return activation_named(getattr(mlp, "act_fn", None) or mlp.activation_fn, mlp.down_proj.weight.device)


def activation_named(function: Any, device: torch.device) -> str:
    """The name in ops.ACTIVATIONS of a function, found by its values. Raises NotReplacedError for any other function."""
    x = torch.linspace(-5.0, 5.0, 64, device=device)
    expected = function(x)
    for name in ops.ACTIVATIONS:
        if results_agree(ops.act(x, name), expected, FIT_TOLERANCE):
            return name
    raise NotReplacedError(f"its activation must be one of {ops.ACTIVATIONS}, got {type(function).__name__}")


def runs_original() -> bool:
    """Whether a replaced module runs its own code: torch.compile traces it, or autograd records and ops have no gradients."""
    return torch.compiler.is_compiling() or (torch.is_grad_enabled() and not has_gradients())


def beside_experts(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(experts, module) for each module that has the same parent as a module of experts, such as their router."""
    experts = {*expert_modules(model), *(m for m in model.modules() if isinstance(m, QuantizedExperts))}
    for parent in model.modules():
        children = list(parent.children())
        found = [child for child in children if child in experts]
        for child in children if found else ():
            if child not in experts:
                yield found[0], child
