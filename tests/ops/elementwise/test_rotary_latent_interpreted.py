"""The kernel of latent attention's rotary embedding, norm and cache write in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn

from fa_serve import ops
from fa_serve.ops.elementwise.rotary_latent import launch_rotary_store_latent
from fa_serve.ops.torch_ops import TorchOps


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.parametrize(
    ("total", "heads", "rank", "rope", "in_place"),
    [
        pytest.param(5, 4, 64, 16, True, id="in-place"),
        pytest.param(1, 35, 48, 24, False, id="two-programs-of-heads"),
        pytest.param(7, 3, 24, 2, False, id="one-pair"),
    ],
)
def test_rotary_store_latent(
    total: int, heads: int, rank: int, rope: int, in_place: bool, pairing: ops.Pairing, dtype: torch.dtype
) -> None:
    """Queries rotate within or out of their place, and keys reach their slots and no others."""
    page_size = 4
    queries = randn(total, heads, 8 + rope, dtype=dtype)
    places = torch.full((total, heads, 16 + rope), 7.0, dtype=dtype)
    q = queries[..., 8:]
    out = q if in_place else places[..., 16:]
    latent = randn(total, 8 + rank + rope, dtype=dtype, seed=1)[:, 8:]
    norm = ops.Norm(randn(rank, dtype=dtype, seed=2), 1e-3, 1.0)
    angles = randn(total, rope // 2, dtype=torch.float32, seed=3).repeat(1, 2)
    cos, sin = (x.to(dtype) for x in (angles.cos(), angles.sin()))
    slots = torch.randperm(3 * page_size, generator=torch.Generator().manual_seed(1))[:total]
    slots[1::3] = -1
    cache = torch.full((3, page_size, 1, rank + rope), 7.0, dtype=dtype)
    untouched = queries[..., :8].clone()
    exact_q = q.double()
    exact_cache = cache.double()
    exact_norm = ops.Norm(norm.weight.double(), norm.eps, norm.offset)
    exact_keys = TorchOps().rotary_store_latent(
        exact_q, latent.double(), exact_cache, slots, exact_norm, cos.double(), sin.double(), pairing, None, exact_q
    )
    keys = launch_rotary_store_latent(q, latent, cache, slots, norm, cos, sin, pairing, None, out)
    assert_rounded_once(out, exact_q)
    assert_rounded_once(keys, exact_keys)
    assert_rounded_once(cache, exact_cache)
    assert torch.equal(queries[..., :8], untouched)
    assert bool((places[..., :16] == 7).all())


@pytest.mark.parametrize("mixed", [False, True])
def test_angles_may_lie_by_columns(mixed: bool) -> None:
    angles = randn(5, 8, dtype=torch.float32, seed=3)
    results = []
    for turned in (False, True):
        cos, sin = (x.t().contiguous().t() if turned else x for x in (angles.cos(), angles.sin()))
        sin = sin.contiguous() if mixed else sin
        q = randn(5, 2, 16, dtype=torch.float32)
        cache = torch.zeros(2, 4, 1, 32)
        norm = ops.Norm(torch.ones(16), 1e-6)
        latent = randn(5, 32, dtype=torch.float32, seed=1)
        keys = launch_rotary_store_latent(q, latent, cache, torch.arange(5), norm, cos, sin, "halves", None, q)
        results.append((q, keys, cache))
    for by_rows, by_columns in zip(*results, strict=True):
        assert torch.equal(by_rows, by_columns)


def test_a_float8_cache_stores_scaled_and_saturated_numbers() -> None:
    """No number needs rounding, because the interpreter of Triton 3.6 rounds carries wrongly; the GPU suite tests rounding."""
    descale = torch.tensor([0.25])
    latent = randn(6, 24, dtype=torch.float32).to(torch.float8_e4m3fn).float() * descale
    latent[0, 20] = 1e4
    latent[1, 21] = -1e4
    latent[:, :16] = torch.tensor([2.0, -2.0]).repeat(8)
    norm = ops.Norm(torch.full((16,), 32.0), 0.0)
    q = torch.zeros(6, 1, 8)
    cache = torch.zeros(2, 3, 1, 24).to(torch.float8_e4m3fn)
    angles = torch.ones(6, 4), torch.zeros(6, 4)
    launch_rotary_store_latent(q, latent, cache, torch.arange(6), norm, *angles, "neighbours", descale, q)
    stored = cache.float().flatten(0, 2)
    assert torch.equal(stored[:, 16:], (latent[:, 16:] / descale).clamp(-448, 448))
    assert torch.equal(stored[:, :16], torch.tensor([128.0, -128.0]).repeat(8).expand(6, -1))
