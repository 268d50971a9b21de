"""The plans of the kernels, in Triton's interpreter: every fact that a launch depends on is part of its plan's key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interpreter_bounds import reachable
from torch import Tensor

from fa_serve.launching.plans import PLANS
from fa_serve.ops import DeltaHeads, GateActivation, LayerNorm, Norm, Pairing, RowTable
from fa_serve.ops.triton_ops import TritonOps

OPS = TritonOps()
BF16 = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def integers(*shape: int) -> Tensor:
    return zeros(*shape, dtype=torch.int64)


def rms_norm(
    total: int = 2,
    width: int = 32,
    stride: int = 32,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    out_stride: int = 32,
    residual_dtype: torch.dtype | None = None,
    residual_stride: int = 32,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Tensor:
    x = zeros(total, stride, dtype=dtype)[:, :width]
    residual = None if residual_dtype is None else zeros(total, residual_stride, dtype=residual_dtype)[:, :width]
    out = zeros(total, out_stride, dtype=out_dtype or dtype)[:, :width]
    return OPS.rms_norm(x, Norm(zeros(width, dtype=weight_dtype), eps, offset), residual, out)


def layer_norm(
    total: int = 2,
    width: int = 32,
    stride: int = 32,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    keep_sum: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    x = zeros(total, stride, dtype=dtype)[:, :width]
    bias = None if bias_dtype is None else zeros(width, dtype=bias_dtype)
    residual = None if residual_dtype is None else zeros(total, width, dtype=residual_dtype)
    return OPS.layer_norm(x, LayerNorm(zeros(width, dtype=weight_dtype), bias, eps), residual, keep_sum)


def linear(
    n: int = 16,
    k: int = 32,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    activation: str | None = None,
    residual_dtype: torch.dtype | None = None,
    alpha: float = 1.0,
) -> Tensor:
    norm = None if norm_dtype is None else Norm(zeros(k, dtype=norm_dtype), eps, offset)
    bias = None if bias_dtype is None else zeros(n, dtype=bias_dtype)
    residual = None if residual_dtype is None else zeros(1, n, dtype=residual_dtype)
    return OPS.linear(zeros(1, k, dtype=dtype), zeros(n, k, dtype=weight_dtype), bias, norm, activation, residual, alpha, None)


def rotary_store_kv(
    total: int = 2,
    num_heads: int = 2,
    kv_heads: int = 2,
    dim: int = 8,
    padding: int = 0,
    gates: int = 0,
    dtype: torch.dtype = torch.float32,
    half: int | None = None,
    half_padding: int = 0,
    cos_dtype: torch.dtype = torch.float32,
    norm_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    page_size: int = 4,
    page_padding: int = 0,
    k_cache_padding: int = 0,
    v_cache_padding: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> None:
    qkv = zeros(total, (num_heads + gates + 2 * kv_heads) * dim + padding, dtype=dtype)
    qkv = qkv[:, : qkv.shape[1] - padding]
    angles = None if half is None else zeros(total, half + half_padding, dtype=cos_dtype)[:, :half]
    norm = None if norm_dtype is None else Norm(zeros(dim, dtype=norm_dtype), eps, offset)
    descale = torch.ones(kv_heads) if cache_dtype == FLOAT8 else None
    k_cache, v_cache = (
        zeros(3, page_size + page_padding, kv_heads, dim + pad, dtype=cache_dtype or dtype)[:, :page_size, :, :dim]
        for pad in (k_cache_padding, v_cache_padding)
    )
    OPS.rotary_store_kv(qkv, k_cache, v_cache, integers(total), num_heads, angles, angles, norm, norm, descale, descale)


def rotary_store_latent(
    total: int = 2,
    num_heads: int = 2,
    rank: int = 16,
    rope: int = 8,
    head_padding: int = 0,
    padding: int = 0,
    out_padding: int = 0,
    dtype: torch.dtype = torch.float32,
    half_padding: int = 0,
    cos_dtype: torch.dtype = torch.float32,
    norm_dtype: torch.dtype = torch.float32,
    eps: float = 1e-6,
    offset: float = 0.0,
    pairing: Pairing = "halves",
    page_size: int = 4,
    page_padding: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> Tensor:
    q = zeros(total, num_heads, rope + head_padding, dtype=dtype)[..., :rope]
    out = zeros(total, num_heads, rope + out_padding, dtype=dtype)[..., :rope]
    latent = zeros(total, rank + rope + padding, dtype=dtype)[:, : rank + rope]
    angles = zeros(total, rope // 2 + half_padding, dtype=cos_dtype)
    cache = zeros(3, page_size + page_padding, 1, rank + rope, dtype=cache_dtype or dtype)[:, :page_size]
    norm = Norm(zeros(rank, dtype=norm_dtype), eps, offset)
    descale = torch.ones(1) if cache_dtype == FLOAT8 else None
    return OPS.rotary_store_latent(q, latent, cache, integers(total), norm, angles, angles, pairing, descale, out)


def gate_heads(
    total: int = 2,
    heads: int = 2,
    dim: int = 32,
    head_padding: int = 0,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    activation: GateActivation = "silu",
    norm_dtype: torch.dtype | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Tensor:
    gate = zeros(total, heads * (dim + head_padding) + padding, dtype=gate_dtype)[:, : heads * (dim + head_padding)]
    gate = gate.unflatten(1, (heads, -1))[..., :dim]
    norm = None if norm_dtype is None else Norm(zeros(dim, dtype=norm_dtype), eps, offset)
    return OPS.gate_heads(zeros(total, heads, dim, dtype=dtype), gate, activation, norm)


def delta_gates(
    total: int = 2,
    heads: int = 2,
    a_padding: int = 0,
    b_padding: int = 0,
    dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    a, b = (zeros(total, heads + padding, dtype=dtype)[:, :heads] for padding in (a_padding, b_padding))
    return OPS.delta_gates(a, b, zeros(heads), zeros(heads, dtype=bias_dtype))


def ungroup_delta_inputs(
    total: int = 2,
    keys: int = 2,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype = torch.float32,
) -> Tensor:
    heads = DeltaHeads(keys, 16, 2 * keys, 16)
    columns = heads.columns + 2 * heads.values
    x = zeros(total, columns + padding, dtype=dtype)[:, :columns]
    return OPS.ungroup_delta_inputs(x, heads, zeros(heads.values), zeros(heads.values, dtype=bias_dtype))[0]


def act(total: int = 2, width: int = 32, dtype: torch.dtype = torch.float32, activation: str = "silu") -> Tensor:
    return OPS.act(zeros(total, width, dtype=dtype), activation)


def act_and_mul(
    total: int = 2, width: int = 32, stride: int = 64, dtype: torch.dtype = torch.float32, activation: str = "silu"
) -> Tensor:
    return OPS.act_and_mul(zeros(total, stride, dtype=dtype)[:, : 2 * width], activation)


def add(
    total: int = 2,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    other_dtype: torch.dtype = torch.float32,
    alpha: float = 1.0,
) -> Tensor:
    return OPS.add(zeros(total, width, dtype=dtype), zeros(total, width, dtype=other_dtype), alpha)


def merge_attention(
    total: int = 2,
    heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    other_dtype: torch.dtype = torch.float32,
) -> Tensor:
    parts = [(zeros(total, heads, dim, dtype=each), zeros(heads, total)) for each in (dtype, other_dtype)]
    return OPS.merge_attention(*parts[0], *parts[1])


def sample_rows(
    n: int = 2,
    vocab: int = 20,
    stride: int = 20,
    dtype: torch.dtype = torch.float32,
    drawn: bool = False,
    top_k: bool = False,
    top_p: bool = False,
    min_p: bool = False,
    stored: bool = False,
) -> Tensor:
    return OPS.sample_rows(
        zeros(n, stride, dtype=dtype)[:, :vocab],
        integers(n) if drawn else None,
        torch.ones(n) if drawn else None,
        integers(n) + 3 if top_k else None,
        torch.ones(n) if top_p else None,
        torch.ones(n) if min_p else None,
        torch.arange(n) if stored else None,
        integers(n) if stored else None,
        None,
    )


def invariant_linear(
    m: int = 2,
    n: int = 8,
    k: int = 32,
    stride: int = 32,
    weight_stride: int = 32,
    dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype | None = None,
) -> Tensor:
    x = zeros(m, stride, dtype=dtype)[:, :k]
    weight = zeros(n, weight_stride, dtype=dtype)[:, :k]
    return OPS.invariant_linear(x, weight, None if bias_dtype is None else zeros(n, dtype=bias_dtype))


def invariant_sum(m: int = 2, width: int = 32, stride: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return OPS.invariant_sum(zeros(m, stride, dtype=dtype)[:, :width])


def move_rows(n: int = 2, width: int = 32, layers: int = 1, pack: bool = True) -> None:
    tensors = [zeros(3, width, dtype=torch.float32) for _ in range(layers)]
    table = RowTable(tensors)
    with reachable(*tensors):
        OPS.move_rows(table, torch.arange(n), zeros(n, table.num_words, dtype=torch.int64), pack)


# for each op, calls of which each needs another launch than all before
CALLS: dict[Callable[..., Any], list[dict[str, Any]]] = {
    move_rows: [{}, {"n": 3}, {"width": 34}, {"layers": 2}, {"pack": False}],
    rms_norm: [
        {},
        {"total": 3},
        {"width": 24},
        {"stride": 40},
        {"dtype": BF16, "out_dtype": torch.float32},
        {"weight_dtype": BF16},
        {"out_dtype": BF16},
        {"out_stride": 40},
        {"residual_dtype": torch.float32},
        {"residual_dtype": BF16},
        {"residual_dtype": torch.float32, "residual_stride": 40},
        {"eps": 1e-5},
        {"offset": 1.0},
    ],
    layer_norm: [
        {},
        {"total": 3},
        {"width": 24},
        {"stride": 40},
        {"dtype": BF16},
        {"weight_dtype": BF16},
        {"bias_dtype": torch.float32},
        {"bias_dtype": BF16},
        {"residual_dtype": torch.float32},
        {"residual_dtype": BF16},
        {"residual_dtype": torch.float32, "keep_sum": True},
        {"eps": 1e-5},
    ],
    linear: [
        {},
        {"n": 18},
        {"k": 48},
        {"dtype": BF16},
        {"weight_dtype": BF16},
        {"bias_dtype": torch.float32},
        {"bias_dtype": BF16},
        {"norm_dtype": torch.float32},
        {"norm_dtype": BF16},
        {"norm_dtype": torch.float32, "eps": 1e-5},
        {"norm_dtype": torch.float32, "offset": 1.0},
        {"activation": "silu"},
        {"activation": "gelu"},
        {"residual_dtype": torch.float32},
        {"residual_dtype": BF16},
        {"residual_dtype": torch.float32, "dtype": BF16},
        {"residual_dtype": torch.float32, "alpha": 0.5},
    ],
    rotary_store_kv: [
        {},
        {"total": 3},
        {"num_heads": 4, "kv_heads": 1},
        {"num_heads": 1, "gates": 1},
        {"dim": 16},
        {"padding": 8},
        {"dtype": BF16, "cache_dtype": torch.float32},
        {"half": 4},
        {"half": 2},
        {"half": 2, "half_padding": 2},
        {"half": 4, "cos_dtype": BF16},
        {"norm_dtype": torch.float32},
        {"norm_dtype": BF16},
        {"norm_dtype": torch.float32, "eps": 1e-5},
        {"norm_dtype": torch.float32, "offset": 1.0},
        {"page_size": 2},
        {"page_size": 2, "page_padding": 2},
        {"k_cache_padding": 8},
        {"v_cache_padding": 8},
        {"cache_dtype": BF16},
        {"cache_dtype": FLOAT8},
    ],
    rotary_store_latent: [
        {},
        {"total": 3},
        {"num_heads": 3},
        {"rank": 8},
        {"rope": 4},
        {"head_padding": 8},
        {"padding": 8},
        {"out_padding": 8},
        {"dtype": BF16, "cache_dtype": torch.float32},
        {"half_padding": 4},
        {"cos_dtype": BF16},
        {"norm_dtype": BF16},
        {"eps": 1e-5},
        {"offset": 1.0},
        {"pairing": "neighbours"},
        {"page_size": 2},
        {"page_size": 2, "page_padding": 2},
        {"cache_dtype": BF16},
        {"cache_dtype": FLOAT8},
    ],
    gate_heads: [
        {},
        {"total": 3},
        {"heads": 3},
        {"dim": 24},
        {"head_padding": 8},
        {"padding": 8},
        {"dtype": BF16},
        {"gate_dtype": BF16},
        {"activation": "sigmoid"},
        {"norm_dtype": torch.float32},
        {"norm_dtype": torch.float32, "eps": 1e-5},
        {"norm_dtype": torch.float32, "offset": 1.0},
        {"norm_dtype": BF16},
    ],
    delta_gates: [{}, {"total": 3}, {"heads": 3}, {"a_padding": 8}, {"b_padding": 8}, {"dtype": BF16}, {"bias_dtype": BF16}],
    ungroup_delta_inputs: [{}, {"total": 3}, {"keys": 3}, {"padding": 8}, {"dtype": BF16}, {"bias_dtype": BF16}],
    act: [{}, {"total": 3}, {"width": 24}, {"dtype": BF16}, {"activation": "gelu"}],
    act_and_mul: [{}, {"total": 3}, {"width": 24}, {"stride": 80}, {"dtype": BF16}, {"activation": "gelu"}],
    add: [{}, {"total": 3}, {"width": 24}, {"dtype": BF16}, {"other_dtype": BF16}, {"alpha": 0.5}],
    merge_attention: [{}, {"total": 3}, {"heads": 3}, {"dim": 24}, {"dtype": BF16}, {"other_dtype": BF16}],
    sample_rows: [
        {},
        {"n": 3},
        {"vocab": 16},
        {"stride": 32},
        {"dtype": BF16},
        {"stored": True},
        {"drawn": True},
        {"drawn": True, "top_k": True},
        {"drawn": True, "top_p": True},
        {"drawn": True, "min_p": True},
    ],
    invariant_linear: [
        {},
        {"m": 3},
        {"n": 9},
        {"k": 16},
        {"stride": 40},
        {"weight_stride": 40},
        {"dtype": torch.float16},
        {"bias_dtype": torch.float32},
        {"bias_dtype": BF16},
    ],
    invariant_sum: [{}, {"m": 3}, {"width": 24}, {"stride": 40}, {"dtype": BF16}],
}


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    PLANS.clear()
    yield
    PLANS.clear()


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_a_call_has_a_plan_of_its_facts(op: Callable[..., Any]) -> None:
    for count, options in enumerate(CALLS[op], 1):
        for _ in range(2):
            op(**options)
            assert len(PLANS) == count, options
    # a product has the most calls in a layer, so its key begins with a shape and spends no time on a name
    names = {"product" if isinstance(key[0], torch.Size) or key[0] == "matrices" else str(key[0]) for key in PLANS}
    expected = {linear: "product", invariant_linear: "invariant"}.get(op, op.__name__)
    assert names == {expected}, "plans of two ops may not share a key"


@pytest.mark.parametrize(
    ("op", "empty", "shape"),
    [
        (rms_norm, {"total": 0}, (0, 32)),
        (layer_norm, {"total": 0}, (0, 32)),
        (rotary_store_kv, {"total": 0}, None),
        (rotary_store_latent, {"total": 0}, (0, 24)),
        (ungroup_delta_inputs, {"total": 0}, (0, 128)),
        (act, {"total": 0}, (0, 32)),
        (act_and_mul, {"total": 0}, (0, 32)),
        (gate_heads, {"total": 0}, (0, 2, 32)),
        (add, {"total": 0}, (0, 32)),
        (move_rows, {"n": 0}, None),
        (sample_rows, {"n": 0, "drawn": True}, (0,)),
        (invariant_sum, {"m": 0}, (0,)),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_an_empty_batch_launches_nothing(op: Callable[..., Any], empty: dict[str, Any], shape: tuple[int, ...] | None) -> None:
    out = op(**empty)
    assert (None if out is None else tuple(out.shape)) == shape
    assert not PLANS


def test_a_product_of_no_tokens_reads_no_weight() -> None:
    """Its plan is a function that makes an empty result."""
    assert tuple(invariant_linear(m=0).shape) == (0, 8)
