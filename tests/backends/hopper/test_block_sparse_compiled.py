"""Lists of key blocks in the Hopper kernel, compiled for sm90 without a GPU: the intended instructions and few spills."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from block_sparse_cases import BASE, SparseCase, make_lists
from cross_compile import Kernel, compiling_for
from sampled_cases import each_nth

from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import SHARED_BYTES, list_tiles
from fa_serve.testing import cu_seqlens, make_qkv, run_plan

PROMPT = replace(BASE, lengths_q=(256,), lengths_k=(256,), heads=4, causal=True, block_size=(128, 128))
CASES = {
    "d128": replace(PROMPT, head_dim=128, causal=False, full=0.0, bits=True),
    "d256": replace(PROMPT, head_dim=256, bits=True, list_heads="q"),
    "d128-pages": replace(PROMPT, head_dim=128, layout="paged", bits=True),
    "d192-128-of-64": replace(PROMPT, head_dim=192, head_dim_v=128, layout="varlen", block_size=(64, 64)),
}
# Bytes per thread, for values that are read once per tile or by the producer; others do not spill. Over pages 48 bytes spill in
# Triton 3.6, and 64, 80 and 104 in the later releases.
SPILL_BUDGET = {"d256": 56, "d128-pages": 104}


def compile_lists(case: SparseCase) -> Kernel:
    dims = (case.heads, case.kv_heads, case.head_dim, case.head_dim_v or None)
    q, k, v = make_qkv(1, case.lengths_q[0], case.lengths_k[0], *dims, dtype=torch.bfloat16)
    given: dict = {
        "blocks": make_lists(case)[0],
        "softmax_scale": 0.1,
        "window_size": (-1, 0 if case.causal else -1),
        "softcap": case.softcap,
        "sinks": torch.zeros(case.heads) if case.sinks else None,
        "return_lse": True,
        "max_seqlen_q": case.lengths_q[0],
        "max_seqlen_k": case.lengths_k[0],
    }
    if case.layout != "dense":
        q, k, v = (x[0] for x in (q, k, v))
        given |= {"cu_seqlens_q": cu_seqlens(case.lengths_q), "keys": cu_seqlens(case.lengths_k)}
    if case.layout == "paged":
        k, v = (x.unflatten(0, (-1, 16)) for x in (k, v))
        given |= {"keys": torch.tensor(case.lengths_k, dtype=torch.int32), "block_table": torch.zeros(1, 16, dtype=torch.int32)}
    with compiling_for("sm90") as kernels:
        run_plan(plan_hopper_forward, q, k, v, **given)
    return kernels[-1]


@pytest.mark.parametrize("name", each_nth(2, list(CASES)))
def test_compiles_to_the_intended_instructions(name: str) -> None:
    case = CASES[name]
    tiles = list_tiles(case.head_dim, case.head_dim_v or case.head_dim, case.block_size)
    kernel = compile_lists(case)
    found = kernel.instructions
    assert found["HGMMA"] > 0
    assert found["UTMALDG"] > 0
    assert found["HMMA"] == 0
    assert kernel.spill_bytes <= SPILL_BUDGET.get(name, 0)
    assert kernel.wgmma_faults == []
    assert kernel.registers <= tiles.registers[0]
    assert kernel.shared_bytes * tiles.blocks_per_sm <= SHARED_BYTES
    handed_out = {int(n, 16) for n in re.findall(r"USETMAXREG\S*\s+(?:\S+,\s*)?(0x[0-9a-f]+)", kernel.sass)}
    assert tiles.groups == 1 or tiles.registers[1] - 8 in handed_out
