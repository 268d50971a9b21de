"""What the host does between the results of a step and the launch of the next one, if the next one verifies drafts.

    python -m benchmarks.engine.bench_draft_gap                  # 1, 16 and 64 sequences, greedy
    python -m benchmarks.engine.bench_draft_gap --sampled        # with temperature, top_k and top_p
    python -m benchmarks.engine.bench_draft_gap --no-lookup      # drafts are not looked up, as in profile_engine.py
    python -m benchmarks.engine.bench_draft_gap --profile 30     # and the functions that take most of this time
    PYTHONPATH=/tmp/before python benchmarks/engine/bench_draft_gap.py   # another source tree

Drafts continue the newest token, so the device is idle from the end of a step until the host has read its results and launched
the next one. This command measures the host's part of that time without a device: the forward and the sampling of a tiny model
are replaced by stubs, and reading a result waits for as long as a device would compute (`--step-ms`). Everything else is the
engine as it runs on a GPU, one step ahead and with the fixed buffers of CUDA graphs. Prompts repeat themselves, so prompt
lookup finds drafts for every sequence in every step; the first ACCEPTED of them count as right.

    gap      from the results to the replay of the next step's graph, in microseconds
    behind   from there to the next read: what the host does while the device computes

Left out: the copy to the device and the launch of a graph, which need one, and what the device computes (profile_engine.py).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.engine.engine_workloads import make_model as tiny_model

BATCHES = (1, 16, 64)
PROMPT = 600
PERIOD = 61
"""Tokens after which a prompt and its answer repeat themselves."""
ACCEPTED = 3
WARM_UP = 20
"""Steps before the measurement begins."""


class Gap:
    """Stands for the device, and measures the host between a result and the next launch.

    gaps, behind: seconds of each step
    profiler:     runs during gaps; None if nothing is profiled
    """

    def __init__(self, seconds: float, profiler: cProfile.Profile | None = None) -> None:
        self.gaps: list[float] = []
        self.behind: list[float] = []
        self._seconds = seconds
        self._profiler = profiler
        self._arrived = 0.0
        self._launched = 0.0
        self._due = 0.0
        self._batch: Any = None

    @contextmanager
    def watching(self, engine: Any) -> Iterator[None]:
        """Inside, the engine's forward and sampling are stubs."""
        from fa_serve.engine.runner.results import PendingResult

        runner = engine._runner
        launch = runner.launch
        read = PendingResult.read
        logits = torch.zeros(256, 1)

        def launched(batch: Any, *others: Any) -> Any:
            self._batch = batch
            return launch(batch, *others)

        def run(shape: Any) -> torch.Tensor:
            self._launch()
            return logits[: shape.rows]

        def sample(forward: Any, masks: Any = None) -> PendingResult:
            del forward, masks
            return PendingResult(torch.tensor(drawn(self._batch)))

        def arrived(pending: PendingResult) -> Any:
            self._wait()
            result = read(pending)
            self._begin()
            return result

        with ExitStack() as stack:
            stack.enter_context(patch.object(runner, "launch", launched))
            stack.enter_context(patch.object(runner, "sample", sample))
            stack.enter_context(patch.object(runner._graphs, "run", run))
            stack.enter_context(patch.object(PendingResult, "read", arrived))
            yield

    def _launch(self) -> None:
        now = time.perf_counter()
        if self._profiler is not None:
            self._profiler.disable()
        self.gaps.append(now - self._arrived)
        self._launched = time.perf_counter()
        self._due = self._launched + self._seconds

    def _wait(self) -> None:
        """The device computes until the step is due. The host polls, as it does when it waits for an event."""
        self.behind.append(time.perf_counter() - self._launched)
        while time.perf_counter() < self._due:
            pass

    def _begin(self) -> None:
        self._arrived = time.perf_counter()
        if self._profiler is not None:
            self._profiler.enable()


