"""`hopper.forward_output`: faults in its source must show in the emulator; `test_forward` shows that it is right."""

from __future__ import annotations

import pytest
from hopper_cases import DYNAMIC, Case, run_dense
from hopper_emulator import EmulationError

from fa_serve.backends.hopper.forward.tiles import HopperTiles

WHOLE = HopperTiles(2, 64, 2, 2, DYNAMIC, pingpong=True)
HALVES = HopperTiles(2, 64, 2, 1, DYNAMIC, o_parts=2)
FAULTS = {
    "queries released before O has left their buffer": (WHOLE, {"    tma.store_wait(0)\n    sync_threads()\n": ""}),
    "a half of O overwritten before it has left": (HALVES, {"    tma.store_wait(0)\n    sync_threads()\n": ""}),
    "both halves of O in the same columns": (
        HALVES,
        {"copy_output(right, origin, length, row, head, WIDTH, ": "copy_output(right, origin, length, row, head, 0, "},
    ),
    "O that is not divided by its sum": (
        WHOLE,
        {"inverse = gl.where(empty, 0.0, 1.0 / total)": "inverse = gl.where(empty, 0.0, 1.0)"},
    ),
    "lse without its logarithm": (WHOLE, {"logarithm = gl.log2(total)": "logarithm = total"}),
    "the rows of the first warpgroup": (
        WHOLE,
        {"    row = tile.row + 64 * group // var.pack_gqa\n    if": "    row = tile.row\n    if"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    tiles, edits = FAULTS[fault]
    case = Case("", scale=3.0, seqlen_q=500, seqlen_k=500, tiles=tiles, head_dim=(128, 128) if tiles is HALVES else (64, 64))

    def run_with_several_seeds() -> None:
        for seed in range(40):  # a race is not lost every time
            run_dense(case, seed=seed, faults=edits)

    with pytest.raises((EmulationError, AssertionError)):
        run_with_several_seeds()
