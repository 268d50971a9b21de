"""Tiles and splits of the decoding kernel on one GPU: a check of the results, then a search, then a short table.

    python -m benchmarks.tuning.tune_decode  # every part, about 4 minutes on an H200
    python -m benchmarks.tuning.tune_decode --parts gate,grid --budget 120 --log decode.jsonl
    python -m benchmarks.tuning.tune_decode --parts grid --layouts 20/20/64

gate    options, dtypes, fp8, bitwise batch invariance, one CUDA graph over changing lengths behind a cache write
launch  programmatic launch on and off, tiles of the combine kernel, host time of a call
grid    (batch, keys) by head layout, bfloat16, page_size 16, shuffled pages: every variant below, FA3
uneven  the same with log-uniform lengths, and with 10% of the sequences 20 times as long
fp8     tiles for a float8_e4m3fn cache; the peer is our bfloat16 call

A variant changes one thing in the choice of `decode_tiles`: another tile, splits for one wave of programs or for several, or
sequences that are not split (`whole`). Its column is the time of our choice divided by the time of the variant; above 1, the
variant is faster. A failed gate ends the run. These results are for tuning only; bench_attention.py measures the rest.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

import fa_serve
from benchmarks.attention.paged_problem import DEVICE, Problem, pools, uneven
from benchmarks.measure import graph_microseconds, host_microseconds, read_bandwidth
from fa_serve import spec
from fa_serve.backends.triton import splits as combining
from fa_serve.backends.triton.decode.plan import DecodeTiles
from fa_serve.backends.triton.tiles import CombineTiles
from fa_serve.launching.launch import multiprocessors
from fa_serve.testing import cu_seqlens

CELLS = {
    (32, 8, 128): ((1, 1024), (1, 16384), (1, 131072), (8, 8192), (32, 4096), (64, 8192), (128, 1024), (256, 512), (256, 4096)),
    (64, 8, 64): ((1, 1024), (1, 16384), (1, 131072), (8, 8192), (32, 4096), (64, 8192), (128, 1024), (256, 4096)),
    (32, 32, 128): ((1, 16384), (8, 8192), (32, 4096)),
    (20, 20, 64): ((16, 1500), (64, 1500)),  # Whisper's decoder, which attends to the states of its encoder
}
Shape = tuple[int, int, int, int]  # block_n, num_warps, num_stages, programs that fit on an SM
TILES: tuple[Shape, ...] = ((64, 4, 2, 3), (64, 4, 2, 4), (64, 4, 3, 3), (128, 4, 2, 4), (128, 4, 3, 2))
FP8_TILES: tuple[Shape, ...] = ((64, 4, 4, 4), (128, 2, 2, 6), (128, 4, 3, 2), (128, 4, 3, 3))
WAVES = (1, 2, 4)


def gate() -> None:
    """Raises AssertionError. Lengths are odd and uneven; what no sequence owns is NaN."""
    lengths = [1, 4097, 63, 700, 64, 1000]
    sinks = torch.randn(8, device=DEVICE)
    shapes = [(dtype, dim, 1) for dtype in (torch.bfloat16, torch.float8_e4m3fn) for dim in (64, 128, 256, 80)]
    shapes += [(dtype, 128, 4) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)]
    for dtype, dim, queries in shapes:
        problem = Problem.make(lengths, 8, 2, dim, dtype, queries=queries)
        what = f"{dtype} D{dim} Q{queries}"
        for splits in (0, 5):
            problem.check(f"{what} splits={splits}", num_splits=splits)
        problem.check(f"{what} window, softcap, sinks", window_size=(300, 0), softcap=20.0, sinks=sinks)
        problem.check(f"{what} both windows", window_size=(40, 2), num_splits=2)
    for page_size in (1, 33, 256):
        Problem.make(lengths, 28, 4, 128, page_size=page_size).check(f"page_size {page_size}")
    problem = Problem.make(lengths, 32, 8, 128)
    for splits in (1, 3, 200):
        for balanced in (False, True):
            tiles = replace(problem.default_tiles(), splits=splits, balanced=balanced)
            problem.check(f"splits {splits} balanced {balanced}", tiles=tiles)
    gate_invariance(problem)
    gate_graph()


def gate_invariance(problem: Problem) -> None:
    together = problem.run(num_splits=4)[0]
    for row in range(len(together)):
        single = {name: problem.options[name][row : row + 1] for name in ("block_table", "seqused_k")}
        single |= {"cu_seqlens_q": cu_seqlens([1], DEVICE), "max_seqlen_k": int(single["seqused_k"])}
        alone = replace(problem, q=problem.q[row : row + 1]).run(num_splits=4, **single)[0]
        assert torch.equal(alone[0], together[row]), f"row {row} alone differs from row {row} of the batch"


def gate_graph() -> None:
    """Capture one graph of cache write and decoding, and replay it with other lengths."""
    problem = Problem.make([4096] * 16, 32, 8, 128)
    used = problem.options["seqused_k"]
    table = problem.options["block_table"].long()
    k, v = (torch.randn(16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.full((16,), -1, device=DEVICE)
    out = torch.empty_like(problem.q)

    def step() -> None:
        for _ in range(3):
            fa_serve.store_kv(k, v, problem.k_cache, problem.v_cache, slots)
            problem.run(out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(20):
        torch.manual_seed(seed)
        used.copy_(torch.randint(1, 4097 if seed % 2 else 200, (16,)))
        last = used.long() - 1
        slots.copy_(table.gather(1, (last // 16)[:, None])[:, 0] * 16 + last % 16)
        for x in (k, v, problem.q):
            x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        expected = problem.run()[0]
        assert torch.equal(problem.k_cache.flatten(0, 1)[slots], k), "the cache write of the graph is missing"
        assert torch.equal(out, expected), f"replay {seed} differs from the eager call"
        problem.check(f"replay {seed}")


class Search:
    """Times tiles of one problem. Tiles that need too much shared memory are skipped; a wrong result ends the run."""

    def __init__(self, log: Path | None, seconds: float) -> None:
        self.log = log.open("w") if log else None
        self.deadline = time.monotonic() + seconds

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def measure(self, case: str, problem: Problem, tiles: DecodeTiles) -> float:
        out = torch.empty_like(problem.q)
        expected = problem.run(problem.default_tiles())[0].float()
        try:
            us = graph_microseconds(lambda: problem.run(tiles, out=out), rep=25)
        except OutOfResources:
            return float("inf")
        error = (out.float() - expected).norm() / expected.norm()
        assert error < 1e-2, f"{case} {tiles}: {error:.1e} from the default tiles' result"
        if self.log:
            print(json.dumps({"case": case, "us": round(us, 2), "tiles": asdict(tiles)}), file=self.log, flush=True)
        return us

    def variants(self, case: str, problem: Problem, ours: float, shapes: Sequence[Shape]) -> dict[str, float]:
        """Name -> our time over the variant's."""
        if self.late:
            return {}
        named = dict(variants(problem, shapes))
        return {name: ours / self.measure(case, problem, tiles) for name, tiles in named.items()}


