"""Calls of the Hopper kernel of latent attention in the emulator, and their check against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hopper_emulator import emulated
from latent_cases import LatentCase, assert_right, make_latent
from torch import Tensor

from fa_serve.backends.hopper.latent.plan import plan_latent_decode
from fa_serve.backends.triton.tiles import DecodeTiles
from fa_serve.testing import run_plan

SMALL = LatentCase(dims=(288, 256), dtype=torch.bfloat16, heads=(32, 1), kv_lens=(17, 1, 170))
CASES = [
    SMALL,
    replace(SMALL, dims=(320, 256), dtype=torch.float16, heads=(128, 1), kv_lens=(33, 90, 0)),
    replace(SMALL, q_lens=(3, 0, 4), kv_lens=(17, 1, 266), num_splits=3),
    replace(SMALL, q_lens=(5, 5), kv_lens=(90, 260), heads=(40, 1), page_size=64),
    replace(SMALL, q_lens=(1,), kv_lens=(700,), page_size=48, dtype=torch.float16),
    replace(SMALL, q_lens=(2, 2), kv_lens=(20, 9), causal=False, head_major=True),
    replace(SMALL, dims=(272, 256), q_lens=(1,) * 5, kv_lens=(129, 40, 0, 300, 31), page_size=128),
]
DEEPSEEK = replace(SMALL, dims=(576, 512), heads=(64, 1), q_lens=(1, 1), kv_lens=(100, 230))


def run_latent(case: LatentCase, tiles: DecodeTiles | None = None, sharpness: float = 1.0, **how: Any) -> Tensor:
    """Emulate a call and compare it with the equation -> its result.

    sharpness: queries are multiplied by it; from 4 on, maxima grow by so much that the output is rescaled
    how:       see `hopper_emulator.emulated`
    """
    q, cache, keys, options = make_latent(case)
    q *= sharpness
    options |= {"window_size": (-1, 0 if case.causal else -1), "softcap": 0.0}
    with emulated(**how):
        given = {} if tiles is None else {"tiles": tiles}
        out, lse = run_plan(plan_latent_decode, q, cache, cache[..., : case.dims[1]], **options, **given)
    assert lse is not None
    assert_right(case, out, lse, q, keys)
    return out
