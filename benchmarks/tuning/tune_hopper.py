"""Measures tiles for the Hopper kernel: checks every variant, then times it and its peers over the prefill grid.

    python3 -m benchmarks.tuning.tune_hopper [--budget 440] [--head-dims 64,128,256] [--seqlens 512,1024,...] [--skip-check]

Every check and every timing is a job in a child process with a time limit, so that a kernel that hangs costs only its own job.
Checks (float64 reference, poisoned neighbours, three runs bitwise equal) run in several processes at a time, which also
compiles all variants. A variant that fails any check is not timed. The tables come last: TFLOPS of every variant, of what
`forward_tiles` chooses ("chosen"), of cuDNN and of FlashAttention-3 if it can be imported; then the host time of a call. All
rows go to --out.

The name of a variant: warpgroups x block_n, s stages, q query stages, then Grid or Dynamic, P ping-pong, o no overlap,
b exponentials where ptxas puts them, l O rescaled late, cn O in n parts through a separate buffer, /n thread blocks per
multiprocessor.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import queue
import sys
import time
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from fa_serve.backends.hopper.forward.tiles import HopperTiles, Schedule

Contender = HopperTiles | str | None  # a tile, the name of a peer, or None for the choice of forward_tiles
G = Schedule.GRID
D = Schedule.DYNAMIC
FULL: dict[tuple[int, int], list[HopperTiles]] = {
    (64, 64): [
        HopperTiles(3, 128, 2, 2, D, pingpong=True),
        HopperTiles(3, 128, 2, 2, D, pingpong=True, softmax_first=False),
        HopperTiles(2, 128, 3, 2, D),
        HopperTiles(3, 128, 2, 2, D),
    ],
    (128, 128): [
        HopperTiles(2, 128, 2, 2, D),
        HopperTiles(2, 128, 2, 2, D, softmax_first=False),
        HopperTiles(2, 128, 2, 2, D, pingpong=True),
        HopperTiles(2, 128, 2, 2, D, pingpong=True, softmax_first=False),
        HopperTiles(2, 128, 2, 2, D, pingpong=True, rescale_late=True),
        HopperTiles(2, 128, 2, 2, D, overlap=False),
    ],
    (256, 256): [
        HopperTiles(2, 64, 2, 1, D, o_parts=2),
        HopperTiles(2, 64, 2, 1, D, o_parts=2, rescale_late=True),
        HopperTiles(2, 64, 2, 1, G, o_parts=2),
    ],
    (192, 128): [HopperTiles(2, 128, 2, 1, D), HopperTiles(2, 64, 2, 2, D)],
    (96, 96): [],
}
CAUSAL: dict[tuple[int, int], list[HopperTiles]] = {
    (64, 64): [
        HopperTiles(1, 64, 3, 2, D, softmax_first=False, blocks_per_sm=3),
        HopperTiles(3, 128, 2, 2, D, pingpong=True),
        HopperTiles(2, 128, 3, 2, D, softmax_first=False),
        HopperTiles(2, 128, 3, 2, D, softmax_first=False, rescale_late=True),
    ],
    (128, 128): [
        HopperTiles(2, 128, 2, 2, D),
        HopperTiles(2, 128, 2, 2, D, softmax_first=False),
        HopperTiles(2, 128, 2, 2, D, pingpong=True),
        HopperTiles(2, 128, 2, 2, D, pingpong=True, rescale_late=True),
        HopperTiles(2, 128, 2, 1, G),
        HopperTiles(1, 64, 2, 2, D, softmax_first=False, blocks_per_sm=2),
    ],
    (256, 256): FULL[256, 256],
    (192, 128): FULL[192, 128],
    (96, 96): [],
}
PACKED = {
    "64 sequences, log-uniform 32-8192": [
        HopperTiles(2, 128, 2, 2, D),
        HopperTiles(2, 128, 2, 2, D, softmax_first=False),
        HopperTiles(2, 128, 2, 2, D, pingpong=True),
        HopperTiles(2, 128, 2, 2, D, pingpong=True, rescale_late=True),
    ],
    "512 sequences of 64": [HopperTiles(1, 64, 2, 2, D, blocks_per_sm=2)],
}
FEATURES = [  # (head dims, options), with the tiles that forward_tiles chooses
    ((64, 64), {"window": (100, 0)}),
    ((64, 64), {"window": (60, 30)}),
    ((128, 128), {"window": (300, -1)}),
    ((128, 128), {"softcap": 8.0, "scale": 0.5}),
    ((64, 64), {"sinks": True}),
    ((128, 128), {"dtype": "float16"}),
    ((64, 64), {"scale": -0.2}),
    ((256, 256), {"window": (100, 0), "sinks": True}),
    ((128, 128), {"strided": True}),
]
SHAPES = [  # batch, seqlen_q, seqlen_k, heads, kv heads
    (2, 333, 333, 4, 2),
    (1, 129, 700, 4, 1),
    (1, 1500, 1500, 3, 3),
    (1, 300, 100, 2, 1),
    (40, 64, 64, 8, 8),
    (2, 1, 900, 4, 4),
]


def label(tiles: HopperTiles | None) -> str:
    if tiles is None:
        return "chosen"
    name = f"{tiles.groups}x{tiles.block_n}s{tiles.stages}q{tiles.q_stages}{'GD'[tiles.schedule]}"
    name += "P" * tiles.pingpong + "o" * (not tiles.overlap) + "b" * (not tiles.softmax_first)
    name += "l" * tiles.rescale_late + (f"c{tiles.o_parts}" if tiles.o_parts else "")
    return name + (f"/{tiles.blocks_per_sm}" if tiles.blocks_per_sm > 1 else "")


def _compare(out: Any, lse: Any, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    from fa_serve.backends.reference import attention_reference
    from fa_serve.testing import assert_lse_matches, assert_matches_reference, eager_attention

    exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), **options)
    assert_matches_reference(out, exact, eager_attention(q, k, v, **options))
    assert_lse_matches(lse, exact_lse)


def check(head_dims: tuple[int, int], tiles: HopperTiles | None, causal: bool, feature: dict[str, Any]) -> None:
    """Dense shapes, then packed sequences of which every other one is NaN. Each runs three times and must be bitwise equal."""
    import torch

    from fa_serve.backends.calls import AttentionOptions, AttentionTensors
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
    from fa_serve.testing import cu_seqlens, make_qkv

    dtype = getattr(torch, feature.get("dtype", "bfloat16"))

    def three_runs(tensors: AttentionTensors, max_seqlen_q: int, max_seqlen_k: int, options: dict[str, Any]) -> tuple[Any, Any]:
        choices = [options[name] for name in ("softmax_scale", "window_size", "softcap")]
        tensors = tensors._replace(sinks=options["sinks"])
        results = []
        for _ in range(3):
            shape = (*tensors.q.shape[:-1], tensors.v.shape[-1])
            tensors = tensors._replace(out=torch.full(shape, float("nan"), dtype=dtype, device="cuda"))
            run = plan_hopper_forward(tensors, AttentionOptions(*choices, max_seqlen_q, max_seqlen_k, return_lse=True), tiles)
            results.append(run(tensors))
        for out, lse in results[1:]:
            assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16)), "out differs from run to run"
            assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32)), "lse differs from run to run"
        return results[0]

    def options_of(heads: int) -> dict[str, Any]:
        sinks = torch.randn(heads, device="cuda") if feature.get("sinks") else None
        window = feature.get("window", (-1, 0 if causal else -1))
        scale = feature.get("scale", head_dims[0] ** -0.5)
        return {"softmax_scale": scale, "window_size": window, "softcap": feature.get("softcap", 0.0), "sinks": sinks}

    for batch, seqlen_q, seqlen_k, heads, kv_heads in SHAPES:
        q, k, v = make_qkv(batch, seqlen_q, seqlen_k, heads, kv_heads, *head_dims, dtype=dtype, device="cuda")
        if feature.get("strided"):
            q, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, v))
        options = options_of(heads)
        out, lse = three_runs(AttentionTensors(q, k, v), seqlen_q, seqlen_k, options)
        try:
            _compare(out, lse, q, k, v, options)
        except AssertionError as error:
            raise AssertionError(f"{(batch, seqlen_q, seqlen_k, heads, kv_heads)}: {error}") from None
    lengths_q = [70, 33, 0, 1, 450, 20, 130, 5, 128]
    lengths_k = [70, 33, 40, 9, 450, 20, 260, 0, 128]
    q, k, v = (x[0] for x in make_qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, *head_dims, dtype=dtype, device="cuda"))
    cu_q = cu_seqlens(lengths_q)
    cu_k = cu_seqlens(lengths_k)
    for b in (1, 3, 5):
        q[cu_q[b] : cu_q[b + 1]] = k[cu_k[b] : cu_k[b + 1]] = v[cu_k[b] : cu_k[b + 1]] = float("nan")
    options = options_of(4)
    packed = AttentionTensors(q, k, v, cu_seqlens_q=cu_q.cuda(), keys=cu_k.cuda())
    out, lse = three_runs(packed, 450, 450, options)
    for b in (0, 4, 6, 7, 8):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1])
        try:
            _compare(out[None, rows], lse[None, :, rows], q[None, rows], k[None, keys], v[None, keys], options)
        except AssertionError as error:
            raise AssertionError(f"packed sequence {b}: {error}") from None


def _in_turn(calls: list[Any], flops: float, rounds: int = 3) -> list[float | str]:
    """TFLOPS of each call, or its error: the median of short measurements that take turns, so that all meet the same clocks."""
    from statistics import median

    from benchmarks.measure import PAUSE, milliseconds

    times: list[list[float]] = [[] for _ in calls]
    errors: dict[int, str] = {}
    for _ in range(rounds):
        for i, call in enumerate(calls):
            if call is None or i in errors:
                continue
            time.sleep(PAUSE)
            try:
                times[i].append(milliseconds(call, warmup=4, rep=16))
            except Exception as error:
                errors[i] = f"{type(error).__name__}: {error}"[:200]
                if "CUDA" in errors[i]:
                    raise
    return [errors.get(i) or (flops / median(t) * 1e-9 if t else float("nan")) for i, t in enumerate(times)]


def time_dense(
    head_dims: tuple[int, int], causal: bool, seqlen: int, everyone: list[HopperTiles | str | None]
) -> list[float | str]:
    """16,384 tokens of hidden size 2048, as in the paper."""
    import torch
    from torch.nn.attention import SDPBackend

    from benchmarks.measure import fa3, sdpa
    from fa_serve.backends.calls import AttentionOptions, AttentionTensors
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward

    heads = 2048 // head_dims[1]
    batch = max(1, 16384 // seqlen)
    q, k, v = (torch.randn(batch, seqlen, heads, d, device="cuda", dtype=torch.bfloat16) for d in (head_dims[0], *head_dims))
    cu = torch.arange(0, (batch + 1) * seqlen, seqlen, device="cuda", dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    flash = fa3()
    tensors = AttentionTensors(q, k, v)
    window = (-1, 0 if causal else -1)
    options = AttentionOptions(head_dims[0] ** -0.5, window, 0.0, seqlen, seqlen, return_lse=False)

    def call_of(who: Contender) -> Any:
        if who == "cudnn":
            return sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, causal)
        if who == "fa3":
            return flash and (lambda: flash(*packed, seqlen, cu, seqlen, cu_seqlens_k=cu, causal=causal, fa_version=3))
        run = plan_hopper_forward(tensors, options, who)
        return lambda: run(tensors)

    flops = 2 * batch * heads * seqlen * seqlen * sum(head_dims) * (0.5 if causal else 1.0)
    return _in_turn([call_of(who) for who in everyone], flops)


def time_packed(case: str, everyone: list[Contender]) -> list[float | str]:
    """Causal attention over packed sequences, 32 query and 8 key heads of 128."""
    import torch
    from torch.nn.attention import SDPBackend

    from benchmarks.measure import fa3, sdpa
    from fa_serve.backends.calls import AttentionOptions, AttentionTensors
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
    from fa_serve.testing import cu_seqlens

    lengths = [64] * 512
    if case.startswith("64 "):
        lengths = (32 * 256 ** torch.rand(64, generator=torch.Generator().manual_seed(0))).int().tolist()
    longest = max(lengths)
    q, k, v = (torch.randn(sum(lengths), heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    padded = [torch.zeros(len(lengths), longest, x.shape[1], 128, device="cuda", dtype=x.dtype) for x in (q, k, v)]
    cu = cu_seqlens(lengths, "cuda")
    flash = fa3()
    tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=cu)
    options = AttentionOptions(128**-0.5, (-1, 0), 0.0, longest, longest, return_lse=False)

    def call_of(who: Contender) -> Any:
        if who == "cudnn":
            return sdpa(SDPBackend.CUDNN_ATTENTION, *padded, True)
        if who == "fa3":
            return flash and (lambda: flash(q, k, v, longest, cu, longest, cu_seqlens_k=cu, causal=True, fa_version=3))
        run = plan_hopper_forward(tensors, options, who)
        return lambda: run(tensors)

    return _in_turn([call_of(who) for who in everyone], sum(2 * 32 * n * n * 128 for n in lengths))


def time_host(packed: bool, public: bool) -> float:
    """Microseconds of host time per call of a small problem, of the public function or of its plan."""
    import torch

    import fa_serve
    from benchmarks.measure import host_microseconds
    from fa_serve.backends.calls import AttentionOptions, AttentionTensors
    from fa_serve.backends.hopper.forward.plan import plan_hopper_forward
    from fa_serve.testing import cu_seqlens, make_qkv

    q, k, v = make_qkv(1, 128, 128, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    lengths: dict[str, Any] = {}
    cu = None
    if packed:
        q = q[0]
        k = k[0]
        v = v[0]
        cu = cu_seqlens([64, 64], "cuda")
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 64, "max_seqlen_k": 64}
    if not public:
        longest = 64 if packed else 128
        tensors = AttentionTensors(q, k, v, cu_seqlens_q=cu, keys=cu)
        run = plan_hopper_forward(tensors, AttentionOptions(0.1, (-1, 0), 0.0, longest, longest, return_lse=False))
        return host_microseconds(lambda: run(tensors))
    function = fa_serve.attention_varlen if packed else fa_serve.attention
    return host_microseconds(lambda: function(q, k, v, causal=True, backend="hopper", **lengths))


def _work(inbox: Any, outbox: Any, number: int) -> None:
    """Do jobs until None comes. The parent is told which job is running, so that it knows which one hangs."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    while (job := inbox.get()) is not None:
        index, function, args = job
        outbox.put(("start", number, index, None))
        try:
            run = globals()[function] if isinstance(function, str) else function
            outbox.put(("done", number, index, run(*args)))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            outbox.put(("failed", number, index, text))
            if "CUDA" in text or "illegal" in text:
                return


