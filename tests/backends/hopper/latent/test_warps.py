"""`hopper.latent_warps`: faults that are planted in its source must show in the emulator; `test_latent_decode` shows that it is
right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper_emulator import EmulationError
from hopper_latent_cases import SMALL, run_latent

FREE_KEYS = "            mbarrier.arrive(bars.k_empty.index(stage), count=1)\n"
FREE_SLOT = "            mbarrier.arrive(bars.p_empty.index(slot), count=1)\n"
WAIT_VALUES = "            left, right = warpgroup_mma_wait(0, deps=[left_token, right_token])\n"
FAULTS = {
    "keys freed before P C is done": {WAIT_VALUES + FREE_SLOT + FREE_KEYS: FREE_KEYS + WAIT_VALUES + FREE_SLOT},
    "a slot freed before P C is done": {WAIT_VALUES + FREE_SLOT: FREE_SLOT + WAIT_VALUES},
    "a slot written before it is free": {
        "    wait_slot(item, bars)\n    slot = item % SLOTS\n": "    slot = item % SLOTS\n",
    },
    "keys that are not waited for": {"                wait_latent_keys(block_count + j + 1, bars, var)\n": ""},
    "no mask": {"columns < gl.expand_dims(last, 1)": "columns >= 0"},
    "a mask that begins one block late": {"if block >= work.inner_end:": "if block > work.inner_end:"},
    "no causal limit": {"        if var.has_right:\n            rows = args": "        if False:\n            rows = args"},
    "O relative to an old maximum": {"smem.factors.index(slot).store(alpha)": "smem.factors.index(slot).store(alpha * 0 + 1)"},
    "a sum relative to an old maximum": {"state.l * gl.expand_dims(factor, 1)": "state.l"},
    "pages of the block before": {"                pages = next_pages\n": ""},
    "an item that is not counted": {"        item += 1\n        blocks =": "        blocks ="},
    "queries of another head": {"rows % GROUPS) * args.stride_qh": "0 * rows) * args.stride_qh"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    case = replace(SMALL, heads=(8, 1), q_lens=(2, 3, 2), kv_lens=(500, 70, 330))

    def run_with_several_seeds() -> None:
        for seed in range(40):  # a race is not lost every time
            run_latent(case, sharpness=4.0, seed=seed, faults=FAULTS[fault])

    with pytest.raises((EmulationError, AssertionError)):
        run_with_several_seeds()
