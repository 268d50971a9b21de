"""`hopper.backward.wide.kernel` in the emulator: gradients of wide heads by the 2x rule, with every option, layout and tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper_backward_cases import GradientCall, GradientCase, run_backward

from fa_serve.backends.hopper.backward.tiles import BackwardTileConfig

CAUSAL = (-1, 0)
WIDE = GradientCase("d256-causal", head_dim=(256, 256), window=CAUSAL, seqlen_q=150, seqlen_k=150)
D192 = replace(WIDE, id="d192-causal", head_dim=(192, 192))
DEEPSEEK = replace(WIDE, id="d192-dv128", head_dim=(192, 128), heads=(4, 2))
DENSE = [
    WIDE,
    D192,
    DEEPSEEK,
    replace(WIDE, id="d256-float16", dtype=torch.float16, window=(-1, -1), seqlen_k=70, batch=2),
    GradientCase("d136-dv256", head_dim=(136, 256), seqlen_q=70),
    GradientCase("d64-dv192", head_dim=(64, 192), seqlen_q=70, seqlen_k=130),
    GradientCase("window-both", head_dim=(256, 256), window=(30, 10), seqlen_q=150, seqlen_k=310),
    GradientCase("window-left", head_dim=(160, 160), window=(70, -1), seqlen_q=130, seqlen_k=200),
    replace(D192, id="softcap", softcap=5.0, scale=1.0, heads=(4, 2)),
    replace(WIDE, id="sinks-lse", sinks=True, with_lse=True),
    # where both keys have a score far below zero, P of a key past the end would be infinite
    GradientCase("far-below-zero", head_dim=(192, 192), seqlen_q=300, seqlen_k=2, scale=10.0),
    replace(DEEPSEEK, id="rows-without-keys", seqlen_q=300, seqlen_k=100),
    GradientCase("keys-without-rows", head_dim=(192, 192), window=(20, -1), seqlen_q=40, seqlen_k=200),
    GradientCase("one-query", head_dim=(256, 256), seqlen_q=1, seqlen_k=200, heads=(4, 1)),
]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_dense(case: GradientCase) -> None:
    run_backward(case)


TILES = [
    BackwardTileConfig(64, 2, shares_dq=True),
    BackwardTileConfig(64, 2, stagger=True),
    BackwardTileConfig(64, 1, 1),
    BackwardTileConfig(64, 1, 1, shares_dq=True),
    BackwardTileConfig(64, 3, 3),
]


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_tiles(tiles: BackwardTileConfig) -> None:
    """Each warpgroup walks over several blocks of two heads, and some tiles see one block."""
    run_backward(replace(D192, tiles=tiles, seqlen_q=270, seqlen_k=270))


LENGTHS = ((70, 70), (33, 33), (0, 40), (1, 9), (150, 150), (20, 20), (90, 130))


def test_packed_sequences_do_not_see_their_neighbours() -> None:
    """Every other sequence is NaN, and its neighbours must be right; keys without queries have gradients of 0."""
    call = GradientCall(GradientCase("", window=CAUSAL, lengths=LENGTHS, head_dim=(192, 136)))
    for number in (1, 3, 5):
        for name in ("q", "k", "v", "out", "dout"):
            getattr(call.tensors, name)[call.rows("k" if name in ("k", "v") else "q", number)] = float("nan")
    found = call.run()
    for number in (0, 4, 6):
        call.check(found, number)
    assert not found.k[call.rows("k", 2)].any()