def run_jobs(jobs: list[tuple[Any, tuple[Any, ...]]], processes: int, limit: float, deadline: float) -> list[Any]:
    """The results in the order of the jobs: a value, None, or the exception of a job that failed.

    jobs: a function, or the name of one of this module, and its arguments
    """
    context = mp.get_context("spawn")
    inbox = context.Queue()
    outbox = context.Queue()
    results: list[Any] = [TimeoutError("not run: out of time")] * len(jobs)
    workers: dict[int, Any] = {}
    running: dict[int, tuple[int, float]] = {}
    finished: set[int] = set()

    def start() -> None:
        number = len(started)
        started.append(number)
        workers[number] = context.Process(target=_work, args=(inbox, outbox, number), daemon=True)
        workers[number].start()

    started: list[int] = []
    for index, (function, args) in enumerate(jobs):
        inbox.put((index, function, args))
    for _ in range(min(processes, len(jobs))):
        start()
    while len(finished) < len(jobs) and time.monotonic() < deadline:
        try:
            kind, number, index, value = outbox.get(timeout=0.5)
            if kind == "start":
                running[number] = (index, time.monotonic())
            else:
                running.pop(number, None)
                finished.add(index)
                results[index] = value if kind == "done" else RuntimeError(value)
            continue
        except queue.Empty:
            pass
        for number, process in list(workers.items()):
            index, since = running.get(number, (-1, time.monotonic()))
            hung = time.monotonic() - since > limit
            if hung or not process.is_alive():
                process.kill()
                process.join()
                del workers[number]
                if running.pop(number, None) is not None:
                    finished.add(index)
                    results[index] = TimeoutError(f"hung for {limit:.0f} s" if hung else "its process died")
                    print(f"  {results[index]}: {jobs[index]}", flush=True)
                if len(finished) < len(jobs):
                    start()
    for process in workers.values():
        process.kill()
    return results


