"""`hopper.backward.wide`, compiled for sm90 without a GPU: the intended instructions are there, and no loop spills."""

from __future__ import annotations

import re

import pytest
import torch
from cross_compile import Kernel, compiling_for, main_loops
from sampled_cases import each_nth

from fa_serve.backends.calls import AttentionOptions, BackwardTensors
from fa_serve.backends.hopper.backward.plan import plan_hopper_backward
from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig
from fa_serve.backends.hopper.backward.types import (
    CONSUMER_REGISTERS,
    LAUNCH_REGISTERS,
    PRODUCER_REGISTERS,
    BackwardNumbers,
)
from fa_serve.backends.hopper.backward.wide.kernel import wide_attention_backward
from fa_serve.testing import cu_seqlens

CAUSAL = (-1, 0)
SHARED = BackwardTileConfig(64, 2, shares_dq=True)
MOST_SHARED_BYTES = 232_448


def compile_wide(
    dims: tuple[int, int],
    window: tuple[int, int] = CAUSAL,
    *,
    packed: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    softcap: float = 0.0,
    tiles: BackwardTileConfig | None = None,
) -> Kernel:
    head_dim, head_dim_v = dims
    shapes = ((4, head_dim), (2, head_dim), (2, head_dim_v), (4, head_dim_v))
    q, k, v, dout = (torch.zeros(1, 2048, *shape, dtype=dtype) for shape in shapes)
    lse = torch.zeros(1, 4, 2048)
    ends = None
    if packed:
        q, k, v, dout, lse = (x[0] for x in (q, k, v, dout, lse))
        ends = cu_seqlens([2048])
    tensors = BackwardTensors(q, k, v, None, None, ends, ends, dout, lse, dout)
    options = AttentionOptions(0.1, window, softcap, 2048, 2048, return_lse=True)
    with compiling_for("sm90") as kernels:
        plan_hopper_backward(tensors, options, tiles)(tensors)
    statistics, kernel, conversion = kernels
    assert (statistics.name, kernel.name, conversion.name) == ("attn_bwd_delta", "wide_attention_backward", "_convert_dq")
    assert statistics.spill_bytes == conversion.spill_bytes == 0
    return kernel


def test_the_numbers_are_the_kernels_parameters() -> None:
    assert tuple(wide_attention_backward.arg_names[17:-1]) == BackwardNumbers._fields


# The bytes per thread that are spilled hold numbers of the tile before and behind the loops.
CASES = [
    pytest.param({"dims": (256, 256), "packed": True}, 32, id="d256-causal-packed"),
    pytest.param({"dims": (256, 256), "window": (100, 0), "softcap": 30.0, "dtype": torch.float16}, 32, id="d256-softcap"),
    pytest.param({"dims": (192, 192)}, 8, id="d192-causal"),
    pytest.param({"dims": (192, 128), "packed": True}, 0, id="d192-dv128-packed"),
    pytest.param({"dims": (192, 192), "tiles": SHARED}, 0, id="d192-causal-shares-dq"),
]


@pytest.mark.parametrize(("options", "spilled"), each_nth(2, CASES))
def test_compiles_to_the_intended_instructions(options: dict, spilled: int) -> None:
    kernel = compile_wide(**options)
    found = kernel.instructions
    assert found["UTMALDG"] > 0, "Q, K, V, dO and the statistics must come through the copy engine"
    assert found["UTMASTG"] > 0, "dK and dV must leave through the copy engine"
    assert found["HMMA"] == 0
    assert kernel.spill_bytes <= spilled
    assert kernel.wgmma_faults == []
    assert kernel.registers <= LAUNCH_REGISTERS
    assert kernel.shared_bytes <= MOST_SHARED_BYTES
    handed_out = {int(n, 16) for n in re.findall(r"USETMAXREG\S*\s+(?:\S+,\s*)?(0x[0-9a-f]+)", kernel.sass)}
    assert {CONSUMER_REGISTERS.value, PRODUCER_REGISTERS.value} <= handed_out
    shares = options.get("tiles") is SHARED
    second = 64 if options["dims"][0] == 192 else 128
    second_value = 0 if options["dims"][1] == 128 else second
    values = 1 + (second_value > 0)
    # a product with a square of 64 rows has 4 instructions for each part of the columns, and scores one for each 16 columns
    (scores,) = main_loops(kernel.sass, 32)
    _check_loop(scores, (128 + second) // 16 + 4 * values + 4 * shares, 16 * shares)
    additions = second // 8 + 16 * (not shares)
    (gradients,) = main_loops(kernel.sass, additions, "REDG.E.ADD.F32x4")
    _check_loop(gradients, (128 + second_value) // 16 + 8 + 4 + 4 * (not shares), additions)


def _check_loop(loop: list[str], products: int, additions: int) -> None:
    """A thread adds its numbers of dQ, 4 at a time; P or dS goes to shared memory by matrices; nothing is spilled."""
    assert sum("HGMMA" in line for line in loop) == products
    assert sum("REDG.E.ADD.F32x4" in line for line in loop) == additions
    assert sum(line.startswith("STSM") for line in loop) == 4
    assert not [line for line in loop if line.startswith(("STL", "LDL"))]
