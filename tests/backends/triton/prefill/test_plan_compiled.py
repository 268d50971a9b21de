"""Every portable kernel compiles for every target, from the launcher's own arguments, within a stated budget of spills."""

from __future__ import annotations

import pytest
import torch
from cross_compile import SHARED_BYTES, UNLIKE, compiling_for, with_targets
from sampled_cases import each_nth

from fa_serve.backends.triton.prefill.plan import plan_forward
from fa_serve.testing import cu_seqlens, make_qkv, run_plan

# bytes per thread; whatever is not named here may not spill at all
SPILL_BUDGET = {
    # zeroing the tail of V needs 40 bytes; the tile that needs none, 32 keys wide, is 8% slower (427 against 466 TFLOPS at 2k)
    ("sm90", "varlen", 256): 48,
    ("sm90", "paged", 512): 64,  # none of them in the loop over keys
    ("sm90", "dense", 512): 8,  # in float32, as on sm120; in 16 bits none
    ("sm120", "dense", 512): 8,
}

CAUSAL = {"window_size": (-1, 0)}
EVERYTHING = {"window_size": (64, 0), "softcap": 30.0, "sinks": True}
DENSE = {
    "D64-causal": (64, 64, torch.bfloat16, CAUSAL),
    "D96-causal": (96, 96, torch.bfloat16, CAUSAL),
    "D128-causal": (128, 128, torch.bfloat16, CAUSAL),
    "D192-128-causal": (192, 128, torch.bfloat16, CAUSAL),
    "D256-causal": (256, 256, torch.bfloat16, CAUSAL),
    "D512-causal": (512, 512, torch.bfloat16, CAUSAL),
    "D64-everything": (64, 64, torch.float16, EVERYTHING),
    "D128-everything": (128, 128, torch.float16, EVERYTHING),
    "D256-everything": (256, 256, torch.float16, EVERYTHING),
    "D512-everything": (512, 512, torch.float16, EVERYTHING),
}
LAYOUTS = [(dim, layout) for dim in (64, 128, 256, 512) for layout in ("varlen", "paged")]


def _launch(dim: int, dim_v: int, dtype: torch.dtype, layout: str = "dense", **options: object) -> None:
    q, k, v = make_qkv(2, 256, 256, 8, 2, dim, dim_v, dtype=dtype)
    case = {"softmax_scale": 0.1, "window_size": (-1, -1), "softcap": 0.0, "sinks": None, "out": None, "return_lse": True}
    case |= options
    if case["sinks"]:
        case["sinks"] = torch.zeros(8)
    if layout == "dense":
        run_plan(plan_forward, q, k, v, **case)
        return
    cu = cu_seqlens([256, 256])
    if layout == "varlen":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        run_plan(plan_forward, q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=256, max_seqlen_k=256, **case)
        return
    table = torch.zeros(2, 16, dtype=torch.int32)
    k, v = (x.reshape(32, 16, 2, -1).transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    q = q.flatten(0, 1)
    lengths = torch.full((2,), 256, dtype=torch.int32)
    run_plan(
        plan_forward, q, k, v, cu_seqlens_q=cu, block_table=table, seqused_k=lengths, max_seqlen_q=256, max_seqlen_k=256, **case
    )


@pytest.mark.parametrize(
    ("name", "target"), with_targets(each_nth(2, list(DENSE)), ["D128-causal", "D512-causal", "D128-everything"])
)
def test_dense(name: str, target: str) -> None:
    dim, dim_v, dtype, options = DENSE[name]
    _expect(target, dim, dim_v, dtype, **options)


@pytest.mark.parametrize(("case", "target"), with_targets(each_nth(3, LAYOUTS), [(128, "paged"), (512, "varlen")]), ids=str)
def test_layouts(case: tuple[int, str], target: str) -> None:
    dim, layout = case
    _expect(target, dim, dim, torch.bfloat16, layout, window_size=(-1, 0))


@pytest.mark.parametrize("target", UNLIKE)
@pytest.mark.parametrize("mask", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 512])
def test_masks(dim: int, mask: torch.dtype, target: str) -> None:
    _expect(target, dim, dim, torch.bfloat16, mask=torch.ones(2, 1, 1, 256, dtype=mask))


@pytest.mark.parametrize("target", UNLIKE)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_float32(dim: int, target: str) -> None:
    _expect(target, dim, dim, torch.float32)


def test_hopper_gets_tma_and_wgmma() -> None:
    with compiling_for("sm90") as kernels:
        _launch(128, 128, torch.bfloat16)
    assert kernels[0].instructions["HGMMA"] > 0
    assert kernels[0].instructions["UTMALDG"] > 0
    assert kernels[0].instructions["LDL"] == 0


def _expect(target: str, dim: int, dim_v: int, dtype: torch.dtype, layout: str = "dense", **options: object) -> None:
    with compiling_for(target) as kernels:
        _launch(dim, dim_v, dtype, layout, **options)
    assert [kernel.name for kernel in kernels] == ["attn_fwd"]
    assert kernels[0].spill_bytes <= SPILL_BUDGET.get((target, layout, dim), 0)
    assert kernels[0].shared_bytes <= SHARED_BYTES[target]
