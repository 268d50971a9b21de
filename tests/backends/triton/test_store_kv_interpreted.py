"""store_kv in Triton's interpreter: what is written, where, and that nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from fa_serve.backends.calls import StoreTensors
from fa_serve.backends.reference import store_kv_reference
from fa_serve.backends.triton.store_kv import plan_store_kv


def store(*tensors: torch.Tensor | None) -> None:
    given = StoreTensors(*tensors)
    plan_store_kv(given)(given)


def make(total: int, heads: int, dim: int, dim_v: int, page_size: int, dtype: torch.dtype, cache_dtype: torch.dtype):
    generator = torch.Generator().manual_seed(total + heads)
    k = torch.randn(total, heads, dim, generator=generator).to(dtype)
    v = torch.randn(total, heads, dim_v, generator=generator).to(dtype)
    pages = total // page_size + 3
    caches = tuple(torch.full((pages, page_size, heads, d), 7.0).to(cache_dtype) for d in (dim, dim_v))
    slots = torch.randperm(pages * page_size, generator=generator)[:total]
    slots[total // 2 :: 4] = -1
    return k, v, *caches, slots


@pytest.mark.parametrize(
    ("total", "heads", "dim", "dim_v", "page_size"),
    [
        pytest.param(1, 1, 16, 16, 1, id="T1-H1-D16-P1"),
        pytest.param(17, 8, 128, 128, 16, id="T17-H8-D128-P16"),
        pytest.param(33, 3, 80, 40, 33, id="T33-H3-D80-DV40-P33"),
        pytest.param(5, 71, 64, 64, 256, id="T5-H71-D64-P256"),
        pytest.param(7, 2, 192, 128, 64, id="T7-H2-D192-DV128-P64"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_writes_its_slots_and_nothing_else(total: int, heads: int, dim: int, dim_v: int, page_size: int, dtype: torch.dtype):
    k, v, k_cache, v_cache, slots = make(total, heads, dim, dim_v, page_size, dtype, dtype)
    expected_k = k_cache.clone()
    expected_v = v_cache.clone()
    store_kv_reference(StoreTensors(k, v, expected_k, expected_v, slots, None, None))
    store(k, v, k_cache, v_cache, slots, None, None)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_quantises_with_saturation(dtype: torch.dtype):
    """On values that need no rounding, which the interpreter of Triton 3.6 gets wrong at a carry; the GPU suite rounds."""
    k, v, k_cache, v_cache, slots = make(9, 4, 32, 48, 4, dtype, torch.float8_e4m3fn)
    k_descale = torch.tensor([0.5, 4.0, 1.0, 0.25])
    v_descale = torch.tensor([2.0, 1.0, 0.125, 8.0])
    k = (k.to(torch.float8_e4m3fn).float() * k_descale[:, None]).to(dtype)
    v = (v.to(torch.float8_e4m3fn).float() * v_descale[:, None]).to(dtype)
    k[0] = 1e4
    k[1] = -1e4
    v[2] = 6e4
    expected_k = k_cache.clone()
    expected_v = v_cache.clone()
    store_kv_reference(StoreTensors(k, v, expected_k, expected_v, slots, k_descale, v_descale))
    store(k, v, k_cache, v_cache, slots, k_descale, v_descale)
    assert expected_k.float().max() == 448
    assert torch.equal(k_cache.float(), expected_k.float())
    assert torch.equal(v_cache.float(), expected_v.float())


def test_any_strides():
    """Keys and values as slices of one fused projection, a cache that keeps K and V together and the heads first."""
    k, v, k_cache, v_cache, slots = make(12, 4, 32, 32, 8, torch.float32, torch.float32)
    expected_k = k_cache.clone()
    expected_v = v_cache.clone()
    store_kv_reference(StoreTensors(k, v, expected_k, expected_v, slots, None, None))
    fused = torch.stack([k, v], dim=-1)
    both = torch.full((2, k_cache.shape[0], 4, 8, 32), 7.0)
    strided_k = both[0].transpose(1, 2)
    strided_v = both[1].transpose(1, 2)
    store(fused[..., 0], fused[..., 1], strided_k, strided_v, slots, None, None)
    assert torch.equal(strided_k, expected_k)
    assert torch.equal(strided_v, expected_v)


def test_no_tokens():
    k, v, k_cache, v_cache, slots = make(4, 2, 16, 16, 4, torch.float32, torch.float32)
    before = k_cache.clone()
    store(k[:0], v[:0], k_cache, v_cache, slots[:0], None, None)
    store(k, v, k_cache, v_cache, torch.full_like(slots, -1), None, None)
    assert torch.equal(k_cache, before)
