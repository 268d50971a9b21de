"""The scan of masks and the portable kernel over its lists compile for unlike targets, within the budgets stated here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cross_compile import SHARED_BYTES, UNLIKE, compiling_for
from mask_cases import BASE, make_mask

from fa_serve.backends.triton.block_sparse.plan import plan_block_sparse
from fa_serve.backends.triton.mask_blocks import plan_over_blocks
from fa_serve.testing import make_qkv, run_plan

CASES = {
    "bool": replace(BASE, seqlen_q=512, seqlen_k=512, head_dim=128),
    "bias": replace(BASE, seqlen_q=512, seqlen_k=512, head_dim=128, form="bias", over="hqk"),
}
SPILL_BUDGET: dict[tuple[str, str], int] = {}


@pytest.mark.parametrize("target", UNLIKE)
@pytest.mark.parametrize("name", CASES)
def test_it_compiles(name: str, target: str) -> None:
    case = CASES[name]
    q, k, v = make_qkv(1, 512, 512, case.heads, case.kv_heads, 128, dtype=torch.bfloat16)
    options = {"softmax_scale": 0.1, "window_size": (-1, 0), "softcap": 0.0, "return_lse": True}
    lengths = {"max_seqlen_q": 512, "max_seqlen_k": 512}
    mask = make_mask(case, torch.bfloat16)
    with compiling_for(target) as kernels:
        run_plan(lambda *given: plan_over_blocks(plan_block_sparse, *given), q, k, v, mask=mask, **options, **lengths)
    assert [kernel.name for kernel in kernels] == ["_classify_blocks", "_list_blocks", "attn_block_sparse"]
    assert kernels[0].spill_bytes == kernels[1].spill_bytes == 0
    assert kernels[2].spill_bytes <= SPILL_BUDGET.get((target, name), 0)
    assert kernels[2].shared_bytes <= SHARED_BYTES[target]
