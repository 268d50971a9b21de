"""What a host tier of the KV cache gives, and what it costs: copies, first tokens, and steps without hits.

    python -m benchmarks.engine.bench_host_tier --shapes qwen06        # on one GPU, a minute; of llama8b 100 s
    python -m benchmarks.engine.bench_host_tier --shapes tiny --device cpu --tiny      # to try the script

to device: GB/s of pages that come back, whole pages of all layers; the peer is one copy of as many bytes between pinned memory
           and the device
to host:   the same for pages that leave
first:     milliseconds to the first token of a prompt of 16,000 tokens whose pages are on the host; the peer computes it, and
           "device" has its pages in the prefix cache
no hits:   seconds of prompts that fill a small cache again and again, none of which comes back, so that every page is copied;
           the peer has no tier. "room" is the same with a cache from which nothing is evicted
pinned:    GiB/s at which a thread pins memory

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

from benchmarks.engine.engine_workloads import SHAPES, make_model, say
from benchmarks.measure import Results
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.runner.host_memory import HostMemory

ANSWER = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PAGE = 16
REPEATS = 2
PINNED = 2 << 30


class Sizes:
    """How much is measured.

    history: tokens of a prompt that comes back; checked: of the prompt whose tokens are compared
    others:  prompts that evict it: as many as a cache of CACHED histories needs
    loads:   prompts without hits, of load_length tokens, with load_tokens tokens of an answer
    host:    bytes of the host for the loads, of which all are pinned before anything is timed, at some GiB/s
    """

    def __init__(self, tiny: bool) -> None:
        self.history = 200 if tiny else 16_000
        self.checked = 200 if tiny else 2_000
        self.others = 2
        self.loads = 4 if tiny else 16
        self.load_length = 60 if tiny else 2_000
        self.load_tokens = 4 if tiny else 64
        self.host = (64 << 20) if tiny else (3 << 30)


CACHED = 1.5
"""Prompts that fit into the device's cache: two others leave nothing of one."""
KEPT = 4
"""Prompts that fit into the host's memory, so that one is still there when the others have left the device behind it."""


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


def make_engine(model: Any, device: str, num_pages: int, longest: int, host: int, deterministic: bool = False) -> Engine:
    """An engine whose tier has pinned all its memory. longest: tokens of a prompt"""
    longest = min(longest + 128, num_pages * PAGE)
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
        for lane in tier.lanes:
            lane.copies.wait_until_pinned()
    return engine


def page_bytes(model: Any) -> int:
    """Bytes of a page in all layers."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * PAGE * config.num_hidden_layers * config.num_key_value_heads * dim * model.dtype.itemsize


def history_engine(model: Any, device: str, history: int, deterministic: bool = False) -> Engine:
    """An engine whose cache has room for CACHED prompts of so many tokens, and whose host for KEPT."""
    pages = -(-history // PAGE) + 1
    host = KEPT * pages * page_bytes(model)
    return make_engine(model, device, int(CACHED * pages) + 2, history, host, deterministic)


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


def measure_pinning(results: Results, shape: str, engine: Engine, device: str) -> None:
    """Memory beside the tier's own, by a thread beside nothing else."""
    copies = engine._scheduler.tier.lanes[0].copies  # type: ignore[union-attr]
    assert isinstance(copies, HostMemory)
    begin = time.perf_counter()
    memory = HostMemory(copies._tensors, PINNED, torch.device(device))
    memory.wait_until_pinned()
    results.show(f"{shape} pinned", "GiB/s", PINNED / 2**30 / (time.perf_counter() - begin), {})
    memory.close()


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
        results.show(f"{shape} {name}", "GB/s", ours, {"copy": whole / seconds(peer, device) / 1e9})


def come_back(engine: Engine, ids: list[int], draw: random.Random, sizes: Sizes) -> tuple[float, list[int]]:
    """Other prompts take the place of this one on the device; then its first token, as `first_token`. AssertionError if the
    pages have not come from the host."""
    for _ in range(sizes.others):
        first_token(engine, prompt(draw, len(ids), engine.vocab_size))
    before = engine.stats().host_tier
    found = first_token(engine, ids)
    after = engine.stats().host_tier
    assert before is not None
    assert after is not None
    restored = after.num_hits - before.num_hits
    assert restored > 0.9 * len(ids) // PAGE, f"only {restored} pages have come back"
    return found


def check_tokens(model: Any, device: str, sizes: Sizes) -> None:
    """Raise AssertionError unless the answer from the host is the one from the device's prefix cache."""
    engine = history_engine(model, device, sizes.checked, deterministic=True)
    draw = random.Random(1)
    ids = prompt(draw, sizes.checked, engine.vocab_size)
    first_token(engine, ids)
    _, expected = first_token(engine, ids)
    _, tokens = come_back(engine, ids, draw, sizes)
    assert tokens == expected, "an answer from the host differs from one from the device's prefix cache"
    engine.close()


def first_tokens(engine: Engine, sizes: Sizes) -> dict[str, float]:
    """Seconds to the first token of a prompt on the host, of one on the device, and of one that is computed."""
    draw = random.Random(1)
    ids = prompt(draw, sizes.history, engine.vocab_size)
    first_token(engine, prompt(draw, sizes.history, engine.vocab_size))  # compiles, and captures graphs
    computed = min(first_token(engine, prompt(draw, sizes.history, engine.vocab_size))[0] for _ in range(2))
    say(f"a prompt of {sizes.history} tokens is computed in {computed:.3f} s")
    first_token(engine, ids)
    # the first compiles what computes a few rows behind a long prefix, and a later one captures its graph
    on_device = min(first_token(engine, ids)[0] for _ in range(4))
    on_host = min(come_back(engine, ids, draw, sizes)[0] for _ in range(2))
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
            engine = make_engine(model, device, num_pages, sizes.load_length + sizes.load_tokens, host)
            taken[host] = load_seconds(engine, vocab, sizes, device)
            say(f"{shape} {name}, {host >> 20} MiB of the host: {taken[host]:.3f} s")
            if name == "no hits" and host:
                tier = engine.stats().host_tier
                assert tier is not None
                assert tier.bytes_out > 0
            engine.close()
            free(device)
        results.show(f"{shape} {name}", "ms", taken[sizes.host] * 1e3, {"without": taken[0] * 1e3})


def measure(results: Results, shape: str, model: Any, device: str, sizes: Sizes) -> None:
    check_tokens(model, device, sizes)
    say(f"{shape}: an answer from the host has the tokens of one from the device's prefix cache")
    free(device)
    engine = history_engine(model, device, sizes.history)
    times = {name: 1e3 * taken for name, taken in first_tokens(engine, sizes).items()}
    results.show(f"{shape} first", "ms", times.pop("host"), times)
    if device != "cpu":
        measure_pinning(results, shape, engine, device)
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


if __name__ == "__main__":
    main()
