"""One token with its adapter in one launch and in two, in Triton's interpreter, against float64.

The interpreter runs one program after the other, so those that are waited for have ended. A GPU shows what waiting means.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_cases import LoraCase, base_weight, choose_ahead, exact_product, make_case, merged_product
from rounded_once import dtype_id

from fa_serve.ops.lora import row_product, run

DTYPES = [torch.float32, torch.float16]
CASES = [
    pytest.param(LoraCase((2,), k=1100, norm=True, widths=(9, 8, 7)), {"residual": True}, id="three parts"),
    pytest.param(LoraCase((1,), norm=True, widths=(19, 8, 3, 5), dora=True), {}, id="four parts"),
    pytest.param(LoraCase((1,), norm=True, dora=True, bias=True, widths=(12, 12)), {"activation": "silu"}, id="gate"),
    pytest.param(LoraCase((1,), ranks=(4, 256), k=2100, widths=(264,)), {"residual": True}, id="rank 256, uneven columns"),
    pytest.param(LoraCase((0,), ranks=(40, 100), k=1100, norm=True, bias=True, widths=(9, 8, 7)), {}, id="3 pages of 7"),
    pytest.param(LoraCase((1,), ranks=(4, 40), norm=True, dora=True, widths=(12, 12)), {"activation": "silu"}, id="3 pages"),
    pytest.param(LoraCase((0,), widths=(20, 20), bias=True), {"activation": "gelu"}, id="gate without an adapter of one part"),
    pytest.param(LoraCase((-1,), widths=(40,), norm=True), {}, id="base"),
]


@pytest.fixture(autouse=True)
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MERGED_PRODUCTS", run.EVERY_PRODUCT)


@pytest.mark.parametrize("ahead", [False, True], ids=["one launch", "ahead"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("case", "extras"), CASES)
def test_a_token_has_its_adapter(
    case: LoraCase, extras: dict[str, Any], dtype: torch.dtype, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_ahead(monkeypatch, ahead)
    given = make_case(case, dtype)
    weight = base_weight(case, dtype)
    exact = exact_product(case, *given, weight, extras.get("activation"), 0.5 if "residual" in extras else None)
    found = merged_product(case, given, weight, extras)
    eps = torch.finfo(dtype).eps
    bound = eps * exact.abs() + (4e-6 if dtype == torch.float32 else eps) * exact.abs().max()
    assert bool(((found.double() - exact).abs() <= bound).all())


def test_counters_of_one_token_only_grow() -> None:
    """They are never reset: a call finds its own number, whatever there was before."""
    case = LoraCase((1,), k=1100, norm=True, widths=(8, 8))
    given = make_case(case, torch.float32)
    weight = base_weight(case, torch.float32)
    assert torch.equal(merged_product(case, given, weight, {}), merged_product(case, given, weight, {}))
    # 16 programs wait, each in another group, and 4 multiply by A
    assert given[2].counters[:, 0].tolist() == [2 * row_product._CALL.value] * 17 + [0] * 48
    given[1].mul_(2.0)
    exact = exact_product(case, *given, weight, None, None)
    torch.testing.assert_close(merged_product(case, given, weight, {}).double(), exact, rtol=1e-5, atol=1e-5)


def test_ranges_of_columns_are_short() -> None:
    assert [row_product.shrink_splits(k) for k in (96, 1024, 4096, 14336)] == [1, 2, 8, 32]
