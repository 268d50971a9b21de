"""Float8 products of the Hopper kernel, compiled for sm90 without a GPU: the intended instructions and no spills."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from cross_compile import compiling_for, main_loops
from sampled_cases import each_nth

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import SHARED_BYTES, hopper_float8_tiles
from fa_serve.spec import Precision
from fa_serve.testing import cu_seqlens

CAUSAL = (-1, 0)
FULL = (-1, -1)
# Bytes per thread, for values that are read once per tile
SPILL_BUDGET = 104


@pytest.mark.parametrize(
    ("dim", "precision", "window", "form"),
    each_nth(
        3,
        [
            (64, "fp8", CAUSAL, "dense"),
            (128, "fp8", FULL, "dense"),
            (128, "fp8", CAUSAL, "packed"),
            (128, "qk8", CAUSAL, "dense"),
            (256, "qk8", FULL, "packed"),
            (128, "fp8", CAUSAL, "paged"),
            (64, "qk8", (500, 0), "paged"),
            (128, "fp8", CAUSAL, "float8 pages"),
            (256, "qk8", CAUSAL, "float8 pages"),
        ],
    ),
)
def test_compiles_to_the_intended_instructions(dim: int, precision: Precision, window: tuple[int, int], form: str) -> None:
    q, k, v = (torch.zeros(1, 2048, heads, dim, dtype=torch.bfloat16) for heads in (4, 2, 2))
    tensors = AttentionTensors(q, k, v)
    cu = cu_seqlens([2048])
    if form == "packed":
        tensors = AttentionTensors(q[0], k[0], v[0], cu_seqlens_q=cu, keys=cu)
    elif form != "dense":
        k, v = (x.view(128, 2, 16, dim).transpose(1, 2) for x in (k, v))
        table = torch.arange(128, dtype=torch.int32)[None]
        tensors = AttentionTensors(q[0], k, v, cu_seqlens_q=cu, keys=cu[1:], block_table=table)
        if form == "float8 pages":
            descale = torch.ones(2)
            tensors = tensors._replace(
                k=k.to(torch.float8_e4m3fn), v=v.to(torch.float8_e4m3fn), k_descale=descale, v_descale=descale
            )
    options = AttentionOptions(0.1, window, 0.0, 2048, 2048, return_lse=True, precision=precision)
    with compiling_for("sm90") as kernels:
        plan_hopper_forward(tensors, options)(tensors)
    *_, quantize, attend = kernels
    assert quantize.name == "_quantize_inputs"
    assert quantize.spill_bytes == 0
    assert quantize.instructions["HGMMA"] > 0
    float8 = len(re.findall(r"\bQGMMA", attend.sass))
    assert float8 > 0
    assert (attend.instructions["HGMMA"] > 0) == (precision == "qk8"), "only the product with V has 16 bits"
    assert attend.instructions["UTMALDG"] > 0
    assert attend.spill_bytes <= SPILL_BUDGET
    scores = 64 * hopper_float8_tiles(dim, dim).block_n // 128
    loops = main_loops(attend.sass, scores + 2)
    assert len(loops) == 2
    for loop in loops:
        found = Counter(instruction.split()[0].split(".")[0] for instruction in loop)
        assert found["STL"] == 0
        assert found["LDL"] <= 1, "a pointer to scales may be read from the stack"
    assert attend.wgmma_faults == []
    assert attend.shared_bytes <= SHARED_BYTES
    if precision == "fp8":
        assert len(re.findall(r"F2FP\.\S*E4M3", attend.sass)) > 0, "P is rounded to float8 by one instruction for two numbers"
