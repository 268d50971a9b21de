"""Where the time of an engine's step goes: time of each kernel, idle time of the device, time of the host's functions.

    python benchmarks/bench_engine.py profile --shapes llama8b       # decoding at batch 1, 64 and 256, and a prefill

Weights are random and made on the device.
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
from typing import Any

from engine_workloads import LIMIT, QUANTISED, SHAPES, Workload, make_folder, make_model, say, weight_bytes


def profile(args: argparse.Namespace) -> None:
    """Profile each shape in turn."""
    for shape in args.shapes:
        profile_shape(shape, args)
        gc.collect()  # the engine and its cache, before the next one takes what is free


def profile_shape(shape: str, args: argparse.Namespace) -> None:
    import torch

    from fa_serve.engine import Engine, EngineConfig

    end = time.time() + args.budget
    settings = {"device": args.device, "max_model_len": LIMIT, "gpu_memory_utilization": 0.85, "prefix_caching": False}
    with TemporaryDirectory() as folder:
        model = None
        if shape in QUANTISED:
            make_folder(shape, Path(folder), args.device)
            settings["model"] = folder
        else:
            model = make_model(shape, args.device, dtype=torch.bfloat16)
        engine = Engine(EngineConfig(**settings | args.set), model=model)
    bandwidth = copy_bandwidth() if args.device == "cuda" else float("nan")
    say(f"{shape}: copies at {bandwidth / 1e12:.2f} TB/s")
    sizes = SHAPES[shape]
    token = 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]  # bytes of its keys and values
    for batch in (1, 64, 256):
        if batch > (args.requests or 256) or time.time() > end:
            say(f"decode {batch}: left out")
            continue
        step = decode_step(engine, batch)
        weights = weights_of_step(engine._runner.model, batch)
        floor = (weights + batch * 640 * token) / bandwidth * 1e3
        read = f"{weights / 1e9:.2f} GB of weights and the KV cache take {floor:.3f} ms"
        say(f"decode, batch {batch}, kv 640: {step}; {read}, ratio {step.wall / floor:.2f}")
        say(step.table(args.top))
    if time.time() < end:
        count = min(16, args.requests or 16)
        step = prefill_step(engine, count)
        say(f"prefill, {count} x 512 tokens: {step}")
        say(step.table(args.top))
        say(host_profile(partial(prefill_step, engine, count), 2 * args.top))


def weights_of_step(model: Any, tokens: int) -> float:
    """Bytes of the weights that a decoding step of so many sequences reads; an even routing chooses the experts."""
    total: float = weight_bytes(model)
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            missed = (1 - model.config.num_experts_per_tok / module.num_experts) ** tokens
            total -= missed * sum(x.nbytes for x in module.parameters())
    return total


def host_profile(call: Callable[[], object], top: int) -> str:
    """The functions in which Python spends most time. The profiler makes all of them slower."""
    profiler = cProfile.Profile()
    text = io.StringIO()
    profiler.runcall(call)
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(top)
    return "\n".join(row[:110] for row in text.getvalue().splitlines() if row.strip())


@dataclass
class Step:
    """What `steps` steps cost.

    wall, busy, host: milliseconds of a step: in all, of the device (profiled), of the host without waiting
    kernels, calls:   microseconds and calls of each kernel over all steps
    """

    wall: float
    busy: float
    host: float
    kernels: Counter[str]
    calls: Counter[str]
    steps: int

    def __str__(self) -> str:
        idle = max(0.0, 1 - self.busy / self.wall)
        return f"{self.wall:.3f} ms a step, device busy {self.busy:.3f} ({idle:.0%} idle), host {self.host:.3f}"

    def table(self, top: int) -> str:
        total = sum(self.kernels.values())
        rows = [
            f"  {us / total:6.1%} {us / self.calls[name]:9.1f} us x{self.calls[name] / self.steps:7.1f}  {short(name)}"
            for name, us in self.kernels.most_common(top)
        ]
        return "\n".join(rows)


def decode_step(engine: Any, batch: int, steps: int = 20) -> Step:
    """A step in the middle of decoding; the sequences have about 640 tokens."""
    from fa_serve.engine import SamplingParams

    prompts = Workload([(640 - steps, 1)] * batch).prompts(f"profile {batch}", engine.vocab_size)
    for row, prompt in enumerate(prompts):
        engine.add_request(f"decode-{row}", prompt, SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step() if output.token_ids}
    for _ in range(5):
        engine.step()
    step = observe(engine.step, steps)
    for row in range(batch):
        engine.abort(f"decode-{row}")
    while engine.has_unfinished():
        engine.step()
    return step


def prefill_step(engine: Any, count: int) -> Step:
    """One step that computes prompts only, from requests to first tokens."""
    from fa_serve.engine import SamplingParams

    prompts = Workload([(512, 1)] * count).prompts("profile prefill", engine.vocab_size)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def step() -> None:
        engine.generate(prompts, params)

    for _ in range(3):  # the second captures it
        step()
    return observe(step, 5)


def observe(step: Callable[[], object], steps: int) -> Step:
    """Time `steps` steps without the profiler, then profile as many."""
    import torch

    from fa_serve.engine.results import PendingResult

    read = PendingResult.read
    waited = 0.0

    def timed_read(pending: PendingResult) -> Any:
        nonlocal waited
        start = time.perf_counter()
        result = read(pending)
        waited += time.perf_counter() - start
        return result

    PendingResult.read = timed_read  # type: ignore[method-assign]
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wall = time.perf_counter() - start
    PendingResult.read = read  # type: ignore[method-assign]

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
    each = 1e3 / steps
    return Step(wall * each, busy * each / 1e6, (wall - waited) * each, kernels, calls, steps)


def short(name: str) -> str:
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "c10::", "cutlass::"):
        name = name.replace(noise, "")
    return name[:78]


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    import torch
    from measure import milliseconds

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3
