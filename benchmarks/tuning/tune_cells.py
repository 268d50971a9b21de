"""Times variants of the Hopper kernel in cells of bench_attention.py: tiles, split keys, and the other backends.

    python -m benchmarks.tuning.tune_cells --cells phi-3-mini_64x197 --tiles 1x64s2q2D/3,2x128s2q2DPb --gpus 2
    python -m benchmarks.tuning.tune_cells --cells 64_8_d64_4_of_4096x32 --splits 1,2 --backends auto,triton

A cell is named as in `prefill`, as in `models` with any number and length of sequences, or as in `chunk` and `verify`. Tiles
are named as tune_hopper.py names them. Each variant is a process: they compile side by side and take turns on their GPU, so 150
variants take a minute on two GPUs with 32 cores. A result that differs from that of the portable kernel is shown as an error.
Left out: the check against float64, which bench_attention.py makes of what is chosen, and peers.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import fa_serve
from benchmarks.attention.attention_cells import HIDDEN, MODELS, MODELS_WITH_SINKS, TOKENS
from benchmarks.attention.paged_problem import Problem
from benchmarks.child_process import MARK, Log, answers
from benchmarks.measure import PAUSE, commit, flash_peers, graph_microseconds
from benchmarks.tuning.tune_hopper import label
from fa_serve.backends.calls import AttentionOptions, AttentionTensors
from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule
from fa_serve.testing import cu_seqlens

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.05
"""Difference of two results in 16 bits, as in paged_benches.py."""
TURNS = 3


class Variant(NamedTuple):
    """One way to compute a cell.

    backend: of the public function, which chooses everything else; "" for the Hopper kernel with the other fields
    tiles:   their name, "" for those of `forward_tiles`
    splits:  into how many the keys of a row may be cut; 0: as `key_splits` says
    """

    backend: str
    tiles: str = ""
    splits: int = 0

    def __str__(self) -> str:
        cut = f" up to {self.splits} splits" if self.splits else ""
        return self.backend or f"{self.tiles or 'chosen'}{cut}"


class Call(NamedTuple):
    """The public function with a backend, the tensors and options of a plan, and those peers of a list that are installed."""

    public: Callable[[str], Tensor]
    tensors: AttentionTensors
    options: AttentionOptions
    peers: Callable[[str], dict[str, Callable[[], Tensor]]]


def parse_tiles(name: str) -> HopperTiles:
    """The inverse of `tune_hopper.label`. Raises ValueError."""
    pattern = r"(\d)x(\d+)s(\d)q(\d)([GD])(P?)(o?)(b?)(l?)(?:c(\d))?(?:/(\d))?"
    found = re.fullmatch(pattern, name)
    if found is None:
        raise ValueError(f"--tiles must be names such as 1x64s2q2D/3 or 2x128s2q2DPbl, got {name!r}")
    groups, block_n, stages, q_stages, schedule, pingpong, serial, late_exponentials, late, parts, blocks = found.groups()
    return HopperTiles(
        int(groups),
        int(block_n),
        int(stages),
        int(q_stages),
        Schedule.GRID if schedule == "G" else Schedule.DYNAMIC,
        pingpong=bool(pingpong),
        overlap=not serial,
        softmax_first=not late_exponentials,
        rescale_late=bool(late),
        o_parts=int(parts or 0),
        blocks_per_sm=int(blocks or 1),
    )


def make_call(cell: str, device: str = "cuda") -> Call:
    """The problem of a cell. Raises ValueError for a name that is none."""
    paged = re.fullmatch(r"(\d+)_(\d+)_d(\d+)_(\d+)_of_(\d+)x(\d+)", cell)
    if paged:
        heads, kv_heads, dim, queries, keys, batch = map(int, paged.groups())
        problem = Problem.make([keys] * batch, heads, kv_heads, dim, queries=queries)
        given = dict(problem.options)
        cached = (problem.q, problem.k_cache, problem.v_cache)
        named = {name: given.pop(name) for name in AttentionTensors._fields if name in given}
        tensors = AttentionTensors(*cached, keys=given.pop("seqused_k"), **named)
        return Call(
            lambda backend: problem.ours(backend)(),
            tensors,
            AttentionOptions(**given),
            lambda _: {"fa3": flash} if (flash := problem.fa3()) is not None else {},
        )
    dense = re.fullmatch(r"d(\d+)_(full|causal)_(\d+)", cell)
    if dense:
        return _dense(int(dense[1]), int(dense[3]), dense[2] == "causal", device)
    model, _, batches = cell.rpartition("_")
    found = next((each for each in MODELS if each[0] == model), None)
    sizes = re.fullmatch(r"(\d+)x(\d+)", batches)
    if found is None or sizes is None:
        raise ValueError(f"--cells must be names such as phi-3-mini_64x197 or 64_8_d64_4_of_4096x32, got {cell!r}")
    count, seqlen = map(int, sizes.groups())
    _, heads, kv_heads, dim, dim_v, window, softcap = found
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    q, k, v = (torch.randn(count * seqlen, *shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    sinks = torch.randn(heads, device=device, dtype=torch.bfloat16) if model in MODELS_WITH_SINKS else None
    ends = cu_seqlens([seqlen] * count, device)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
    public = partial(fa_serve.attention_varlen, q, k, v, window_size=window, softcap=softcap, sinks=sinks, **packed)
    options = AttentionOptions(dim**-0.5, window, softcap, seqlen, seqlen, return_lse=False)
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=ends, keys=ends, sinks=sinks)
    lengths = [seqlen] * count
    return Call(
        lambda backend: public(backend=backend),
        tensors,
        options,
        lambda wanted: flash_peers(wanted, q, k, v, lengths, window, softcap, sinks),
    )


def _dense(dim: int, seqlen: int, causal: bool, device: str) -> Call:
    """A cell of the papers' grid."""
    batch = TOKENS // seqlen
    q, k, v = (torch.randn(batch, seqlen, HIDDEN // dim, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    window = (-1, 0 if causal else -1)
    return Call(
        lambda backend: fa_serve.attention(q, k, v, causal=causal, backend=backend),
        AttentionTensors(q, k, v),
        AttentionOptions(dim**-0.5, window, 0.0, seqlen, seqlen, return_lse=False),
        lambda wanted: flash_peers(wanted, *(x.flatten(0, 1) for x in (q, k, v)), [seqlen] * batch, window),
    )


def measure(cell: str, variant: Variant, lock: str) -> float:
    """Median of the microseconds of a call in a CUDA graph, measured while this process holds the lock."""
    call = make_call(cell)
    if variant.backend:
        ours = partial(call.public, variant.backend)
    else:
        from fa_serve.backends.hopper.forward.plan import plan_hopper_forward

        tiles = parse_tiles(variant.tiles) if variant.tiles else None
        run = plan_hopper_forward(call.tensors, call.options, tiles, variant.splits or None)

        def ours() -> Tensor:
            return run(call.tensors)[0]

    worst = (ours().float() - call.public("triton").float()).abs().max().item()
    assert worst < TOLERANCE, f"differs from the portable kernel by {worst}"
    times = []
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(TURNS):
            time.sleep(PAUSE)
            times.append(graph_microseconds(ours))
    return statistics.median(times)


def variants(args: argparse.Namespace) -> list[Variant]:
    """The backends, and every choice of tiles with every number of splits."""
    chosen = [Variant(backend) for backend in args.backends]
    own = [Variant("", tiles, splits) for tiles, splits in product(args.tiles or [""], args.splits or [0])]
    return chosen + (own if args.tiles or args.splits else [])


def run_one(cell: str, variant: Variant, gpu: int, locks: Path, seconds: float) -> tuple[float | None, str]:
    """-> microseconds, or None and the reason."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.tuning.tune_cells",
        "--one",
        json.dumps([cell, *variant, str(locks / str(gpu))]),
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    log = Log(lines=4)
    for microseconds, reason in answers(
        command, os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": path}, seconds, log
    ):
        return microseconds, reason
    return None, " ".join("".join(log.last).split())[:120]


def run(args: argparse.Namespace) -> None:
    """Print a table for each cell, and write a line for each variant."""
    deadline = time.monotonic() + args.budget
    jobs = list(product(args.cells, variants(args)))
    with tempfile.TemporaryDirectory(prefix="tune_cells_") as folder, ThreadPoolExecutor(args.processes) as pool:

        def work(number: int) -> tuple[float | None, str]:
            left = deadline - time.monotonic()
            if left <= 0:
                return None, "not started for lack of time"
            return run_one(*jobs[number], number % args.gpus, Path(folder), left)

        results = list(pool.map(work, range(len(jobs))))
    versions = {"torch": torch.__version__, "commit": commit()}
    with args.out.open("w") as file:
        for (cell, variant), (microseconds, reason) in zip(jobs, results, strict=True):
            line = {"cell": cell, "variant": str(variant), "us": microseconds, "reason": reason, **versions}
            file.write(json.dumps(line) + "\n")
    last = ""
    for (cell, variant), (microseconds, reason) in zip(jobs, results, strict=True):
        if cell != last:
            print(cell)
            last = cell
        print(f"  {variant!s:<36}{reason if microseconds is None else f'{microseconds:9.1f} us'}")


def tell_one(cell: str, backend: str, tiles: str, splits: int, lock: str) -> None:
    """What a child process does."""
    try:
        told: tuple[float | None, str] = (measure(cell, Variant(backend, tiles, splits), lock), "")
    except Exception as error:  # ptxas, a lack of shared memory, a wrong result: all are answers
        told = (None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:160])
    print(MARK + json.dumps(told), flush=True)


def names(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=names, default=["phi-3-mini_64x197"])
    parser.add_argument("--tiles", type=names, default=[], help="names of tiles, with commas")
    parser.add_argument(
        "--splits", type=lambda text: [int(x) for x in text.split(",")], default=[], help="numbers, with commas"
    )
    parser.add_argument("--backends", type=names, default=["auto"], help="of the public function, with commas")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--processes", type=int, default=12, help="at a time, on all GPUs together")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("tune_cells.jsonl"))
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        tell_one(*args.one)
        return
    for name in args.tiles:
        assert label(parse_tiles(name)) == name, f"{name} is not how tune_hopper.py names these tiles"
    run(args)


if __name__ == "__main__":
    main()
