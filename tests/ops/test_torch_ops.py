"""The ops in plain PyTorch, against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from torch import Tensor

from fa_serve import ops


def exact_norm(x: Tensor, norm: ops.Norm) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.weight.double() + norm.offset)


def exact_activation(x: Tensor, name: str) -> Tensor:
    if name == "silu":
        return x / (1 + (-x).exp())
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, residual: bool, offset: float) -> None:
    x = randn(5, 96, dtype=dtype)[:, :80]
    norm = ops.Norm(randn(80, dtype=dtype, seed=1), 1e-3, offset)
    added = randn(5, 80, dtype=dtype, seed=2) if residual else None
    exact = exact_norm(x, norm) + (0 if added is None else added.double())
    assert_rounded_once(ops.rms_norm(x, norm, residual=added), exact)
    assert ops.rms_norm(x, norm, residual=added, out=x) is x
    assert_rounded_once(x, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("keep_sum", [False, True], ids=["", "kept"])
def test_layer_norm(dtype: torch.dtype, keep_sum: bool) -> None:
    x = randn(5, 96, dtype=dtype)[:, :80]
    residual = randn(5, 80, dtype=dtype, seed=2)
    norm = ops.LayerNorm(randn(80, dtype=dtype, seed=1), randn(80, dtype=dtype, seed=3), 1e-3)
    total = x.double() + residual.double()
    centred = total - total.mean(-1, keepdim=True)
    wanted = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double() + norm.bias.double()
    before = residual.clone()
    assert_rounded_once(ops.layer_norm(x, norm, residual=residual, keep_sum=keep_sum), wanted)
    assert_rounded_once(residual, total if keep_sum else before.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_add(dtype: torch.dtype) -> None:
    x = randn(5, 110, dtype=dtype)
    y = randn(5, 110, dtype=dtype, seed=1)
    exact = x.double() - 2.5 * y.double()
    assert ops.add(x, y, alpha=-2.5) is x
    assert_rounded_once(x, exact)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_act(activation: str, dtype: torch.dtype) -> None:
    x = 4 * randn(5, 110, dtype=dtype)
    out = ops.act(x, activation)
    assert out.dtype == dtype
    assert_rounded_once(out, exact_activation(x.double(), activation))


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_act_and_mul(activation: str, dtype: torch.dtype) -> None:
    x = 4 * randn(5, 2 * 110, dtype=dtype)
    gate, up = x.double().chunk(2, dim=1)
    out = ops.act_and_mul(x, activation)
    assert out.dtype == dtype
    assert_rounded_once(out, exact_activation(gate, activation) * up)


@pytest.mark.parametrize("total", [1, 3])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("norm", [False, True], ids=["raw", "norm"])
@pytest.mark.parametrize("after", ["nothing", "silu", "gelu_tanh", "residual"])
def test_linear(total: int, bias: bool, norm: bool, after: str) -> None:
    x = randn(total, 40, dtype=torch.float32)
    weight = randn(24, 40, dtype=torch.float32, seed=1)
    b = randn(24, dtype=torch.float32, seed=2) if bias else None
    n = ops.Norm(randn(40, dtype=torch.float32, seed=3), 1e-3, 1.0) if norm else None
    residual = randn(total, 24, dtype=torch.float32, seed=4) if after == "residual" else None
    exact = (x.double() if n is None else exact_norm(x, n)) @ weight.double().t()
    if b is not None:
        exact = exact + b.double()
    if residual is not None:
        exact = residual.double() + 0.5 * exact
    elif after != "nothing":
        exact = exact_activation(exact[:, :12], after) * exact[:, 12:]
    activation = after if after in ops.ACTIVATIONS else None
    out = ops.linear(x, weight, b, norm=n, activation=activation, residual=residual, alpha=0.5)
    assert residual is None or out is residual
    assert_rounded_once(out, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (20, 8), (16, None)], ids=["D16", "D20-R8", "no-rotary"])
@pytest.mark.parametrize("norm", [False, True], ids=["raw", "norm"])
@pytest.mark.parametrize("step", [1, 2], ids=["queries", "queries with gates"])
def test_rotary_store_kv(dim: int, rotary: int | None, norm: bool, step: int, dtype: torch.dtype) -> None:
    heads = 4
    kv_heads = 2
    qkv = randn(3, (heads * step + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = qkv.clone().view(3, -1, dim).split([heads * step, kv_heads, kv_heads], dim=1)
    gates = q[:, 1::step]
    q = q[:, ::step]
    q_norm = ops.Norm(randn(dim, dtype=dtype, seed=1), 1e-3, 1.0) if norm else None
    k_norm = ops.Norm(randn(dim, dtype=dtype, seed=2), 1e-3, 1.0) if norm else None
    exact_q = q.double() if q_norm is None else exact_norm(q, q_norm)
    exact_k = k.double() if k_norm is None else exact_norm(k, k_norm)
    cos = sin = None
    if rotary:
        angles = randn(3, rotary // 2, dtype=torch.float32, seed=3)
        cos = angles.cos().to(dtype)
        sin = angles.sin().to(dtype)
        for x in (exact_q, exact_k):
            turned = torch.view_as_complex(torch.stack(x[..., :rotary].chunk(2, dim=-1), dim=-1))
            turned = turned * torch.complex(cos.double(), sin.double())[:, None]
            x[..., :rotary] = torch.cat([turned.real, turned.imag], dim=-1)
    k_cache = torch.full((2, 4, kv_heads, dim), 7.0, dtype=dtype)
    v_cache = torch.full((2, kv_heads, 4, dim), 7.0, dtype=dtype).transpose(1, 2)
    ops.rotary_store_kv(
        qkv,
        k_cache,
        v_cache,
        torch.tensor([5, -1, 2]),
        num_heads=heads,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
    )
    new_q, new_k, new_v = qkv.view(3, -1, dim).split([heads * step, kv_heads, kv_heads], dim=1)
    assert step == 1 or torch.equal(new_q[:, 1::step], gates)
    assert_rounded_once(new_q[:, ::step], exact_q)
    assert_rounded_once(new_k, exact_k)
    assert torch.equal(new_v, v)
    for cache, stored in ((k_cache, new_k), (v_cache, v)):
        expected = torch.full((8, kv_heads, dim), 7.0, dtype=dtype)
        expected[[5, 2]] = stored[[0, 2]]
        assert torch.equal(cache.reshape(8, kv_heads, dim), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_rotary_store_latent(pairing: ops.Pairing, dtype: torch.dtype) -> None:
    rank = 12
    rope = 8
    q = randn(3, 4, rope, dtype=dtype)
    latent = randn(3, rank + rope, dtype=dtype, seed=1)
    norm = ops.Norm(randn(rank, dtype=dtype, seed=2), 1e-3, 1.0)
    angles = randn(3, rope // 2, dtype=torch.float32, seed=3)
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)
    turn = torch.complex(cos.double(), sin.double())[:, None]

    def rotated(x: Tensor) -> Tensor:
        by_pair = x.double().unflatten(-1, (2, -1)).mT if pairing == "halves" else x.double().unflatten(-1, (-1, 2))
        turned = torch.view_as_real(torch.view_as_complex(by_pair.contiguous()) * turn)
        return (turned.mT if pairing == "halves" else turned).flatten(-2)

    exact_keys = torch.cat([exact_norm(latent[:, :rank], norm), rotated(latent[:, None, rank:])[:, 0]], dim=1)
    exact_q = rotated(q)
    cache = torch.full((2, 4, 1, rank + rope), 7.0, dtype=dtype)
    more = torch.cat([cos, cos + 9], dim=1)  # models repeat the angles; only the first columns count
    keys = ops.rotary_store_latent(
        q, latent, cache, torch.tensor([5, -1, 2]), norm=norm, cos=more, sin=sin, pairing=pairing, out=q
    )
    assert_rounded_once(q, exact_q)
    assert_rounded_once(keys, exact_keys)
    expected = torch.full((8, rank + rope), 7.0, dtype=dtype)
    expected[[5, 2]] = keys[[0, 2]]
    assert torch.equal(cache.view(8, -1), expected)


def test_a_float8_cache_of_latent_keys_stores_scaled_and_saturated_numbers() -> None:
    cache = torch.zeros(1, 1, 1, 4).to(torch.float8_e4m3fn)
    norm = ops.Norm(torch.tensor([0.5, 1e4]), 0.0)
    latent = torch.tensor([[1.0, 1.0, 3.0, -2.0]])
    angles = {"cos": torch.ones(1, 1), "sin": torch.zeros(1, 1)}
    q = torch.zeros(1, 1, 2)
    descale = torch.tensor([0.25])
    slots = torch.tensor([0])
    ops.rotary_store_latent(q, latent, cache, slots, norm=norm, **angles, pairing="halves", descale=descale, out=q)
    assert cache.float().flatten().tolist() == [2.0, 448.0, 12.0, -8.0]


def test_a_float8_cache_stores_scaled_and_saturated_numbers() -> None:
    qkv = torch.tensor([[1.0, -2.0, 3.0, 1e4, 0.3, -1e4]])
    k_cache, v_cache = (torch.zeros(1, 1, 1, 2).to(torch.float8_e4m3fn) for _ in "kv")
    descale = torch.tensor([0.5]), torch.tensor([2.0])
    ops.rotary_store_kv(qkv, k_cache, v_cache, torch.tensor([0]), num_heads=1, k_descale=descale[0], v_descale=descale[1])
    assert k_cache.float().flatten().tolist() == [6.0, 448.0]
    assert v_cache.float().flatten().tolist() == [0.15625, -448.0]


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_of_invariant_ops_do_not_depend_on_each_other(rows: int) -> None:
    x = randn(2, 7, 50, dtype=torch.float32)
    weight = randn(30, 50, dtype=torch.float32, seed=1)
    bias = randn(30, dtype=torch.float32, seed=2)
    products = ops.invariant_linear(x, weight, bias)
    sums = ops.invariant_sum(x)
    assert_rounded_once(products, x.double() @ weight.double().t() + bias.double())
    assert_rounded_once(sums, x.double().sum(-1))
    assert torch.equal(ops.invariant_linear(x[:, :rows], weight, bias), products[:, :rows])
    assert torch.equal(ops.invariant_sum(x[:, :rows]), sums[:, :rows])


def test_float64_stays_float64() -> None:
    x = randn(2, 8, dtype=torch.float64)
    norm = ops.Norm(randn(8, dtype=torch.float64, seed=1), 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, norm), exact_norm(x, norm), rtol=1e-14, atol=0)
    assert ops.invariant_sum(x).dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("norm", [False, True], ids=["raw", "norm"])
def test_gate_heads(activation: ops.GateActivation, norm: bool, dtype: torch.dtype) -> None:
    x = randn(3, 5, 24, dtype=dtype)
    gate = randn(3, 10, 24, dtype=dtype, seed=1)[:, 1::2]
    weights = ops.Norm(randn(24, dtype=dtype, seed=2), 1e-3, 1.0) if norm else None
    exact = x.double() if weights is None else exact_norm(x, weights)
    exact = exact * gate.double().sigmoid() * (gate.double() if activation == "silu" else 1.0)
    assert_rounded_once(ops.gate_heads(x, gate, activation, norm=weights), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_ungroup_delta_inputs(dtype: torch.dtype) -> None:
    """Two key heads of 3 numbers, each with two heads of values of 4: a group has 22 columns, and 4 of b and a."""
    x = randn(2, 52, dtype=dtype)
    a_log, dt_bias = (randn(4, dtype=dtype, seed=seed) for seed in (2, 3))
    qkv, z, g, beta = ops.ungroup_delta_inputs(x, ops.DeltaHeads(2, 3, 4, 4), a_log, dt_bias)
    columns = [*range(3), *range(22, 25), *range(3, 6), *range(25, 28), *range(6, 14), *range(28, 36)]
    assert torch.equal(qkv, x[:, columns])
    assert torch.equal(z, x[:, [*range(14, 22), *range(36, 44)]])
    wanted_g, wanted_beta = ops.delta_gates(x[:, [46, 47, 50, 51]], x[:, [44, 45, 48, 49]], a_log, dt_bias)
    assert torch.equal(g, wanted_g)
    assert torch.equal(beta, wanted_beta)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_delta_gates(dtype: torch.dtype) -> None:
    a, b = (randn(3, 5, dtype=dtype, seed=seed) for seed in (0, 1))
    a_log, dt_bias = (randn(5, dtype=dtype, seed=seed) for seed in (2, 3))
    g, beta = ops.delta_gates(a, b, a_log, dt_bias)
    exact = -a_log.double().exp() * torch.log1p((a.double() + dt_bias.double()).exp())
    torch.testing.assert_close(g.double(), exact, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(beta.double(), b.double().sigmoid(), rtol=1e-6, atol=1e-7)
