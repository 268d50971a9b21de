"""The engine against vLLM and transformers' continuous batching, offline, on one GPU, correctness first; and where a step goes.

    python benchmarks/bench_engine.py --shapes qwen06 --peer-path DIR           # A, B, C, D and the start-up; vLLM lies in DIR
    python benchmarks/bench_engine.py --shapes llama8b --workloads all --budget 400
    python benchmarks/bench_engine.py profile --shapes llama8b                  # decoding at batch 1, 64 and 256, and a prefill
    python benchmarks/bench_engine.py --shapes tiny --device cpu --requests 4   # tries the script out

A, B, C, D: `WORKLOADS` below; greedy, end tokens ignored, token ids in and out, no prefix cache. `shared` is 128 requests with
one beginning of 2,048 tokens, prefix caches on. `sampled` is B with temperature 0.7 and top_p 0.9, against our own greedy B.
The start-up counts from the start of the process to the first token, compilers' caches as they are.

A model has its shape's config and random weights, written once, which every engine loads. Each engine has a process of its
own, one after the other, and its share of --budget seconds for each shape; what does not end in time is left out. Before it is
timed, an engine answers requests that end one by one, so that every batch size has occurred.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 4096  # max_model_len of every engine
SHARED = 2048
TOP_P = {"temperature": 0.7, "top_p": 0.9}
SHARES = {"fa_serve": 2, "vllm": 3, "generate_batch": 3}  # of the time
PEERS = ("vllm", "generate_batch")
SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen06": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
}  # fmt: skip


def uneven(count: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(count)]


@dataclass(frozen=True)
class Workload:
    """Requests as (tokens in, tokens out), and whether the rate counts those that come in as well."""

    lengths: list[tuple[int, int]]
    all_tokens: bool = False
    prefix: int = 0
    sampled: bool = False

    def prompts(self, name: str, vocab: int) -> list[list[int]]:
        """Token ids, others for each workload; `prefix` of each are the same."""
        draw = random.Random(name)
        shared = draw.choices(range(5, vocab), k=self.prefix)
        return [shared + draw.choices(range(5, vocab), k=tokens_in - self.prefix) for tokens_in, _ in self.lengths]

    def cut(self, requests: int) -> Workload:
        return Workload(self.lengths[:requests], self.all_tokens, self.prefix, self.sampled)

    @property
    def tokens(self) -> int:
        return sum(tokens_out + tokens_in * self.all_tokens for tokens_in, tokens_out in self.lengths)


WORKLOADS = {
    "A": Workload([(512, 256)] * 256),
    "B": Workload(uneven(256)),
    "sampled": Workload(uneven(256), sampled=True),
    "C": Workload([(128, 256)]),
    "D": Workload([(3072, 1)] * 64, all_tokens=True),
    "shared": Workload([(SHARED + 64, 64)] * 128, prefix=SHARED),
}
WARM_UP = Workload([(64, 8 + row // 4) for row in range(256)])


# The process that starts the others


def run(args: argparse.Namespace) -> None:
    """Every shape, every engine; prints as it goes, and a table at the end."""
    rates: dict[str, dict[str, float]] = {}
    for shape in args.shapes:
        deadline = time.time() + args.budget
        with tempfile.TemporaryDirectory(prefix="bench_engine_") as folder:
            say(f"{shape}: budget {args.budget:.0f} s")
            if "done" not in dict(child("prepare", shape, folder, [], deadline, args)):
                sys.exit(
                    "nothing is measured: the engine's tokens are not those of model.generate, or the model cannot be made"
                )
            plain, shared = [w for w in args.workloads if w != "shared"], [w for w in args.workloads if w == "shared"]
            jobs = [(engine, part) for part in (plain, shared) if part for engine in ("fa_serve", *args.peers)]
            if ("generate_batch", shared) in jobs:
                jobs.remove(("generate_batch", shared))  # by default it shares nothing
            for index, (engine, part) in enumerate(jobs):
                share = SHARES[engine] / sum(SHARES[name] for name, _ in jobs[index:])
                end = time.time() + share * (deadline - time.time())
                asked = part if engine == "fa_serve" else [name for name in part if name != "sampled"]
                for name, value in child(engine, shape, folder, asked, end, args):
                    if name != "done" and not (name == "startup" and part is shared and plain):
                        rates.setdefault(f"{shape} {name}", {})[engine] = value
    for case, theirs in rates.items():
        if case.endswith(" sampled"):
            theirs |= {"own_greedy": greedy} if (greedy := rates.get(case[:-7] + "B", {}).get("fa_serve")) else {}
    report(rates, args)


def child(
    engine: str, shape: str, folder: str, workloads: list[str], deadline: float, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Run one engine in a process of its own until the deadline: (workload, rate) as they come, and ("done", 0.0)."""
    if engine == "vllm":
        path = args.peer_path
        own = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    else:
        path, own = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])), {}
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | own
    options = {"folder": folder, "shapes": shape, "deadline": deadline, "device": args.device, "requests": args.requests,
               "started": time.time(), "workloads": ",".join(workloads)}  # fmt: skip
    command = [
        sys.executable,
        __file__,
        engine,
        *(f"--{name}={value}" for name, value in options.items() if value not in ("", None)),
    ]
    command += [f"--set={name}={json.dumps(value)}" for name, value in args.set.items()]
    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    alarm = threading.Timer(max(deadline - time.time(), 1.0), kill, [process])
    alarm.start()
    log: deque[str] = deque(maxlen=15)
    done = False
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if not line.startswith("@ "):
                log.append(line[:200])
                continue
            name, value, note = json.loads(line[2:])
            if value is not None:
                yield name, value
            if name == "done":
                done = True
                break  # all that it would still do is end
            say(f"  {engine:<15}{name:<9}{'' if value is None else f'{value:10.5g}'}  {note}")
    finally:
        late = not alarm.is_alive()
        alarm.cancel()
        kill(process)
        process.wait()
    if not done:
        reason = "its time is up" if late else f"it ended with {process.returncode}"
        say(f"  {engine:<15}not finished: {reason}\n" + "".join(log))


