"""Decoding steps beside their floors, and where the time of a step goes: kernels, idle time, the host's functions.

    python -m benchmarks.engine.bench_engine decode --shapes qwen30a3b,deepseek-lite  # steps at batch 1 to 256, their floors
    python -m benchmarks.engine.bench_engine profile --shapes llama8b  # the same with kernels, and a prefill
    python -m benchmarks.engine.bench_engine profile --shapes llama8b --set speculative=ngram  # and steps that verify drafts

The floor of a step is the time of a copy of as many bytes as it must read, by the bandwidth of copies in the same run: all
weights, of experts those that an even routing meets, and the keys and values that each layer sees. Weights are random and made
on the device. With speculation, `profile` also shows steps in which each sequence verifies as many drafts as it may and accepts
one of them; their floor is that of a decoding step.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import pstats
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from benchmarks.engine.engine_runs import gate
from benchmarks.engine.engine_workloads import (
    LIMIT,
    QUANTISED,
    Workload,
    make_folder,
    make_model,
    quantised_weights,
    say,
    stored_bytes,
    weight_bytes,
)
from benchmarks.tuning.step_parts import WAITING, timing_parts

BATCHES = (1, 16, 64, 256)
LENGTH = 640
"""Tokens of a sequence in a step that is measured."""
PROMPT = 512
"""Tokens of a prompt whose prefill is profiled."""
STEPS = 20
"""Decoding steps that are timed, and as many that are profiled."""


def decode(args: argparse.Namespace) -> None:
    """Print the decoding steps of each shape beside their floors, when a small model of its kind has given the right tokens."""
    rows = []
    for shape in args.shapes:
        gate(args, shape)
        say(f"{shape}: greedy float32 tokens of a small model of this kind are those of model.generate")
        name = name_of(shape, args)
        engine = make_engine(shape, args)
        end = time.time() + args.budget
        bandwidth = copy_bandwidth(args.device)
        say(f"{shape}: copies at {bandwidth / 1e12:.3g} TB/s")
        for batch in BATCHES:
            if batch > (args.requests or BATCHES[-1]) or time.time() > end:
                say(f"{shape}: batch {batch} is left out")
                continue
            wall = decode_step(engine, batch, timed).wall
            floor = floor_bytes(engine, batch) / bandwidth * 1e3
            rows.append(f"| {name} | {batch} | {wall:.3f} | {floor:.3f} | {wall / floor:.2f} |")
            say(rows[-1])
            record(f"{name} decode {batch}", wall, floor, args)
        engine.close()
        del engine
        release()
    say("\n".join(["", f"| shape | sequences of {LENGTH} | step, ms | floor, ms | ratio |", "|---|---|---|---|---|", *rows]))


def name_of(shape: str, args: argparse.Namespace) -> str:
    """What the lines of results call a model."""
    name = shape if args.tensor_parallel == 1 else f"{shape} on {args.tensor_parallel} GPUs"
    parts = [] if args.layers is None else [f"{args.layers} layers"]
    return ", ".join([name, *parts, *(f"{setting}={value}" for setting, value in args.set.items())])


def record(case: str, wall: float, floor: float, args: argparse.Namespace) -> None:
    """Write a step and its floor, in milliseconds, to results/steps.jsonl."""
    from benchmarks.measure import Results

    if args.device == "cuda" and not args.tiny:
        results = Results("steps", args.out)
        results.add(case, "ms", wall, {"floor": floor})


def profile(args: argparse.Namespace) -> None:
    """Profile each shape in turn."""
    for shape in args.shapes:
        profile_shape(shape, args)
        release()


def make_engine(shape: str, args: argparse.Namespace) -> Any:
    """An engine with a model of this shape. Ranks of tensor parallelism read it from a folder, each its part."""
    import torch

    from fa_serve.engine import Engine, EngineConfig
    from fa_serve.engine.process.child import tune_interpreter

    settings = {"device": args.device, "max_model_len": LIMIT, "gpu_memory_utilization": 0.85, "prefix_caching": False}
    settings["tensor_parallel"] = args.tensor_parallel
    with TemporaryDirectory() as folder:
        model = None
        if shape in QUANTISED or args.tensor_parallel > 1:
            make_folder(shape, Path(folder), args.device)
            settings["model"] = folder
        else:
            model = make_model(shape, args.device, dtype=torch.bfloat16)
        engine = Engine(EngineConfig(**settings | args.set), model=model)
    tune_interpreter()
    return engine


def release() -> None:
    """Return the memory of an engine that has no other reference, before the next one takes what is free."""
    gc.unfreeze()
    gc.collect()


def profile_shape(shape: str, args: argparse.Namespace) -> None:
    """Time all steps, then profile them: once CUDA's profiler has run, each launch of a graph takes longer."""
    from benchmarks.engine.synthetic_drafts import accepting, no_drafts

    gate(args, shape)
    engine = make_engine(shape, args)
    end = time.time() + args.budget
    bandwidth = copy_bandwidth(args.device)
    say(f"{shape}: copies at {bandwidth / 1e12:.3g} TB/s")
    kinds = {"decode": partial(no_drafts, engine)}
    if engine._scheduler.speculation.num_tokens:
        kinds["verify"] = partial(accepting, engine, 1)
    timings = {}
    for kind, drafting in kinds.items():
        with drafting():
            timings[kind] = time_steps(shape, kind, engine, bandwidth, end, args)
    count = min(16, args.requests or 16)
    of_prefill = prefill_step(engine, count, timed)
    for kind, drafting in kinds.items():
        with drafting():
            profile_steps(kind, timings[kind], engine, end, args)
    if time.time() < end:
        step = prefill_step(engine, count, partial(observe, of_prefill))
        say(f"prefill, {count} x {PROMPT} tokens: {step}")
        say(step.table(args.top))
        say(host_profile(partial(prefill_step, engine, count, timed), 2 * args.top))
    engine.close()


