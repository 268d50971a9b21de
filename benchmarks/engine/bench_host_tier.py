"""What a host tier of the KV cache gives, and what it costs: copies, first tokens, and steps without hits.

    python -m benchmarks.engine.bench_host_tier                        # 0.6B and 8B on one GPU, a minute
    python -m benchmarks.engine.bench_host_tier --shapes tiny --device cpu --tiny      # to try the script

to device: GB/s of pages that come back, whole pages of all layers; the peer is one copy of as many bytes between pinned memory
           and the device
to host:   the same for pages that leave
first:     milliseconds to the first token of a prompt of 16,000 tokens whose pages are on the host; the peer computes it, and
           "device" has its pages in the prefix cache
no hits:   seconds of prompts that fill a small cache again and again, none of which comes back, so that every page is copied;
           the peer has no tier. "room" is the same with a cache from which nothing is evicted
pinned:    GiB/s of memory that is pinned while the engine runs

Before anything is timed, the tokens of an answer from the host are compared with those from the device's prefix cache, by a
deterministic engine: how many tokens of a prompt are computed together changes bits otherwise. Lines carry `bench: host_tier`,
and are in results/host_tier.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.engine_workloads import SHAPES, make_model
from benchmarks.measure import Results
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.runner.host_memory import HostMemory

ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PAGE = 16
REPEATS = 3


class Sizes:
    """How much is measured: history (tokens of a prompt), others (prompts that evict it), loads (prompts without hits)."""

    def __init__(self, tiny: bool) -> None:
        self.history = 200 if tiny else 16_000
        self.others = 4
        self.loads = 4 if tiny else 24
        self.load_length = 60 if tiny else 2_000
        self.load_tokens = 4 if tiny else 64
        self.host = (64 << 20) if tiny else (12 << 30)


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(call: Any, device: str) -> float:
    """The best of some calls, with what they queue on the device."""
    best = float("inf")
    for _ in range(REPEATS):
        settle(device)
        begin = time.perf_counter()
        call()
        settle(device)
        best = min(best, time.perf_counter() - begin)
    return best


def make_engine(model: Any, device: str, num_pages: int, sizes: Sizes, host: int, deterministic: bool = False) -> Engine:
    longest = min(max(sizes.history, sizes.load_length) + 128, num_pages * PAGE)
    config = EngineConfig(
        device=device,
        num_pages=num_pages,
        page_size=PAGE,
        max_model_len=longest,
        max_num_seqs=32,
        max_num_batched_tokens=min(4096, longest),
        kv_host_memory=host,
        seed=0,
        deterministic=deterministic,
    )
    engine = Engine(config, model=model)
    if (tier := engine._scheduler.tier) is not None:
        begin = time.perf_counter()
        for lane in tier.lanes:
            lane.copies.wait_until_pinned()
        engine.pinning_seconds = time.perf_counter() - begin  # type: ignore[attr-defined]
    return engine


def prompt(draw: random.Random, length: int, vocab: int) -> list[int]:
    return [draw.randrange(vocab) for _ in range(length)]


def first_token(engine: Engine, ids: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and the whole answer."""
    name = f"first-{time.perf_counter()}"
    tokens: list[int] = []
    begin = time.perf_counter()
    taken = 0.0
    engine.add_request(name, ids, ANSWER)
    while engine.has_unfinished():
        for output in engine.step():
            tokens += output.token_ids
            taken = taken or time.perf_counter() - begin
    return taken, tokens


