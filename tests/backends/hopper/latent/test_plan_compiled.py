"""The Hopper kernel of latent attention compiles for sm90 within the budgets stated here, and its products overlap."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cross_compile import SHARED_BYTES, Kernel, compiling_for, main_loops
from sampled_cases import each_nth

from fa_serve.backends.hopper.latent import plan as latent_decode
from fa_serve.backends.hopper.latent.plan import plan_latent_decode
from fa_serve.testing import run_plan

SPILL_BUDGET = 8  # bytes per thread, none of them in a loop over keys


@dataclass(frozen=True)
class Shape:
    heads: int = 128
    rank: int = 512
    rope: int = 64
    dtype: torch.dtype = torch.bfloat16
    max_seqlen_q: int = 1
    page_size: int = 16
    num_splits: int = 0
    gap: int = 0  # between query heads

    def __str__(self) -> str:
        sizes = f"H{self.heads}-R{self.rank}-{self.rope}-Q{self.max_seqlen_q}-P{self.page_size}-S{self.num_splits}-G{self.gap}"
        return f"{sizes}-{str(self.dtype)[6:]}"


SHAPES = [
    Shape(),
    Shape(heads=64, dtype=torch.float16),
    Shape(heads=40, max_seqlen_q=4, page_size=64),
    Shape(heads=128, max_seqlen_q=16, page_size=48),
    Shape(num_splits=4),
    Shape(heads=32, rank=256, rope=32),
    Shape(heads=32, rank=256, rope=48, gap=1),
]


@pytest.fixture(autouse=True)
def many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_decode, "multiprocessors", lambda device, otherwise: 132)


def compile_latent_decode(shape: Shape) -> list[Kernel]:
    batch = 3
    q = torch.zeros(batch * shape.max_seqlen_q, shape.heads, shape.gap + shape.rank + shape.rope, dtype=shape.dtype)
    cache = torch.zeros(4, shape.page_size, 1, shape.rank + shape.rope, dtype=shape.dtype)
    with compiling_for("sm90") as kernels:
        run_plan(
            plan_latent_decode,
            q[..., shape.gap :],
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
            return_lse=True,
        )
    return kernels


@pytest.mark.parametrize("shape", each_nth(2, SHAPES), ids=str)
def test_registers_and_shared_memory_suffice(shape: Shape) -> None:
    kernel, combine = compile_latent_decode(shape)
    assert (kernel.name, combine.name) == ("attn_latent_hopper", "_combine")
    budget = SPILL_BUDGET if shape.max_seqlen_q > 1 or shape.num_splits else 0
    assert kernel.spill_bytes <= budget, f"spills {kernel.spill_bytes} bytes per thread"
    assert kernel.shared_bytes <= SHARED_BYTES["sm90"]
    assert kernel.instructions["HMMA"] == 0
    assert kernel.wgmma_faults == []
    assert kernel.programmatic == ["wait", "launch_dependents"], "_combine reads lengths before it waits"
    pages = 2 if shape.page_size % 32 else 1
    assert kernel.instructions["UTMALDG"] == pages * (shape.rank + 64) // 64


def test_scores_of_the_next_block_run_under_the_softmax() -> None:
    """All products of S are issued before the first exponential, and are waited for after the last one.

    P C is issued by other warpgroups, so S is issued without a wait for it. A thread computes 16 exponentials of scores and
    those of the factors of its two rows.
    """
    kernel = compile_latent_decode(Shape())[0]
    [loop] = main_loops(kernel.sass, 16 + 2)
    products = [i for i, line in enumerate(loop) if "HGMMA" in line]
    exponentials = [i for i, line in enumerate(loop) if "MUFU.EX2" in line]
    waits = [i for i, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
    assert len(products) == 576 // 16
    assert len(waits) == 1
    assert products[-1] < exponentials[0]
    assert exponentials[-1] < waits[0]
    assert len(loop) < 430
    assert not [line for line in loop if "LDL" in line or "STL" in line]


def test_the_warpgroups_of_values_wait_once_for_a_block() -> None:
    """Each issues 4 products of 64 x 128 x 16 for a block of 32 keys, and nothing is serialised."""
    kernel = compile_latent_decode(Shape())[0]
    loops = [loop for loop in main_loops(kernel.sass, 0) if any("HGMMA.64x128x16" in line for line in loop)]
    assert len(loops) == 2
    for loop in loops:
        assert sum("HGMMA" in line for line in loop) == 4
        assert sum("WARPGROUP.DEPBAR" in line for line in loop) == 1
        assert sum("FMUL" in line for line in loop) == 128  # of which none is executed while no maximum grows
        assert not [line for line in loop if "LDL" in line or "STL" in line]
    assert kernel.instructions["WARPGROUP.DEPBAR"] == 4