def variants(problem: Problem, shapes: Sequence[Shape]) -> Iterator[tuple[str, DecodeTiles]]:
    default = problem.default_tiles()
    for block_n, num_warps, num_stages, resident in shapes:
        # two programs have more registers each than a thread can name: the compiler's choice
        registers = 65536 // (32 * num_warps * resident) // 8 * 8 if resident > 2 else 0
        tiles = replace(default, block_n=block_n, num_warps=num_warps, num_stages=num_stages, registers=registers)
        yield f"{block_n},{num_warps},{num_stages},{resident}", waves_of(problem, tiles, 1, resident)
    resident = 65536 // (32 * default.num_warps * default.registers) if default.registers else 2
    for waves in WAVES:
        yield f"w{waves}", waves_of(problem, default, waves, resident)
    yield "whole", replace(default, balanced=False, splits=1, min_blocks=1)


def waves_of(problem: Problem, tiles: DecodeTiles, waves: int, resident: int) -> DecodeTiles:
    """The same tile with splits for `waves` times the programs that run at once."""
    batch = len(problem.options["seqused_k"])
    blocks = -(-problem.options["max_seqlen_k"] // tiles.block_n)
    wave = max(1, waves * resident * multiprocessors(DEVICE, 0) // problem.k_cache.shape[2])
    if batch == 1:
        return replace(tiles, balanced=False, splits=min(wave, blocks), min_blocks=1)
    return replace(tiles, balanced=True, splits=wave, min_blocks=2)


def short(tiles: DecodeTiles) -> str:
    return f"{tiles.block_n},{tiles.num_warps},{tiles.num_stages} {'bal' if tiles.balanced else 'fix'}{tiles.splits}"


def names(shapes: Sequence[Shape]) -> list[str]:
    return [*(",".join(map(str, shape)) for shape in shapes), *(f"w{waves}" for waves in WAVES), "whole"]


def cells(found: dict[str, float], shapes: Sequence[Shape]) -> str:
    return "".join(f"{found[name]:10.2f}" if name in found else f"{'-':>10}" for name in names(shapes))


def compare(search: Search, cases: Iterator[tuple[str, Problem]]) -> list[str]:
    heading = "".join(f"{name:>10}" for name in names(TILES))
    rows = [f"{'case':<20}{'ours':>8} {'TB/s':>5} {'tiles':<14}{'fa3/ours':>8}{heading}"]
    ratios = []
    for case, problem in cases:
        mine = problem.default_tiles()
        ours = search.measure(case, problem, mine)
        call = problem.fa3()
        peer = graph_microseconds(call, rep=25) if call else float("nan")
        found = search.variants(case, problem, ours, TILES)
        rate = problem.bytes_read / ours * 1e-6
        rows.append(f"{case:<20}{ours:8.1f} {rate:5.2f} {short(mine):<14}{peer / ours:8.3f}{cells(found, TILES)}")
        print(rows[-1], flush=True)
        ratios.append(peer / ours)
    rows.append(f"fa3 / ours: geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}, least {min(ratios):.3f}")
    return rows


def grid_cases(layouts: Sequence[str]) -> Iterator[tuple[str, Problem]]:
    """The cells of these head layouts, which are named like 32/8/128; of all layouts if none is named."""
    pool = pools()
    for (heads, kv_heads, dim), shapes in CELLS.items():
        if layouts and f"{heads}/{kv_heads}/{dim}" not in layouts:
            continue
        for batch, kv in shapes:
            problem = Problem.make([kv] * batch, heads, kv_heads, dim, pool=pool(kv_heads, dim))
            yield f"{heads}/{kv_heads} d{dim} {batch}x{kv}", problem


def uneven_cases() -> Iterator[tuple[str, Problem]]:
    pool = pools()
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64)):
        for batch in (16, 64, 256):
            for name, lengths in uneven(batch).items():
                yield (
                    f"{heads}/{kv_heads} d{dim} {batch} {name}",
                    Problem.make(lengths, heads, kv_heads, dim, pool=pool(kv_heads, dim)),
                )


