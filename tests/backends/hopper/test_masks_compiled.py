"""Masks of elements in the Hopper kernel, compiled for sm90 without a GPU: the scan and the loads, and few spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cross_compile import Kernel, compiling_for
from mask_cases import BASE, MaskCase, make_mask
from sampled_cases import each_nth

from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import SHARED_BYTES
from fa_serve.backends.triton.mask_blocks import plan_over_blocks
from fa_serve.testing import make_qkv, run_plan

CASES = {
    "d64-bias": replace(BASE, form="bias"),
    "d128-bias": replace(BASE, form="bias", head_dim=128),
    "d192-bias": replace(BASE, form="bias", head_dim=192),
    "d256-bias": replace(BASE, form="bias", head_dim=256),
    "d128-bool": replace(BASE, head_dim=128),
}
# Bytes per thread: a float mask takes 32 registers of 240 while the scores are computed. Number by number it takes more.
SPILL_BUDGET = {"d128-bias": 16, "d256-bias": 144}


def compile_masked(case: MaskCase) -> list[Kernel]:
    """The kernels of a call, in the order of their launches: classify, list, attend."""
    q, k, v = make_qkv(1, 512, 512, case.heads, case.kv_heads, case.head_dim, dtype=torch.bfloat16)
    mask = make_mask(replace(case, seqlen_q=512, seqlen_k=512), torch.bfloat16)
    options = {"softmax_scale": 0.1, "window_size": (-1, -1), "softcap": 0.0, "return_lse": True}
    lengths = {"max_seqlen_q": 512, "max_seqlen_k": 512}
    with compiling_for("sm90") as kernels:
        run_plan(lambda *given: plan_over_blocks(plan_hopper_forward, *given), q, k, v, mask=mask, **options, **lengths)
    return kernels


@pytest.mark.parametrize("name", each_nth(2, list(CASES)))
def test_compiles_to_the_intended_instructions(name: str) -> None:
    classify, listing, attend = compile_masked(CASES[name])
    assert attend.instructions["HGMMA"] > 0
    assert attend.spill_bytes <= SPILL_BUDGET.get(name, 0)
    assert classify.spill_bytes == listing.spill_bytes == 0
    assert "LDG.E.128" in classify.sass, "16 bytes of a mask are loaded at a time"
    assert attend.shared_bytes <= SHARED_BYTES
    in_words = CASES[name].form == "bias" and CASES[name].head_dim <= 192
    assert ("LDG.E.128" in attend.sass) == in_words, "eight numbers of a float mask are loaded at a time"
