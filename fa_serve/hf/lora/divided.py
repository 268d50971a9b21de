"""What a rank keeps of an adapter whose model is divided: the rows and columns that it keeps of the weights.

    low = part_of_low_rank("model.layers.0.self_attn.q_proj", low, module)       # as the weight of the module is divided

A layer that is divided by its rows, such as q, k and v, has A whole on each rank, and the same rows of B as of the weight. A
layer that is divided by its columns, such as an output projection, has the same columns of A, and B whole: its outputs are
parts of a sum, and B (A x) is linear in x, so that the sum over ranks that the layer has anyway adds the adapter up. The bias
of such an adapter is added by rank 0 alone. Left out: which rows and columns a rank keeps (hf/surgery/divide).
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
    """(rows, columns) of the weight of a module on all ranks together. rows, columns: of this rank"""
    part = rank_part(module)
    if part is None:
        return rows, columns
    return (part.whole, columns) if part.cut.dim == 0 else (rows, part.whole)


def part_of_low_rank(name: str, low: LowRank, module: nn.Module) -> LowRank:
    """What this rank adds to a linear layer. Raises ParameterError for DoRA of a layer that is divided by its columns.

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
        rule = f"be false with tensor_parallel above 1 for an adapter of {name[:128]}, no row of which is whole on a rank"
        raise ParameterError("use_dora", rule, True)
    # the row of the bias stays, so that the adapter has as many pages on every rank
    bias = low.bias if low.bias is None or part.rank == 0 else low.bias.new_zeros(low.bias.shape)
    return replace(low, a=part.kept(low.a, 1), bias=bias)


def part_of_matrix(x: Tensor, module: nn.Module, dim: int = 0) -> Tensor:
    """What this rank keeps of a matrix whose dimension `dim` is that of the rows of the module's weight."""
    part = rank_part(module)
    return x if part is None else part.kept(x, dim)


def part_of_experts(low: LowRankExperts, module: Any, name: str) -> LowRankExperts:
    """What this rank adds to a parameter of a module of experts, whose matrices may be stored transposed."""
    part = rank_part(module, name)
    if part is None:
        return low
    by_columns = part.cut.dim == (1 if module.is_transposed else 2)
    return low._replace(a=part.kept(low.a, 2)) if by_columns else low._replace(b=part.kept(low.b, 1))
