"""Timing, the peers, and the form of a result, for every benchmark in this folder.

A result is one JSON line: {"bench", "case", "unit", "ours", "peers": {name: value}, "ratio"}, the machine, the versions and
the commit. The ratio compares ours with the best peer; above 1, ours is faster. A line has no entry for a peer that is not
installed. If FlashAttention-3 or 4 cannot be imported, the reason is printed.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from fa_serve.testing import cu_seqlens

PAUSE = 0.1
"""Seconds between two measurements. TFLOPS of ours and of FlashAttention-3, measured in turn on D256 causal 16k, were
770 and 745 without a pause (725 and 763 in the other order), 787 and 800 with 0.05 s, 792 and 801 with 0.1 s, 794 and 803 with
0.3 s, 796 and 803 with 1 s, 794 and 804 with 2 s."""


class Cells:
    """Which cells of a bench are measured: those whose names contain one of `wanted`, until `budget` seconds have passed.

    wanted: parts of names, separated by commas; empty: all cells
    """

    def __init__(self, wanted: str, budget: float) -> None:
        self.wanted = wanted.split(",")
        self.end = time.monotonic() + budget
        self.left_out: list[str] = []

    def takes(self, case: str) -> bool:
        """Whether to measure this cell now."""
        if not any(part in case for part in self.wanted):
            return False
        if time.monotonic() < self.end:
            return True
        self.left_out.append(case)
        return False

    def end_at_a_signal(self) -> None:
        """At the first Ctrl-C no further cell begins, and those that were measured are written. A second one interrupts."""
        signal.signal(signal.SIGINT, self._end)

    def _end(self, number: int, frame: object) -> None:
        self.end = -math.inf
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def report(self) -> None:
        if self.left_out:
            print(f"not measured for lack of time: {', '.join(self.left_out)}")


def milliseconds(call: Callable[[], object], rep: int = 60, warmup: int = 15) -> float:
    """Median device time of one call, after a warm-up and with a cold L2 cache. Without a GPU, the host time of one call."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    return float(do_bench(call, warmup=warmup, rep=rep, return_mode="median"))


def in_turns(
    calls: dict[str, Callable[[], object]], measure: Callable[..., float] = milliseconds, turns: int = 3, rep: int = 20
) -> dict[str, float]:
    """The median of several turns of each call. Each turn follows a pause.

    The clock of a GPU depends on the power that was drawn in the last tenth of a second. Without pauses, a call that follows a
    slow kernel is 5 to 10% faster than one that follows a fast kernel. FlashAttention's benchmarks sleep for the same reason.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            time.sleep(PAUSE)
            times[name].append(measure(call, rep=rep))
    return {name: statistics.median(each) for name, each in times.items()}


def graph_microseconds(call: Callable[[], object], calls: int = 4, rep: int = 40) -> float:
    """Median device time of one call inside a CUDA graph of several calls, which is what a captured decode step costs.

    Without a GPU, the host time of one call.
    """
    if not torch.cuda.is_available():
        return milliseconds(call) * 1e3
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return float(do_bench(graph.replay, warmup=10, rep=rep, return_mode="median")) * 1e3 / calls


def host_microseconds(call: Callable[[], object], calls: int = 200) -> float:
    """Least host time to enqueue one call, without waiting for the device."""
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
    """TB/s of summing 4 GiB: the bandwidth that a kernel which only reads can reach on this machine."""
    x = torch.randn(1 << 30, device="cuda")
    return x.numel() * 4 / graph_microseconds(lambda: x.sum(), calls=1) * 1e-6


def sdpa(kind: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """A call of PyTorch's operator with one kind of kernel; q, k, v are (batch, seqlen, heads, dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]

    def call() -> torch.Tensor:
        with sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    return call


def fa3() -> Callable[..., Any] | None:
    """The varlen function of FlashAttention-3 that vLLM ships, or None where vLLM is not installed."""
    return _imported("fa3", "vllm.vllm_flash_attn.flash_attn_interface")


def fa4() -> Callable[..., Any] | None:
    """The function of FlashAttention-4 for packed and for dense calls, or None where `flash-attn-4` cannot be imported."""
    return _imported("fa4", "flash_attn.cute.interface")


@lru_cache(maxsize=16)
def _imported(name: str, module: str) -> Callable[..., Any] | None:
    """The varlen function of a peer. The first time that the peer cannot be imported, the reason is printed."""
    try:
        function: Callable[..., Any] = import_module(module).flash_attn_varlen_func
    except ImportError as error:
        print(f"{name} is left out, because it cannot be imported: {error}", flush=True)
        return None
    return function