def drawn(batch: Any) -> list[int]:
    """The tokens that a step draws: each sequence repeats its prompt."""
    tokens = []
    for chunk in batch.chunks:
        prompt = chunk.sequence.request.prompt
        end = chunk.start + chunk.length
        tokens += [prompt[place % PERIOD] for place in range(end - chunk.num_samples + 1, end + 1)]
    return tokens


def make_engine(**settings: Any) -> Any:
    """An engine with prompt lookup and a tiny model, which runs one step ahead and has graphs, as on a GPU."""
    from fa_serve.engine import Engine, EngineConfig
    from fa_serve.engine.runner import cuda_graphs

    model = tiny_model("tiny", "cpu", dtype=torch.float32, num_hidden_layers=1, vocab_size=128256)
    options: dict[str, Any] = {
        "device": "cpu",
        "speculative": "ngram",
        "num_pages": 8192,
        "max_model_len": 4096,
        "max_num_seqs": BATCHES[-1],
    }
    engine = Engine(EngineConfig(**options | settings), model=model)
    engine._steps.depth = 1
    with patch.object(cuda_graphs, "capture", lambda function, pool, model: (function, pool)):
        engine._runner.make_graphs()
    return engine


def measure(engine: Any, batch: int, steps: int, params: Any, gap: Gap) -> None:
    """Let `batch` sequences verify drafts for `steps` steps."""
    from fa_serve.engine.scheduler import scheduler

    generator = torch.Generator().manual_seed(batch)
    for row in range(batch):
        pattern = torch.randint(5, engine.vocab_size, (PERIOD,), generator=generator).tolist()
        engine.add_request(str(row), (pattern * (PROMPT // PERIOD + 1))[:PROMPT], params)
    with (
        gap.watching(engine),
        patch.object(scheduler, "num_accepted", lambda drafts, draws: min(ACCEPTED, len(drafts))),
    ):
        while engine.stats().speculation.num_drafts == 0:
            engine.step()
        for _ in range(WARM_UP):
            engine.step()
        gap.gaps.clear()
        gap.behind.clear()
        before = engine.stats().speculation
        for _ in range(steps):
            engine.step()
        after = engine.stats().speculation
        if after.num_drafts - before.num_drafts < batch * (steps - 1):
            sys.exit(f"only {after.num_drafts - before.num_drafts} of {batch * steps} sequences verified drafts")
        for row in range(batch):
            engine.abort(str(row))
        while engine.has_unfinished():
            engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=BATCHES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-ms", type=float, default=2.0, help="how long the device computes a step")
    parser.add_argument("--sampled", action="store_true", help="with temperature, top_k and top_p")
    parser.add_argument("--no-lookup", action="store_true", help="take the last tokens for drafts")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="print the N functions that take most of the gap")
    args = parser.parse_args()
    from fa_serve.engine import SamplingParams

    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if args.sampled else {"temperature": 0.0}
    params = SamplingParams(max_tokens=3000, ignore_eos=True, **sampling)
    engine = make_engine()
    if args.no_lookup:
        engine._scheduler.speculation.drafter.propose = lambda sequence, count: (sequence.tokens[-16:] * 2)[:count]
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the middle of a measurement is noise
    print("| sequences | gap, us: median | least tenth | behind, us |\n|---|---|---|---|")
    for batch in args.batches:
        gap = Gap(args.step_ms / 1e3)
        measure(engine, batch, args.steps, params, gap)
        least = statistics.quantiles(gap.gaps, n=10)[0]
        row = (statistics.median(gap.gaps), least, statistics.median(gap.behind))
        print(f"| {batch} | {' | '.join(f'{seconds * 1e6:.0f}' for seconds in row)} |", flush=True)
        gc.collect()
    for batch in args.batches if args.profile else ():
        profiler = cProfile.Profile()
        measure(engine, batch, args.steps, params, Gap(args.step_ms / 1e3, profiler))
        print(f"\n{batch} sequences, {args.steps} gaps and the steps before them:")
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(args.profile)
    engine.close()


if __name__ == "__main__":
    main()
