"""The part of an adapter that a rank keeps if the model is divided. It follows the division of the weights.

    low = part_of_low_rank("model.layers.0.self_attn.q_proj", low, module)       # divided like the weight of the module

In a layer that is divided by rows, such as q, k and v, each rank keeps A whole, and the same rows of B as of the weight. In a
layer that is divided by columns, such as an output projection, each rank keeps B whole, and the same columns of A as of the
weight. The outputs of such a layer are parts of a sum. B (A x) is linear in x, so the layer's own sum over the ranks also adds
up the adapter. Only rank 0 adds the bias of such an adapter. Left out: which rows and columns a rank keeps (hf/surgery/divide).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fa_serve.hf.lora.format import LowRank
from fa_serve.hf.surgery.divide.sections import rank_part
from fa_serve.ops.moe.fallback import LowRankExperts
from fa_serve.spec import ParameterError


def whole_sizes(module: nn.Module, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of the undivided weight of a module. rows, columns: the sizes of this rank's part"""
    part = rank_part(module)
    if part is None:
        return rows, columns
    return (part.whole, columns) if part.cut.dim == 0 else (rows, part.whole)


def part_of_low_rank(name: str, low: LowRank, module: nn.Module) -> LowRank:
    """This rank's part of the adapter of a linear layer. Raises ParameterError for DoRA in a layer that is divided by columns.

    DoRA needs the norm of each row of the weight, and no rank has whole rows of such a layer.
    """
    part = rank_part(module)
    if part is None:
        return low
    if part.cut.dim == 0:
        return replace(
            low,
            b=part.kept(low.b, 0),
            bias=None if low.bias is None else part.kept(low.bias, 0),
            magnitude=None if low.magnitude is None else part.kept(low.magnitude, 0),
        )
    if low.magnitude is not None:
        rule = f"be false with tensor_parallel above 1: no rank has whole rows of {name[:128]}, whose norms DoRA needs"
        raise ParameterError("use_dora", rule, True)
    # other ranks keep a bias of zeros, so that the adapter has the same number of pages on every rank
    bias = low.bias if low.bias is None or part.rank == 0 else low.bias.new_zeros(low.bias.shape)
    return replace(low, a=part.kept(low.a, 1), bias=bias)


def part_of_matrix(x: Tensor, module: nn.Module, dim: int = 0) -> Tensor:
    """This rank's part of a matrix. dim: the dimension of x that corresponds to the divided dimension of the module's weight"""
    part = rank_part(module)
    return x if part is None else part.kept(x, dim)


def part_of_experts(low: LowRankExperts, module: Any, name: str) -> LowRankExperts:
    """This rank's part of the adapter of a parameter of experts. The matrices of the experts may be stored transposed."""
    part = rank_part(module, name)
    if part is None:
        return low
    by_columns = part.cut.dim == (1 if module.is_transposed else 2)
    return low._replace(a=part.kept(low.a, 2)) if by_columns else low._replace(b=part.kept(low.b, 1))
