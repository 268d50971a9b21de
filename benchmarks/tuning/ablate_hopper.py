"""Measures what each technique of the Hopper forward brings: the chosen tile, and the same tile with one change.

python -m benchmarks.tuning.ablate_hopper        # about 100 s; 16k tokens, hidden size 2048, bfloat16

Each variant is first compared with PyTorch in float32, in several processes, which also compiles it. The variants of a cell are
then timed in turn. A figure is the time of the variant divided by the time of the chosen tile: above 1 the chosen tile is
faster.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from benchmarks.measure import PAUSE, milliseconds
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule, hopper_forward_tiles

SEQLENS = (1024, 4096, 16384)
CELLS = [(dim, causal, seqlen) for dim in (64, 128, 256) for causal in (False, True) for seqlen in SEQLENS]
ROUNDS = 4


def variants(dim: int, causal: bool, seqlen: int) -> dict[str, HopperTiles]:
    tile = hopper_forward_tiles(dim, dim, (-1, 0 if causal else -1), seqlen, seqlen, False)
    found = {
        "chosen": tile,
        "no overlap": replace(tile, overlap=False),
        "ping-pong toggled": replace(tile, pingpong=not tile.pingpong),
        "softmax first toggled": replace(tile, softmax_first=not tile.softmax_first),
        "grid": replace(tile, schedule=Schedule.GRID),
        "rescaling late toggled": replace(tile, rescale_late=not tile.rescale_late),
    }
    if tile.q_stages == 2:
        found["one Q slot"] = replace(tile, q_stages=1)
    if tile.groups == 2:
        found["half the keys"] = replace(tile, block_n=tile.block_n // 2, stages=tile.stages * 2)
    if tile.groups == 3:
        found["two warpgroups"] = replace(tile, groups=2)
    return found


def planned(qkv: list[torch.Tensor], causal: bool, tile: HopperTiles) -> Callable[[], torch.Tensor]:
    """Attention of these tensors, planned once."""
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward

    _, seqlen, _, dim = qkv[0].shape
    options = AttentionOptions(dim**-0.5, (-1, 0 if causal else -1), 0.0, seqlen, seqlen, return_lse=False)
    tensors = AttentionTensors(*qkv)
    run = plan_hopper_forward(tensors, options, tile)
    return lambda: run(tensors)[0]


def complaint(job: tuple[int, bool, HopperTiles]) -> str:
    """Why a variant is left out, because it does not compile or is wrong; empty if it is right."""
    dim, causal, tile = job
    try:
        qkv = [torch.randn(2, 700, 4, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        q, k, v = (x.transpose(1, 2).float() for x in qkv)
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
        error = (planned(qkv, causal, tile)().float() - exact).abs().max().item()
    except Exception as failure:  # the compiler raises errors of many types
        return f"{type(failure).__name__}: {failure}"[:100].replace("\n", " ")
    return "" if error < 2e-2 else f"error {error}"


def main() -> None:
    jobs = sorted({(dim, causal, tile) for dim, causal, n in CELLS for tile in variants(dim, causal, n).values()}, key=repr)
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        complaints = dict(zip(jobs, pool.map(complaint, jobs, chunksize=1), strict=True))
    for job, reason in complaints.items():
        if reason:
            print("left out:", *job, reason)
    table: dict[tuple[str, int, bool], dict[int, float]] = {}
    for dim, causal, seqlen in CELLS:
        shape = (16384 // seqlen, seqlen, 2048 // dim, dim)
        qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        tiles = {name: tile for name, tile in variants(dim, causal, seqlen).items() if not complaints[dim, causal, tile]}
        names = list(tiles)
        calls = {name: planned(qkv, causal, tile) for name, tile in tiles.items()}
        times = {name: [] for name in tiles}
        for turn in range(ROUNDS):
            for name in names[2 * turn :] + names[: 2 * turn]:
                time.sleep(PAUSE)
                times[name].append(milliseconds(calls[name], warmup=2, rep=8))
        for name in names:
            table.setdefault((name, dim, causal), {})[seqlen] = median(times[name]) / median(times["chosen"])
    print("time over that of the chosen tile, at", *SEQLENS)
    for (name, dim, causal), ratios in sorted(table.items()):
        if name != "chosen":
            cells = "  ".join(f"{ratios.get(n, float('nan')):.2f}" for n in SEQLENS)
            print(f"{name:30} d{dim} {'causal' if causal else 'full':6} {cells}")


if __name__ == "__main__":
    main()
