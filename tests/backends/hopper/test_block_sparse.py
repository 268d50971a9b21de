"""Lists of key blocks in the Hopper kernel, in the emulator: each kind of list, in each layout, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from block_sparse_cases import BASE, SparseCase, check_sparse
from hopper_emulator import EmulationError, emulated

import fa_serve
from fa_serve.backends import ATTENTION
from fa_serve.backends.hopper import HopperBackend
from fa_serve.launching.plans import PLANS
from fa_serve.testing import make_qkv

WIDE = replace(BASE, head_dim=64)
PAGED = replace(WIDE, layout="paged", lengths_q=(70, 20, 130), lengths_k=(210, 150, 130), causal=True)
CASES = [
    replace(WIDE, kept=0.0, sinks=True),
    replace(WIDE, kept=1.0, full=0.0, bits=True, causal=True),
    replace(WIDE, kept=1.0, full=1.0, lengths_q=(60,), lengths_k=(50,)),
    replace(WIDE, full=0.0, causal=True, list_heads="q", heads=6),
    replace(WIDE, bits=True, list_heads="kv", softcap=5.0, block_size=(128, 128), lengths_q=(300, 300), lengths_k=(400, 400)),
    replace(WIDE, bits=True, list_heads="q", block_size=(64, 128), head_dim=80),
    replace(WIDE, bits=True, block_size=(128, 64), batched=False, lengths_q=(200, 200), lengths_k=(333, 333)),
    replace(WIDE, bits=True, block_size=(128, 128), head_dim=256, lengths_q=(140,)),
    replace(WIDE, head_dim=192, head_dim_v=128, window=(90, 20), block_size=(128, 128)),
    replace(WIDE, layout="varlen", lengths_q=(17, 130, 0, 40), lengths_k=(200, 90, 30, 0), bits=True, list_heads="kv"),
    PAGED,
    replace(PAGED, window=(60, 0), sinks=True, bits=True, list_heads="q", page_size=48),
    replace(PAGED, kept=1.0, block_size=(128, 128), page_size=256, head_dim=128),
]


class Emulated(HopperBackend):
    """The backend's plans for tensors on a CPU."""

    def supports(self, spec: Any) -> str | None:
        return None


def check(case: SparseCase, dtype: torch.dtype = torch.bfloat16, **emulation: Any) -> None:
    PLANS.clear()
    with mock.patch.dict(ATTENTION._loaded, {"hopper": Emulated()}), emulated(**emulation):
        check_sparse(case, "hopper", dtype)
    PLANS.clear()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: SparseCase) -> None:
    check(case)


def test_other_blocks_are_not_copied() -> None:
    """NaN in every block that no list has leaves no trace."""
    q, k, v = make_qkv(1, 128, 640, 4, 2, 64, dtype=torch.bfloat16)
    keep = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    keep[..., [1, 4]] = True
    lists = fa_serve.BlockLists.from_blocks(keep)
    PLANS.clear()
    with mock.patch.dict(ATTENTION._loaded, {"hopper": Emulated()}), emulated():
        expected = fa_serve.attention(q, k, v, block_mask=lists, backend="hopper")
        for x in (k, v):
            for block in (0, 2, 3):
                x[:, block * 128 : (block + 1) * 128] = float("nan")
        actual = fa_serve.attention(q, k, v, block_mask=lists, backend="hopper")
    PLANS.clear()
    assert torch.equal(actual, expected)
    assert bool(expected.isfinite().all())


FAULTS = {
    "a number announced after its stage is full": {
        "    if var.block_k > 0:\n        announce_key_block(key_block, smem.key_blocks.index(stage))\n"
        "    full = bars.k_full": "    full = bars.k_full",
    },
    "K and V of different key blocks": {
        "_load_values(tile, kv_head, key_block, block_count + j - 1,": (
            "_load_values(tile, kv_head, upcoming, block_count + j - 1,"
        ),
    },
    "a list that is one key block too short": {"end = gl.maximum(of.total, 1)": "end = gl.maximum(of.total - 1, 1)"},
    "bits of the wrong rows": {"row % var.block_q + gl": "row % 64 + gl"},
    "the list of another head": {"tile.head // lists.heads_per_list": "0"},
    "a stage whose number is that of the next": {
        "smem.key_blocks.index(block_count % var.tiles.stages)": "smem.key_blocks.index((block_count + 1) % var.tiles.stages)"
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str) -> None:
    case = replace(WIDE, bits=True, list_heads="q", block_size=(128, 128), lengths_q=(300,), lengths_k=(500,))
    with pytest.raises((EmulationError, AssertionError, RuntimeError)):
        check(case, faults=FAULTS[fault])
