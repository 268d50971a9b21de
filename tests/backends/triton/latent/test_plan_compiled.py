"""Latent attention compiles for every target, from the launcher's own arguments, within the budgets stated here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cross_compile import SHARED_BYTES, TARGETS, Kernel, compiling_for
from sampled_cases import each_nth

from fa_serve.backends.triton.latent import plan as latent
from fa_serve.backends.triton.latent.plan import plan_latent
from fa_serve.testing import run_plan

SPILL_BUDGET = {"sm90": 376, "gfx942": 76}  # bytes per thread, none of them written in the inner loop; gfx942 in float32
FLOAT8_SPILL_BUDGET = {"sm89": 88, "sm90": 352, "sm100": 80}  # with a float8 cache
RELOADS = 7  # numbers that 64 rows read back in an inner loop of 900 instructions on sm90, because nothing changes them


@dataclass(frozen=True)
class Shape:
    heads: int = 128
    rank: int = 512
    rope: int = 64
    dtype: torch.dtype = torch.bfloat16
    float8: bool = False
    max_seqlen_q: int = 1
    page_size: int = 16
    num_splits: int = 0
    decodes: bool = True

    def __str__(self) -> str:
        kind = "decode" if self.decodes else "prompt"
        dtype = str(self.dtype)[6:] + "-float8" * self.float8
        return f"{kind}-H{self.heads}-R{self.rank}-Q{self.max_seqlen_q}-P{self.page_size}-{dtype}"


OTHERS = [
    ("sm80", Shape(heads=16, rank=256, rope=32, dtype=torch.float16, max_seqlen_q=2)),
    ("sm86", Shape(max_seqlen_q=256, decodes=False)),
    ("sm90", Shape(max_seqlen_q=256, decodes=False)),
    ("sm90", Shape(page_size=64, num_splits=4)),
    ("sm90", Shape(heads=20)),
    ("sm89", Shape(float8=True)),
    ("sm90", Shape(float8=True)),
    ("sm100", Shape(float8=True)),
    ("gfx942", Shape(heads=16, dtype=torch.float32)),
]


@pytest.fixture(autouse=True)
def many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "multiprocessors", lambda device, otherwise: 132)


def compile_latent(target: str, shape: Shape) -> list[Kernel]:
    batch = 3
    dtype = torch.float8_e4m3fn if shape.float8 else shape.dtype
    cache = torch.zeros(4, shape.page_size, 1, shape.rank + shape.rope, dtype=dtype)
    descale = torch.ones(1) if shape.float8 else None
    with compiling_for(target) as kernels:
        run_plan(
            lambda tensors, options: plan_latent(tensors, options, decodes=shape.decodes),
            torch.zeros(batch * shape.max_seqlen_q, shape.heads, shape.rank + shape.rope, dtype=shape.dtype),
            cache,
            cache[..., : shape.rank],
            k_descale=descale,
            v_descale=descale,
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


@pytest.mark.parametrize(("target", "shape"), each_nth(3, [*((target, Shape()) for target in TARGETS), *OTHERS]), ids=str)
def test_latent(target: str, shape: Shape) -> None:
    """What a split needs once may spill: the rows of its result are written to one of two places."""
    kernels = compile_latent(target, shape)
    assert [kernel.name for kernel in kernels] == ["attn_latent", "_combine"][: 1 + shape.decodes]
    budget = FLOAT8_SPILL_BUDGET if shape.float8 else SPILL_BUDGET
    for kernel in kernels:
        assert kernel.spill_bytes <= budget.get(target, 0), f"{kernel.name} spills {kernel.spill_bytes} bytes per thread"
        assert kernel.shared_bytes <= SHARED_BYTES[target], f"{kernel.name} wants {kernel.shared_bytes} bytes"
        if kernel.spill_bytes and target != "gfx942":
            reloads = RELOADS if target == "sm90" and not shape.float8 else 0
            assert kernel.hot_loop["STL"] == 0, f"{kernel.name} spills in its inner loop"
            assert kernel.hot_loop["LDL"] <= reloads, (
                f"{kernel.name} reads {kernel.hot_loop['LDL']} spilled registers in its loop"
            )


def test_hopper_multiplies_from_shared_memory_and_copies_ahead() -> None:
    """Both products are wgmma, and a block of 64 keys of 576 numbers is copied by 16 bytes at a time while another is used."""
    kernel = compile_latent("sm90", Shape())[0]
    assert kernel.hot_loop["HGMMA"] > 0
    assert kernel.hot_loop["LDGSTS"] == 64 * 576 * 2 // (256 * 16)
    assert kernel.programmatic == ["wait", "launch_dependents"], "_combine reads lengths before it waits"
    assert "prefetch.global.L2" in kernel.binary.asm["ptx"]


def test_slices_of_columns_take_few_addresses() -> None:
    """389 instructions for a block of 64 keys; with all columns in one slice it takes 724."""
    kernel = compile_latent("sm90", Shape(heads=16))[0]
    assert kernel.spill_bytes == 0
    assert kernel.hot_loop["LDGSTS"] == 64 * 576 * 2 // (256 * 16)
    assert kernel.hot_loop.total() < 450