def measure_copies(results: Results, shape: str, engine: Engine, device: str) -> None:
    """Whole batches of pages, in both directions, beside nothing else."""
    copies = engine._scheduler.tier.lanes[0].copies  # type: ignore[union-attr]
    assert isinstance(copies, HostMemory)
    draw = random.Random(0)
    count = min(engine._scheduler.pages.num_pages, copies.num_slots, max((2 << 30) // copies.row_bytes, 4))
    pages = draw.sample(range(engine._scheduler.pages.num_pages), count)
    slots = [*range(count)]
    num_bytes = count * copies.row_bytes
    sample = min(num_bytes, 256 << 20)
    there = torch.empty(sample, dtype=torch.uint8, device=device)
    here = torch.empty(sample, dtype=torch.uint8, pin_memory=device != "cpu")
    rounds = max(num_bytes // sample, 1)

    def plain(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(rounds):
            target.copy_(source, non_blocking=True)

    whole = rounds * sample
    for name, call, peer in (
        ("to host", lambda: copies.to_host(pages, slots).wait(), lambda: plain(here, there)),
        ("to device", lambda: copies.to_device(slots, pages).wait(), lambda: plain(there, here)),
    ):
        call()
        ours = num_bytes / seconds(call, device) / 1e9
        results.add(f"{shape} {name}", "GB/s", ours, {"copy": whole / seconds(peer, device) / 1e9})


def first_tokens(engine: Engine, vocab: int, sizes: Sizes) -> dict[str, float]:
    """Seconds to the first token of a prompt on the host, of one on the device, and of one that is computed."""
    draw = random.Random(1)
    ids = prompt(draw, sizes.history, vocab)
    first_token(engine, prompt(draw, sizes.history, vocab))  # compiles, and captures graphs
    computed = min(first_token(engine, prompt(draw, sizes.history, vocab))[0] for _ in range(2))
    first_token(engine, ids)
    on_device, expected = first_token(engine, ids)
    on_host = float("inf")
    for _ in range(2):
        for _ in range(sizes.others):
            first_token(engine, prompt(draw, sizes.history, vocab))
        before = engine.stats().host_tier
        taken, tokens = first_token(engine, ids)
        after = engine.stats().host_tier
        assert before is not None
        assert after is not None
        restored = after.num_hits - before.num_hits
        assert restored > 0.9 * sizes.history // PAGE, f"only {restored} pages have come back"
        if engine.config.deterministic:
            assert tokens == expected, "an answer from the host differs from one from the device's prefix cache"
        on_host = min(on_host, taken)
    return {"host": on_host, "computed": computed, "device": on_device}


def load_seconds(engine: Engine, vocab: int, sizes: Sizes, device: str) -> float:
    """Of prompts that nobody has sent before."""
    draw = random.Random()
    params = SamplingParams(max_tokens=sizes.load_tokens, temperature=0.0, ignore_eos=True)

    def run() -> None:
        engine.generate([prompt(draw, sizes.load_length, vocab) for _ in range(sizes.loads)], params)

    run()
    return seconds(run, device)


def measure_load(results: Results, shape: str, model: Any, device: str, sizes: Sizes) -> None:
    vocab = model.config.vocab_size
    each = -(-(sizes.load_length + sizes.load_tokens) // PAGE) + 1
    for name, num_pages in (("no hits", each * sizes.loads * 3 // 4), ("room", each * sizes.loads * (REPEATS + 2))):
        taken = {}
        for host in (0, sizes.host):
            engine = make_engine(model, device, num_pages, sizes, host)
            taken[host] = load_seconds(engine, vocab, sizes, device)
            if name == "no hits" and host:
                tier = engine.stats().host_tier
                assert tier is not None
                assert tier.bytes_out > 0
            engine.close()
            free(device)
        results.add(f"{shape} {name}", "ms", taken[sizes.host] * 1e3, {"without": taken[0] * 1e3})


def measure(results: Results, shape: str, model: Any, device: str, sizes: Sizes) -> None:
    pages = -(-sizes.history // PAGE)
    exact = make_engine(model, device, pages * 2 + 16, sizes, sizes.host, deterministic=True)
    first_tokens(exact, model.config.vocab_size, sizes)
    exact.close()
    free(device)
    engine = make_engine(model, device, pages * 2 + 16, sizes, sizes.host)
    if device != "cpu":
        results.add(f"{shape} pinned", "GiB/s", sizes.host / 2**30 / engine.pinning_seconds, {})  # type: ignore[attr-defined]
    times = {name: 1e3 * taken for name, taken in first_tokens(engine, model.config.vocab_size, sizes).items()}
    results.add(f"{shape} first", "ms", times.pop("host"), times)
    results.merge()  # a run that is cut off keeps what it has measured
    measure_copies(results, shape, engine, device)
    engine.close()
    free(device)
    measure_load(results, shape, model, device, sizes)


def free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen06,llama8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="short prompts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    results = Results("host_tier", options.out)
    for shape in options.shapes.split(","):
        model = make_model(shape, options.device, dtype=torch.float32 if options.tiny else torch.bfloat16)
        measure(results, shape, model, options.device, Sizes(options.tiny))
    for line in results.lines:
        print(f"bench: host_tier {line['case']}: {line['ours']} {line['unit']}, peers {line['peers']}")
    results.merge()


if __name__ == "__main__":
    main()
