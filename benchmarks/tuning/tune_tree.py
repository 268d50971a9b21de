"""Attention by a fixed tree beside the usual attention on a paged cache, with the forms that the tree may have.

    python -m benchmarks.tuning.tune_tree

Microseconds for 32 query heads and 8 KV heads of 128 in bfloat16: prompts, chunks after a cached prefix, and decoding. "apart"
is one program for each group of keys, "whole" one for all, with 64 or 128 packed rows. What the lines decide is in
fa_serve/backends/triton/tree/plan.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import fa_serve
from benchmarks.measure import milliseconds
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.spec import TREE_SPLITS
from fa_serve.testing import cu_seqlens

CASES = (
    (1, 512, 512),
    (1, 4096, 4096),
    (8, 512, 512),
    (1, 512, 8192),
    (1, 1, 2048),
    (1, 1, 16384),
    (64, 1, 2048),
    (256, 1, 1024),
)
"""Sequences, queries and keys of each."""
FORMS: dict[str, dict[str, Any]] = {
    "whole 64": {"apart": False},
    "whole 128": {"apart": False, "block_m": 128},
    "apart 64": {"apart": True},
}


def main() -> None:
    for batch, queries, keys in CASES:
        pages = -(-keys // 16)
        q = torch.randn(batch * queries, 32, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(batch * pages, 8, 16, 128, dtype=q.dtype, device=q.device).transpose(1, 2) for _ in range(2))
        table = torch.arange(batch * pages, dtype=torch.int32, device=q.device).view(batch, pages)
        lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens([queries] * batch, q.device), "block_table": table}
        used = torch.full((batch,), keys, dtype=torch.int32, device=q.device)
        usual = partial(fa_serve.attention_paged, q, k, v, seqused_k=used, max_seqlen_q=queries, max_seqlen_k=keys, **lengths)
        calls = {"usual": usual, "tree": partial(usual, num_splits=TREE_SPLITS)}
        tensors = AttentionTensors(q, k, v, keys=used, **lengths)
        options = AttentionOptions(128**-0.5, (-1, 0), 0.0, queries, keys, False, TREE_SPLITS)
        for name, form in FORMS.items():
            if form["apart"] and queries > 16:
                continue
            calls[name] = partial(plan_tree(tensors, options, **form), tensors)
        times = {name: 1e3 * milliseconds(call, rep=15, warmup=5) for name, call in calls.items()}
        listed = "  ".join(f"{name} {time:.1f}" for name, time in times.items())
        print(f"{batch} x {queries} queries, {keys} keys, us: {listed}", flush=True)


if __name__ == "__main__":
    main()