def flash_peers(
    wanted: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    window_size: tuple[int, int],
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls of FlashAttention-3 and 4 over packed sequences, those of `wanted` that are installed, which return `out`.

    wanted: names of peers, separated by commas; q, k, v: (total, heads, dim); lengths: of the sequences
    """
    names = wanted.split(",")
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    cu = cu_seqlens(lengths, q.device)
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    shared = {"causal": window_size[1] == 0, "softcap": softcap} | ends
    flash3 = fa3() if "fa3" in names else None
    if flash3 is not None:
        extra = {} if sinks is None else {"s_aux": sinks}
        calls["fa3"] = partial(flash3, q, k, v, window_size=list(window_size), fa_version=3, **shared, **extra)
    flash4 = fa4() if "fa4" in names else None
    if flash4 is not None:
        # -1 means unlimited to FlashAttention-3; to FlashAttention-4, None does
        window = tuple(None if side < 0 else side for side in window_size)
        if len(set(lengths)) == 1:
            shared = {name: value for name, value in shared.items() if name not in ends}
            q, k, v = (x.unflatten(0, (len(lengths), -1)) for x in (q, k, v))
        call = partial(flash4, q, k, v, window_size=window, learnable_sink=sinks, **shared)
        calls["fa4"] = lambda: call()[0].flatten(0, -3)
    return calls


def pytorch_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], window_size: tuple[int, int]
) -> dict[str, Callable[[], torch.Tensor]]:
    """The call of PyTorch's operator for packed sequences, in the releases that have it; q, k, v: (total, heads, dim)."""
    try:
        function = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return {}
    options: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    names = inspect.signature(function).parameters
    if "window_size" in names:
        options["window_size"] = window_size
    elif window_size != (-1, -1):
        options["is_causal"] = window_size == (-1, 0)
    cu = cu_seqlens(lengths, q.device)
    return {"varlen": partial(function, q, k, v, cu, cu, max(lengths), max(lengths), **options)}


def served(calls: dict[str, Callable[[], torch.Tensor]]) -> dict[str, Callable[[], torch.Tensor]]:
    """The calls of peers that support their arguments."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:  # FlashAttention-4 compiles here, and refuses arguments with errors of several types
            print(f"  {name}: {str(error).splitlines()[0][:100]}")
        else:
            found[name] = call
    return found


def commit() -> str:
    """The commit of the working tree. FA_SERVE_COMMIT names it for a copy without its history."""
    return os.environ.get("FA_SERVE_COMMIT") or commit_of(Path.cwd())


def commit_of(tree: Path) -> str:
    """The commit of a source tree, "unknown" for a copy without its history."""
    done = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class Results:
    """The lines of a run. Each is in the file of its bench as soon as it is added, so that a run that is cut off keeps what it
    has measured, and a run may measure a part: the file keeps the lines of other cases. `write`, at the end of a whole run,
    drops them.
    """

    def __init__(self, bench: str, folder: Path, *, kept: bool = True, **versions: str) -> None:
        """kept: whether lines go to the file; without it they are only collected, as where a script is tried on a CPU

        `versions` are added to each line, beside those of torch and Triton, and replace the commit if they name one.
        """
        self.bench = bench
        self.kept = kept
        self.path = folder / f"{bench}.jsonl"
        self.lines: list[dict[str, Any]] = []
        self.machine = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "commit": commit(),
            **versions,
        }

    def add(self, case: str, unit: str, ours: float, peers: dict[str, float]) -> float:
        """Add a line, in place of an earlier one of the same case. Returns the ratio of ours to the best peer, NaN without one.

        unit: says whether more is better
        """
        ratio = min((_ratio({"unit": unit, "ours": ours}, theirs) for theirs in peers.values()), default=float("nan"))
        line = {
            "bench": self.bench,
            "case": case,
            "unit": unit,
            "ours": float(f"{ours:.5g}"),
            "peers": {name: float(f"{value:.5g}") for name, value in peers.items()},
            "ratio": round(ratio, 3) if peers else None,
        }
        self.lines = [each for each in self.lines if each["case"] != case] + [line | self.machine]
        if self.kept:
            self._merge()
        return ratio

    def show(self, case: str, unit: str, ours: float, peers: dict[str, float]) -> None:
        """Add a line, and print it."""
        ratio = self.add(case, unit, ours, peers)
        beside = "".join(f", {name} {value:.5g}" for name, value in peers.items())
        print(f"{case}: {ours:.5g} {unit}{beside}" + (f", ratio {ratio:.3f}" if peers else ""), flush=True)

    def _merge(self) -> None:
        measured = {line["case"] for line in self.lines}
        earlier = map(json.loads, self.path.read_text().splitlines()) if self.path.exists() else ()
        lines = [line for line in earlier if line["case"] not in measured] + self.lines
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write(self) -> None:
        """Write the lines of a whole run, and print how we compare with each peer."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self.summarise()

    def summarise(self) -> None:
        """Print how the lines compare with each peer, and with the best one."""
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
