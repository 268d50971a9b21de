"""Latent attention compiles for every target, from the launcher's own arguments, within the budgets stated here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cross_compile import TARGETS, Kernel, compiling_for

from fa_serve.backends.triton import latent
from fa_serve.backends.triton.latent import plan_latent
from fa_serve.testing import run_plan

SHARED_BUDGET = {  # bytes one program may ask for
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm120": 99 << 10,
    "gfx942": 64 << 10,
}


@dataclass(frozen=True)
class Shape:
    heads: int = 128
    rank: int = 512
    rope: int = 64
    dtype: torch.dtype = torch.bfloat16
    max_seqlen_q: int = 1
    page_size: int = 16
    num_splits: int = 0
    decodes: bool = True

    def __str__(self) -> str:
        kind = "decode" if self.decodes else "prompt"
        return f"{kind}-H{self.heads}-R{self.rank}-Q{self.max_seqlen_q}-P{self.page_size}-{str(self.dtype)[6:]}"


EVERYWHERE = [Shape(), Shape(heads=16), Shape(max_seqlen_q=256, decodes=False), Shape(heads=16, dtype=torch.float32)]
ON_HOPPER = [
    Shape(heads=16, max_seqlen_q=2),
    Shape(heads=40, rank=256, rope=32, dtype=torch.float16),
    Shape(page_size=64, num_splits=4),
]


@pytest.fixture(autouse=True)
def many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "multiprocessors", lambda device, otherwise: 132)


def compile_latent(target: str, shape: Shape) -> list[Kernel]:
    batch = 3
    cache = torch.zeros(4, shape.page_size, 1, shape.rank + shape.rope, dtype=shape.dtype)
    with compiling_for(target) as kernels:
        run_plan(
            lambda tensors, options: plan_latent(tensors, options, decodes=shape.decodes),
            torch.zeros(batch * shape.max_seqlen_q, shape.heads, shape.rank + shape.rope, dtype=shape.dtype),
            cache,
            cache[..., : shape.rank],
            block_table=torch.zeros(batch, 64, dtype=torch.int32),
            seqused_k=torch.zeros(batch, dtype=torch.int32),
            cu_seqlens_q=torch.zeros(batch + 1, dtype=torch.int32),
            max_seqlen_q=shape.max_seqlen_q,
            max_seqlen_k=1024,
            softmax_scale=0.1,
            window_size=(-1, 0),
            softcap=0.0,
            num_splits=shape.num_splits,
            return_lse=False,
        )
    return kernels


def assert_within_budgets(kernels: list[Kernel], shape: Shape) -> None:
    assert [kernel.name for kernel in kernels] == ["_latent", "_combine"][: 1 + shape.decodes]
    for kernel in kernels:
        print(kernel.target, shape, kernel.name, kernel.spill_bytes, kernel.shared_bytes, kernel.registers)
    for kernel in kernels:
        assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes per thread"
        assert kernel.shared_bytes <= SHARED_BUDGET[kernel.target], f"{kernel.name} wants {kernel.shared_bytes} bytes"


@pytest.mark.parametrize("shape", EVERYWHERE, ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_latent(target: str, shape: Shape) -> None:
    assert_within_budgets(compile_latent(target, shape), shape)


@pytest.mark.parametrize("shape", ON_HOPPER, ids=str)
def test_latent_on_hopper(shape: Shape) -> None:
    assert_within_budgets(compile_latent("sm90", shape), shape)
