"""`hopper.float8_probabilities`, compiled for sm90 without a GPU: P takes few instructions on its way through integers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from cross_compile import compiling_for, main_loops

from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import hopper_float8_tiles


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=["full", "causal"])
def test_packing_takes_one_instruction_a_register_beside_the_rounding(dim: int, window: tuple[int, int]) -> None:
    tensors = AttentionTensors(*(torch.zeros(1, 4096, 2, dim, dtype=torch.bfloat16) for _ in range(3)))
    options = AttentionOptions(0.1, window, 0.0, 4096, 4096, return_lse=False, precision="fp8")
    with compiling_for("sm90") as kernels:
        plan_hopper_forward(tensors, options)(tensors)
    kernel = kernels[-1]
    scores = 64 * hopper_float8_tiles(dim, dim).block_n // 128
    loops = main_loops(kernel.sass, scores + 2)
    assert len(loops) == 2
    for loop in loops:
        found = Counter(instruction.split()[0].split(".")[0] for instruction in loop)
        assert found["F2FP"] == scores // 2
        assert found["PRMT"] <= scores // 4
        assert found["QGMMA"] > 0
    assert not [line for line in kernel.ptxas_warnings if "C7513" in line], "products are serialised"
