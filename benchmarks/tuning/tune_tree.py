"""Attention by a fixed tree beside the usual attention on a paged cache, with the forms that the tree may have.

    python -m benchmarks.tuning.tune_tree
    python -m benchmarks.tuning.tune_tree --heads 16,8 --prompts    # prompts and chunks at the shape of 0.6B

Microseconds in bfloat16 with heads of 128: prompts, chunks after a cached prefix, and decoding. "apart" is one program for each
group of keys, "whole" one for all, with 64 or 128 packed rows (`tree/plan.py:CHOOSES_ROWS`), and "hopper" is Hopper's kernel
(`hopper.FOLLOWS_TREE`), by name with its tiles: "late" rescales late, "pingpong" takes turns, "small" has 64 rows
(`tiles.HALVES_TREE_TILES`).
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import fa_serve
from benchmarks.measure import milliseconds
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule
from fa_serve.backends.triton.tree.plan import plan_tree
from fa_serve.spec import TREE_SPLITS
from fa_serve.testing import cu_seqlens

CASES = (
    (1, 512, 512),
    (1, 4096, 4096),
    (16, 512, 512),
    (2, 4096, 4096),
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


HOPPER_FORMS = {
    "hopper late": HopperTiles(2, 64, 4, 2, Schedule.DYNAMIC, rescale_late=True),
    "hopper late pingpong": HopperTiles(2, 64, 4, 2, Schedule.DYNAMIC, rescale_late=True, pingpong=True),
    "hopper pingpong": HopperTiles(2, 64, 4, 2, Schedule.DYNAMIC, pingpong=True),
    "hopper small": HopperTiles(1, 64, 2, 2, Schedule.DYNAMIC, rescale_late=True, blocks_per_sm=2),
    "hopper late early-exp": HopperTiles(2, 64, 4, 2, Schedule.DYNAMIC, rescale_late=True, softmax_first=False),
}
"""Tiles for prompts; see `hopper.forward.tiles.tree_tiles`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="32,8", help="query heads and KV heads")
    parser.add_argument("--prompts", action="store_true", help="no case with one query")
    given = parser.parse_args()
    num_heads, heads = (int(number) for number in given.heads.split(","))
    for batch, queries, keys in CASES:
        if given.prompts and queries == 1:
            continue
        pages = -(-keys // 16)
        q = torch.randn(batch * queries, num_heads, 128, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(batch * pages, heads, 16, 128, dtype=q.dtype, device=q.device).transpose(1, 2) for _ in range(2))
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
        if queries > 1 and torch.cuda.get_device_capability()[0] == 9:
            for name, tiles in HOPPER_FORMS.items():
                calls[name] = partial(plan_hopper_forward(tensors, options, tiles), tensors)
        times = {name: 1e3 * milliseconds(call, rep=15, warmup=5) for name, call in calls.items()}
        listed = "  ".join(f"{name} {time:.1f}" for name, time in times.items())
        print(f"{batch} x {queries} queries, {keys} keys, us: {listed}", flush=True)


if __name__ == "__main__":
    main()
