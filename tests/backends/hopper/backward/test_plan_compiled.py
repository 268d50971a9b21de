"""`hopper.backward`, compiled for sm90 without a GPU: the intended instructions are there, and little is spilled."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from cross_compile import Kernel, compiling_for, main_loops
from sampled_cases import each_nth

from fa_serve.backends.calls import AttentionOptions, BackwardTensors
from fa_serve.backends.hopper.backward.plan import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    BackwardNumbers,
    _attention_backward,
    plan_hopper_backward,
)
from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig, hopper_backward_tiles
from fa_serve.testing import cu_seqlens

CAUSAL = (-1, 0)
FULL = (-1, -1)


@cache
def compile_backward(
    head_dim: int,
    window: tuple[int, int],
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    seqlen: int = 2048,
    tiles: BackwardTileConfig | None = None,
) -> Kernel:
    q, dout = (torch.zeros(1, seqlen, 4, head_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.zeros(1, seqlen, 2, head_dim, dtype=dtype) for _ in range(2))
    lse = torch.zeros(1, 4, seqlen)
    ends = None
    if packed:
        q, k, v, dout, lse = (x[0] for x in (q, k, v, dout, lse))
        ends = cu_seqlens([seqlen])
    tensors = BackwardTensors(q, k, v, None, None, ends, ends, q, lse, dout)
    options = AttentionOptions(0.1, window, softcap, seqlen, seqlen, return_lse=True)
    with compiling_for("sm90") as kernels:
        plan_hopper_backward(tensors, options, tiles)(tensors)
    statistics, kernel, conversion = kernels
    assert (statistics.name, conversion.name) == ("attn_bwd_delta", "_convert_dq")
    assert statistics.spill_bytes == conversion.spill_bytes == 0
    return kernel


def test_the_numbers_are_the_kernels_parameters() -> None:
    assert tuple(_attention_backward.arg_names[11:-1]) == BackwardNumbers._fields


# Bytes per thread. They hold numbers of the tile and addresses; the accumulators of dK and dV and the scores stay in registers.
CASES = [
    pytest.param({"head_dim": 128, "window": CAUSAL, "packed": True}, 112, id="d128-causal-packed"),
    pytest.param({"head_dim": 64, "window": CAUSAL}, 80, id="d64-causal"),
    pytest.param(
        {"head_dim": 80, "window": FULL, "softcap": 30.0, "dtype": torch.float16},
        112,
        id="d80-softcap-float16",
    ),
]


@pytest.mark.parametrize(("options", "spilled"), each_nth(2, CASES))
def test_compiles_to_the_intended_instructions(options: dict, spilled: int) -> None:
    kernel = compile_backward(**options)
    tiles = options.get("tiles") or hopper_backward_tiles(128 if options["head_dim"] > 64 else 64)
    found = kernel.instructions
    assert found["UTMALDG"] > 0, "Q, K, V, dO and the statistics must come through the copy engine"
    assert found["UTMASTG"] > 0, "dK and dV must leave through the copy engine"
    assert found["HMMA"] == 0
    assert kernel.spill_bytes <= spilled
    assert kernel.wgmma_faults == []
    assert kernel.registers <= LAUNCH_REGISTERS
    assert kernel.shared_bytes <= 232_448
    handed_out = {int(n, 16) for n in re.findall(r"USETMAXREG\S*\s+(?:\S+,\s*)?(0x[0-9a-f]+)", kernel.sass)}
    assert {CONSUMER_REGISTERS.value, PRODUCER_REGISTERS.value} <= handed_out
    loops = main_loops(kernel.sass, 64 * tiles.block_m // 128)
    assert len(loops) == 2
    for loop in loops:
        assert sum("HGMMA" in line for line in loop) == 32
        # a thread adds its 32 numbers of a square, 4 at a time
        assert sum("REDG.E.ADD.F32x4" in line for line in loop) == 8
        assert sum(line.startswith("STSM") for line in loop) == tiles.block_m // 16, "dS goes to shared memory by matrices"


def test_one_machine_code_for_all_lengths() -> None:
    codes = {compile_backward(64, CAUSAL, seqlen=seqlen).binary.asm["cubin"] for seqlen in (2048, 2047)}
    assert len(codes) == 1
