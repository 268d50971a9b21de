"""Products with their adapters in two launches, in Triton's interpreter, against float64 token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_cases import LoraCase, exact_product, make_case
from rounded_once import dtype_id
from torch import Tensor

from fa_serve.ops.lora import product, row_product, run
from fa_serve.ops.triton_ops import TritonOps

DTYPES = [torch.float32, torch.float16]  # the interpreter's products take no bfloat16
CASES = [
    pytest.param(LoraCase((0, 1, -1, 2, 1, 0, 0)), {}, id="mixed"),
    pytest.param(LoraCase((1, 0, -1), k=1100, norm=True), {}, id="norm, several splits"),
    pytest.param(LoraCase((-1, 0, 2, 2), dora=True, bias=True, widths=(40,)), {"residual": True}, id="everything"),
    pytest.param(LoraCase((1,) * 35 + (0,) * 3 + (-1,) * 20, widths=(72, 72)), {"activation": "silu"}, id="gate of two parts"),
    pytest.param(LoraCase((2, -1), widths=(144,), bias=True), {"activation": "gelu_tanh"}, id="gate of one part"),
    pytest.param(LoraCase((2,), k=1100, norm=True, widths=(9, 8, 7)), {"residual": True}, id="one token of three parts"),
    pytest.param(
        LoraCase((1,), norm=True, dora=True, bias=True, widths=(12, 12)), {"activation": "silu"}, id="one token, gate"
    ),
    pytest.param(LoraCase((-1,), widths=(40,), norm=True), {}, id="one token of the base"),
    pytest.param(LoraCase(tuple(range(35)), ranks=(4,) * 35, widths=(24, 40)), {}, id="many adapters"),
]


def compute(case: LoraCase, given: tuple[Any, ...], weight: Tensor, extras: dict[str, Any]) -> Tensor:
    y, x, weights, batch, norm, bias = given
    residual = y.clone() if "residual" in extras else None
    options = (norm, extras.get("activation"), residual, 0.5 if residual is not None else 1.0)
    return TritonOps().linear_lora(x, weight, bias, weights, batch, *options)


@pytest.fixture(autouse=True)
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MERGES_ADAPTERS", True)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("case", "extras"), CASES)
def test_products_have_their_adapters(case: LoraCase, extras: dict[str, Any], dtype: torch.dtype) -> None:
    given = make_case(case, dtype)
    weight = (torch.randn(sum(case.widths), case.k, generator=torch.Generator().manual_seed(1)) / case.k**0.5).to(dtype)
    assert run.refuses_merging(given[1], weight, given[2], given[3], extras.get("activation")) is None
    exact = exact_product(case, *given, weight, extras.get("activation"), 0.5 if "residual" in extras else None)
    found = compute(case, given, weight, extras)
    # tensor cores take x A^T, and a normalised x, rounded to the dtype of the weights
    eps = torch.finfo(dtype).eps
    bound = eps * exact.abs() + (4e-6 if dtype == torch.float32 else 2 * eps) * exact.abs().max()
    assert bool(((found.double() - exact).abs() <= bound).all())


def differs(case: LoraCase, change: Any) -> bool:
    """Whether a planted fault changes a result by more than rounding."""
    given = make_case(case, torch.float32)
    weight = torch.randn(sum(case.widths), case.k, generator=torch.Generator().manual_seed(1)) / case.k**0.5
    right = compute(case, given, weight, {})
    y, x, weights, batch, norm, bias = given
    wrong = compute(case, (y, x, *change(weights, batch), norm, bias), weight, {})
    return not torch.allclose(right, wrong, rtol=1e-3, atol=1e-3)


def test_planted_faults_are_seen() -> None:
    case = LoraCase((0, 1, -1, 2, 1), plain=(0, 9), widths=(40,))
    assert not differs(case, lambda weights, batch: (weights, batch))
    assert differs(case, lambda weights, batch: (weights._replace(scales=torch.ones_like(weights.scales)), batch)), "alpha"
    assert differs(case, lambda weights, batch: (weights, batch._replace(pages=batch.pages.roll(1, 0)))), "a stale slot"
    assert differs(case, lambda weights, batch: (weights, batch._replace(rows=batch.rows.flip(0)))), "a wrong segment"
    assert differs(case, lambda weights, batch: (weights, batch._replace(slots=batch.slots.roll(1)))), "a wrong slot of a row"


def test_counters_of_one_token_only_grow() -> None:
    """They are never reset: a call finds its own number, whatever there was before."""
    case = LoraCase((1,), k=1100, norm=True, widths=(8, 8))
    given = make_case(case, torch.float32)
    weight = torch.randn(sum(case.widths), case.k, generator=torch.Generator().manual_seed(1)) / case.k**0.5
    assert torch.equal(compute(case, given, weight, {}), compute(case, given, weight, {}))
    assert given[2].counters.tolist() == [2 * row_product._CALL.value] * 2
    given[1].mul_(2.0)
    exact = exact_product(case, *given, weight, None, None)
    torch.testing.assert_close(compute(case, given, weight, {}).double(), exact, rtol=1e-5, atol=1e-5)


def test_what_is_refused_takes_separate_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LoraCase((0, 1, -1, 2))
    given = make_case(case, torch.float32)
    _, x, weights, batch, _, _ = given
    weight = torch.zeros(sum(case.widths), case.k)

    def reason(**changes: Any) -> str:
        asked = {"x": x, "weight": weight, "weights": weights, "batch": batch, "activation": None} | changes
        return str(run.refuses_merging(**asked))

    assert "got (48, 16, 16)" in reason(activation="silu")
    assert "got 129 in tiles of 16" in reason(x=x[:1].expand(129, -1))
    assert "got 4 in tiles of 64" in reason(batch=batch._replace(block_rows=64))
    assert "dtype of the input" in reason(weight=weight.half())
    assert "contiguous" in reason(weight=weight.t().contiguous().t())
    monkeypatch.setattr(run, "MERGES_ADAPTERS", False)
    assert "MERGES_ADAPTERS" in reason()


def test_sums_are_split_while_all_programs_are_on_the_gpu() -> None:
    def splits(n: int, k: int) -> int:
        return product.choose_product_tile(64, n, k, 2, 132).splits

    assert [splits(6144, 4096), splits(4096, 4096), splits(28672, 4096), splits(4096, 14336)] == [4, 4, 1, 4]
    assert splits(4096, 256) == 1
    assert product.choose_product_tile(65, 4096, 4096, 2, 132)[:4] == (128, 64, 64, 3)
    assert product.choose_product_tile(9, 4096, 4096, 4, 132)[:2] == (16, 32)
