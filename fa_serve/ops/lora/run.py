"""Which launches compute a product with adapters on a GPU.

    y = merged_linear_lora(x, weight, bias, weights, batch, norm, activation, residual, alpha)     # None if it is not merged

One token takes one launch, or two with a gate (row_product.py). Few tokens take two launches, one for the product and one for
what follows it (product.py). The calls that `refuses_merging` refuses take separate launches (separate.py, kernel.py): many
tokens, for which adapters are a small part of the time, few tokens with a gate, and quantised weights.
"""

from __future__ import annotations

from torch import Tensor

from fa_serve.ops.elementwise.norm import launch_rms_norm
from fa_serve.ops.lora.problem import MOST_MERGED_TOKENS, SMALL_TILE_ROWS, LoraBatch, LoraWeights
from fa_serve.ops.lora.product import launch_product
from fa_serve.ops.lora.row_product import launch_row
from fa_serve.ops.ops_backend import Norm, Weight

EVERY_PRODUCT = frozenset({"one token", "one token, gated", "few tokens", "few tokens, gated"})
MERGED_PRODUCTS = EVERY_PRODUCT - {"few tokens, gated"}
"""The switch: the products whose launches compute adapters as well. Microseconds on one H200 for an 8B model and one adapter,
first with separate launches and then merged: qkv 26.7 and 25.1 for 64 tokens, 33.9 and 17.4 for one; output 21.6 and 18.2, 21.1
and 12.9; down 49.9 and 42.0, 49.4 and 33.5; one token with a gate 76.7 and 68.7. 64 tokens with a gate are left out: they take
77.5 and 74.1, but 99.6 and 109.0 with 32 adapters. benchmarks/tuning/tune_lora.py times them, and tests/gpu/test_lora_gpu.py
has checked their results on that GPU."""


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
    """Arguments and result are those of `fa_serve.ops.linear_lora`; None for a call that `refuses_merging` refuses."""
    if refuses_merging(x, weight, weights, batch, activation) is not None:
        return None
    assert isinstance(weight, Tensor)
    if len(x) == 1:
        return launch_row(x, weight, bias, weights, batch, norm, activation, residual, alpha)
    given = x if norm is None else launch_rms_norm(x, norm, None, None)
    return launch_product(given, weight, bias, weights, batch, activation, residual, alpha)


def refuses_merging(x: Tensor, weight: Weight, weights: LoraWeights, batch: LoraBatch, activation: str | None) -> str | None:
    """Why the launches of a product do not compute its adapters; None if they do."""
    kind = ("one token" if len(x) == 1 else "few tokens") + ("" if activation is None else ", gated")
    if kind not in MERGED_PRODUCTS:
        return f"adapters are computed separately for {kind} (ops/lora/run.py:MERGED_PRODUCTS)"
    if not isinstance(weight, Tensor):
        return "supports floating-point matrices only"
    if not x.dtype == weight.dtype == weights.a.dtype == weights.b.dtype:
        return "supports only weights and adapters that have the input's dtype"
    if batch.block_rows != SMALL_TILE_ROWS or not 0 < len(x) <= MOST_MERGED_TOKENS:
        known = f"{MOST_MERGED_TOKENS} tokens in tiles of {SMALL_TILE_ROWS}"
        return f"multiplies 1 to {known}, got {len(x)} in tiles of {batch.block_rows}"
    if activation is not None and weights.widths not in ((len(weight),), (len(weight) // 2,) * 2):
        return f"can gate a product only with one part or two equal parts, got {weights.widths}"
    if not weight.is_contiguous() or x.stride(1) != 1:
        return "needs contiguous weights, and rows whose elements are contiguous"
    return None