def table(title: str, columns: list[str], rows: list[tuple[str, list[float]]]) -> list[float]:
    """Print it -> what is chosen against the best peer, row by row."""
    everything: list[float] = []
    width = [max(7, len(c) + 1) for c in columns]
    print(f"{title}\n{'':>7}" + "".join(f"{c:>{w}}" for c, w in zip(columns, width, strict=True)) + "  best/peer chosen/peer")
    for name, values in rows:
        ours = {c: x for c, x in zip(columns, values, strict=True) if c not in ("cudnn", "fa3") and x == x}
        peer = max((x for c, x in zip(columns, values, strict=True) if c in ("cudnn", "fa3") and x == x), default=float("nan"))
        best = max(ours.values(), default=float("nan"))
        everything.append(ours.get("chosen", float("nan")) / peer)
        print(
            f"{name:>7}"
            + "".join(f"{x:{w}.0f}" for x, w in zip(values, width, strict=True))
            + f"  {best / peer:9.2f} {everything[-1]:11.2f}",
            flush=True,
        )
    return everything


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=440, help="seconds for everything")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqlens", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--processes", type=int, default=8, help="for the checks")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("tune_hopper.jsonl"))
    options = parser.parse_args()
    began = time.monotonic()
    deadline = began + options.budget
    dims = [(d, d) for d in map(int, options.head_dims.split(","))]
    seqlens = [int(s) for s in options.seqlens.split(",")]

    jobs: list[tuple[str, tuple[Any, ...]]] = []
    for causal, of_dims in ((True, CAUSAL), (False, FULL)):
        for head_dims, variants in of_dims.items():
            jobs += [("check", (head_dims, tiles, causal, {})) for tiles in (None, *variants)]
    packed_variants = {tiles for variants in PACKED.values() for tiles in variants} - set(CAUSAL[128, 128])
    jobs += [("check", ((128, 128), tiles, True, {})) for tiles in sorted(packed_variants, key=label)]
    jobs += [("check", (head_dims, None, True, feature)) for head_dims, feature in FEATURES]
    bad: set[tuple[Any, Any, bool]] = set()
    if not options.skip_check:
        for (_, (head_dims, tiles, causal, feature)), result in zip(
            jobs, run_jobs(jobs, options.processes, 90, deadline - 60), strict=True
        ):
            if isinstance(result, Exception):
                bad.add((head_dims, tiles, causal))
                print(f"BAD d{head_dims} {label(tiles)} causal={causal} {feature}: {result}", flush=True)
        print(f"checks: {len(jobs)} jobs, {len(bad)} bad, {time.monotonic() - began:.0f} s", flush=True)

    cells: list[tuple[str, str, list[Any], tuple[str, tuple[Any, ...]]]] = []
    for head_dims in dims:
        for causal, of_dims in ((False, FULL), (True, CAUSAL)):
            who = ["cudnn", "fa3", None, *(t for t in of_dims[head_dims] if (head_dims, t, causal) not in bad)]
            title = f"d{head_dims[0]} {'causal' if causal else 'full'}"
            cells += [(title, str(n), who, ("time_dense", (head_dims, causal, n, who))) for n in seqlens]
    for case, variants in PACKED.items():
        who = ["cudnn", "fa3", None, *(t for t in variants if ((128, 128), t, True) not in bad)]
        cells.append((case, "", who, ("time_packed", (case, who))))
    host = [("time_host", (packed, public)) for packed in (False, True) for public in (False, True)]
    results = run_jobs(host + [cell[3] for cell in cells], 1, 40, deadline)
    host_times = results[: len(host)]
    results = results[len(host) :]

    titles = dict.fromkeys(cell[0] for cell in cells)
    rows: dict[str, list[tuple[str, list[float]]]] = {title: [] for title in titles}
    columns: dict[str, list[str]] = {}
    with options.out.open("w") as file:
        for (title, name, who, _), values in zip(cells, results, strict=True):
            columns[title] = [w if isinstance(w, str) else label(w) for w in who]
            if isinstance(values, Exception):
                print(f"  {title} {name}: {values}")
                values = [float("nan")] * len(who)
            for column, value in zip(columns[title], values, strict=True):
                if isinstance(value, str):
                    print(f"  {title} {name} {column}: {value}")
            numbers = [float("nan") if isinstance(value, str) else value for value in values]
            rows[title].append((name, numbers))
            file.write(
                json.dumps(
                    {"case": f"{title} {name}".strip(), "unit": "TFLOPS", **dict(zip(columns[title], numbers, strict=True))}
                )
                + "\n"
            )
    ratios = [r for title in titles for r in table(title, columns[title], rows[title]) if r == r]
    if ratios:
        print(f"chosen/peer over {len(ratios)} cells: geometric mean {geometric_mean(ratios):.3f}, least {min(ratios):.3f}")
    for (_, (packed, public)), value in zip(host, host_times, strict=True):
        what = f"{'packed' if packed else 'dense'}, {'public function' if public else 'plan'}"
        print(f"host time, {what}: {value if isinstance(value, Exception) else f'{value:.1f} us'}")
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
