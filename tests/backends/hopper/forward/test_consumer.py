"""`hopper.consumer`: faults that are planted in its source must show in the emulator; `test_forward` shows that it is right."""

from __future__ import annotations

import pytest
from hopper_cases import DYNAMIC, Case, run_dense
from hopper_emulator import EmulationError

from fa_serve.backends.hopper.forward.tiles import HopperTiles

RELEASE_K = "    mbarrier.arrive(bars.k_empty.index(block_count % var.tiles.stages), count=1)\n"
RELEASE_V = "    mbarrier.arrive(bars.v_empty.index((block_count - 1) % var.tiles.stages), count=1)"
ISSUE_V = "o_token = _issue_values(p, acc, state.alpha, block_count - 1, smem, bars, var)\n"
WAIT_V = "        acc = _wait_values(0, o_token, acc, alpha, var)"
FAULTS = {
    "V released before its product is done": {
        ISSUE_V + "        _pass_turn": ISSUE_V + "    " + RELEASE_V + "\n        _pass_turn",
        WAIT_V + "\n" + RELEASE_V: WAIT_V,
    },
    "K released before its product is done": {
        "    _take_turn(group, var)\n    if": "    _take_turn(group, var)\n" + RELEASE_K + "    if",
        RELEASE_K + "    p, state": "    p, state",
    },
    "no mask": {"keep = columns < gl.expand_dims(limits.last, 1)": "keep = columns >= 0"},
    "a mask that begins one block late": {"crosses = (block >= limits.high)": "crosses = (block > limits.high)"},
    "the output of the wrong tile": {"_finish_tile(acc, state, folded, tile, ": "_finish_tile(acc, state, folded, upcoming, "},
    "O relative to an old maximum": {"    if not var.tiles.rescale_late and": "    if False and"},
    "late: O relative to an old maximum": {"    if var.tiles.rescale_late:": "    if False:"},
    "a sum relative to an old maximum": {"state.l * gl.expand_dims(rescale, 1)": "state.l"},
    "a turn that is never passed": {"    if group == var.tiles.groups - 1:\n        _pass_turn(group, var)\n": ""},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    tiles = HopperTiles(2, 64, 2, 2, DYNAMIC, pingpong=True, rescale_late="late" in fault)
    case = Case("", scale=3.0, seqlen_q=500, seqlen_k=500, tiles=tiles)

    def run_with_several_seeds() -> None:
        for seed in range(40):  # a race is not lost every time
            run_dense(case, seed=seed, faults=FAULTS[fault])

    with pytest.raises((EmulationError, AssertionError)):
        run_with_several_seeds()