def fp8(search: Search) -> list[str]:
    heading = "".join(f"{name:>10}" for name in names(FP8_TILES))
    rows = [f"{'case':<22}{'bf16':>8}{'fp8':>8} {'tiles':<15}{'bf16/fp8':>8}{heading}"]
    pool = pools()
    quantised = pools(torch.float8_e4m3fn)
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64)):
        for batch, kv in ((1, 131072), (64, 8192), (256, 4096)):
            case = f"{heads}/{kv_heads} d{dim} {batch}x{kv}"
            plain = Problem.make([kv] * batch, heads, kv_heads, dim, pool=pool(kv_heads, dim))
            base = search.measure(case, plain, plain.default_tiles())
            small = Problem.make([kv] * batch, heads, kv_heads, dim, torch.float8_e4m3fn, pool=quantised(kv_heads, dim))
            mine = small.default_tiles()
            ours = search.measure(case + " fp8", small, mine)
            found = cells(search.variants(case + " fp8", small, ours, FP8_TILES), FP8_TILES)
            rows.append(f"{case:<22}{base:8.1f}{ours:8.1f} {short(mine):<15}{base / ours:8.2f}{found}")
            print(rows[-1], flush=True)
    return rows


def _constant(value: Any, *args: Any) -> Any:
    return value


def launch() -> list[str]:
    """Microseconds of whole calls; `comb 16,1,4` stands for the block_splits, block_rows and num_warps of CombineTiles."""
    shapes = ((16, 1, 1), (16, 1, 4), (4, 2, 1), (64, 1, 2), (64, 1, 4))
    heading = "".join(f"{'comb ' + ','.join(map(str, shape)):>13}" for shape in shapes)
    rows = [f"{'case':<22}{'programmatic':>13}{'plain':>8}{heading}{'host us':>9}"]
    for batch, kv in ((1, 1024), (1, 16384), (1, 131072), (32, 4096)):
        problem = Problem.make([kv] * batch, 32, 8, 128)
        tiles = problem.default_tiles()
        out = torch.empty_like(problem.q)
        arch_of = spec.arch_of
        chosen = combining.combine_tiles

        def timed(problem: Problem = problem, tiles: DecodeTiles = tiles, out: torch.Tensor = out) -> float:
            return graph_microseconds(lambda: problem.run(tiles, out=out))

        times = []
        for arch in (arch_of(DEVICE), 80):
            spec.arch_of = functools.partial(_constant, arch)
            times.append(timed())
        spec.arch_of = arch_of
        for shape in shapes:
            combining.combine_tiles = functools.partial(_constant, CombineTiles(*shape))
            times.append(timed())
        combining.combine_tiles = chosen
        host = host_microseconds(problem.plan(out=out))  # without the public function, which finds the plan
        cells = "".join(f"{us:13.2f}" for us in times[2:])
        rows.append(f"32/8 d128 {f'{batch}x{kv}':<12}{times[0]:13.2f}{times[1]:8.2f}{cells}{host:9.1f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="gate,launch,uneven,fp8,grid")
    parser.add_argument(
        "--layouts", nargs="*", default=[], metavar="HEADS/KV_HEADS/DIM", help="of the grid; all of them if none"
    )
    parser.add_argument("--budget", type=float, default=220.0, help="seconds; once spent, only the default tiles are timed")
    parser.add_argument("--log", type=Path, help="file for one JSON line for each variant")
    args = parser.parse_args()
    parts = args.parts.split(",")
    start = time.monotonic()
    if "gate" in parts:
        gate()
        print(f"gate: green in {time.monotonic() - start:.0f} s", flush=True)
    search = Search(args.log, args.budget - (time.monotonic() - start))
    tables = []
    if "launch" in parts:
        tables.append(launch())
    if "fp8" in parts:
        tables.append(fp8(search))
    if "uneven" in parts:
        tables.append(compare(search, uneven_cases()))
    if "grid" in parts:
        tables.append(compare(search, grid_cases(args.layouts)))
    print(f"\nread bandwidth {read_bandwidth():.2f} TB/s; {time.monotonic() - start:.0f} s in all")
    for table in tables:
        print("\n" + "\n".join(table))


if __name__ == "__main__":
    main()
