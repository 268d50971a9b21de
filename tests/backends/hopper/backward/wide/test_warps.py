"""`hopper.backward.wide.warps`: faults that are planted in its source must show in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper_backward_cases import GradientCase, run_backward
from hopper_emulator import EmulationError

from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig

WAIT_DK = "        dk, dk1 = warpgroup_mma_wait(0, deps=[dk_token, dk1_token])\n"
RELEASE_Q = "        mbarrier.arrive(bars.q_empty.index(i % var.tiles.q_stages), count=1)\n"
ISSUE_DV = "        dv, dv1 = _issue_wide_dv(p, dv, dv1, i, smem, var)\n"
FINISH_DV = "        dv, dv1 = _finish_dv(dv, dv1, var)\n"
RELEASE_DO = "        mbarrier.arrive(bars.do_empty.index(i % var.tiles.do_stages), count=1)\n"
NEXT = "        m, head = next_block(m, head, tile)\n"
SLOT_WAIT = "    mbarrier.wait(bars.ds_full.index(slot), ((i // SLOTS_OF_SCORES) & 1) ^ 1)\n"
WEIGHTS_WAIT = "    mbarrier.wait(bars.weights_full.index(slot), (i // SLOTS_OF_SCORES) & 1)\n"
DV_LEAVES = "    # dV leaves through the buffer of V: wait until the other warpgroup has read it for dP\n"
DK_LEAVES = "    # dK leaves through the buffer of K: wait until the other warpgroup has read it for S and dQ\n"
BOTH_ARE_DONE = '    named_barrier("sync", FIRST_NAMED_BARRIER)\n'
FAULTS = {
    "Q released before dK is done": {WAIT_DK + RELEASE_Q: RELEASE_Q + "        tma.store_wait(0)\n" + WAIT_DK},
    "dO released before dV is done": {
        ISSUE_DV + FINISH_DV + RELEASE_DO + NEXT: ISSUE_DV + RELEASE_DO + "        tma.store_wait(0)\n" + FINISH_DV + NEXT
    },
    "one release of Q for both warpgroups": {
        "        mbarrier.init(q_empty.index(i), count=2)\n": "        q_empty.index(i).init(1)\n"
    },
    "P overwritten before dS is made of it": {SLOT_WAIT: ""},
    "P read before it is there": {WEIGHTS_WAIT: ""},
    "dV leaves through V while dP reads it": {
        DV_LEAVES + BOTH_ARE_DONE: "",
        DK_LEAVES + BOTH_ARE_DONE: "",
    },
    "dO copied before its stage is free": {"    mbarrier.wait(bars.do_empty.index(stage), ((i // STAGES) & 1) ^ 1)\n": ""},
    "a wrong phase of Q": {
        "    mbarrier.wait(bars.q_empty.index(stage), ((i // STAGES) & 1) ^ 1)\n    mbarrier.expect(full, 64 * (2 * (": (
            "    mbarrier.wait(bars.q_empty.index(stage), (i // STAGES) & 1)\n    mbarrier.expect(full, 64 * (2 * ("
        )
    },
    "dS without delta": {"weight * (dp - delta)": "weight * dp"},
    "a part of dQ at the place of the other": {"64 * FIRST_PART * part, dq)": "64 * FIRST_PART * (1 - part), dq)"},
    "the second part of Q from the first columns": {
        "row, head, FIRST_PART, full, smem.q1.index(stage)": "row, head, 0, full, smem.q1.index(stage)"
    },
    "dK1 without its scale": {"dk1 = (dk1 * args.softmax_scale).to(dtype)": "dk1 = dk1.to(dtype)"},
}
SHARED_FAULTS = {
    "dQ before dS is there": {"        _wait_ds(i - 1, bars)\n": ""},
    "dQ of this block in the place of the one before": {"_issue_wide_dq(i - 1, _no_dq": "_issue_wide_dq(i, _no_dq"},
    "dQ of the block before at the place of this block": {
        "        _add_wide_dq(dq, m, head, args, tile, 0, var)\n": (
            "        _add_wide_dq(dq, next_m, next_head, args, tile, 0, var)\n"
        )
    },
    "the last dQ left out": {"    _add_wide_dq(dq, m, head, args, tile, 0, var)\n    return dv, dv1\n": "    return dv, dv1\n"},
    "one slot for dS": {
        "    smem.ds.index(slot).store(ds)\n": "    smem.ds.index(0).store(ds)\n",
        "smem.ds.index(i % SLOTS_OF_SCORES)": "smem.ds.index(0)",
    },
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", [*FAULTS, *SHARED_FAULTS])
def test_the_emulator_sees(fault: str) -> None:
    # with one stage, what is released too early is overwritten at once; with more, the warpgroups can be further apart
    stages = 1 if "released" in fault or "copied" in fault else 4 if fault.startswith("P overwritten") else 2
    tiles = BackwardTileConfig(64, stages, stages, shares_dq=fault in SHARED_FAULTS)
    case = GradientCase("", head_dim=(192, 192), window=(140, 0), seqlen_q=270, seqlen_k=270, scale=0.4, tiles=tiles)
    if fault.startswith("dV leaves"):
        case = replace(case, seqlen_q=64, seqlen_k=64, window=(-1, -1), heads=(1, 1))

    def run_with_several_seeds() -> None:
        for seed in range(40):  # a race is not lost every time
            run_backward(case, seed=seed, faults=(FAULTS | SHARED_FAULTS)[fault])

    with pytest.raises((EmulationError, AssertionError)):
        run_with_several_seeds()
