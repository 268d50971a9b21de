"""`hopper.backward_consumer`: faults that are planted in its source must show in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hopper_backward_cases import GradientCase, run_backward
from hopper_emulator import EmulationError

from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig

RELEASE_Q = "mbarrier.arrive(bars.q_empty.index(i % var.tiles.q_stages), count=1)\n"
WAIT_DK = "        dk = warpgroup_mma_wait(0, deps=[dk_token])\n"
EARLY_Q = {WAIT_DK + "        " + RELEASE_Q: "        " + RELEASE_Q + "        tma.store_wait(0)\n" + WAIT_DK}
RELEASE_DO = "        mbarrier.arrive(bars.do_empty.index(i % var.tiles.do_stages), count=1)\n"
WAIT_DV = "        dv, dq = warpgroup_mma_wait(1, deps=[dv_token, dq_token])\n"
BARRIER = '    fence_async_shared()\n    named_barrier("sync", FIRST_NAMED_BARRIER)\n    return ds'
FAULTS = {
    "Q released before dK is done": EARLY_Q,
    "dO released before dV is done": {WAIT_DV + RELEASE_DO: RELEASE_DO + WAIT_DV},
    "S read too early": {"s = warpgroup_mma_wait(1, deps=[s_token])": "s = warpgroup_mma_wait(2, deps=[s_token])"},
    "dQ computed before the other warpgroup's dS is there": {BARRIER: "    fence_async_shared()\n    return ds"},
    "one buffer for dS": {
        "smem.ds.index(i % 2 * var.groups + group).store(ds)": "smem.ds.index(group).store(ds)",
        "smem.ds_chunks.index((i % 2 * GROUPS + g)": "smem.ds_chunks.index((g)",
    },
    "dK written where the other warpgroup still reads K": {
        '    named_barrier("sync", FIRST_NAMED_BARRIER)\n    origin = tile.k_origin\n': "    origin = tile.k_origin\n"
    },
    "keys past the end": {"crosses = first + 64 > tile.kv_len": "crosses = first > tile.kv_len"},
    "a mask that ends one block early": {"(first + 63 > top + args.right)": "(first > top + args.right)"},
    "a left edge that is missed": {"(first < top + BLOCK_M - 1 - args.left)": "(first < top - args.left)"},
    "dS without delta": {"weight * (dp - delta)": "weight * dp"},
    "dQ added at another head": {"tile.stats + head * args.stats_width": "tile.stats + tile.kv_head * args.stats_width"},
    "the wrong square of dQ": {"column_chunk: gl.constexpr = group % var.column_chunks\n    dq": "column_chunk = 0\n    dq"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    # with one stage of dO, what is released too early is overwritten at once; with two, the warpgroups can be further apart
    tiles = BackwardTileConfig(64, 2, 1 if fault.startswith("dO") else 2)
    case = GradientCase("", head_dim=(128, 128), window=(140, 0), seqlen_q=330, seqlen_k=330, scale=0.4, tiles=tiles)
    if fault == "keys past the end":
        case = replace(case, window=(-1, -1), seqlen_k=2, scale=10.0)

    def run_with_several_seeds() -> None:
        for seed in range(40):  # a race is not lost every time
            run_backward(case, seed=seed, faults=FAULTS[fault])

    with pytest.raises((EmulationError, AssertionError)):
        run_with_several_seeds()