def time_steps(shape: str, kind: str, engine: Any, bandwidth: float, end: float, args: argparse.Namespace) -> dict[int, Timing]:
    """Time steps at each batch size, and write them beside their floors. Returns what each batch size took.

    kind:      what results call the steps: "decode", or "verify" if sequences draft
    bandwidth: bytes per second of copies
    end:       the time after which no batch is begun
    """
    timings = {}
    for batch in BATCHES:
        if batch > (args.requests or BATCHES[-1]) or time.time() > end:
            say(f"{kind} {batch}: left out")
            continue
        if kind == "verify" and not num_drafts(engine, batch):
            say(f"{kind} {batch}: so many sequences draft nothing")
            continue
        timings[batch] = decode_step(engine, batch, timed)
        wall = timings[batch].wall
        read = floor_bytes(engine, batch)
        floor = read / bandwidth * 1e3
        bytes_read = f"{read / 1e9:.2f} GB of weights and the KV cache take {floor:.3f} ms"
        say(f"{kind}, batch {batch}: {wall:.3f} ms a step; {bytes_read}, ratio {wall / floor:.2f}")
        record(f"{name_of(shape, args)} {kind} {batch}", wall, floor, args)
    return timings


def profile_steps(kind: str, timings: dict[int, Timing], engine: Any, end: float, args: argparse.Namespace) -> None:
    """Profile the steps that have been timed. kind, end: as in `time_steps`"""
    for batch, timing in timings.items():
        if time.time() > end:
            say(f"{kind} {batch}: not profiled")
            continue
        step = decode_step(engine, batch, partial(observe, timing))
        drafts = num_drafts(engine, batch) if kind == "verify" else 0
        name = f"{kind}, batch {batch}" + (f" x {drafts} drafts" if drafts else "")
        say(f"{name}, kv {LENGTH}: {step}")
        say(step.table(args.top))


def num_drafts(engine: Any, batch: int) -> int:
    """Drafts of each of so many sequences in a step."""
    from fa_serve.engine.speculation.drafts import draft_limit

    return draft_limit(engine._scheduler.speculation.num_tokens, batch)


def floor_bytes(engine: Any, batch: int) -> float:
    """Bytes that a decoding step of so many sequences of LENGTH tokens must read: weights, what each layer sees, and states."""
    runner = engine._runner
    cached = 0
    for layer in runner.layers.values():
        left = layer.window_size[0]
        cached += layer.cached_bytes * (LENGTH if left < 0 else min(LENGTH, left + 1))
    states = runner.state_memory
    tail = sum(spec.bytes_per_row for spec in states.specs.values()) * runner.page_size // 2  # half a page stands in it
    cached += states.bytes_per_state + tail
    return weights_of_step(runner.model, batch) + batch * cached


def weights_of_step(model: Any, tokens: int) -> float:
    """Bytes of the weights that a decoding step of so many sequences reads; an even routing chooses the experts."""
    total: float = weight_bytes(model)
    for module in model.modules():
        if hasattr(module, "num_experts") and (hasattr(module, "_apply_gate") or hasattr(module, "scheme")):
            missed = (1 - model.config.num_experts_per_tok / module.num_experts) ** tokens
            quantised = sum(stored_bytes(weight) for weight in quantised_weights(module))
            total -= missed * (quantised + sum(x.nbytes for x in module.parameters()))
    return total


