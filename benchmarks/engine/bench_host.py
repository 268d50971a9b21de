"""Host time of a call, before and after a change: two source trees in turn, in one run on one machine.

    git worktree add /tmp/before 02e0ae0
    python -m benchmarks.engine.bench_host --before /tmp/before --after .

Python and the launch of kernels cost time on the host, and a small change there is lost in the noise between two runs. Each
round therefore starts one process for each tree, with PYTHONPATH set to the tree. The two processes measure in turns of a
fraction of a second, so that a change of the machine's speed meets both; while one measures, the other waits for its turn. The
number of a round is the median of its turns. The table shows the medians of the rounds, their ratio after / before, and the
least and greatest ratio of a round. A ratio above 1 means that the change made the call slower. `--cases` measures a part.

    dense, varlen, paged      one call of `fa_serve.attention`, `attention_varlen`, `attention_paged`
    flash_attn ...            the same three calls through `fa_serve.flash_attn`; in a tree without it, the calls that it makes
    layer prompt, token       one decoder layer of a model with `attn_implementation="fa_serve"` and a growing cache
    engine N host             one decode step of `Engine` with N sequences, without waiting for the device
    engine N wall             the same, with the device: what a token takes

Calls are enqueued while the device is idle and has less to do than the host; the time until the last one is enqueued counts.
Both trees must have the public names of `fa_serve` 0.1; neither needs to be installed. Weights are random. Results go to
results/host.jsonl in the form of measure.py, with the tree before as the peer. Left out: what the device does.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.engine_workloads import make_model
from benchmarks.measure import Results, commit_of

ROOT = Path(__file__).parents[2]
CASES = ("dense", "varlen", "paged", "flash_attn", "layer", "engine")


@dataclass(frozen=True)
class Sizes:
    """What a worker measures; the defaults are those that the results quote."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    prompt: int = 512
    lengths: tuple[int, ...] = (64,) * 8
    decoding: int = 64  # sequences of the paged call
    context: int = 128  # keys of each of them
    model: str = "qwen06"
    layers: int = 8
    engines: tuple[int, ...] = (1, 256)
    calls: int = 50  # enqueued before the device is waited for
    model_calls: int = 8
    repeats: int = 10  # groups of calls in a turn
    steps: int = 12  # of the engine in a turn
    turns: int = 9  # of a process in a round; the first one warms up and does not count


TINY = Sizes(
    device="cpu",
    dtype=torch.float32,
    heads=4,
    kv_heads=2,
    dim=16,
    prompt=8,
    lengths=(3, 5),
    decoding=2,
    context=20,
    model="tiny",
    layers=2,
    engines=(1, 2),
    calls=2,
    model_calls=2,
    repeats=2,
    steps=3,
    turns=2,
)
"""For a test on a CPU; its times say nothing."""


