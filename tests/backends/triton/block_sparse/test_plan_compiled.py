"""The block-sparse kernel compiles for every target, from the plan's own arguments, within the budgets stated here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_sparse_cases import SparseCase, make_lists
from cross_compile import SHARED_BYTES, Kernel, compiling_for, with_targets
from sampled_cases import each_nth

from fa_serve.backends.triton.block_sparse.plan import plan_block_sparse
from fa_serve.testing import cu_seqlens, make_qkv, run_plan

SPILL_BUDGET = {  # bytes per thread; whatever is not named here may not spill at all
    ("sm120", "D128-everything"): 32,  # softcap, bits and slopes at once
    ("sm90", "D256"): 56,  # a third of the time of the largest tile without spills
    ("sm90", "D256-decode"): 8,
}
BF16 = torch.bfloat16
PROMPT: dict[str, Any] = {"lengths_q": (256,), "lengths_k": (256,), "heads": 8, "window": (-1, 0)}
DECODE: dict[str, Any] = {**PROMPT, "lengths_q": (1,), "layout": "paged", "list_heads": "kv"}
EVERYTHING: dict[str, Any] = {"window": (64, 0), "softcap": 30.0, "sinks": True, "alibi": True, "bits": True}
CASES = {
    **{f"D{dim}": (SparseCase(head_dim=dim, **PROMPT), BF16) for dim in (64, 128, 256, 512)},
    **{f"D{dim}-bits": (SparseCase(head_dim=dim, **PROMPT, bits=True, list_heads="q"), BF16) for dim in (64, 128, 256, 512)},
    "D192-128-varlen": (SparseCase(head_dim=192, head_dim_v=128, **PROMPT, layout="varlen"), BF16),
    "D128-paged": (SparseCase(head_dim=128, **PROMPT, layout="paged"), BF16),
    "D128-everything": (SparseCase(head_dim=128, **(PROMPT | EVERYTHING)), torch.float16),
    "D128-float32": (SparseCase(head_dim=128, **PROMPT, bits=True), torch.float32),
    **{f"D{dim}-decode": (SparseCase(head_dim=dim, **DECODE), BF16) for dim in (64, 128, 256, 512)},
    "D128-decode-pages-of-64": (SparseCase(head_dim=128, **DECODE, page_size=64, block_size=(128, 128)), BF16),
    "D128-decode-float8": (SparseCase(head_dim=128, **DECODE, float8=True), BF16),
    "D128-prompt-float8": (SparseCase(head_dim=128, **PROMPT, layout="paged", float8=True), BF16),
}


def _compile(case: SparseCase, dtype: torch.dtype, target: str) -> list[Kernel]:
    dims = (case.heads, case.kv_heads, case.head_dim, case.head_dim_v or None)
    q, k, v = make_qkv(1, case.lengths_q[0], case.lengths_k[0], *dims, dtype=dtype)
    given: dict[str, Any] = {
        "blocks": make_lists(case)[0],
        "softmax_scale": 0.1,
        "window_size": case.window,
        "softcap": case.softcap,
        "sinks": torch.zeros(case.heads) if case.sinks else None,
        "alibi_slopes": torch.zeros(case.heads) if case.alibi else None,
        "return_lse": True,
        "max_seqlen_q": case.lengths_q[0],
        "max_seqlen_k": case.lengths_k[0],
    }
    if case.layout != "dense":
        q, k, v = (x[0] for x in (q, k, v))
        given |= {"cu_seqlens_q": cu_seqlens(case.lengths_q)}
    if case.layout == "varlen":
        given |= {"keys": cu_seqlens(case.lengths_k)}
    if case.layout == "paged":
        k, v = (x.unflatten(0, (-1, case.page_size)) for x in (k, v))
        given |= {"keys": torch.tensor(case.lengths_k, dtype=torch.int32), "block_table": torch.zeros(1, 16, dtype=torch.int32)}
    if case.float8:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        given |= dict.fromkeys(("k_descale", "v_descale"), torch.ones(case.kv_heads))
    with compiling_for(target) as kernels:
        run_plan(plan_block_sparse, q, k, v, **given)
    return kernels


EVERYWHERE = ["D128", "D128-decode", "D128-prompt-float8"]


@pytest.mark.parametrize(("name", "target"), with_targets(each_nth(2, list(CASES)), EVERYWHERE))
def test_it_compiles(name: str, target: str) -> None:
    case, dtype = CASES[name]
    if case.float8 and target in ("sm80", "sm86"):
        pytest.skip("reads float8 from compute capability 8.9 on")
    kernels = _compile(case, dtype, target)
    names = ["attn_block_sparse"] + (["_combine"] if len(case.lengths_q) == case.lengths_q[0] else [])
    assert [kernel.name for kernel in kernels] == names
    assert kernels[0].spill_bytes <= SPILL_BUDGET.get((target, name), 0)
    assert kernels[0].shared_bytes <= SHARED_BYTES[target]


def test_loads_are_asynchronous_on_hopper() -> None:
    """Addresses that come from a list do not keep the compiler from pipelining keys and values."""
    case, dtype = CASES["D128"]
    [kernel] = _compile(case, dtype, "sm90")
    assert kernel.instructions["HGMMA"] > 0
    assert kernel.instructions["LDGSTS"] > 0
