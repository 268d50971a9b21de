"""Which launches compute a product with adapters on a GPU.

    y = merged_linear_lora(x, weight, bias, weights, batch, norm, activation, residual, alpha)     # None if it is not merged

One token takes one launch (row_product.py), and few tokens the two launches of their product and its gate (product.py). What
`refuses_merging` names, such as many tokens and quantised weights, has A in the launch before its product, with the norm, and
B in the one behind it, with the gate or the residual sum, if `FINISHED_PRODUCTS` says so. Else it takes separate launches
(separate.py, kernel.py).
"""

from __future__ import annotations

from torch import Tensor

from fa_serve.ops.elementwise.norm import launch_rms_norm
from fa_serve.ops.lora.problem import LoraBatch, LoraWeights
from fa_serve.ops.lora.product import MOST_MERGED_TOKENS, launch_finish, launch_product
from fa_serve.ops.lora.row_product import launch_row
from fa_serve.ops.ops_backend import Norm, Weight
from fa_serve.ops.products.run import multiply

EVERY_PRODUCT = frozenset({"one token", "one token, gated", "few tokens", "few tokens, gated"})
MERGED_PRODUCTS = frozenset({"one token", "few tokens"})
"""The switch: products that have adapters in their launches. Microseconds on one H200 with separate launches and merged, 8B:
qkv 24.6 and 21.9 for 64 tokens, 26.7 and 18.2 for one; output 21.5 and 16.8, 20.8 and 14.4; down 51.9 and 40.0, 49.3 and 36.8.
Gated products are left out: 74.5 and 84.5, 69.6 and 78.8. tests/gpu/test_lora_gpu.py has found their bits right there."""

EVERY_FINISH = frozenset({"few tokens", "prompts"})
FINISHED_PRODUCTS: frozenset[str] = frozenset()
"""The switch: products that are not merged, with one launch before and one behind them. Tiles of 16 rows are few
tokens. benchmarks/tuning/tune_lora.py times them."""


def merged_linear_lora(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    weights: LoraWeights,
    batch: LoraBatch,
    norm: Norm | None,
    activation: str | None,
    residual: Tensor | None,
    alpha: float,
) -> Tensor | None:
    """Arguments and result are those of `fa_serve.ops.linear_lora`; None for what has separate launches."""
    if refuses_merging(x, weight, weights, batch, activation) is not None:
        if refuses_finishing(x, weights, batch, activation, residual) is not None:
            return None
        if norm is not None and batch.block_rows > 16:
            x = launch_rms_norm(x, norm, None, None)  # of many rows it takes longer than a launch
            norm = None

        def multiply_base(x: Tensor) -> Tensor:
            y = multiply(x, weight, None, None, None, None, 1.0, None)
            assert isinstance(y, Tensor)
            return y

        return launch_finish(multiply_base, x, bias, weights, batch, norm, activation, residual, alpha)
    assert isinstance(weight, Tensor)
    if len(x) == 1:
        return launch_row(x, weight, bias, weights, batch, norm, activation, residual, alpha)
    given = x if norm is None else launch_rms_norm(x, norm, None, None)
    return launch_product(given, weight, bias, weights, batch, activation, residual, alpha)


def refuses_finishing(
    x: Tensor, weights: LoraWeights, batch: LoraBatch, activation: str | None, residual: Tensor | None
) -> str | None:
    """Why adapters are not part of what is behind a product; None if they are."""
    kind = "few tokens" if batch.block_rows == 16 else "prompts"
    if kind not in FINISHED_PRODUCTS:
        return f"adapters of {kind} have separate launches (ops/lora/run.py:FINISHED_PRODUCTS)"
    if len(x) < 2:
        return "one token has its norm, gate and residual sum in the launch of its product"
    if not x.dtype == weights.a.dtype == weights.b.dtype:
        return "multiplies adapters of the dtype of the input"
    if activation is not None and (len(set(weights.widths)) > 1 or len(weights.widths) > 2):
        return f"gates a product of one part or two equal ones, got {weights.widths}"
    if x.stride(1) != 1 or (residual is not None and not residual.is_contiguous()):
        return "multiplies and adds rows whose elements are contiguous"
    return None


def refuses_merging(x: Tensor, weight: Weight, weights: LoraWeights, batch: LoraBatch, activation: str | None) -> str | None:
    """Why adapters are not part of the launches of a product; None if they are."""
    kind = ("one token" if len(x) == 1 else "few tokens") + ("" if activation is None else ", gated")
    if kind not in MERGED_PRODUCTS:
        return f"adapters are not merged with a product of {kind} (ops/lora/run.py:MERGED_PRODUCTS)"
    if not isinstance(weight, Tensor):
        return "multiplies matrices of floats"
    if not x.dtype == weight.dtype == weights.a.dtype == weights.b.dtype:
        return "multiplies weights and adapters of the dtype of the input"
    if batch.block_rows != 16 or not 0 < len(x) <= MOST_MERGED_TOKENS:
        return f"multiplies 1 to {MOST_MERGED_TOKENS} tokens in tiles of 16, got {len(x)} in tiles of {batch.block_rows}"
    if activation is not None and weights.widths not in ((len(weight),), (len(weight) // 2,) * 2):
        return f"gates a product of one part or two equal ones, got {weights.widths}"
    if not weight.is_contiguous() or x.stride(1) != 1:
        return "multiplies contiguous weights, and rows whose elements are contiguous"
    return None
