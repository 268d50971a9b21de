"""`hopper.producer`: it assigns every tile once, and faults that are planted in its source must show in the emulator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hopper_cases import DYNAMIC, FULL, Case, run_dense, run_paged
from hopper_emulator import EmulationError, emulated, kernel_definitions

from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles
from fa_serve.testing import cu_seqlens, make_qkv


@pytest.mark.parametrize("heads", [1, 5, 32])
@pytest.mark.parametrize(("group", "tail"), [(1, 1), (4, 1), (4, 13), (8, 32), (32, 32)])
def test_every_tile_of_every_head_comes_once(heads: int, group: int, tail: int) -> None:
    """Groups of heads follow one another, with the longest tiles of a group first; the last group has at least `tail` heads."""
    locate = kernel_definitions({})["_locate_tile"]
    tiles = 7
    args = SimpleNamespace(head_group=min(group, heads), head_tail=min(tail, heads))
    located = [tuple(map(int, locate(torch.tensor(i), tiles, heads, args))) for i in range(tiles * heads)]
    assert sorted(located) == [(head, tile) for head in range(heads) for tile in range(tiles)]
    in_last = heads - (heads - args.head_tail) // args.head_group * args.head_group
    ends = [*range(args.head_group, heads - in_last + 1, args.head_group), heads]
    order = [(next(g for g, end in enumerate(ends) if head < end), tile, head) for head, tile in located]
    assert order == sorted(order)


def test_the_emulator_sees_a_wrong_phase() -> None:
    wait = "(block_count // var.tiles.stages) & 1) ^ 1)\n    if var.block_k"
    case = Case("", seqlen_q=500, seqlen_k=500, tiles=HopperTiles(2, 64, 2, 2, DYNAMIC))
    with pytest.raises((EmulationError, AssertionError)):
        run_dense(case, faults={wait: wait.replace(" ^ 1)", ")")})


def test_the_emulator_sees_a_counter_that_is_not_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches share a counter: the second is right only because the first has set it back to zero."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr("fa_serve.backends.hopper.forward.launches.take_counter", lambda x: counter)
    case = Case("", seqlen_q=300, seqlen_k=300, tiles=HopperTiles(1, 64, 2, 2, DYNAMIC))
    for _ in range(2):
        run_dense(case)
        assert counter.item() == 0
    faults = {"gl.store(args.counter, 0)": "pass"}
    run_dense(case, faults=faults)
    assert counter.item() != 0


PAGE_FAULTS = {
    "a page read past the end of its sequence": (
        "gl.minimum(gl.maximum(tile.kv_len - key + row, 0), var.page_size)",
        "var.page_size",
    ),
    "the boxes of a block in another order": (
        "(stage * CHUNKS + chunk) * BOXES + i",
        "(stage * CHUNKS + chunk) * BOXES + (i ^ 1)",
    ),
}


@pytest.mark.parametrize("fault", PAGE_FAULTS)
def test_the_emulator_sees_in_pages(fault: str) -> None:
    with pytest.raises((EmulationError, AssertionError)):
        run_paged(Case("", window=FULL), faults=dict([PAGE_FAULTS[fault]]))


def test_the_emulator_sees_a_bound_past_the_sequence() -> None:
    q, k, v = (x[0] for x in make_qkv(1, 96, 96, 2, 1, 64, dtype=torch.bfloat16))
    v[48:] = float("nan")
    cu = cu_seqlens([48, 30])
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=cu)
    faults = {"[RAGGED, origin + length, RAGGED - length + row": "[RAGGED, origin + length + 9, RAGGED - length - 9 + row"}
    for expected, fault in ((True, {}), (False, faults)):
        with emulated(faults=fault):
            out, _ = plan_hopper_forward(tensors, Case("", window=FULL).options(48, 48))(tensors)
        assert bool(torch.isfinite(out[:48]).all()) == expected