def wait(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def microseconds(call: Callable[[], object], sizes: Sizes, calls: int, start: Callable[[], object] = lambda: None) -> float:
    """Median host time of one call; `start` is run before each group of `calls`, and is not counted."""
    times = []
    for _ in range(sizes.repeats):
        start()
        wait(sizes)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        end = time.perf_counter()
        times.append((end - begin) / calls * 1e6)
    wait(sizes)
    return statistics.median(times)


def random_tensors(sizes: Sizes, tokens: int) -> list[torch.Tensor]:
    """q (tokens, heads, dim), k and v (tokens, kv_heads, dim)."""
    shapes = [(tokens, heads, sizes.dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    return [torch.randn(shape, device=sizes.device, dtype=sizes.dtype) for shape in shapes]


Call = Callable[[], object]


def dense_call(sizes: Sizes, drop_in: bool = False) -> Call:
    """A dense causal call; `drop_in` makes it through `fa_serve.flash_attn`."""
    import fa_serve

    q, k, v = (x[None] for x in random_tensors(sizes, sizes.prompt))
    if drop_in:
        from fa_serve.flash_attn import flash_attn_func

        return partial(flash_attn_func, q, k, v, causal=True)
    return partial(fa_serve.attention, q, k, v, causal=True)


def varlen_call(sizes: Sizes, drop_in: bool = False) -> Call:
    """A packed causal call of `sizes.lengths`."""
    import fa_serve

    q, k, v = random_tensors(sizes, sum(sizes.lengths))
    lengths = torch.tensor((0, *sizes.lengths), device=sizes.device)
    ends = lengths.cumsum(0, dtype=torch.int32)
    longest = max(sizes.lengths)
    if drop_in:
        from fa_serve.flash_attn import flash_attn_varlen_func

        return partial(flash_attn_varlen_func, q, k, v, ends, ends, longest, longest, causal=True)
    return partial(
        fa_serve.attention_varlen,
        q,
        k,
        v,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
    )


def paged_call(sizes: Sizes, drop_in: bool = False) -> Call:
    """One query per sequence over a paged cache."""
    import fa_serve

    page_size = 16
    pages = -(-sizes.context // page_size)
    count = sizes.decoding
    q, _, _ = random_tensors(sizes, count)
    shape = (count * pages, page_size, sizes.kv_heads, sizes.dim)
    k_cache, v_cache = (torch.randn(shape, device=sizes.device, dtype=sizes.dtype) for _ in range(2))
    integers = {"device": sizes.device, "dtype": torch.int32}
    table = torch.arange(count * pages, **integers).view(count, pages)
    lengths = torch.full((count,), sizes.context, **integers)
    if drop_in:
        from fa_serve.flash_attn import flash_attn_with_kvcache

        words = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        return partial(flash_attn_with_kvcache, q[:, None], k_cache, v_cache, **words)
    return partial(
        fa_serve.attention_paged,
        q,
        k_cache,
        v_cache,
        block_table=table,
        seqused_k=lengths,
        cu_seqlens_q=torch.arange(count + 1, **integers),
        max_seqlen_q=1,
        max_seqlen_k=sizes.context,
        causal=True,
    )


CALLS = {"dense": dense_call, "varlen": varlen_call, "paged": paged_call}

Turns = Iterator[dict[str, float]]
"""Measures a turn for each item: microseconds by the name of the number."""


def plain(name: str, sizes: Sizes) -> Turns:
    call = CALLS[name](sizes)
    for _ in range(sizes.turns):
        yield {name: microseconds(call, sizes, sizes.calls)}


def flash_attn(sizes: Sizes) -> Turns:
    has_it = importlib.util.find_spec("fa_serve.flash_attn") is not None
    calls = {f"flash_attn {name}": make(sizes, has_it) for name, make in CALLS.items()}
    for _ in range(sizes.turns):
        yield {name: microseconds(call, sizes, sizes.calls) for name, call in calls.items()}


def layer(sizes: Sizes) -> Turns:
    """A forward of the model as `generate` calls it, divided by its layers: they are all but a few percent of it."""
    from transformers import DynamicCache

    import fa_serve

    changes = {"model_type": "llama", "num_hidden_layers": sizes.layers, "vocab_size": 512}
    model = make_model(sizes.model, sizes.device, dtype=sizes.dtype, **changes)
    fa_serve.patch(model)
    longest = sizes.prompt + sizes.model_calls
    ids = torch.randint(5, 512, (1, longest), device=sizes.device)
    ones = torch.ones_like(ids)
    caches: list[Any] = []

    def forward(begin: int, end: int, cache: Any) -> None:
        model(ids[:, begin:end], attention_mask=ones[:, :end], past_key_values=cache, use_cache=True)

    def prompt() -> None:
        forward(0, sizes.prompt, DynamicCache())

    def start() -> None:
        caches[:] = [DynamicCache()]
        forward(0, sizes.prompt, caches[0])

    def token() -> None:
        seen = caches[0].get_seq_length()
        forward(seen, seen + 1, caches[0])

    for _ in range(sizes.turns):
        with torch.no_grad():
            prompts = microseconds(prompt, sizes, sizes.model_calls)
            tokens = microseconds(token, sizes, sizes.model_calls, start)
        yield {"layer prompt": prompts / sizes.layers, "layer token": tokens / sizes.layers}


def engine(sizes: Sizes) -> Turns:
    """Decode steps of sequences that all run already.

    A step of the engine launches its work and then reads the results of the step before. The host's time is that of a step
    which begins when the device is idle: the results have arrived, and nothing is waited for.
    """
    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    model = make_model(sizes.model, sizes.device, dtype=sizes.dtype, eos_token_id=None)
    settings = {"device": sizes.device, "max_model_len": 1024, "max_num_seqs": max(sizes.engines), "prefix_caching": False}
    running = Engine(EngineConfig(num_pages=40 * max(sizes.engines), seed=0, **settings), model=model)
    params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    for batch in sizes.engines:
        names = [f"{batch}-{row}" for row in range(batch)]
        for row, name in enumerate(names):
            running.add_request(name, [5 + (row + i) % 97 for i in range(16)], params)
        started: set[str] = set()
        while len(started) < batch:
            started |= {output.request_id for output in running.step() if output.token_ids}
        for _ in range(10):
            running.step()
        for _ in range(sizes.turns):
            yield engine_turn(running, batch, sizes)
        for name in names:
            running.abort(name)
        while running.has_unfinished():
            running.step()


def engine_turn(running: Any, batch: int, sizes: Sizes) -> dict[str, float]:
    """Decode steps of the running sequences: each alone for the host's time, then all in a row."""
    host = []
    for _ in range(sizes.steps):
        wait(sizes)
        begin = time.perf_counter()
        running.step()
        host.append((time.perf_counter() - begin) * 1e6)
    wait(sizes)
    begin = time.perf_counter()
    for _ in range(sizes.steps):
        running.step()
    wall = (time.perf_counter() - begin) / sizes.steps * 1e6
    return {f"engine {batch} host": statistics.median(host), f"engine {batch} wall": wall}


def turns_of(cases: list[str], sizes: Sizes) -> Turns:
    """The turns of all cases, one case after another."""
    others = {"flash_attn": flash_attn, "layer": layer, "engine": engine}
    for name in cases:
        yield from plain(name, sizes) if name in CALLS else others[name](sizes)
        gc.collect()


def work(args: argparse.Namespace, sizes: Sizes) -> None:
    """One process, for one tree: for each line that it reads, measure a turn and print it as JSON; null after the last one."""
    import fa_serve

    where = Path(fa_serve.__file__).resolve()
    if not where.is_relative_to(args.worker.resolve()):
        sys.exit(f"fa_serve must come from {args.worker}, it was imported from {where}")
    if sizes.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    import transformers  # noqa: F401

    import fa_serve.engine

    gc.disable()  # a collection in the middle of a measurement is noise
    turns = turns_of(args.cases, sizes)
    print(MARK + json.dumps(None), flush=True)
    while sys.stdin.readline():
        print(MARK + json.dumps(next(turns, None)), flush=True)


MARK = "@ "
"""Begins the lines that a worker prints for the comparison."""


class Worker:
    """The process that measures the tree."""

    def __init__(self, tree: Path, args: argparse.Namespace) -> None:
        self.tree = tree
        paths = [str(tree.resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, __file__, "--worker", str(tree), "--cases", ",".join(args.cases)]
        command += ["--tiny"] if args.tiny else []
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def turn(self) -> dict[str, float] | None:
        """Microseconds of each number that one turn measured, None after the last turn."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; its exit status is reported below
            self.process.stdin.write("\n")
        return self.answer()

    def answer(self) -> dict[str, float] | None:
        """What the process prints next; None if it has imported its modules or has measured its last turn."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                numbers: dict[str, float] | None = json.loads(line.removeprefix(MARK))
                return numbers
        sys.exit(f"the worker of {self.tree} ended with {self.process.wait()}")

    def end(self) -> None:
        self.process.communicate()


def compare(args: argparse.Namespace) -> None:
    """The rounds. Table and results are written after each, so a run that is ended early leaves what it has measured.

    The processes of all rounds import their modules side by side first, which is most of what a round takes, and then wait. The
    trees start first in turn.
    """
    trees = {"before": args.before, "after": args.after}
    commits = {name: getattr(args, f"{name}_commit") or commit_of(tree) for name, tree in trees.items()}
    waiting = []
    for number in range(args.rounds):
        order = list(trees)[:: 1 if number % 2 == 0 else -1]  # a process that starts first may get the better core
        waiting.append({name: Worker(trees[name], args) for name in order})
    for workers in waiting:
        for worker in workers.values():
            worker.answer()
    rounds: list[dict[str, dict[str, float]]] = []
    for number, workers in enumerate(waiting):
        rounds.append(measure_round(workers))
        print(f"\nround {number + 1} of {args.rounds} is done", flush=True)
        report(rounds, Results("host", args.out, before=commits["before"], commit=commits["after"]))


def measure_round(workers: dict[str, Worker]) -> dict[str, dict[str, float]]:
    """Two processes in turns, then their end -> for each tree, the median of the turns of each number, in microseconds."""
    times: dict[str, dict[str, list[float]]] = {name: {} for name in workers}
    order = list(workers)
    while True:
        turns = {name: workers[name].turn() for name in order}
        if None in turns.values():
            break
        for name, numbers in turns.items():
            for case, us in (numbers or {}).items():
                times[name].setdefault(case, []).append(us)
        order.reverse()
    for worker in workers.values():
        worker.end()
    return {name: {case: statistics.median(us[1:]) for case, us in cases.items()} for name, cases in times.items()}


def report(rounds: list[dict[str, dict[str, float]]], results: Results) -> None:
    """Print the medians of the rounds so far, and write them as results."""
    print(f"{'us per call':<18}{'before':>10}{'after':>10}{'ratio':>8}   least and greatest of a round")
    for case in rounds[0]["before"]:
        before, after = (statistics.median(each[name][case] for each in rounds) for name in ("before", "after"))
        ratios = [each["after"][case] / each["before"][case] for each in rounds]
        results.add(case, "us", after, {"before": before})
        print(f"{case:<18}{before:>10.1f}{after:>10.1f}{after / before:>8.3f}   {min(ratios):.3f} {max(ratios):.3f}")
    results.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="source tree to compare with")
    parser.add_argument("--after", type=Path, default=ROOT, help="source tree with the change (default: this one)")
    for name in ("before", "after"):
        parser.add_argument(f"--{name}-commit", default="", help="its commit, where the tree has no history")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--tiny", action="store_true", help="a CPU and sizes that are done at once; the times say nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.cases) - set(CASES)
    if unknown:
        parser.error(f"--cases must be some of {','.join(CASES)}, got {','.join(sorted(unknown))}")
    if args.worker is not None:
        work(args, TINY if args.tiny else Sizes())
    elif args.before is None:
        parser.error("--before is required: the source tree to compare with")
    else:
        compare(args)


if __name__ == "__main__":
    main()
