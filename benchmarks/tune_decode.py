"""Tiles and splits of the decode kernel on one GPU: correctness first, then a search, a short table last.

    python benchmarks/tune_decode.py                       # every part, about 5 minutes on an H200
    python benchmarks/tune_decode.py --parts gate,grid --budget 120 --log decode.jsonl

gate    options, dtypes, fp8, bitwise batch invariance, one CUDA graph over changing lengths behind a cache write
grid    5 head layouts x 9 (batch, keys), bfloat16, page_size 16, shuffled pages: each tile, each number of splits, FA3
uneven  log-uniform lengths; 10% of the sequences 20 times longer: shares of work against splits of each sequence, FA3
fp8     tiles for a float8_e4m3fn cache, against our own bfloat16
launch  programmatic launch on and off where a step is short, and the host's cost of a call

A red gate ends the run. What a branch of `decode_tiles` says was measured is measured here. Left out: results that count for
anything but tuning; those are bench_attention.py's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import fa3, graph_microseconds, host_microseconds
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fa_serve import spec
from fa_serve.backends.reference import ReferenceBackend
from fa_serve.backends.triton.decode import DecodeTiles, _num_sms, decode_tiles, launch_decode
from fa_serve.backends.triton.kv_cache import launch_store_kv
from fa_serve.testing import assert_lse_matches, assert_matches_reference, cu_seqlens, eager_attention

DEVICE = torch.device("cuda", 0)
HEADS = ((32, 8, 128), (32, 32, 128), (64, 8, 128), (16, 8, 128), (64, 8, 64))
CELLS = (
    (1, 1024), (1, 16384), (1, 131072), (8, 8192), (32, 4096), (64, 8192), (128, 1024), (256, 512), (256, 4096),
)  # fmt: skip
TILES = ((64, 2, 4), (64, 2, 3), (64, 2, 2), (64, 4, 4), (64, 4, 3), (128, 4, 2), (32, 2, 4))  # block_n, num_warps, num_stages
FP8_TILES = ((64, 4, 4), (64, 4, 3), (64, 2, 4), (128, 4, 3), (128, 8, 4), (128, 8, 3))
WAVES = (1, 2, 3, 4, 6, 8)  # programs per SM


@dataclass
class Problem:
    """One decode step over a cache of random keys, pages in random order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: dict[str, Any]

    @classmethod
    def make(
        cls, lengths: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.bfloat16, page_size: int = 16,
        queries: int = 1, pool: tuple[Tensor, Tensor] | None = None,
    ) -> Problem:  # fmt: skip
        counts = [-(-n // page_size) for n in lengths]
        poisoned = pool is None
        if pool is None:
            shape = (sum(counts), page_size, kv_heads, dim)
            pool = tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype) for _ in range(2))
        order = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
        table = torch.full((len(lengths), max(counts)), 2**28 if poisoned else 0, device=DEVICE, dtype=torch.int32)
        for row, pages in enumerate(order.split(counts)):
            table[row, : len(pages)] = pages
            if poisoned and lengths[row] % page_size:
                for cache in pool:
                    cache[int(pages[-1]), lengths[row] % page_size :] = float("nan")
        options = {
            "block_table": table, "seqused_k": torch.tensor(lengths, device=DEVICE, dtype=torch.int32),
            "cu_seqlens_q": cu_seqlens([queries] * len(lengths), DEVICE), "max_seqlen_q": queries, "max_seqlen_k": max(lengths),
            "softmax_scale": dim**-0.5, "window_size": (-1, 0), "softcap": 0.0, "sinks": None, "k_descale": None,
            "v_descale": None, "num_splits": 0, "out": None, "return_lse": False,
        }  # fmt: skip
        q_dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
        q = torch.randn(queries * len(lengths), heads, dim, device=DEVICE, dtype=q_dtype)
        if dtype == torch.float8_e4m3fn:
            options |= {name: torch.rand(kv_heads, device=DEVICE) + 0.5 for name in ("k_descale", "v_descale")}
        return cls(q, pool[0][: sum(counts)], pool[1][: sum(counts)], options)

    def run(self, tiles: DecodeTiles | None = None, **changes: Any) -> tuple[Tensor, Tensor | None]:
        return launch_decode(self.q, self.k_cache, self.v_cache, **(self.options | changes), tiles=tiles)

    def default_tiles(self) -> DecodeTiles:
        batch, (_, heads, dim), kv_heads = len(self.options["seqused_k"]), self.q.shape, self.k_cache.shape[2]
        return decode_tiles(
            spec.arch_of(DEVICE), _num_sms(DEVICE), self.q.element_size(), self.k_cache.element_size(), dim, dim, heads,
            kv_heads, batch, self.options["max_seqlen_q"], self.options["max_seqlen_k"], 0,
        )  # fmt: skip

    def fa3(self) -> Callable[[], object] | None:
        call, o = fa3(), self.options
        if call is None:
            return None
        out = torch.empty_like(self.q)
        return lambda: call(
            self.q, self.k_cache, self.v_cache, o["max_seqlen_q"], o["cu_seqlens_q"], o["max_seqlen_k"], fa_version=3, out=out,
            seqused_k=o["seqused_k"], causal=True, block_table=o["block_table"],
        )  # fmt: skip

    def eager(self, options: dict[str, Any]) -> Tensor:
        """The equation in q's own dtype, sequence by sequence."""
        starts, page_size, outs = options["cu_seqlens_q"].tolist(), self.k_cache.shape[1], []
        for row, length in enumerate(options["seqused_k"].tolist()):
            pages = options["block_table"][row, : -(-length // page_size)].long()
            kv = []
            for cache, descale in ((self.k_cache, options["k_descale"]), (self.v_cache, options["v_descale"])):
                x = cache[pages].flatten(0, 1)[:length].to(self.q.dtype)
                kv.append(x if descale is None else (x * descale[:, None]).to(x.dtype))
            names = ("softmax_scale", "window_size", "softcap", "sinks")
            q = self.q[starts[row] : starts[row + 1]]
            outs.append(eager_attention(q[None], kv[0][None], kv[1][None], **{name: options[name] for name in names})[0])
        return torch.cat(outs)

    def check(self, what: str, tiles: DecodeTiles | None = None, **changes: Any) -> None:
        """Against float64, by the 2x rule."""
        options = self.options | changes | {"return_lse": True, "out": None}
        out, lse = self.run(tiles, **options)
        exact, exact_lse = ReferenceBackend().forward_paged(self.q.double(), self.k_cache, self.v_cache, **options)
        assert lse is not None
        assert_matches_reference(out, exact, self.eager(options), what)
        assert_lse_matches(lse, exact_lse)

    @property
    def bytes_read(self) -> int:
        tokens = int(self.options["seqused_k"].sum())
        return 2 * tokens * self.k_cache.shape[2] * self.k_cache.shape[3] * self.k_cache.element_size()


def gate() -> None:
    """Raises AssertionError. Lengths are odd and uneven; what no sequence owns is NaN."""
    lengths = [1, 4097, 63, 700, 64, 1000]
    sinks = torch.randn(8, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        for dim in (64, 128, 256, 80):
            for queries in (1, 4):
                problem = Problem.make(lengths, 8, 2, dim, dtype, queries=queries)
                what = f"{dtype} D{dim} Q{queries}"
                for splits in (0, 1, 5):
                    problem.check(f"{what} splits={splits}", num_splits=splits)
                problem.check(f"{what} window, softcap, sinks", window_size=(300, 0), softcap=20.0, sinks=sinks)
                problem.check(f"{what} both windows", window_size=(40, 2), num_splits=2)
    for page_size in (1, 33, 256):
        Problem.make(lengths, 28, 4, 128, page_size=page_size).check(f"page_size {page_size}")
    problem = Problem.make(lengths, 32, 8, 128)
    for parts in (1, 3, 200):
        for balanced in (False, True):
            tiles = replace(problem.default_tiles(), parts=parts, balanced=balanced)
            problem.check(f"parts {parts} balanced {balanced}", tiles)
    gate_invariance(problem)
    gate_graph()


def gate_invariance(problem: Problem) -> None:
    together = problem.run(num_splits=4)[0]
    for row in range(len(together)):
        single = {name: problem.options[name][row : row + 1] for name in ("block_table", "seqused_k")}
        single |= {"cu_seqlens_q": cu_seqlens([1], DEVICE), "max_seqlen_k": int(single["seqused_k"])}
        alone = replace(problem, q=problem.q[row : row + 1]).run(num_splits=4, **single)[0]
        assert torch.equal(alone[0], together[row]), f"row {row} differs with its company"


def gate_graph() -> None:
    """One graph of cache write and decode, replayed over lengths that it was not captured with."""
    problem = Problem.make([4096] * 16, 32, 8, 128)
    used, table = problem.options["seqused_k"], problem.options["block_table"].long()
    k, v = (torch.randn(16, 8, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.full((16,), -1, device=DEVICE)
    out = torch.empty_like(problem.q)

    def step() -> None:
        for _ in range(3):
            launch_store_kv(k, v, problem.k_cache, problem.v_cache, slots, None, None)
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
    """Times configurations of one problem; an impossible one (shared memory) is skipped, a wrong one ends the run."""

    def __init__(self, log: Path | None, seconds: float) -> None:
        self.log = log.open("w") if log else None
        self.deadline = time.monotonic() + seconds
        self.relative: dict[tuple[int, ...], list[float]] = defaultdict(list)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def measure(self, case: str, problem: Problem, tiles: DecodeTiles) -> float:
        out, expected = torch.empty_like(problem.q), problem.run(problem.default_tiles())[0].float()
        try:
            us = graph_microseconds(lambda: problem.run(tiles, out=out), rep=25)
        except OutOfResources:
            return float("inf")
        error = (out.float() - expected).norm() / expected.norm()
        assert error < 1e-2, f"{case} {tiles}: {error:.1e} from the default tiles' result"
        if self.log:
            print(json.dumps({"case": case, "us": round(us, 2), "tiles": asdict(tiles)}), file=self.log, flush=True)
        return us

    def best(self, case: str, problem: Problem, shapes: tuple[tuple[int, int, int], ...]) -> tuple[float, DecodeTiles]:
        """Every tile at the default number of splits, then every number of splits for the two best tiles."""
        default = problem.default_tiles()
        times = {}
        for shape in shapes:
            block_n, num_warps, num_stages = shape
            tiles = rescaled(problem, replace(default, block_n=block_n, num_warps=num_warps, num_stages=num_stages), 4)
            times[tiles] = self.measure(case, problem, tiles)
        fastest = min(times.values())
        for tiles, us in times.items():
            self.relative[tiles.block_n, tiles.num_warps, tiles.num_stages].append(us / fastest)
        for tiles in sorted(times, key=times.__getitem__)[:2]:
            for candidate in split_choices(problem, tiles):
                if candidate not in times and not self.late:
                    times[candidate] = self.measure(case, problem, candidate)
        chosen = min(times, key=times.__getitem__)
        return times[chosen], chosen


def rescaled(problem: Problem, tiles: DecodeTiles, waves: int) -> DecodeTiles:
    """The same tile with splits for `waves` programs per SM."""
    rows = problem.q.shape[1] // problem.k_cache.shape[2] * problem.options["max_seqlen_q"]
    units = problem.k_cache.shape[2] * -(-rows // tiles.block_m)
    if not tiles.balanced:
        units *= len(problem.options["seqused_k"])
    blocks = -(-problem.options["max_seqlen_k"] // tiles.block_n)
    parts = -(-waves * _num_sms(DEVICE) // units)
    return replace(tiles, parts=parts if tiles.balanced else min(parts, blocks))


def split_choices(problem: Problem, tiles: DecodeTiles) -> Iterator[DecodeTiles]:
    batch = len(problem.options["seqused_k"])
    for balanced in (False, True) if batch > 1 else (False,):
        for waves in WAVES:
            yield rescaled(problem, replace(tiles, balanced=balanced, min_blocks=2 if balanced else 1), waves)
    yield replace(tiles, balanced=False, parts=1, min_blocks=1)


def short(tiles: DecodeTiles) -> str:
    return f"{tiles.block_n},{tiles.num_warps},{tiles.num_stages} {'bal' if tiles.balanced else 'fix'}{tiles.parts}"


def compare(search: Search, cases: Iterator[tuple[str, Problem]], shapes: tuple[tuple[int, int, int], ...]) -> list[str]:
    rows = [f"{'case':<20}{'ours':>8} {'TB/s':>5} {'tiles':<15}{'best':>8} {'tiles':<15}{'fa3':>8} fa3/ours fa3/best"]
    ratios = []
    for case, problem in cases:
        mine = problem.default_tiles()
        ours = search.measure(case, problem, mine)
        best, tiles = (ours, mine) if search.late else search.best(case, problem, shapes)
        call = problem.fa3()
        peer = graph_microseconds(call, rep=25) if call else float("nan")
        rows.append(
            f"{case:<20}{ours:8.1f} {problem.bytes_read / ours * 1e-6:5.2f} {short(mine):<15}{best:8.1f} {short(tiles):<15}"
            f"{peer:8.1f} {peer / ours:8.3f} {peer / best:8.3f}"
        )
        print(rows[-1], flush=True)
        ratios.append(peer / ours)
    rows.append(f"fa3 / ours: geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}, least {min(ratios):.3f}")
    return rows


def pools(dtype: torch.dtype = torch.bfloat16) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    """One pool of pages per head layout, as large as its largest cell, freed when the next one is asked for."""
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def pool(kv_heads: int, dim: int, pages: int) -> tuple[Tensor, Tensor]:
        if (kv_heads, dim) not in held:
            held.clear()
            shape = (pages, 16, kv_heads, dim)
            held[kv_heads, dim] = tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).to(dtype) for _ in range(2))
        return held[kv_heads, dim]

    return pool


def grid_cases() -> Iterator[tuple[str, Problem]]:
    pool, largest = pools(), max(batch * kv for batch, kv in CELLS) // 16
    for heads, kv_heads, dim in HEADS:
        for batch, kv in CELLS:
            problem = Problem.make([kv] * batch, heads, kv_heads, dim, pool=pool(kv_heads, dim, largest))
            yield f"{heads}/{kv_heads} d{dim} {batch}x{kv}", problem


def uneven_cases() -> Iterator[tuple[str, Problem]]:
    pool = pools()
    generator = torch.Generator().manual_seed(0)
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64)):
        for batch in (16, 64, 256):
            exponents = torch.rand(batch, generator=generator) * 8 + 5  # 32 to 8192
            spread = [int(2**e) for e in exponents.tolist()]
            long = [20 * 512 if i % 10 == 3 else 512 for i in range(batch)]
            for name, lengths in (("log", spread), ("20x", long)):
                problem = Problem.make(lengths, heads, kv_heads, dim, pool=pool(kv_heads, dim, 64 * 1024))
                yield f"{heads}/{kv_heads} d{dim} {batch} {name}", problem


def fp8(search: Search) -> list[str]:
    rows = [f"{'case':<22}{'bf16':>8}{'fp8':>8} {'tiles':<16}{'best':>8} {'tiles':<16} bf16/fp8  bf16/best"]
    pool, quantised = pools(), pools(torch.float8_e4m3fn)
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64)):
        for batch, kv in ((1, 131072), (64, 8192), (256, 4096)):
            case = f"{heads}/{kv_heads} d{dim} {batch}x{kv}"
            plain = Problem.make([kv] * batch, heads, kv_heads, dim, pool=pool(kv_heads, dim, 65536))
            base = search.measure(case, plain, plain.default_tiles())
            small = Problem.make([kv] * batch, heads, kv_heads, dim, torch.float8_e4m3fn, pool=quantised(kv_heads, dim, 65536))
            ours = search.measure(case + " fp8", small, small.default_tiles())
            best, tiles = (ours, small.default_tiles()) if search.late else search.best(case + " fp8", small, FP8_TILES)
            rows.append(
                f"{case:<22}{base:8.1f}{ours:8.1f} {short(small.default_tiles()):<16}{best:8.1f} {short(tiles):<16}"
                f"{base / ours:8.2f} {base / best:10.2f}"
            )
            print(rows[-1], flush=True)
    return rows


def launch() -> list[str]:
    rows = [f"{'case':<22}{'programmatic':>13}{'plain':>8}{'host us':>9}"]
    for batch, kv in ((1, 1024), (1, 16384), (32, 4096)):
        problem = Problem.make([kv] * batch, 32, 8, 128)
        tiles, out, arch_of = problem.default_tiles(), torch.empty_like(problem.q), spec.arch_of
        times = []
        for arch in (arch_of(DEVICE), 80):
            spec.arch_of = lambda device, arch=arch: arch  # type: ignore[misc]
            times.append(graph_microseconds(lambda problem=problem, tiles=tiles, out=out: problem.run(tiles, out=out)))
        spec.arch_of = arch_of
        host = host_microseconds(lambda problem=problem, out=out: problem.run(out=out))
        rows.append(f"32/8 d128 {f'{batch}x{kv}':<12}{times[0]:13.2f}{times[1]:8.2f}{host:9.1f}")
    return rows


def read_bandwidth() -> float:
    """TB/s of summing 4 GiB: what a kernel that only reads can reach here."""
    x = torch.randn(1 << 30, device=DEVICE)
    return x.numel() * 4 / graph_microseconds(lambda: x.sum(), calls=1) * 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="gate,launch,uneven,fp8,grid")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds; once spent, only the default tiles are timed")
    parser.add_argument("--log", type=Path, help="one JSON line for every configuration timed")
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
    if "uneven" in parts:
        tables.append(compare(search, uneven_cases(), ((64, 2, 4), (64, 2, 3), (64, 4, 3))))
    if "fp8" in parts:
        tables.append(fp8(search))
    if "grid" in parts:
        tables.append(compare(search, grid_cases(), TILES))
    print(f"\nread bandwidth {read_bandwidth():.2f} TB/s; {time.monotonic() - start:.0f} s in all")
    for table in tables:
        print("\n" + "\n".join(table))
    print("\ntile: time relative to the best tile of the cell, geometric mean and worst")
    for shape, ratios in sorted(search.relative.items(), key=lambda item: statistics.geometric_mean(item[1])):
        print(f"  {shape}: {statistics.geometric_mean(ratios):.3f} {max(ratios):.3f}")


if __name__ == "__main__":
    main()
