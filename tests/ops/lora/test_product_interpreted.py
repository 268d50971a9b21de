"""Products with their adapters in two launches, in Triton's interpreter, against float64 token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lora_cases import LoraCase, base_weight, choose_ahead, exact_product, make_case, merged_product
from peft import LoraConfig
from peft.tuners.lora import Linear
from rounded_once import dtype_id
from torch import nn

from fa_serve.ops.lora import product, run
from fa_serve.ops.triton_ops import TritonOps

DTYPES = [torch.float32, torch.float16]  # the interpreter's products take no bfloat16
CASES = [
    pytest.param(LoraCase((0, 1, -1, 2, 1, 0, 0)), {}, id="mixed"),
    pytest.param(LoraCase((1, 0, -1), k=1100, norm=True), {}, id="norm, several splits"),
    pytest.param(LoraCase((-1, 0, 2, 2), dora=True, bias=True, widths=(40,)), {"residual": True}, id="everything"),
    pytest.param(LoraCase((1,) * 35 + (0,) * 3 + (-1,) * 20, widths=(72, 72)), {"activation": "silu"}, id="gate of two parts"),
    pytest.param(LoraCase((2, -1), widths=(144,), bias=True), {"activation": "gelu_tanh"}, id="gate of one part"),
    pytest.param(LoraCase(tuple(range(35)), ranks=(4,) * 35, widths=(24, 40)), {}, id="many adapters"),
    pytest.param(LoraCase((1, -1, 0, 2), widths=(140, 9, 3, 5), bias=True), {}, id="four parts"),
]


@pytest.fixture(autouse=True)
def merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MERGED_PRODUCTS", run.EVERY_PRODUCT)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(("case", "extras"), CASES)
def test_products_have_their_adapters(case: LoraCase, extras: dict[str, Any], dtype: torch.dtype) -> None:
    given = make_case(case, dtype)
    weight = base_weight(case, dtype)
    exact = exact_product(case, *given, weight, extras.get("activation"), 0.5 if "residual" in extras else None)
    found = merged_product(case, given, weight, extras)
    # tensor cores take x A^T, and a normalised x, rounded to the dtype of the weights
    eps = torch.finfo(dtype).eps
    bound = eps * exact.abs() + (4e-6 if dtype == torch.float32 else 2 * eps) * exact.abs().max()
    assert bool(((found.double() - exact).abs() <= bound).all())


def differs(case: LoraCase, change: Any) -> bool:
    """Whether a planted fault changes a result by more than rounding."""
    given = make_case(case, torch.float32)
    weight = base_weight(case, torch.float32)
    right = merged_product(case, given, weight, {})
    y, x, weights, batch, norm, bias = given
    wrong = merged_product(case, (y, x, *change(weights, batch), norm, bias), weight, {})
    return not torch.allclose(right, wrong, rtol=1e-3, atol=1e-3)


def test_planted_faults_are_seen() -> None:
    case = LoraCase((0, 1, -1, 2, 1), plain=(0, 9), widths=(40,))
    assert not differs(case, lambda weights, batch: (weights, batch))
    assert differs(case, lambda weights, batch: (weights._replace(scales=torch.ones_like(weights.scales)), batch)), "alpha"
    assert differs(case, lambda weights, batch: (weights, batch._replace(pages=batch.pages.roll(1, 0)))), "a stale slot"
    assert differs(case, lambda weights, batch: (weights, batch._replace(rows=batch.rows.flip(0)))), "a wrong segment"
    assert differs(case, lambda weights, batch: (weights, batch._replace(slots=batch.slots.roll(1)))), "a wrong slot of a row"


def test_sums_are_split_while_all_programs_are_on_the_gpu() -> None:
    def tile(n: int, k: int, tokens: int = 64, itemsize: int = 2, arch: int = 90) -> tuple[int, ...]:
        found = product.choose_product_tile(tokens, n, k, itemsize, 132, arch)
        return found.block_m, found.block_n, found.num_stages, found.splits

    assert [tile(6144, 4096), tile(4096, 4096), tile(4096, 14336)] == [(64, 128, 4, 4)] * 3
    assert tile(28672, 4096) == (64, 128, 4, 1)
    assert tile(28672, 4096, arch=80) == (64, 64, 4, 1)
    assert tile(1024, 2048) == (64, 64, 4, 8)
    assert tile(1024, 256) == (64, 64, 4, 1)
    assert tile(4096, 4096, tokens=65) == (128, 128, 3, 4)
    assert tile(4096, 4096, tokens=9, itemsize=4) == (16, 32, 2, 1)


@pytest.mark.parametrize("rank", [16, 40, 256])
@pytest.mark.parametrize("tokens", [1, 5])
def test_results_are_those_of_peft(rank: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear layer of peft with a random adapter, by each way."""
    case = LoraCase((1,) * tokens, ranks=(4, rank), widths=(48,), plain=(0, 1))
    _, x, weights, batch, _, _ = make_case(case, torch.float32)
    weight = base_weight(case, torch.float32)
    layer = nn.Linear(case.k, 48, bias=False)
    layer.weight.data = weight
    adapted = Linear(layer, "a", LoraConfig(r=rank, lora_alpha=8), r=rank, lora_alpha=8)
    pages = batch.pages[1, : rank // 16 + (rank % 16 > 0)].long()
    adapted.lora_A["a"].weight.data = weights.a[pages, 0].flatten(0, 1)[:rank]
    adapted.lora_B["a"].weight.data = weights.b[pages].flatten(0, 1)[:rank].t()
    weights.scales[1, 0] = 8 / rank
    with torch.no_grad():
        expected = adapted(x)
    for merged, ahead in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(run, "MERGED_PRODUCTS", run.EVERY_PRODUCT if merged else frozenset())
        choose_ahead(monkeypatch, ahead)
        found = TritonOps().linear_lora(x, weight, None, weights, batch, None, None, None, 1.0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
