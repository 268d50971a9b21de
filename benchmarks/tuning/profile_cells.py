"""Hardware counters of cells of bench_attention.py, ours and their peers, by Nsight Compute (`ncu` must be on PATH).

    python -m benchmarks.tuning.profile_cells --cells d64_full_16384,28_4_d128_8_of_4096x32 --peers fa3,fa4
    python -m benchmarks.tuning.profile_cells --cells d64_causal_4096 --peers ""  # ours alone

A cell is named as tune_cells.py names it. Each contender is a process under ncu, which counts one call after two others, and
prints one line for each kernel of this call. ncu clears the caches before each kernel and does not fix the clocks, so times are
longer than those of the benchmarks. Left out: what a whole model spends (bench_engine.py profile).
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNTERS = {
    "us": "gpu__time_duration.sum",
    "GHz": "sm__cycles_elapsed.avg.per_second",
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_elapsed",
    "exp %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "L2 hits %": "lts__t_sector_hit_rate.pct",
    "MB": "dram__bytes.sum",
    "memory %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "instructions": "sm__inst_executed.sum",
    "active %": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
}
STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = (
    "barrier",
    "gmma",
    "long_scoreboard",
    "math_pipe_throttle",
    "mio_throttle",
    "not_selected",
    "short_scoreboard",
    "wait",
)
UNITS = {"second": 1e6, "ms": 1e3, "msecond": 1e3, "us": 1.0, "usecond": 1.0, "ns": 1e-3, "nsecond": 1e-3}
UNITS |= {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3, "Mhz": 1e-3, "Ghz": 1.0, "hz": 1e-9}
UNITS |= dict.fromkeys(("", "%", "inst", "inst/cycle", "ratio"), 1.0)


def rows(text: str) -> list[dict[str, str]]:
    """What `ncu --csv --page raw` says of each kernel: the name, the counters of COUNTERS and STALLS."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise ValueError(f"ncu has counted no kernel: {text.strip()[-400:]}")
    heads, units, *found = csv.reader(io.StringIO("\n".join(lines)))

    def value(line: list[str], counter: str) -> float:
        place = heads.index(counter)
        if units[place] not in UNITS:
            raise ValueError(f"ncu gives {counter} in {units[place]}, which is none of {', '.join(UNITS)}")
        return float(line[place].replace(",", "")) * UNITS[units[place]]

    kernels = []
    for line in found:
        row = {"kernel": line[heads.index("Kernel Name")]}
        row |= {name: f"{value(line, counter):.4g}" for name, counter in COUNTERS.items() if counter in heads}
        stalls = {reason: value(line, STALLS.format(reason)) for reason in REASONS if STALLS.format(reason) in heads}
        longest = sorted(stalls, key=lambda reason: -stalls[reason])[:3]
        row["stalls"] = ", ".join(f"{reason} {stalls[reason]:.1f}" for reason in longest)
        kernels.append(row)
    return kernels


def count(cell: str, contender: str, seconds: float) -> list[dict[str, str]]:
    """Raises ValueError if nothing was counted, subprocess.TimeoutExpired."""
    counters = [*COUNTERS.values(), *map(STALLS.format, REASONS)]
    ncu = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    command = [
        *ncu,
        "--csv",
        "--page",
        "raw",
        "--metrics",
        ",".join(counters),
        sys.executable,
        "-m",
        "benchmarks.tuning.profile_cells",
        "--one",
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = subprocess.run(
        [*command, cell, contender],
        env=os.environ | {"PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
    )
    return rows(found.stdout)


def call_once(cell: str, contender: str) -> None:
    """What runs under ncu."""
    import torch

    from benchmarks.tuning.tune_cells import make_call

    call = make_call(cell)
    calls = {"ours": lambda: call.public("auto")} if contender == "ours" else call.peers(contender)
    if contender not in calls:
        print(f"{contender} is not installed, or does not serve this cell")
        return
    run = calls[contender]
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="d64_full_16384,28_4_d128_8_of_4096x32", help="names, with commas")
    parser.add_argument("--peers", default="fa3,fa4", help="with commas")
    parser.add_argument("--seconds", type=float, default=120.0, help="upper bound for one contender")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        call_once(*args.one)
        return
    for cell, contender in product(args.cells.split(","), ["ours", *filter(None, args.peers.split(","))]):
        try:
            kernels = count(cell, contender, args.seconds)
        except (ValueError, subprocess.TimeoutExpired) as error:
            print(f"{cell} {contender}: {error}", flush=True)
            continue
        for row in kernels:
            shown = "  ".join(f"{name} {value}" for name, value in row.items() if name != "kernel")
            print(f"{cell} {contender} {row['kernel'].split('(')[0][:60]}: {shown}", flush=True)


if __name__ == "__main__":
    main()
