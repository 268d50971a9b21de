"""`selected_keys.gather_wgmma` in the emulator: attention to slots against float64, and faults planted in its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hopper_emulator import EmulationError, emulated
from selected_keys_cases import numbers, sparse_reference
from torch import Tensor

from fa_serve.backends.hopper.latent.tiles import Ring
from fa_serve.launching.plans import PLANS
from fa_serve.ops.selected_keys import attention
from fa_serve.ops.selected_keys.attention import run_sparse_attention
from fa_serve.ops.selected_keys.gather_wgmma import GATHER_RING, cannot_gather

PAGE = 16


@dataclass(frozen=True)
class GatherCase:
    """gap: numbers between the tokens of a page and the next page, so that a slot is no row"""

    id: str
    heads: int = 64
    dims: tuple[int, int] = (576, 512)
    queries: int = 2
    topk: int = 100
    num_splits: int = 1
    sinks: bool = False
    gap: int = 0
    ring: Ring = GATHER_RING


def _slots(case: GatherCase, num_keys: int) -> Tensor:
    """The first query has the whole list and the last one no key; others have gaps in front."""
    draw = torch.Generator().manual_seed(1)
    slots = torch.full((case.queries, case.topk), -1, dtype=torch.int32)
    for row in range(case.queries - 1):
        count = (case.topk, 1, case.topk // 2 + 1)[row % 3]
        slots[row, -count:] = torch.randperm(num_keys, generator=draw)[:count].int()
    return slots


def _compare(case: GatherCase, seed: int = 0, **emulation: Any) -> None:
    dim, dim_v = case.dims
    pages = 2 * case.topk // PAGE + 2
    whole = numbers(pages, (PAGE + case.gap) * dim, dtype=torch.bfloat16, seed=2)
    k = whole.view(pages, PAGE + case.gap, 1, dim)[:, :PAGE]
    slots = _slots(case, pages * PAGE)
    unused = torch.ones(pages * PAGE, dtype=torch.bool)
    unused[slots[slots >= 0].long()] = False
    k[unused.view(pages, PAGE)] = float("nan")
    q = numbers(case.queries, case.heads, dim, dtype=torch.bfloat16, seed=3)
    sinks = numbers(case.heads, seed=4) if case.sinks else None
    scale = dim**-0.5
    PLANS.clear()
    with emulated(seed=seed, **emulation):
        out = run_sparse_attention(q, k, k[..., :dim_v], slots, sinks, scale, case.num_splits, case.ring)
    exact = sparse_reference(q, k.nan_to_num(), k[..., :dim_v].nan_to_num(), slots, scale, sinks)
    tolerance = 4 * torch.finfo(torch.bfloat16).eps * float(exact.abs().max())
    torch.testing.assert_close(out.double(), exact, atol=tolerance, rtol=0.0)
    assert out[-1].eq(0).all()


CASES = [
    GatherCase("64-heads", queries=4),
    GatherCase("128-heads-in-parts", heads=128, num_splits=3),
    GatherCase("sinks-in-parts", sinks=True, num_splits=2, queries=3),
    GatherCase("pages-with-gaps", gap=1, dims=(288, 256), queries=3),
    GatherCase("rest-of-16", dims=(528, 512), topk=33),
    GatherCase("more-parts-than-blocks", num_splits=5, topk=40),
    GatherCase("one-key", topk=1, sinks=True),
    GatherCase("two-stages", ring=Ring(32, 2), topk=300),
    GatherCase("blocks-of-16", ring=Ring(16, 8)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_attention_to_slots(case: GatherCase) -> None:
    _compare(case)


EMPTY_WAIT = "        mbarrier.wait(bars.k_empty.index(stage), ((j // var.tiles.stages) & 1) ^ 1)\n"
FAULTS = {
    "a stage overwritten before it is read": {EMPTY_WAIT + "        for box": "        for box"},
    "keys of the next block's slots": {
        "live = gl.expand_dims(slot >= 0, 1)\n": "slot = next_slot\n        live = gl.expand_dims(slot >= 0, 1)\n"
    },
    "the first stage of keys again": {"smem.cr.index(stage), keys": "smem.cr.index(0), keys"},
    "no mask of slots": {'s = gl.where(gl.expand_dims(slot >= 0, 0), s, float("-inf"))\n        state': "state"},
    "the mask of the block before": {"        slot = next_slot\n    last": "    last"},
    "slots of the next part": {"mask=at < args.end": "mask=at < args.end + var.tiles.block_n"},
    "a sink in each part": {"        if args.part == 0:\n            m": "        if args.part >= 0:\n            m"},
    "every thread but one": {"mbarrier.init(k_full.index(i), count=128)": "mbarrier.init(k_full.index(i), count=129)"},
    "lse at another part's place": {"args.lse + (args.place": "args.lse + (args.token"},
    "no empty item at the end": {
        "    smem.records.index(last_item % SLOTS).store(gl.zeros([4], gl.int32, layout=RECORD_LAYOUT))\n": (
            "    smem.records.index(last_item % SLOTS).store(record)\n"
        )
    },
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    case = GatherCase("", queries=3, topk=200, num_splits=2, sinks=True, dims=(320, 256), ring=Ring(32, 2))

    def run_with_several_seeds() -> None:
        for seed in range(20):  # a race is not lost every time
            _compare(case, seed, faults=FAULTS[fault])

    with pytest.raises((EmulationError, AssertionError)):
        run_with_several_seeds()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"heads": 128}, None),
        ({"heads": 96}, "needs a multiple of 64 query heads, got 96"),
        ({"dims": (192, 128)}, "the first 256 or 512 numbers of the keys"),
        ({"dims": (520, 512)}, "the first 256 or 512 numbers of the keys"),
    ],
    ids=str,
)
def test_says_what_it_leaves_to_the_portable_kernel(change: dict, words: str | None) -> None:
    case = replace(GatherCase(""), **change)
    q = torch.zeros(2, case.heads, case.dims[0], dtype=torch.bfloat16)
    k = torch.zeros(4, PAGE, 1, case.dims[0], dtype=torch.bfloat16)
    reason = cannot_gather(q, k, k[..., : case.dims[1]], shared=True)
    assert reason is None if words is None else words in str(reason)
    assert "latent keys" in str(cannot_gather(q, k, k[..., : case.dims[1]], shared=False))


def test_other_addresses_and_numbers_are_left_to_the_portable_kernel() -> None:
    k = torch.zeros(4, PAGE, 1, 576, dtype=torch.bfloat16)
    flat = torch.zeros(2 * 64 * 576 + 1, dtype=torch.bfloat16)
    q = flat[1:].view(2, 64, 576)
    assert "multiples of 16 bytes" in str(cannot_gather(q, k, k[..., :512], shared=True))
    assert "16-bit inputs" in str(cannot_gather(q.float(), k.float(), k[..., :512].float(), shared=True))


def test_it_is_chosen_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(2, 128, 576, dtype=torch.bfloat16)
    k = torch.zeros(4, PAGE, 1, 576, dtype=torch.bfloat16)
    assert attention._ring_of(q, k, k[..., :512], 90) == Ring(32, 4)
    assert attention._ring_of(q, k, k[..., :512], 100) is None
    assert attention._ring_of(q[:, :96], k, k[..., :512], 90) is None
    monkeypatch.setattr(attention, "compiles_gluon", lambda: False)  # another release, or the interpreter
    assert attention._ring_of(q, k, k[..., :512], 90) is None
