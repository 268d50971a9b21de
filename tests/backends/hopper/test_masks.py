"""Masks of elements in the Hopper kernel, in the emulator: scanned into lists, with bits or numbers, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hopper_emulator import EmulationError, emulated
from mask_cases import BASE, CASES, MaskCase, check_masked
from sampled_cases import each_nth

from fa_serve.backends import ATTENTION
from fa_serve.backends.hopper import HopperBackend
from fa_serve.backends.hopper.forward import plan, tiles
from fa_serve.backends.mask_blocks import SCANNED
from fa_serve.launching.plans import PLANS


class Emulated(HopperBackend):
    """The backend's plans for tensors on a CPU."""

    def supports(self, spec: Any) -> str | None:
        return None


def check(case: MaskCase, dtype: torch.dtype = torch.bfloat16, **emulation: Any) -> None:
    PLANS.clear()
    SCANNED.clear()
    with mock.patch.dict(ATTENTION._loaded, {"hopper": Emulated()}), emulated(**emulation):
        check_masked(case, "hopper", dtype)
    PLANS.clear()
    SCANNED.clear()


@pytest.mark.parametrize("case", each_nth(2, CASES), ids=str)
def test_cases(case: MaskCase) -> None:
    check(case)


def test_words_of_float16() -> None:
    check(replace(BIAS, batch=1), torch.float16)


BIAS = replace(BASE, form="bias", over="bhqk", batch=2, heads=2, kv_heads=1, seqlen_k=304)
ODD = replace(BASE, seqlen_k=301)
FAULTS = {
    "bits at the place in the list": (BASE, {'place if var.mask == "none" else number': "place"}),
    "numbers of the wrong warpgroup": (BIAS, {"row.to(gl.int64) * added.row\n": "(row * 0).to(gl.int64) * added.row\n"}),
    "numbers of another head": (BIAS, {"tile.head.to(gl.int64) * added.head": "0"}),
    "numbers of another sequence": (BIAS, {"tile.origin.to(gl.int64) * added.batch": "0"}),
    "numbers of another key block": (BIAS, {"key_block.number * WIDTH + gl.arange(0, WIDTH": "gl.arange(0, WIDTH"}),
    "numbers in the scale of scores": (BIAS, {"* (LOG2E / scale)": "* LOG2E"}),
    "the two numbers of a word in the other order": (BIAS, {"gl.join(first, second)": "gl.join(second, first)"}),
    "a mixed block taken for a full one": (ODD, {"changed.to(tl.int32) * 65536": "(changed.to(tl.int32) * 0)"}),
    "a block that hides a part taken for an empty one": (ODD, {"counts & 65535 == 0": "counts & 65535 < 16384"}),
    "a mixed block of words taken for a full one": (
        BASE,
        {"every & 0x01010101 == 0x01010101": "some & 0x01010101 == 0x01010101"},
    ),
    "a block of words that hides a part taken for an empty one": (BASE, {"if some == 0": "if every == 0"}),
    "a list that begins one place late": (
        BASE,
        {"mixed_before + tl.cumsum(mixed, 0) - 1": "mixed_before + tl.cumsum(mixed, 0)"},
    ),
    "the mask of another head scanned": (
        replace(BASE, over="hqk", pattern="random"),
        {"(batch_head % heads).to(tl.int64) * stride_h": "0"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    case, faults = FAULTS[fault]
    with pytest.raises((EmulationError, AssertionError, RuntimeError)):
        check(case, faults=faults)


SHARED = replace(BASE, form="bias", over="hqk", batch=3, seqlen_q=256, seqlen_k=256)


@pytest.mark.parametrize("fault", ["", "batch = batch_head % sequences", "head = batch_head // sequences"])
def test_sequences_that_share_a_bias_follow_one_another(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence of each head is computed once; if all tiles took the first sequence or head, the emulator would see it."""
    groups = []

    def head_group(heads: int, per_kv: int, *numbers: Any) -> tuple[int, int]:
        groups.append((heads, per_kv))
        return tiles.head_group(heads, per_kv, *numbers)

    monkeypatch.setattr(plan, "SHARE_BIAS", True)
    monkeypatch.setattr(plan, "head_group", head_group)
    if not fault:
        check(SHARED)
        check(replace(SHARED, over="bhqk"))
        assert groups == [(12, 2 * 3), (12, 2)]
        return
    with pytest.raises((EmulationError, AssertionError)):
        check(SHARED, faults={fault: f"{fault} * 0"})