def host_profile(call: Callable[[], object], top: int) -> str:
    """The functions in which Python spends most time. The profiler makes all of them slower."""
    profiler = cProfile.Profile()
    text = io.StringIO()
    profiler.runcall(call)
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(top)
    return "\n".join(row[:110] for row in text.getvalue().splitlines() if row.strip())


class Timing(NamedTuple):
    """Milliseconds of a step, and of each part of `parts_of_step`."""

    wall: float
    parts: dict[str, float]


@dataclass
class Step:
    """What `steps` steps cost.

    wall, busy, host: milliseconds of a step: in all, of the device (profiled), of the host without waiting
    parts:            milliseconds of each part of the host's work, by its name in `parts_of_step`
    kernels, calls:   microseconds and calls of each kernel over all steps
    """

    wall: float
    busy: float
    host: float
    parts: dict[str, float]
    kernels: Counter[str]
    calls: Counter[str]
    steps: int

    def __str__(self) -> str:
        idle = max(0.0, 1 - self.busy / self.wall)
        parts = ", ".join(f"{name} {spent:.3f}" for name, spent in self.parts.items())
        return f"{self.wall:.3f} ms a step, device busy {self.busy:.3f} ({idle:.0%} idle), host {self.host:.3f} ({parts})"

    def table(self, top: int) -> str:
        total = sum(self.kernels.values())
        rows = [
            f"  {us / total:6.1%} {us / self.calls[name]:9.1f} us x{self.calls[name] / self.steps:7.1f}  {short(name)}"
            for name, us in self.kernels.most_common(top)
        ]
        return "\n".join(rows)


T = TypeVar("T")


def decode_step(engine: Any, batch: int, look: Callable[[Callable[[], object], int], T]) -> T:
    """What `look` says of steps in the middle of decoding; the sequences have about LENGTH tokens.

    look: is given a function that runs a step, and how many of them to look at
    """
    from fa_serve.engine import SamplingParams

    prompts = Workload([(LENGTH - STEPS, 1)] * batch).prompts(f"profile {batch}", engine.vocab_size)
    for row, prompt in enumerate(prompts):
        engine.add_request(f"decode-{row}", prompt, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step() if output.token_ids}
    for _ in range(5):
        engine.step()
    seen = look(engine.step, STEPS)
    for row in range(batch):
        engine.abort(f"decode-{row}")
    while engine.has_unfinished():
        engine.step()
    return seen


def prefill_step(engine: Any, count: int, look: Callable[[Callable[[], object], int], T]) -> T:
    """What `look` says of steps that compute prompts only, from requests to first tokens. look: as in `decode_step`"""
    from fa_serve.engine import SamplingParams

    prompts = Workload([(PROMPT, 1)] * count).prompts("profile prefill", engine.vocab_size)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def step() -> None:
        engine.generate(prompts, params)

    for _ in range(3):  # the second captures it
        step()
    return look(step, 5)


def timed(step: Callable[[], object], steps: int) -> Timing:
    """What each of so many steps takes, without a profiler."""
    with timing_parts() as spent:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wall = time.perf_counter() - start
    return Timing(wall * 1e3 / steps, {name: seconds * 1e3 / steps for name, seconds in spent.items()})


def observe(timing: Timing, step: Callable[[], object], steps: int) -> Step:
    """Profile so many steps. timing: what such a step took without the profiler"""
    import torch

    wall = timing.wall
    parts = {name: spent for name, spent in timing.parts.items() if name != WAITING}
    host = wall - timing.parts[WAITING]
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    wait()
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(steps):
            step()
        wait()
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    kernels: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans = []
    for event in profiler.events() or []:
        if event.device_type == kind:
            begin = event.time_range.start
            end = event.time_range.end
            kernels[event.name] += end - begin if on_gpu else event.self_cpu_time_total
            calls[event.name] += 1
            spans.append((begin, end))
    busy = 0.0
    until = 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return Step(wall, busy / 1e3 / steps, host, parts, kernels, calls, steps)


def short(name: str) -> str:
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "c10::", "cutlass::"):
        name = name.replace(noise, "")
    return name[:78]


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    import torch

    if device == "cpu":  # to try the script
        source = torch.zeros(1 << 26, dtype=torch.uint8)
        start = time.perf_counter()
        for _ in range(8):
            source.clone()
        return 16 * source.nbytes / (time.perf_counter() - start)
    from benchmarks.measure import milliseconds

    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3
