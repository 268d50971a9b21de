"""The kernels between a layer's products, in Triton's interpreter, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fa_serve import ops
from fa_serve.backends.triton.layers import launch_act_and_mul, launch_rms_norm, launch_rotary_store_kv
from fa_serve.backends.triton.linear import launch_linear_row

DTYPES = [torch.float32, torch.bfloat16]


def close(actual: Tensor, exact: Tensor) -> None:
    """Rounded once from float32."""
    assert actual.shape == exact.shape
    bound = torch.finfo(actual.dtype).eps * exact.abs() + 4e-6 * exact.abs().max()
    assert bool(((actual.double() - exact).abs() <= bound).all())


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("total", "width"), [(1, 64), (5, 80), (3, 1024)])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
def test_rms_norm(total: int, width: int, dtype: torch.dtype, residual: bool) -> None:
    x = randn(total, 2 * width, dtype=dtype)[:, :width]
    weight = randn(width, dtype=dtype, seed=1)
    r = randn(total, width, dtype=dtype, seed=2) if residual else None
    out = torch.empty(total, width, dtype=dtype)
    launch_rms_norm(x, weight, 1e-3, 1.0, r, out)
    norm = ops.Norm(weight.double(), 1e-3, 1.0)
    close(out, ops.rms_norm(x.double(), norm, residual=None if r is None else r.double()))


def test_rms_norm_in_place() -> None:
    x = randn(4, 48, dtype=torch.float32)
    weight = randn(48, dtype=torch.float32, seed=1)
    exact = ops.rms_norm(x.double(), ops.Norm(weight.double(), 1e-6))
    launch_rms_norm(x, weight, 1e-6, 0.0, None, x)
    close(x, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("total", "heads", "kv_heads", "dim", "rotary", "norm"),
    [
        pytest.param(1, 4, 2, 64, 64, True, id="norm-D64"),
        pytest.param(7, 9, 3, 128, 128, False, id="D128-H9-HKV3"),
        pytest.param(3, 4, 1, 80, 32, True, id="norm-D80-R32"),
        pytest.param(3, 2, 2, 96, 96, False, id="D96"),
        pytest.param(2, 2, 1, 64, None, False, id="no-rotary"),
    ],
)
def test_rotary_store_kv(total, heads, kv_heads, dim, rotary, norm, dtype) -> None:
    """Queries and keys turn in place, keys and values reach their slots and no others, values as they are."""
    page_size = 4
    qkv = randn(total, (heads + 2 * kv_heads) * dim + 16, dtype=dtype)[:, :-16]
    slots = torch.randperm(3 * page_size, generator=torch.Generator().manual_seed(1))[:total]
    slots[1::3] = -1
    caches = [torch.full((3, kv_heads, page_size, dim), 7.0, dtype=dtype).transpose(1, 2) for _ in "kv"]
    given = [None] * 4
    wide = [None] * 4
    if rotary:
        angles = randn(total, rotary // 2, dtype=torch.float32, seed=3).repeat(1, 2)
        given[:2] = [angles.cos().to(dtype), angles.sin().to(dtype)]
        wide[:2] = [x.double() for x in given[:2]]
    if norm:
        given[2:] = [ops.Norm(randn(dim, dtype=dtype, seed=seed), 1e-3, 1.0) for seed in (4, 5)]
        wide[2:] = [ops.Norm(x.weight.double(), 1e-3, 1.0) for x in given[2:]]
    exact = qkv.double()
    exact_caches = [cache.double() for cache in caches]
    named = dict(zip(("cos", "sin", "q_norm", "k_norm"), wide, strict=True))
    ops.rotary_store_kv(exact, *exact_caches, slots, num_heads=heads, **named)
    values = qkv[:, -kv_heads * dim :].clone()
    launch_rotary_store_kv(qkv, *given, *caches, slots, heads, None, None)
    close(qkv, exact)
    assert torch.equal(qkv[:, -kv_heads * dim :], values)
    for cache, expected in zip(caches, exact_caches, strict=True):
        close(cache, expected)


def test_rotary_store_kv_quantises_with_saturation() -> None:
    """On values that need no rounding, which the interpreter of Triton 3.6 gets wrong at a carry; the GPU suite rounds."""
    heads = 4
    kv_heads = 2
    dim = 32
    descales = torch.tensor([0.5, 4.0]), torch.tensor([2.0, 0.125])
    q = randn(6, heads, dim, dtype=torch.float32)
    k, v = (
        randn(6, kv_heads, dim, dtype=torch.float32, seed=s).to(torch.float8_e4m3fn).float() * d[:, None]
        for s, d in zip((1, 2), descales, strict=True)
    )
    k[0], v[1] = 1e4, -1e4
    qkv = torch.cat([q, k, v], dim=1).flatten(1)
    slots = torch.arange(6)
    caches = [torch.zeros(2, 3, kv_heads, dim).to(torch.float8_e4m3fn) for _ in "kv"]
    expected = [cache.clone() for cache in caches]
    ops.rotary_store_kv(qkv.clone(), *expected, slots, num_heads=heads, k_descale=descales[0], v_descale=descales[1])
    launch_rotary_store_kv(qkv, None, None, None, None, *caches, slots, heads, *descales)
    assert float(expected[0].float().max()) == 448
    for cache, exact in zip(caches, expected, strict=True):
        assert torch.equal(cache.float(), exact.float())


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_act_and_mul(activation: str, dtype: torch.dtype) -> None:
    x = 4 * randn(5, 2 * 1100, dtype=dtype)
    out = torch.empty(5, 1100, dtype=dtype)
    launch_act_and_mul(x, activation, out)
    close(out, ops.act_and_mul(x.double(), activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(
    ("n", "k", "norm", "activation", "residual", "bias"),
    [
        pytest.param(40, 64, False, None, False, False, id="plain"),
        pytest.param(33, 1100, True, None, False, True, id="norm-bias-odd"),
        pytest.param(9, 2304, True, "silu", False, True, id="norm-gated-bias"),
        pytest.param(21, 96, False, "gelu", False, False, id="gated"),
        pytest.param(37, 1500, False, None, True, True, id="residual-bias"),
    ],
)
def test_linear_row(n: int, k: int, norm: bool, activation: str | None, residual: bool, bias: bool, dtype: torch.dtype) -> None:
    x = randn(1, k, dtype=dtype)
    weight = randn(n * (2 if activation else 1), k, dtype=dtype, seed=1) / 16
    b = randn(weight.shape[0], dtype=dtype, seed=2) if bias else None
    r = randn(1, n, dtype=dtype, seed=3) if residual else None
    given = ops.Norm(randn(k, dtype=dtype, seed=4), 1e-3, 1.0) if norm else None
    exact = ops.linear(
        x.double(),
        weight.double(),
        None if b is None else b.double(),
        activation=activation,
        alpha=0.5,
        norm=None if given is None else ops.Norm(given.weight.double(), 1e-3, 1.0),
        residual=None if r is None else r.double(),
    )
    out = torch.empty(1, n, dtype=dtype) if r is None else r
    launch_linear_row(x, weight, b, given, activation, r, 0.5, out)
    close(out, exact)
