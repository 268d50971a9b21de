"""The kernels of adapters compile for every GPU, almost without spills, at the sizes of 8B models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cross_compile import SHARED_BYTES, TARGETS, compiling_for
from sampled_cases import each_nth

from fa_serve.ops import LoraBatch, LoraWeights, Norm
from fa_serve.ops.lora import row_product
from fa_serve.ops.lora.kernel import launch_add_lora
from fa_serve.ops.lora.problem import COUNTER_WORDS, LORA_COUNTERS
from fa_serve.ops.lora.product import launch_finish, launch_product
from fa_serve.ops.lora.row_product import launch_row
from fa_serve.ops.products.run import problem_of


def make(k: int, widths: tuple[int, ...], total: int, block_rows: int, dtype: torch.dtype) -> tuple[LoraWeights, LoraBatch]:
    n = sum(widths)
    slots = 4
    weights = LoraWeights(
        torch.zeros(1, len(widths), 16, k, dtype=dtype),
        torch.zeros(1, 16, n, dtype=dtype),
        *(torch.zeros(slots, 4, dtype=kind)[:, : len(widths)] for kind in (torch.float32, torch.int32, torch.int32)),
        torch.zeros(LORA_COUNTERS, COUNTER_WORDS, dtype=torch.int64),
        widths,
    )
    tiles = torch.zeros(-(-total // block_rows) + 4, 3, dtype=torch.int32)
    pages = torch.zeros(slots, 4, dtype=torch.int32)
    rows = torch.zeros(total, dtype=torch.int32)
    return weights, LoraBatch(rows, tiles, rows, pages, torch.zeros(slots, dtype=torch.int32), block_rows)


def launch(k: int, widths: tuple[int, ...], total: int, block_rows: int, dtype: torch.dtype, norm: bool = False) -> None:
    given = make(k, widths, total, block_rows, dtype)
    norms = Norm(torch.zeros(k, dtype=dtype), 1e-6) if norm else None
    launch_add_lora(torch.zeros(total, sum(widths), dtype=dtype), torch.zeros(total, k, dtype=dtype), *given, norms, None)


def multiply(k: int, widths: tuple[int, ...], total: int, dtype: torch.dtype, activation: str | None = None) -> None:
    given = make(k, widths, total, 16, dtype)
    n = sum(widths)
    residual = torch.zeros(total, n, dtype=dtype) if n == 4096 else None
    x = torch.zeros(total, k, dtype=dtype)
    weight = torch.zeros(n, k, dtype=dtype)
    if total == 1:
        norm = None if residual is not None else Norm(torch.zeros(k, dtype=dtype), 1e-6)
        launch_row(x, weight, None, *given, norm, activation, residual, 1.0)
    else:
        launch_product(x, weight, None, *given, activation, residual, 1.0)


@pytest.mark.parametrize("target", each_nth(3, list(TARGETS)))
def test_shrink_and_expand(target: str) -> None:
    with compiling_for(target) as kernels:
        launch(4096, (4096, 1024, 1024), 1, 16, torch.bfloat16, norm=True)
        launch(4096, (14336, 14336), 64, 16, torch.bfloat16)
        launch(14336, (4096,), 512, 64, torch.bfloat16)
        launch(4096, (4096,), 64, 16, torch.float16)
    assert [kernel.name for kernel in kernels] == ["_shrink", "_expand"] * 4
    # the loop over tiles costs `_expand` two registers more than there are, for gate and up alone
    spills = [kernel.spill_bytes for kernel in kernels]
    assert spills.pop(3) <= 8
    assert spills == [0] * 7
    assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", ["sm90"])
def test_float32_is_exact_and_launches_are_programmatic(target: str) -> None:
    with compiling_for(target) as kernels:
        launch(1024, (1024,), 16, 16, torch.float32)
    for kernel in kernels:
        assert kernel.programmatic == ["launch_dependents", "wait"]
        assert not kernel.instructions["HMMA"], "tensor cores would round float32"


@pytest.mark.parametrize("target", each_nth(3, list(TARGETS)))
def test_products_with_their_adapters(target: str) -> None:
    with compiling_for(target) as kernels:
        multiply(4096, (4096, 1024, 1024), 64, torch.bfloat16)
        multiply(4096, (14336, 14336), 128, torch.bfloat16, "silu")
        multiply(14336, (4096,), 16, torch.float16)
    assert [kernel.name for kernel in kernels] == ["_product_and_shrink", "_expand_and_finish"] * 3
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 6
    assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_BYTES[target]
    if target == "sm90":
        assert kernels[0].instructions["HGMMA"], "64 tokens are multiplied by warpgroups"
        assert kernels[0].instructions["LDGSTS"], "weights are loaded ahead"
        assert kernels[0].programmatic == ["launch_dependents", "wait"] * 2, "of A and of the weights"
        assert 2 * kernels[0].shared_bytes <= SHARED_BYTES[target], "two programs are on a multiprocessor"


@pytest.mark.parametrize("target", each_nth(3, list(TARGETS)))
def test_adapters_behind_a_product(target: str) -> None:
    with compiling_for(target) as kernels:
        for total, block_rows in ((64, 16), (512, 64)):
            gate_up = make(4096, (14336, 14336), total, block_rows, torch.bfloat16)
            down = make(14336, (4096,), total, block_rows, torch.bfloat16)
            hidden = torch.zeros(total, 4096, dtype=torch.bfloat16)
            norm = Norm(torch.zeros(4096, dtype=torch.bfloat16), 1e-6) if block_rows == 16 else None
            inner = torch.zeros(total, 14336, dtype=torch.bfloat16)
            launch_finish(lambda x: x.new_zeros(len(x), 28672), hidden, None, *gate_up, norm, "silu", None, 1.0)
            launch_finish(lambda x: x.new_zeros(len(x), 4096), inner, None, *down, None, None, hidden, 1.0)
    assert [kernel.name for kernel in kernels] == ["_shrink", "_expand_and_finish"] * 4
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 8
    assert max(kernel.shared_bytes for kernel in kernels) <= SHARED_BYTES[target]


@pytest.mark.parametrize("target", each_nth(3, list(TARGETS)))
def test_one_token_by_a_ahead(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_product, "SHRINKS_AHEAD", True)
    monkeypatch.setattr(row_product, "problem_of", lambda *given, **asked: replace(problem_of(*given, **asked), num_sms=132))
    with compiling_for(target) as kernels:
        multiply(4096, (4096, 1024, 1024), 1, torch.bfloat16)
        multiply(4096, (14336, 14336), 1, torch.bfloat16, "silu")
        multiply(14336, (4096,), 1, torch.float16)
    assert [kernel.name for kernel in kernels] == ["_shrink_token", "_adapted_row"] * 3
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 6
    if target == "sm90":
        assert [kernel.registers <= 168 for kernel in kernels] == [True] * 6, "3 programs are on a multiprocessor"
        assert "CCTL.E.PF2" in kernels[1].sass, "weights are requested ahead"
        assert all(kernel.programmatic == ["launch_dependents", "wait"] for kernel in kernels)


@pytest.mark.parametrize("target", each_nth(3, list(TARGETS)))
def test_one_token_with_its_adapter(target: str) -> None:
    with compiling_for(target) as kernels:
        multiply(4096, (4096, 1024, 1024), 1, torch.bfloat16)
        multiply(4096, (14336, 14336), 1, torch.bfloat16, "silu")
        multiply(14336, (4096,), 1, torch.float16)
    assert [kernel.name for kernel in kernels] == ["_adapted_row"] * 3
    assert [kernel.spill_bytes for kernel in kernels] == [0] * 3
