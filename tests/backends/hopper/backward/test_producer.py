"""`hopper.backward_producer`: the walk visits every pair that is seen once, and faults in the source show in the emulator."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hopper_backward_cases import GradientCase, run_backward
from hopper_emulator import EmulationError, kernel_definitions

from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig
from fa_serve.backends.hopper.backward.types import HopperBackwardVariant


def _visited(window: tuple[int, int], seqlen_q: int, seqlen_k: int, stagger: bool) -> Counter[tuple[int, int, int, int]]:
    """How often each (batch, head, query block, key block) is visited by a launch over 2 batches and 4 heads in 2 groups."""
    names = kernel_definitions({})
    tiles = BackwardTileConfig(64, 2, stagger=stagger)
    var = HopperBackwardVariant(tiles, 128, False, window[0] >= 0, window[1] >= 0, False)
    num_n = -(-seqlen_k // 128)
    numbers = {"num_n": num_n, "num_heads": 4, "heads_per_kv": 2, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    args = SimpleNamespace(**numbers, left=window[0], right=window[1], stats_width=512)
    found: Counter[Any] = Counter()
    for index in range(2 * 2 * num_n):
        tile = names["key_tile"](torch.tensor(index), args, var)
        m = tile.start
        head = tile.kv_head * 2
        for _ in range(tile.count):
            found[int(tile.q_origin), int(head), int(m), int(tile.first) // 128] += 1
            m, head = names["next_block"](m, head, tile)
    return found


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (70, 0), (30, 10), (100, -1)], ids=str)
def test_the_walk_visits_what_is_seen_once(window: tuple[int, int], stagger: bool) -> None:
    for seqlen_q, seqlen_k in ((300, 300), (200, 400), (400, 200), (1, 300)):
        rows = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        keys = torch.arange(seqlen_k)
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if window[0] >= 0:
            seen &= keys >= rows - window[0]
        if window[1] >= 0:
            seen &= keys <= rows + window[1]
        blocks = {
            (m, n)
            for m in range(-(-seqlen_q // 64))
            for n in range(-(-seqlen_k // 128))
            if seen[m * 64 : m * 64 + 64, n * 128 : n * 128 + 128].any()
        }
        found = _visited(window, seqlen_q, seqlen_k, stagger)
        assert set(found.values()) <= {1}
        for batch in (0, 1):
            for head in range(4):
                mine = {(m, n) for b, h, m, n in found if (b, h) == (batch, head)}
                assert blocks <= mine
                assert len(mine - blocks) <= 2, "a block that nothing sees costs as much as any other"


FAULTS = {
    "a wrong phase of Q": {
        "mbarrier.wait(bars.q_empty.index(stage), ((i // STAGES) & 1) ^ 1)": (
            "mbarrier.wait(bars.q_empty.index(stage), (i // STAGES) & 1)"
        )
    },
    "dO copied before its stage is free": {
        "    mbarrier.wait(bars.do_empty.index(stage), ((i // STAGES) & 1) ^ 1)\n": "",
    },
    "the statistics of another head": {
        "async_load(desc.delta, [tile.stats_row + head,": "async_load(desc.delta, [tile.stats_row + head * 0,"
    },
    "a walk that begins one block late": {
        "low = gl.maximum(first - offset - args.right, 0) // BLOCK_M": (
            "low = gl.maximum(first - offset - args.right, 0) // BLOCK_M + 1"
        )
    },
    "a walk that ends one block early": {"(gl.maximum(end, 0) + BLOCK_M - 1) // BLOCK_M": "gl.maximum(end, 0) // BLOCK_M"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    # with one stage of dO, a copy that does not wait overwrites what is read
    tiles = BackwardTileConfig(64, 2, 1)
    case = GradientCase("", head_dim=(128, 128), window=(300, 0), seqlen_q=330, seqlen_k=330, tiles=tiles)

    def run_with_several_seeds() -> None:
        for seed in range(40):  # a race is not lost every time
            run_backward(case, seed=seed, faults=FAULTS[fault])

    with pytest.raises((EmulationError, AssertionError)):
        run_with_several_seeds()
