"""What every benchmark here shares: timing, the peers, and how a result is written.

A result is one JSON line: {"bench", "case", "unit", "ours", "peers": {name: value}, "ratio"} and the machine, versions and
commit; the ratio is ours against the best peer, above 1 when ours is faster. Peers that are not installed are left out of the
line.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

PAUSE = 0.1
"""Seconds. D256 causal 16k, ours and FlashAttention-3 beside it, TFLOPS: no pause 770 and 745, or 725 and 763 in another order;
0.05 s 787 and 800; 0.1 s 792 and 801; 0.3 s 794 and 803; 1 s 796 and 803; 2 s 794 and 804."""


def milliseconds(call: Callable[[], object], rep: int = 60, warmup: int = 15) -> float:
    """Median device time of one call, cold L2, after a warm-up."""
    return float(do_bench(call, warmup=warmup, rep=rep, return_mode="median"))


def in_turns(
    calls: dict[str, Callable[[], object]], measure: Callable[..., float] = milliseconds, turns: int = 3, rep: int = 20
) -> dict[str, float]:
    """The median of several turns of each, each after a pause.

    A GPU's clock follows the power of what ran in the tenth of a second before. Without pauses what comes after a slow kernel
    has 5 to 10% more than what comes after a fast one; FlashAttention's own benchmarks sleep for that reason, too.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            time.sleep(PAUSE)
            times[name].append(measure(call, rep=rep))
    return {name: statistics.median(each) for name, each in times.items()}


def graph_microseconds(call: Callable[[], object], calls: int = 4, rep: int = 40) -> float:
    """Median device time of one call inside a CUDA graph of several: what a captured decode step pays."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return float(do_bench(graph.replay, warmup=10, rep=rep, return_mode="median")) * 1e3 / calls


def host_microseconds(call: Callable[[], object], calls: int = 200) -> float:
    """Host time to issue one call, without waiting for the device."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return min(times)


def read_bandwidth() -> float:
    """TB/s of summing 4 GiB: what a kernel that only reads can reach here."""
    x = torch.randn(1 << 30, device="cuda")
    return x.numel() * 4 / graph_microseconds(lambda: x.sum(), calls=1) * 1e-6


def sdpa(kind: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """torch's operator held to one kernel; q, k, v as (batch, seqlen, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]

    def call() -> torch.Tensor:
        with sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    return call


def fa3() -> Callable[..., Any] | None:
    """FlashAttention-3's varlen entry point, as vLLM ships it, or None."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func  # type: ignore[no-any-return]


def commit() -> str:
    """Of the working tree; FA_SERVE_COMMIT names it for a copy without its history."""
    if "FA_SERVE_COMMIT" in os.environ:
        return os.environ["FA_SERVE_COMMIT"]
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class Results:
    """Collects lines; `write` replaces the file of this bench, so that its last run is what counts."""

    def __init__(self, bench: str, folder: Path) -> None:
        self.bench, self.path, self.lines = bench, folder / f"{bench}.jsonl", list[dict[str, Any]]()
        self.machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit(),
        }

    def add(self, case: str, unit: str, ours: float, peers: dict[str, float]) -> float:
        """One line; the unit says whether more is better. -> ours against the best peer, NaN without one."""
        ratio = min((_ratio({"unit": unit, "ours": ours}, theirs) for theirs in peers.values()), default=float("nan"))
        line = {
            "bench": self.bench,
            "case": case,
            "unit": unit,
            "ours": round(ours, 2),
            "peers": {name: round(value, 2) for name, value in peers.items()},
            "ratio": round(ratio, 3) if peers else None,
        }
        self.lines.append(line | self.machine)
        return ratio

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        for peer in sorted({name for line in self.lines for name in line["peers"]}):
            self._summarise(
                peer, {line["case"]: _ratio(line, line["peers"][peer]) for line in self.lines if peer in line["peers"]}
            )
        if any(line["peers"] for line in self.lines):
            self._summarise("best peer", {line["case"]: line["ratio"] for line in self.lines if line["peers"]})
        print(f"{len(self.lines)} lines -> {self.path}")

    @staticmethod
    def _summarise(peer: str, ratios: dict[str, float]) -> None:
        worst = min(ratios, key=ratios.__getitem__)
        mean = statistics.geometric_mean(ratios.values())
        print(f"ours / {peer:<10} geometric mean {mean:.3f}, least {ratios[worst]:.3f} at {worst}")


def _ratio(line: dict[str, Any], theirs: float) -> float:
    faster_is_more = line["unit"] not in ("us", "ms", "s")
    return float(line["ours"] / theirs if faster_is_more else theirs / line["ours"])
