"""The same calls and the same requests in two source trees, in turns on one GPU: what a change of the code costs.

    python -m benchmarks.tuning.compare_trees --before DIR                       # DIR: another checkout of this repository
    python -m benchmarks.tuning.compare_trees --before DIR --rounds 7 --cases varlen,sample
    python -m benchmarks.tuning.compare_trees --before DIR --rounds 3 --cases engine_llama8b --engines

A round starts one process for each tree, because both have a package of the same name. The processes measure case by case in
turns: one call of a case in a CUDA graph, the median of several replays. With `--engines` there are cases of whole workloads
too (engine_workloads.py), which an engine of each tree answers from the same folder of random weights, with as many pages of
the cache: the median of three answers, after two that compile and capture. The line of a case has the median over the rounds
of the new tree and of the old one, and the least and greatest ratio of a round. Results are not checked: the tests do that.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
MARK = "@ "
"""Begins the lines that a worker prints for the comparison."""
PAGE = 16
VARLEN = {"8x2048": [2048] * 8, "64x128": [128] * 64, "uneven": [5000, 17, 1, 900, 0, 64, 3000, 7018]}
PAGED = {"1x8192": (1, 8192, 1), "64x4096": (64, 4096, 1), "256x512": (256, 512, 1), "32x1024_verify8": (32, 1024, 8)}
CHUNKS = {"chunk_512_of_8192": ([512], [8192]), "mixed_32_and_512": ([1] * 32 + [512], [2048] * 32 + [4096])}
HEADS = {"32_8_d128": (32, 8, 128), "64_8_d64": (64, 8, 64)}
ROWS = (1, 64, 256)
VOCABULARY = 151936
ENGINES = {"qwen06": "AC", "llama8b": "AC", "llama8b-w4": "C"}
"""The workloads of each shape of model."""
PAGES = 13000
"""Of each engine's cache: workload A's 256 requests of 768 tokens, and a few more."""


def varlen(lengths: list[int], heads: tuple[int, int, int]) -> Callable[[], Any]:
    import fa_serve

    num_heads, num_kv_heads, dim = heads
    total = sum(lengths)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(total, n, dim, device="cuda", dtype=torch.bfloat16) for n in (num_heads, num_kv_heads, num_kv_heads))
    longest = max(lengths)
    return lambda: fa_serve.attention_varlen(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
    )


def paged(queries: list[int], keys: list[int], heads: tuple[int, int, int]) -> Callable[[], Any]:
    import fa_serve

    num_heads, num_kv_heads, dim = heads
    pages = -(-max(keys) // PAGE)
    cache = torch.randn(2, len(keys) * pages, PAGE, num_kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(len(keys) * pages, device="cuda", dtype=torch.int32).view(len(keys), pages)
    ends = torch.tensor([0, *queries], device="cuda").cumsum(0).int()
    q = torch.randn(sum(queries), num_heads, dim, device="cuda", dtype=torch.bfloat16)
    used = torch.tensor(keys, device="cuda", dtype=torch.int32)
    return lambda: fa_serve.attention_paged(
        q, cache[0], cache[1], block_table=table, seqused_k=used, cu_seqlens_q=ends,
        max_seqlen_q=max(queries), max_seqlen_k=max(keys),
    )  # fmt: skip


def sample(rows: int, limits: str) -> Callable[[], Any]:
    from fa_serve import ops

    logits = torch.randn(rows, VOCABULARY, device="cuda", dtype=torch.bfloat16) * 3
    keys = torch.arange(rows, device="cuda")
    full = {
        "top_k": torch.full((rows,), 40, device="cuda"),
        "top_p": torch.full((rows,), 0.9, device="cuda"),
        "min_p": torch.full((rows,), 0.05, device="cuda"),
    }
    own = {name: full[name] for name in limits.split("+") if name in full}
    temperature = torch.full((rows,), 0.8, device="cuda")
    return lambda: ops.sample_rows(logits, keys, temperature, largest_top_k=40 if "top_k" in own else None, **own)


def open_engine(folder: Path) -> Any:
    """An engine of this process's tree for a model's folder."""
    from benchmarks.engine.engine_workloads import LIMIT
    from fa_serve.engine import Engine, EngineConfig

    sizes: dict[str, Any] = {"max_model_len": LIMIT, "num_pages": PAGES, "page_size": PAGE}
    running = Engine(EngineConfig(model=str(folder), device="cuda", prefix_caching=False, seed=0, **sizes))
    running.tokenizer = None  # so older trees make no text
    gc.collect()
    gc.freeze()
    return running


def answer_workload(running: Any, name: str) -> float:
    """Microseconds in which an engine answers a workload, with prompts that it has not seen."""
    from benchmarks.engine.engine_workloads import WORKLOADS
    from fa_serve.engine import SamplingParams

    silent = {"detokenize": False} if "detokenize" in SamplingParams.__dataclass_fields__ else {}
    taken = []
    for turn in range(5):
        prompts = WORKLOADS[name].prompts(f"{name} {turn}", running.vocab_size)
        begin = time.perf_counter()
        for row, (prompt, (_, tokens_out)) in enumerate(zip(prompts, WORKLOADS[name].lengths, strict=True)):
            params = SamplingParams(max_tokens=tokens_out, temperature=0.0, ignore_eos=True, **silent)
            running.add_request(f"{turn}-{row}", prompt, params)
        while running.has_unfinished():
            running.step()
        taken.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(taken[2:])


def calls(wanted: list[str]) -> dict[str, Callable[[], Callable[[], Any]]]:
    """The makers of the calls by their names. A call is made when it is measured, so that memory holds one at a time."""
    made: dict[str, Callable[[], Callable[[], Any]]] = {}
    for heads, sizes in HEADS.items():
        for name, lengths in VARLEN.items():
            made[f"varlen_{name}_{heads}"] = lambda lengths=lengths, sizes=sizes: varlen(lengths, sizes)
        for name, (batch, keys, queries) in PAGED.items():
            lengths = [queries] * batch, [keys] * batch
            made[f"paged_{name}_{heads}"] = lambda lengths=lengths, sizes=sizes: paged(*lengths, sizes)
        for name, (queries, keys) in CHUNKS.items():
            made[f"paged_{name}_{heads}"] = lambda queries=queries, keys=keys, sizes=sizes: paged(queries, keys, sizes)
    for rows in ROWS:
        for limits in ("draw", "top_k", "top_p", "top_k+top_p", "min_p"):
            made[f"sample_{rows}_{limits}"] = lambda rows=rows, limits=limits: sample(rows, limits)
    return {name: make for name, make in made.items() if not wanted or any(part in name for part in wanted)}


def workloads_of(wanted: list[str]) -> dict[str, list[str]]:
    """The workloads to answer, by the shape of the model."""
    chosen = {}
    for shape, names in ENGINES.items():
        cases = {name: f"engine_{shape}_{name}" for name in names}
        chosen[shape] = [name for name, case in cases.items() if not wanted or any(part in case for part in wanted)]
    return {shape: names for shape, names in chosen.items() if names}


def work(wanted: list[str], folders: Path | None) -> None:
    """One process, for one tree: for each line that it reads, measure a case and print its microseconds; null at the end.

    folders: where the models of the engines lie, by shape; None for no such cases
    """
    import fa_serve  # noqa: F401

    sys.path.insert(0, str(ROOT))  # the other tree may have benchmarks too
    from benchmarks.measure import graph_microseconds

    torch.manual_seed(0)
    for name, make in calls(wanted).items():
        sys.stdin.readline()
        print(MARK + json.dumps([name, graph_microseconds(make())]), flush=True)
    if folders is not None:
        work_with_engines(wanted, folders)
    sys.stdin.readline()
    print(MARK + json.dumps(None), flush=True)


def work_with_engines(wanted: list[str], folders: Path) -> None:
    """The cases with engines, as `work` measures the others."""
    for shape, names in workloads_of(wanted).items():
        running = open_engine(folders / shape)
        for name in names:
            sys.stdin.readline()
            print(MARK + json.dumps([f"engine_{shape}_{name}", answer_workload(running, name)]), flush=True)
        running.close()
        del running
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


class Worker:
    """The process that measures a tree."""

    def __init__(self, tree: Path, wanted: list[str], folders: Path | None) -> None:
        self.tree = tree
        path = os.pathsep.join([str(tree.resolve()), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--worker", "--cases", ",".join(wanted)]
        command += [] if folders is None else ["--folders", str(folders)]
        self.process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def turn(self) -> tuple[str, float] | None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        for line in self.process.stdout:
            if line.startswith(MARK):
                found = json.loads(line.removeprefix(MARK))
                return None if found is None else (found[0], found[1])
        sys.exit(f"the worker of {self.tree} ended with {self.process.wait()}")


def make_models(folders: Path, wanted: list[str]) -> None:
    from benchmarks.engine.engine_workloads import make_folder

    for shape in workloads_of(wanted):
        folder = folders / shape
        folder.mkdir()
        make_folder(shape, folder, "cuda")
    torch.cuda.empty_cache()


def compare(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="compare_trees_") as made:
        folders = Path(made) if args.engines else None
        if folders is not None:
            make_models(folders, args.cases)
        compare_rounds(args, folders)


def compare_rounds(args: argparse.Namespace, folders: Path | None) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(args.rounds):
        before = Worker(args.before, args.cases, folders)
        after = Worker(ROOT, args.cases, folders)
        order = [before, after] if number % 2 == 0 else [after, before]
        while True:
            turns = {worker: worker.turn() for worker in order}
            old = turns[before]
            new = turns[after]
            if old is None or new is None:
                break
            found.setdefault(old[0], []).append((old[1], new[1]))
        for worker in order:
            worker.process.communicate()
        print(f"\nround {number + 1} of {args.rounds} is done", flush=True)
        report(found, args)


def report(found: dict[str, list[tuple[float, float]]], args: argparse.Namespace) -> None:
    """Print and write what the rounds so far say, so that a run which is ended early leaves what it has measured."""
    from benchmarks.measure import Results, commit_of

    results = Results(
        "trees", args.out, before=args.before_commit or commit_of(args.before), commit=args.commit or commit_of(ROOT)
    )
    print(f"{'us':<44}{'before':>9}{'after':>9}{'ratio':>8}   least and greatest of a round")
    for case, pairs in found.items():
        old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = [after / before for before, after in pairs]
        results.add(case, "us", new, {"before": old})
        print(f"{case:<44}{old:>9.2f}{new:>9.2f}{new / old:>8.3f}   {min(ratios):.3f} {max(ratios):.3f}")
    results.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="source tree to compare with")
    parser.add_argument("--before-commit", default="", help="its commit, where the tree has no history")
    parser.add_argument("--commit", default="", help="the commit of this tree, where it has no history")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=lambda text: list(filter(None, text.split(","))), default=[], help="parts of names")
    parser.add_argument("--engines", action="store_true", help="engines too: models of 0.6B and 8B are written first")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folders", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.cases, args.folders)
    elif args.before is None:
        parser.error("--before is required: the source tree to compare with")
    else:
        compare(args)


if __name__ == "__main__":
    main()
