"""The kernels of gradients in Triton's interpreter, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rounded_once import DTYPES, assert_rounded_once, dtype_id, randn
from torch import Tensor

from fa_serve import ops
from fa_serve.launching.plans import PLANS
from fa_serve.ops.elementwise import gradients
from fa_serve.ops.elementwise.gradients import (
    launch_act_and_mul_backward,
    launch_rms_norm_backward,
    launch_rotary_backward,
)
from fa_serve.ops.elementwise.torch_gradients import (
    torch_act_and_mul_backward,
    torch_rms_norm_backward,
    torch_rotary_backward,
)


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    """The tests change how many programs there are, which no key says."""
    PLANS.clear()
    yield
    PLANS.clear()


def wide(norm: ops.Norm) -> ops.Norm:
    return norm._replace(weight=norm.weight.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("total", "width"), [(1, 64), (5, 80)])
@pytest.mark.parametrize("programs", [2, 512])
def test_rms_norm_backward(total: int, width: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer programs than rows, and with one for each row."""
    monkeypatch.setattr(gradients, "GRADIENT_PROGRAMS", programs)
    x = randn(total, 2 * width, dtype=dtype)[:, :width]
    dy = randn(total, width, dtype=dtype, seed=1)
    norm = ops.Norm(randn(width, dtype=dtype, seed=2), 1e-3, 1.0)
    for needs_weight in (True, False):
        dx, dweight = launch_rms_norm_backward(dy, x, norm, needs_weight)
        expected, of_weight = torch_rms_norm_backward(dy.double(), x.double(), wide(norm), True)
        assert dx.dtype == dtype
        assert_rounded_once(dx, expected)
        assert (dweight is not None) == needs_weight
        if dweight is not None and of_weight is not None:
            assert_rounded_once(dweight, of_weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize("width", [72, 1100])
def test_act_and_mul_backward(activation: str, width: int, dtype: torch.dtype) -> None:
    x = randn(3, 2 * width, dtype=dtype)
    dy = randn(3, width, dtype=dtype, seed=1)
    assert_rounded_once(
        launch_act_and_mul_backward(dy, x, activation), torch_act_and_mul_backward(dy.double(), x.double(), activation)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("gates", [0, 3], ids=["plain", "gated"])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("rotary_dim", [0, 8, 24])
@pytest.mark.parametrize("num_kv_heads", [1, 15], ids=lambda n: f"{n}-keys")
def test_rotary_backward(
    num_kv_heads: int, rotary_dim: int, norms: bool, gates: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of one program and of two, and more tokens than programs."""
    monkeypatch.setattr(gradients, "GRADIENT_PROGRAMS", 4)
    sizes = (3, num_kv_heads, 24)
    row = (3 + gates + 2 * num_kv_heads) * 24
    qkv = randn(6, row, dtype=dtype)
    dqkv = randn(6, row, dtype=dtype, seed=1)
    weights = [randn(24, dtype=dtype, seed=seed) for seed in (2, 3)]
    both = [ops.Norm(weight, 1e-3, 1.0) if norms else None for weight in weights]
    exact_both = [None if norm is None else wide(norm) for norm in both]
    angles = randn(6, rotary_dim, dtype=torch.float32, seed=4)[:, : rotary_dim // 2]
    tables: tuple[Tensor | None, Tensor | None] = (angles.cos(), angles.sin()) if rotary_dim else (None, None)
    exact = dqkv.double()
    wanted = torch_rotary_backward(exact, qkv.double(), *sizes, *tables, *exact_both, norms)
    found = launch_rotary_backward(dqkv, qkv, *sizes, *tables, *both, norms)
    assert_rounded_once(dqkv, exact)
    for dweight, expected in zip(found, wanted, strict=True):
        assert (dweight is None) == (expected is None)
        if dweight is not None and expected is not None:
            assert_rounded_once(dweight, expected)
    if norms:
        assert launch_rotary_backward(dqkv, qkv, *sizes, *tables, *both, False) == (None, None)


def test_no_tokens_have_no_launch() -> None:
    norm = ops.Norm(torch.ones(16), 1e-6)
    dx, dweight = launch_rms_norm_backward(torch.zeros(0, 16), torch.zeros(0, 16), norm, True)
    assert dx.shape == (0, 16)
    assert dweight is not None
    assert not dweight.any()
    assert launch_act_and_mul_backward(torch.zeros(0, 8), torch.zeros(0, 16), "silu").shape == (0, 16)
    found = launch_rotary_backward(torch.zeros(0, 64), torch.zeros(0, 64), 2, 1, 16, None, None, norm, norm, True)
    assert all(x is not None and not x.any() for x in found)


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def act_and_mul_backward(
    total: int = 2, width: int = 32, dtype: torch.dtype = torch.float32, activation: str = "silu"
) -> Tensor:
    return launch_act_and_mul_backward(zeros(total, width, dtype=dtype), zeros(total, 2 * width, dtype=dtype), activation)


def rms_norm_backward(
    total: int = 2,
    width: int = 32,
    stride: int = 32,
    dy_stride: int = 32,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
    needs_weight: bool = True,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> Tensor:
    x = zeros(total, stride, dtype=dtype)[:, :width]
    dy = zeros(total, dy_stride, dtype=dtype)[:, :width]
    return launch_rms_norm_backward(dy, x, ops.Norm(zeros(width, dtype=weight_dtype), eps, offset), needs_weight)[0]


def rotary_backward(
    total: int = 2,
    num_heads: int = 2,
    kv_heads: int = 2,
    dim: int = 8,
    gates: int = 0,
    dtype: torch.dtype = torch.float32,
    half: int | None = 4,
    half_padding: int = 0,
    cos_dtype: torch.dtype = torch.float32,
    norm_dtype: torch.dtype | None = None,
    needs_weights: bool = True,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> None:
    qkv = zeros(total, (num_heads + gates + 2 * kv_heads) * dim, dtype=dtype)
    angles = None if half is None else zeros(total, half + half_padding, dtype=cos_dtype)[:, :half]
    norm = None if norm_dtype is None else ops.Norm(zeros(dim, dtype=norm_dtype), eps, offset)
    launch_rotary_backward(qkv.clone(), qkv, num_heads, kv_heads, dim, angles, angles, norm, norm, needs_weights)


CALLS: dict[Callable[..., Any], list[dict[str, Any]]] = {
    act_and_mul_backward: [{}, {"total": 3}, {"width": 24}, {"dtype": torch.bfloat16}, {"activation": "gelu"}],
    rms_norm_backward: [
        {},
        {"total": 3},
        {"width": 24},
        {"stride": 40},
        {"dy_stride": 40},
        {"dtype": torch.bfloat16},
        {"weight_dtype": torch.bfloat16},
        {"needs_weight": False},
        {"eps": 1e-5},
        {"offset": 1.0},
    ],
    rotary_backward: [
        {},
        {"total": 3},
        {"num_heads": 4},
        {"kv_heads": 1},
        {"dim": 16},
        {"gates": 2},
        {"dtype": torch.bfloat16},
        {"half": 2},
        {"half_padding": 2},
        {"cos_dtype": torch.bfloat16},
        {"norm_dtype": torch.float32},
        {"norm_dtype": torch.float32, "half": None},
        {"norm_dtype": torch.float32, "needs_weights": False},
        {"norm_dtype": torch.float32, "eps": 1e-5},
        {"norm_dtype": torch.float32, "offset": 1.0},
        {"norm_dtype": torch.bfloat16},
    ],
}


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_a_call_has_a_plan_of_its_facts(op: Callable[..., Any]) -> None:
    for count, options in enumerate(CALLS[op], 1):
        for _ in range(2):
            op(**options)
            assert len(PLANS) == count, options
