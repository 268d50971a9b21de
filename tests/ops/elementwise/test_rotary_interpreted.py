"""The kernel of head norms, rotary embedding and the cache write in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.ops.elementwise.rotary import launch_rotary_store_kv
from fa_serve.spec import ParameterError


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    ("total", "heads", "kv_heads", "dim", "rotary", "norm", "gated"),
    [
        pytest.param(1, 4, 2, 64, 64, True, False, id="norm-D64"),
        pytest.param(7, 9, 3, 128, 128, False, False, id="D128-H9-HKV3"),
        pytest.param(3, 4, 1, 80, 32, True, False, id="norm-D80-R32"),
        pytest.param(3, 2, 2, 96, 96, False, False, id="D96"),
        pytest.param(2, 2, 1, 64, None, False, False, id="no-rotary"),
        pytest.param(3, 9, 3, 64, 16, True, True, id="gates"),
    ],
)
def test_rotary_store_kv(
    total: int, heads: int, kv_heads: int, dim: int, rotary: int | None, norm: bool, gated: bool, dtype: torch.dtype
) -> None:
    """Queries and keys rotate in place; keys and values reach their slots and no others; values and gates keep their bits."""
    page_size = 4
    queries = heads * (2 if gated else 1)
    qkv = randn(total, (queries + 2 * kv_heads) * dim + 16, dtype=dtype)[:, :-16]
    gates = qkv[:, : queries * dim].view(total, heads, -1)[..., dim:]
    own_gates = gates.clone()
    slots = torch.randperm(3 * page_size, generator=torch.Generator().manual_seed(1))[:total]
    slots[1::3] = -1
    k_cache, v_cache = (torch.full((3, kv_heads, page_size, dim), 7.0, dtype=dtype).transpose(1, 2) for _ in "kv")
    cos = sin = q_norm = k_norm = exact_q_norm = exact_k_norm = None
    if rotary:
        angles = randn(total, rotary // 2, dtype=torch.float32, seed=3).repeat(1, 2)
        cos, sin = (x.to(dtype)[:, : rotary // 2] for x in (angles.cos(), angles.sin()))
    if norm:
        q_norm, k_norm = (ops.Norm(randn(dim, dtype=dtype, seed=seed), 1e-3, 1.0) for seed in (4, 5))
        exact_q_norm, exact_k_norm = (ops.Norm(x.weight.double(), 1e-3, 1.0) for x in (q_norm, k_norm))
    exact = qkv.double()
    exact_k_cache = k_cache.double()
    exact_v_cache = v_cache.double()
    ops.rotary_store_kv(
        exact,
        exact_k_cache,
        exact_v_cache,
        slots,
        num_heads=heads,
        cos=wide(cos),
        sin=wide(sin),
        q_norm=exact_q_norm,
        k_norm=exact_k_norm,
    )
    values = qkv[:, -kv_heads * dim :].clone()
    launch_rotary_store_kv(qkv, k_cache, v_cache, slots, heads, cos, sin, q_norm, k_norm, None, None)
    assert_rounded_once(qkv, exact)
    assert torch.equal(qkv[:, -kv_heads * dim :], values)
    assert torch.equal(gates, own_gates)
    assert_rounded_once(k_cache, exact_k_cache)
    assert_rounded_once(v_cache, exact_v_cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_heads_without_a_cache_only_rotate(dtype: torch.dtype) -> None:
    """As an encoder's queries and keys, behind which its values lie: a cache of no heads gets nothing."""
    total = 5
    heads = 6
    dim = 32
    qkv = randn(total, 3 * heads // 2 * dim, dtype=dtype)
    before = qkv.clone()
    angles = randn(total, dim // 2, dtype=torch.float32, seed=3)
    cos, sin = (x.to(dtype) for x in (angles.cos(), angles.sin()))
    nowhere = torch.empty(1, 1, 0, dim, dtype=dtype)
    both = qkv[:, : heads * dim]
    exact = both.double()
    slots = torch.full((total,), -1)
    ops.rotary_store_kv(exact, nowhere.double(), nowhere.double(), slots, num_heads=heads, cos=cos.double(), sin=sin.double())
    launch_rotary_store_kv(both, nowhere, nowhere, slots, heads, cos, sin, None, None, None, None)
    assert_rounded_once(both, exact)
    assert not torch.equal(both, before[:, : heads * dim])
    assert torch.equal(qkv[:, heads * dim :], before[:, heads * dim :])


@pytest.mark.parametrize("mixed", [False, True])
def test_angles_may_lie_by_columns(mixed: bool) -> None:
    """As gpt-oss makes them: the cosine of a transposed product has the product's strides."""
    total = 5
    dim = 32
    angles = randn(total, dim // 2, dtype=torch.float32, seed=3)
    qkv = randn(total, 3 * dim, dtype=torch.float32)
    results = []
    for turned in (False, True):
        cos, sin = (x.t().contiguous().t() if turned else x for x in (angles.cos(), angles.sin()))
        assert cos.is_contiguous() != turned
        given = qkv.clone()
        caches = [torch.zeros(2, 4, 1, dim) for _ in "kv"]
        sin = sin.contiguous() if mixed else sin
        launch_rotary_store_kv(given, caches[0], caches[1], torch.arange(total), 1, cos, sin, None, None, None, None)
        results.append((given, *caches))
    for by_rows, by_columns in zip(*results, strict=True):
        assert torch.equal(by_rows, by_columns)
    assert not torch.equal(results[0][0], qkv)


def test_a_float8_cache_stores_scaled_and_saturated_numbers() -> None:
    """No number needs rounding, because the interpreter of Triton 3.6 rounds carries wrongly; the GPU suite tests rounding."""
    heads = 4
    kv_heads = 2
    dim = 32
    k_descale = torch.tensor([0.5, 4.0])
    v_descale = torch.tensor([2.0, 0.125])
    q = randn(6, heads, dim, dtype=torch.float32)
    k, v = (
        randn(6, kv_heads, dim, dtype=torch.float32, seed=seed).to(torch.float8_e4m3fn).float() * descale[:, None]
        for seed, descale in ((1, k_descale), (2, v_descale))
    )
    k[0] = 1e4
    v[1] = -1e4
    qkv = torch.cat([q, k, v], dim=1).flatten(1)
    k_cache, v_cache = (torch.zeros(2, 3, kv_heads, dim).to(torch.float8_e4m3fn) for _ in "kv")
    launch_rotary_store_kv(qkv, k_cache, v_cache, torch.arange(6), heads, None, None, None, None, k_descale, v_descale)
    for cache, x, descale in ((k_cache, k, k_descale), (v_cache, v, v_descale)):
        assert torch.equal(cache.float().flatten(0, 1), (x / descale[:, None]).clamp(-448, 448))


def test_angles_of_more_elements_than_a_head_are_refused() -> None:
    """The kernel would rotate into the next head, and beyond the tensor after the last one."""
    qkv = torch.zeros(2, 3 * 8)
    caches = torch.zeros(2, 1, 4, 1, 8)
    angles = torch.zeros(2, 8)
    with pytest.raises(ParameterError, match=r"cos must have at most head_dim / 2 = 4 columns, got \(2, 8\)"):
        launch_rotary_store_kv(qkv, caches[0], caches[1], torch.tensor([0, 1]), 1, angles, angles, None, None, None, None)
