"""Attention that reads the pages which sequences share once (cascade_attention), beside attention that reads them for each.

    python -m benchmarks.engine.bench_cascade --parts layer              # attention of one layer, ten seconds on a GPU
    python -m benchmarks.engine.bench_cascade --parts engine             # an engine of the shape of an 8B model, a minute
    python -m benchmarks.engine.bench_cascade --parts layer,engine --shapes tiny --device cpu --tiny      # to try the script

layer:  microseconds of the attention of one layer inside a CUDA graph of four layers; the peer reads each sequence. A case is
        groups x sequences of each x tokens that they share + tokens of each; "members 64" is one call of all 64 queries of a
        group, whose groups have 16 at most otherwise. Values are compared with float64 first
engine: output tokens a second of requests over one prefix that is in the prefix cache, and of n = 4 answers to each prompt;
        the peer is the same engine with cascade_attention off. It prints how many greedy tokens of both agree

Lines carry `bench: cascade`, and are in results/cascade.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.engine.engine_workloads import SHAPES, make_model
from benchmarks.measure import Results, graph_microseconds
from fa_serve.backends.reference import attention_reference
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.runner.cuda_graphs import KEY_LENGTHS
from fa_serve.engine.scheduler.prefix_groups import MAX_MEMBERS
from fa_serve.hf import PagedBatch
from fa_serve.hf.adapter.common_prefix import CommonPrefixes
from fa_serve.testing import assert_matches_reference, eager_attention

PAGE = 16
LAYERS = 4
WARM_RUNS = 2
"""Runs that are not measured: the first one fills the prefix cache and captures graphs, and what is left of prompts whose pages
are cached takes kernels that only the second one compiles."""


class Case(NamedTuple):
    """groups of `size` sequences each that share `common` tokens and have `own` tokens more."""

    groups: int
    size: int
    common: int
    own: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    members: int = MAX_MEMBERS

    @property
    def name(self) -> str:
        name = f"layer {self.heads}_{self.kv_heads}_d{self.dim} {self.groups}x{self.size}x{self.common}+{self.own}"
        return name if self.members == MAX_MEMBERS else f"{name} members {self.members}"


CASES = (
    Case(1, 64, 16384, 128),
    Case(1, 64, 16384, 128, members=64),
    Case(1, 64, 16384, 128, heads=16),
    Case(1, 16, 16384, 128),
    Case(32, 4, 1024, 64),
    Case(16, 4, 1024, 64),
    Case(16, 8, 3072, 128),
    Case(1, 128, 1024, 512),
    Case(1, 8, 2048, 64),  # about where the rule of the engine turns groups on
)
TINY = (Case(2, 3, 64, 20, heads=4, kv_heads=2, dim=16, members=2),)


def make_step(case: Case, device: str, dtype: torch.dtype) -> tuple[PagedBatch, Tensor]:
    """A step of this case over LAYERS caches, with its groups, and the queries of a layer."""
    draw = torch.Generator().manual_seed(0)
    batch = case.groups * case.size
    common = case.common // PAGE
    own = -(-case.own // PAGE)
    count = case.groups * common + batch * own
    order = torch.randperm(count, generator=draw, dtype=torch.int32)
    table = torch.empty(batch, common + own, dtype=torch.int32)
    for row in range(batch):
        group = row // case.size
        table[row, :common] = order[group * common : (group + 1) * common]
        table[row, common:] = order[case.groups * common + row * own :][:own]
    bounds = [0]
    for group in range(case.groups):
        parts = -(-case.size // case.members)
        bounds += [group * case.size + case.size * (part + 1) // parts for part in range(parts)]
    # as the engine has them: a step may have half as many groups as sequences, and some bound of the keys
    padding = max(batch // 2 + 1 - len(bounds), 0) if case.members == MAX_MEMBERS else 0
    keys = next(length for length in (*KEY_LENGTHS, 1 << 17) if length >= case.common + case.own)
    table = torch.nn.functional.pad(table, (0, keys // PAGE - table.shape[1])).to(device)
    starts = torch.tensor([*bounds, *bounds[-1:] * padding], dtype=torch.int32, device=device)
    used = torch.full((batch,), case.common + case.own, dtype=torch.int32, device=device)
    pages = torch.full((len(starts) - 1,), common, dtype=torch.int32, device=device)
    pages[len(bounds) - 1 :] = 0
    groups = CommonPrefixes.of_step(
        table,
        used,
        group_table=table[starts[:-1].long().clamp(max=batch - 1)],
        group_ends=starts,
        group_pages=pages,
        shared_pages=torch.full((batch,), common, dtype=torch.int32, device=device),
        page_size=PAGE,
        max_seqlen_q=case.members,
    )
    shape = (count, PAGE, case.kv_heads, case.dim)
    step = PagedBatch(
        kv_caches={
            layer: (torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device).to(dtype))
            for layer in range(LAYERS)
        },
        slot_mapping=torch.zeros(batch, dtype=torch.int64, device=device),
        block_table=table,
        seqused_k=used,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
        max_seqlen_q=1,
        max_seqlen_k=keys,
        common=groups,
    )
    return step, torch.randn(batch, case.heads, case.dim, device=device).to(dtype)


def attend(step: PagedBatch, q: Tensor, layer: int) -> Tensor:
    return step.attention(layer, q, q, q, left=-1, softmax_scale=None, softcap=0.0, sinks=None)


def check_step(case: Case, step: PagedBatch, q: Tensor) -> None:
    """Compare some sequences with float64; AssertionError if one breaks the 2x rule."""
    out = attend(step, q, 0)
    exact = []
    eager = []
    ours = []
    for row in sorted({0, case.size - 1, len(q) // 2, len(q) - 1}):
        length = int(step.seqused_k[row])
        pages = step.block_table[row, : -(-length // PAGE)].long()
        keys, values = (cache[pages].flatten(0, 1)[None, :length] for cache in step.kv_caches[0])
        query = q[None, row : row + 1]
        options = {"softmax_scale": case.dim**-0.5, "window_size": (-1, 0), "softcap": 0.0, "sinks": None}
        exact.append(attention_reference(query.double(), keys.double(), values.double(), **options)[0][0])
        eager.append(eager_attention(query, keys, values, **options)[0])
        ours.append(out[row : row + 1])
    assert_matches_reference(torch.cat(ours), torch.cat(exact), torch.cat(eager), case.name)


def measure_layer(results: Results, cases: Sequence[Case], device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for case in cases:
        torch.manual_seed(0)
        step, q = make_step(case, device, dtype)
        check_step(case, step, q)
        plain = PagedBatch(**{name: getattr(step, name) for name in step.__dataclass_fields__} | {"common": None})
        taken = []
        for batch in (step, plain):

            def call(batch: PagedBatch = batch, q: Tensor = q) -> None:
                for layer in range(LAYERS):
                    attend(batch, q, layer)

            taken.append(graph_microseconds(call, calls=1) / LAYERS)
        results.show(case.name, "us", taken[0], {"each": taken[1]})
        free(device)


class Sizes:
    """Requests over one prefix of `prefix` tokens, and `prompts` prompts of `length` tokens with n = 4 answers."""

    def __init__(self, tiny: bool) -> None:
        self.prefix = 64 if tiny else 16_384
        self.requests = 4 if tiny else 64
        self.prompts = 2 if tiny else 32
        self.length = 48 if tiny else 1_024
        self.answer = 8 if tiny else 128


def measure_engine(results: Results, shape: str, model: Any, device: str, sizes: Sizes) -> None:
    vocab = model.config.vocab_size
    draw = random.Random(0)
    prefix = [draw.randrange(vocab) for _ in range(sizes.prefix)]
    behind = [[*prefix, *(draw.randrange(vocab) for _ in range(20))] for _ in range(sizes.requests)]
    prompts = [[draw.randrange(vocab) for _ in range(sizes.length)] for _ in range(sizes.prompts)]
    greedy = SamplingParams(max_tokens=sizes.answer, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(n=4, max_tokens=sizes.answer, temperature=1.0, seed=1, ignore_eos=True)
    works = {
        f"{sizes.requests} over {sizes.prefix}": (behind, greedy),
        f"{sizes.prompts} of {sizes.length}, n = 4": (prompts, drawn),
    }
    rates: dict[str, float] = {}  # with cascade_attention
    tokens: list[list[list[int]]] = []
    for cascade in (True, False):
        engine = make_engine(model, device, sizes, cascade)
        for name, (given, params) in works.items():
            found: list[float] = []
            for run in range(WARM_RUNS + 2):
                begin = time.perf_counter()
                outputs = engine.generate(given, params)
                if device != "cpu":
                    torch.cuda.synchronize()
                taken = time.perf_counter() - begin
                print(f"{shape} {name}, cascade_attention {cascade}, run {run}: {taken:.3f} s", flush=True)
                if run >= WARM_RUNS:
                    found.append(sum(len(output.token_ids) for output in outputs) / taken)
            if cascade:
                rates[name] = max(found)
            else:
                results.show(f"{shape} {name}", "tokens/s", rates[name], {"each": max(found)})
            if params is greedy:
                tokens.append([output.token_ids for output in outputs])
        graphs = engine._runner._graphs
        kinds = "none" if graphs is None else f"{sum(x.groups for x in graphs._replays)} with groups of {len(graphs._replays)}"
        print(f"{shape}: cascade_attention {cascade}, CUDA graphs: {kinds}", flush=True)
        engine.close()
        free(device)
    same = sum(a == b for x, y in zip(*tokens, strict=True) for a, b in zip(x, y, strict=True))
    print(f"{shape}: {same} of {sizes.requests * sizes.answer} greedy tokens are those without cascade_attention", flush=True)


def make_engine(model: Any, device: str, sizes: Sizes, cascade: bool) -> Engine:
    longest = sizes.prefix + 32 + sizes.answer
    sequences = max(sizes.requests, 4 * sizes.prompts)
    own = -(-(sizes.length + sizes.answer + 32) // PAGE) + 1
    return Engine(
        EngineConfig(
            device=device,
            num_pages=2 * (longest // PAGE + 2) + sequences * own,
            page_size=PAGE,
            max_model_len=longest,
            max_num_seqs=sequences,
            max_num_batched_tokens=min(8192, longest),
            cascade_attention=cascade,
            seed=0,
        ),
        model=model,
    )


def free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="layer,engine")
    parser.add_argument("--shapes", default="llama8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few tokens")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    results = Results("cascade", options.out)
    parts = options.parts.split(",")
    if "layer" in parts:
        measure_layer(results, TINY if options.tiny else CASES, options.device)
    for shape in options.shapes.split(",") if "engine" in parts else ():
        model = make_model(shape, options.device, dtype=torch.float32 if options.tiny else torch.bfloat16)
        measure_engine(results, shape, model, options.device, Sizes(options.tiny))


if __name__ == "__main__":
    main()
