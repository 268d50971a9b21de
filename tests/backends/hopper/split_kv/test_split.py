"""`hopper.split_kv` in the emulator: keys of long sequences are split among tiles, and heads that fill a tile in part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hopper_cases import CAUSAL, DYNAMIC, FULL, GRID, Case, PagedCall, run_with_skipped_sequences
from hopper_emulator import EmulationError, emulated
from sampled_cases import each_nth

from fa_serve.backends.calls import AttentionTensors
from fa_serve.backends.hopper.forward import plan as forward
from fa_serve.backends.hopper.forward import tiles
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles
from fa_serve.backends.hopper.forward.types import Variant
from fa_serve.testing import cu_seqlens, make_qkv

SMALL = HopperTiles(2, 64, 2, 2, DYNAMIC)
CHUNKS = [
    Case("full", heads=(2, 2), window=FULL, max_splits=4, tiles=SMALL),
    Case("causal", heads=(4, 2), max_splits=3),
    Case("window-both", heads=(2, 1), window=(100, 5), max_splits=4, tiles=SMALL),
    Case("window", heads=(4, 2), window=(300, 0), max_splits=4),
    Case("sinks", sinks=True, max_splits=4),
    Case("d80", head_dim=(80, 80), max_splits=3),
    Case("softcap", softcap=5.0, scale=1.0, max_splits=4),
    Case("d128-float16", head_dim=(128, 128), dtype=torch.float16, heads=(3, 1), max_splits=4),
    Case("d192-dv128", head_dim=(192, 128), max_splits=3),
    Case("d72-dv40", head_dim=(72, 40), max_splits=3, page_size=64),
    Case("d256", head_dim=(256, 256), max_splits=3, page_size=48),
    Case("grid", max_splits=4, tiles=HopperTiles(1, 64, 2, 1, GRID)),
    Case("pingpong", max_splits=4, tiles=HopperTiles(2, 64, 2, 2, DYNAMIC, pingpong=True)),
    Case("whole", max_splits=1),
]
FEW = [
    Case("one-head", heads=(2, 2), max_splits=4),
    Case("four-heads", heads=(8, 2), max_splits=4),
    Case("four-heads-window", heads=(8, 2), max_splits=4, window=(130, 0)),
    Case("three-heads", heads=(6, 2), max_splits=4),
    Case("seven-heads-whole", heads=(7, 1), max_splits=1, sinks=True),
    Case("twelve-heads-d128", heads=(12, 1), head_dim=(128, 128), max_splits=3),
    Case("seven-heads", heads=(14, 2), max_splits=3, sinks=True),
    Case("five-heads-d192-dv128", heads=(5, 1), head_dim=(192, 128), max_splits=2),
]


@pytest.fixture(autouse=True)
def _short_splits() -> Iterator[None]:
    """Splits of one block are allowed, so that short sequences are split."""
    with mock.patch.object(forward, "MIN_BLOCKS_OF_A_SPLIT", 1):
        yield


@pytest.mark.parametrize("case", each_nth(2, CHUNKS), ids=lambda case: case.id)
def test_chunks_behind_pages(case: Case) -> None:
    """Sequences of unequal lengths, one of them without keys and one without queries. Unused slots of pages are NaN."""
    call = PagedCall.of(case, [70, 1, 0, 20, 30], [460, 9, 40, 130, 0])
    out, lse = call.run()
    for sequence in (0, 1, 3):
        call.check(out, lse, sequence)
    assert (out[call.sequences[4][0]] == 0).all()


PACKED = [
    Case("two-heads", heads=(4, 2)),
    Case("eight-heads-window", heads=(8, 1), window=(300, 0)),
    Case("four-heads-sinks-d128", heads=(4, 1), head_dim=(128, 128), sinks=True, max_splits=4),
    Case("one-split", heads=(8, 2), softcap=5.0, max_splits=1),
]


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.id)
def test_chunks_whose_heads_share_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 queries would fill a second tile of 128 rows for each head."""
    monkeypatch.setattr(tiles, "MIN_SPLIT_KEYS", 64)
    variants = []

    def make_variant(*values: Any, **named: Any) -> Variant:
        variants.append(Variant(*values, **named))
        return variants[-1]

    monkeypatch.setattr(forward, "Variant", make_variant)
    call = PagedCall.of(replace(case, tiles=SMALL), [70, 1, 0, 20, 30], [460, 9, 40, 130, 0])
    out, lse = call.run()
    assert [(var.pack_gqa, var.split_kv) for var in variants] == [(case.heads[0] // case.heads[1], True)]
    for sequence in (0, 1, 3):
        call.check(out, lse, sequence)
    assert (out[call.sequences[4][0]] == 0).all()


@pytest.mark.parametrize("case", each_nth(2, FEW), ids=lambda case: case.id)
def test_few_queries(case: Case) -> None:
    call = PagedCall.of(case, [1, 16, 0, 5, 9], [90, 400, 30, 5, 0])
    out, lse = call.run()
    for sequence in (0, 1, 3):
        call.check(out, lse, sequence)
    assert (out[call.sequences[4][0]] == 0).all()


@pytest.mark.parametrize("longest", [16, 70])
def test_packed_sequences_do_not_see_their_neighbours(longest: int) -> None:
    """The neighbours are NaN, and rows after the last sequence are 0."""
    lengths_q = [longest, 9, 0, 3]
    lengths_k = [500, 33, 40, 250]
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q) + 7, sum(lengths_k) + 7, 6, 2, 64, dtype=torch.bfloat16))
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[cu[-1] :] = float("nan")
        x[cu[1] : cu[2]] = float("nan")
    case = Case("", window=CAUSAL, heads=(6, 2))
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu_q, keys=cu_k, out=torch.full_like(q, 7.0))
    with emulated():
        out, lse = plan_hopper_forward(tensors, case.options(longest, 500), SMALL, 3)(tensors)
    assert out is tensors.out
    assert (out[cu_q[-1] :] == 0).all()
    assert (lse[:, cu_q[-1] :] == float("-inf")).all()
    for b in (0, 3):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        case.check(out[None, rows], lse[None, :, rows], q[None, rows], k[None, keys], v[None, keys])