def kill(process: subprocess.Popen[str]) -> None:
    """End a process and those that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def report(rates: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    from measure import Results

    peers = [*args.peers, "own_greedy"]
    say("\n" + f"{'case':<20}{'unit':<7}" + "".join(f"{name:>15}" for name in ["fa_serve", *peers]) + "   ratio")
    results = Results("engine", args.out) if args.device == "cuda" else None
    for name, values in rates.items():
        if "fa_serve" not in values:
            continue
        unit = "s" if name.endswith("startup") else "tok/s"
        theirs = {peer: value for peer, value in values.items() if peer != "fa_serve"}
        case = name if args.requests is None else f"{name} of {args.requests}"
        ratio = results.add(case, unit, values["fa_serve"], theirs) if results else float("nan")
        cells = "".join(f"{values.get(peer, float('nan')):15.5g}" for peer in ["fa_serve", *peers])
        say(f"{case:<20}{unit:<7}{cells}{ratio:8.3f}")
    if results is None:
        say("not written: results are those of a GPU")
        return
    if results.path.exists():
        # the lines of cases that this run has not measured stay
        measured = {line["case"] for line in results.lines}
        earlier = map(json.loads, results.path.read_text().splitlines())
        results.lines[:0] = [line for line in earlier if line["case"] not in measured]
    results.write()


def say(text: str) -> None:
    print(text, flush=True)


# What runs in a process of its own


def tell(name: str, value: float | None = None, note: str = "") -> None:
    """To the process that has started this one."""
    print("@ " + json.dumps([name, value, note]), flush=True)


def prepare(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    gate(args)
    tell("gate", None, f"greedy float32 tokens are those of model.generate, {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    make_folder(args.shapes[0], Path(args.folder), args.device)
    tell("model", None, f"written in {time.perf_counter() - start:.1f} s")
    tell("done", 0.0)


def gate(args: argparse.Namespace) -> None:
    """The engine's greedy tokens, prompts cut in chunks and decoded together, are those of transformers, one by one."""
    import torch

    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    # logits that are far apart, so that rounding never decides
    model = make_model("tiny", args.device, dtype=torch.float32, initializer_range=0.4, eos_token_id=None)
    draw = random.Random(0)
    prompts = [draw.choices(range(5, 512), k=length) for length in (1, 15, 16, 17, 63, 150)]
    expected = []
    model.set_attn_implementation("eager")
    for prompt in prompts:
        ids = torch.tensor([prompt], device=args.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    settings = {"device": args.device, "num_pages": 256, "max_num_seqs": 8, "max_num_batched_tokens": 100, "max_model_len": 512}
    engine = Engine(EngineConfig(**settings | args.set), model=model)
    answers = engine.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    for prompt, answer, tokens in zip(prompts, answers, expected, strict=True):
        assert answer.token_ids == tokens, f"prompt of {len(prompt)} tokens: {answer.token_ids}, model.generate says {tokens}"


def make_model(shape: str, device: str, *, dtype: Any, **changes: Any) -> Any:
    """A model of that shape with random weights, made where it runs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.for_model(**SHAPES[shape] | changes)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config = GenerationConfig()
    return model.eval()


def make_folder(shape: str, folder: Path, device: str) -> None:
    """Weights and config, and a tokenizer with a word for each id."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make_model(shape, device, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SHAPES[shape]["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


Rate = Callable[[str, Workload], tuple[float, str] | None]


def measure(args: argparse.Namespace, rate: Rate, warm_up: Workload = WARM_UP) -> None:
    """The workloads in their order. `rate` answers one: seconds and a note, or None when the time is up."""
    for name in ("warm-up", *args.workloads):
        workload = (warm_up if name == "warm-up" else WORKLOADS[name]).cut(args.requests or 256)
        if (taken := rate(name, workload)) is None:
            return
        seconds, note = taken
        note = f"{len(workload.lengths)} requests in {seconds:.2f} s{note}"
        tell(name, None if name == "warm-up" else workload.tokens / seconds, note)
    tell("done", 0.0)


def serve_ours(args: argparse.Namespace) -> None:
    imports = time.time()
    from fa_serve.engine import Engine, EngineConfig, SamplingParams

    settings = {"model": args.folder, "device": args.device, "max_model_len": LIMIT, "gpu_memory_utilization": 0.85, "seed": 0,
                "prefix_caching": args.workloads == ["shared"]}  # fmt: skip
    loading = time.time()
    engine = Engine(EngineConfig(**settings | args.set))
    engine.tokenizer = None  # no text is made, as in the other engines
    first = time.time()
    engine.generate([[7] * 128], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    start_up(args, imports, loading, first)

    def rate(name: str, workload: Workload) -> tuple[float, str] | None:
        before, prompts = engine.stats(), workload.prompts(name, engine.vocab_size)
        start = time.perf_counter()
        for row, (prompt, (_, tokens_out)) in enumerate(zip(prompts, workload.lengths, strict=True)):
            sampling: Any = TOP_P if workload.sampled else {"temperature": 0.0}
            engine.add_request(f"{name}-{row}", prompt, SamplingParams(max_tokens=tokens_out, ignore_eos=True, **sampling))
        ended: Counter[str | None] = Counter()
        while engine.has_unfinished():
            ended.update(output.finish_reason for output in engine.step() if output.finished)
            if time.time() > args.deadline:
                return None
        seconds, after = time.perf_counter() - start, engine.stats()
        assert ended == {"length": len(prompts)}, ended
        steps, preempted = after.num_steps - before.num_steps, after.num_preemptions - before.num_preemptions
        note = f", {steps} steps of {seconds / steps * 1e3:.2f} ms"
        note += f", {preempted} preemptions" if preempted else ""
        cached = after.num_cached_tokens - before.num_cached_tokens
        return seconds, note + (f", {cached} tokens cached" if cached else "")

    measure(args, rate)


def serve_vllm(args: argparse.Namespace) -> None:
    imports = time.time()
    from vllm import LLM, SamplingParams

    loading = time.time()
    llm = LLM(
        args.folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=LIMIT, gpu_memory_utilization=0.85,
        enable_prefix_caching=args.workloads == ["shared"], disable_log_stats=True,
    )  # fmt: skip
    vocab = SHAPES[args.shapes[0]]["vocab_size"]

    def params(tokens_out: int) -> Any:
        return SamplingParams(max_tokens=tokens_out, temperature=0.0, ignore_eos=True, detokenize=False)

    first = time.time()
    llm.generate([{"prompt_token_ids": [7] * 128}], params(1), use_tqdm=False)
    start_up(args, imports, loading, first)

    def rate(name: str, workload: Workload) -> tuple[float, str]:
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts(name, vocab)]
        asked = [params(tokens_out) for _, tokens_out in workload.lengths]
        start = time.perf_counter()
        answers = llm.generate(prompts, asked, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(x.outputs[0].token_ids) for x in answers] == [tokens_out for _, tokens_out in workload.lengths]
        return seconds, ""

    measure(args, rate)


def serve_generate_batch(args: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    imports = loading = time.time()
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype="auto", attn_implementation="paged|sdpa")
    model.to(args.device).eval()

    def rate(name: str, workload: Workload) -> tuple[float, str]:
        (tokens_out,) = {tokens_out for _, tokens_out in workload.lengths}
        config = GenerationConfig(max_new_tokens=tokens_out, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        answers = model.generate_batch(workload.prompts(name, model.config.vocab_size), config, progress_bar=False)
        if args.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert {len(answer.generated_tokens) for answer in answers.values()} == {tokens_out}
        return seconds, ""

    first = time.time()
    rate("first", Workload([(128, 1)]))
    start_up(args, imports, loading, first)
    # it takes one length of answers for all, which B has not
    args.workloads = [name for name in args.workloads if len({tokens_out for _, tokens_out in WORKLOADS[name].lengths}) == 1]
    measure(args, rate, Workload([(64, 8)] * 32))


def start_up(args: argparse.Namespace, imports: float, loading: float, first: float) -> None:
    """Where the time has gone since this process was started, to the first token, which has just come."""
    now = time.time()
    parts = f"Python {imports - args.started:.1f}, imports {loading - imports:.1f}, engine {first - loading:.1f}"
    tell("startup", now - args.started, f"s: {parts}, first token {now - first:.1f}")


# Where a step goes


def profile(args: argparse.Namespace) -> None:
    """Kernels by their share of the device's time, how long the device is idle, and what a step costs the host."""
    import torch

    from fa_serve.engine import Engine, EngineConfig

    for shape in args.shapes:
        end = time.time() + args.budget
        model = make_model(shape, args.device, dtype=torch.bfloat16)
        settings = {"device": args.device, "max_model_len": LIMIT, "gpu_memory_utilization": 0.85, "prefix_caching": False}
        engine = Engine(EngineConfig(**settings | args.set), model=model)
        embedding = model.get_input_embeddings().weight
        weights = sum(x.nbytes for x in model.parameters()) - (0 if model.config.tie_word_embeddings else embedding.nbytes)
        bandwidth = copy_bandwidth() if args.device == "cuda" else float("nan")
        say(f"{shape}: weights of a step {weights / 1e9:.2f} GB, copies at {bandwidth / 1e12:.2f} TB/s")
        sizes = SHAPES[shape]
        token = (
            4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
        )  # bytes of its keys and values
        for batch in (1, 64, 256):
            if batch > (args.requests or 256) or time.time() > end:
                say(f"decode {batch}: left out")
                continue
            step = decode_step(engine, batch)
            floor = (weights + batch * 640 * token) / bandwidth * 1e3
            say(f"decode, batch {batch}, kv 640: {step}; weights and KV take {floor:.3f} ms, ratio {step.wall / floor:.2f}")
            say(step.table(args.top))
        if time.time() < end:
            count = min(16, args.requests or 16)
            step = prefill_step(engine, count)
            say(f"prefill, {count} x 512 tokens: {step}")
            say(step.table(args.top))


@dataclass
class Step:
    """Milliseconds of a step by the clock, of the device (profiled) and of the host; microseconds and calls of each kernel."""

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
    """A step in the middle of decoding, of sequences with about 640 tokens."""
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
    """One step of nothing but prompts, from requests to first tokens."""
    from fa_serve.engine import SamplingParams

    prompts = Workload([(512, 1)] * count).prompts("profile prefill", engine.vocab_size)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def step() -> None:
        engine.generate(prompts, params)

    step()
    return observe(step, 5)


def observe(step: Callable[[], object], steps: int) -> Step:
    """Time that many steps first, undisturbed, then profile as many."""
    import torch

    from fa_serve.engine.model_runner import PendingResult

    read, waited = PendingResult.read, 0.0

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
            begin, end = event.time_range.start, event.time_range.end
            kernels[event.name] += end - begin if on_gpu else event.self_cpu_time_total
            calls[event.name] += 1
            spans.append((begin, end))
    busy, until = 0.0, 0.0
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
    """Bytes a second, read and written, of a large copy."""
    import torch
    from measure import milliseconds

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} not among {list(known)}")
        return chosen

    return parse


def settings(items: list[str]) -> dict[str, Any]:
    """name=value; a value is JSON, or else a string."""
    chosen = {}
    for item in items:
        name, _, value = item.partition("=")
        try:
            chosen[name] = json.loads(value)
        except json.JSONDecodeError:
            chosen[name] = value
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"run": run, "profile": profile, "prepare": prepare, "fa_serve": serve_ours, "vllm": serve_vllm,
             "generate_batch": serve_generate_batch}  # fmt: skip
    parser.add_argument("part", nargs="?", choices=parts, default="run", help="run or profile; the others are run's own")
    parser.add_argument("--shapes", type=names(SHAPES), default=["llama8b", "qwen06"])
    parser.add_argument("--workloads", type=names(WORKLOADS), default=["A", "B", "C", "D"])
    parser.add_argument("--peers", type=names(PEERS), default=["vllm"])
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[])
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM's process")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds for each shape")
    parser.add_argument("--requests", type=int, help="so many of each workload's at most")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of EngineConfig, e.g. eager=true")
    parser.add_argument("--top", type=int, default=8, help="kernels that the profile shows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    for name, kind in (("folder", str), ("deadline", float), ("started", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.set = settings(args.set)
    parts[args.part](args)


if __name__ == "__main__":
    main()