def test_sequences_of_another_kernel_stay_as_they_are() -> None:
    run_with_skipped_sequences(max_splits=3)


def test_whole_rows_do_not_touch_the_buffer() -> None:
    """With equal lengths that fill the GPU nothing is split, and nothing is left to combine."""
    call = PagedCall.of(Case("", heads=(2, 2), max_splits=4), [4, 4, 4], [300, 300, 300])
    out, lse = call.run(faults={"gl.store(args.buffer + cells": "gl.nothing(args.buffer + cells"})
    for sequence in range(3):
        call.check(out, lse, sequence)


@pytest.mark.parametrize(
    ("cases", "case", "old", "new"),
    [
        (CHUNKS, "causal", "tl.where(empty, 0, kv_len)", "kv_len"),
        (CHUNKS, "sinks", '== 0, sinks, float("-inf"))', ">= 0, sinks, sinks)"),
        (CHUNKS, "causal", "end = low + (high - low) * (split + 1) // splits", "end = high"),
        (FEW, "seven-heads", "there & (members < args.heads_per_kv)", "there"),
        (FEW, "four-heads", "splits >= min_splits", "splits > min_splits"),
        (FEW, "three-heads", "return head * heads_per_kv, head", "return head * var.pack_gqa, head"),
    ],
    ids=["empty-splits", "sinks-once", "overlapping-splits", "rows-without-a-head", "two-splits", "heads-of-padded-tiles"],
)
def test_the_cases_catch_faults(cases: list[Case], case: str, old: str, new: str) -> None:
    found = next(c for c in cases if c.id == case)
    lengths = ([20, 1], [300, 9]) if cases is CHUNKS else ([16, 9, 1], [300, 90, 30])
    if "empty" in old:
        found = replace(found, tiles=SMALL, max_splits=16)
        lengths = ([140, 1], [140, 9])
    if "least" in old:
        found = replace(found, max_splits=2)
    call = PagedCall.of(found, *lengths)

    def run_with_the_fault() -> None:
        out, lse = call.run(resident_blocks=64, faults={old: new})
        for sequence in range(len(lengths[0])):
            call.check(out, lse, sequence)

    with pytest.raises((AssertionError, EmulationError)):
        run_with_the_fault()
