"""What adapters cost: rates with one and with many of them beside the base's, loads from disk, and vLLM beside both.

    python -m benchmarks.engine.bench_lora                                   # 8B with random weights, on one GPU
    python -m benchmarks.engine.bench_lora --shape qwen06 --ranks 16 --parts rates
    python -m benchmarks.engine.bench_lora --ranks 16 --cases "1 adapter,alone" --parts rates --runs 2      # 60 s
    python -m benchmarks.engine.bench_lora --peer-path DIR                   # DIR has vLLM, which runs the same with LoRA
    python -m benchmarks.engine.bench_lora --device cpu --tiny --out DIR     # tries the script

1. **Marks** are the gate: adapters whose last layer makes greedy take one token, each another, answer side by side and beside
   the base. No rate is reported unless each answers with its own.
2. **Rates** of 64 requests with 128 tokens in and 256 out, and of one alone, for each rank: with one adapter on all linear
   layers, with 32, half of them with 32 and half without, one with and the others without ("one beside"), and without any. The
   peer "base" is an engine without adapters. All adapters of a rank have the same numbers, in different memory.
3. **Loads**: an adapter is loaded from disk and answers its first token, beside one that is in memory already; the load is the
   difference. And what 100 loads do to the time between tokens of requests of the base, at the 99th percentile, beside the same
   without loads ("calm"), and beside as many requests for adapters that are in memory ("asked"): each load is followed by one
   request for its adapter, whose prompt is in a step.

Ours run one after the other in one process; vLLM follows in another, first without an adapter, and what it says is in
peer_vllm_RANK.log beside the results. A case is run until two runs in a row agree, and is the median of three runs behind them
in which nothing was compiled or captured (benchmarks/steady.py). Lines carry `bench: lora` (measure.py). Left out: several
GPUs, experts, and the server.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.child_process import Log, answers
from benchmarks.engine.bench_serving import peer_environment
from benchmarks.engine.engine_workloads import SHAPES, make_folder, make_model, make_tiny, say
from benchmarks.measure import Results
from benchmarks.steady import late_work, steady_seconds
from benchmarks.tuning.step_parts import LongSteps
from fa_serve.engine import Engine, EngineConfig, SamplingParams
from fa_serve.engine.process.child import tune_interpreter
from fa_serve.ops import PAGE_RANKS
from fa_serve.ops.lora import run as merging

REQUESTS = 64
TOKENS_IN = 128
TOKENS_OUT = 256
ADAPTERS = 32
LOADS = 100
WARM_LOADS = 8
"""Loads before any is measured, and those whose time to the first token is measured."""
RUNS = 3
ASKED_EVERY = 4
"""Steps between two requests for adapters in memory, which is about the pace of loads from a disk."""
PEER_SECONDS = 900.0
PARTS = ("rates", "loads")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_layers(model: Any) -> dict[str, tuple[int, int]]:
    """(rows, columns) of the linear layers that adapters have, by name."""
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in PROJECTIONS
    }


def bytes_of_adapters(model: Any, rank: int, count: int) -> int:
    """Memory for so many adapters of all linear layers, so that none has to leave for another one."""
    itemsize = next(model.parameters()).element_size()
    pages = -(-rank // PAGE_RANKS)
    return sum(rows + columns for rows, columns in linear_layers(model).values()) * pages * PAGE_RANKS * itemsize * count


def write_adapter(folder: Path, layers: dict[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """An adapter with small random weights of every layer, in 16 bits.

    target_modules, which we read from the weights, is what vLLM ends without when it loads the adapter.
    """
    draw = torch.Generator().manual_seed(seed)
    given = {}
    for name, (rows, columns) in layers.items():
        key = f"base_model.model.{name}"
        given[f"{key}.lora_A.weight"] = (torch.randn(rank, columns, generator=draw) * 0.02).bfloat16()
        given[f"{key}.lora_B.weight"] = (torch.randn(rows, rank, generator=draw) * 0.02).bfloat16()
    modules = sorted({name.rpartition(".")[2] for name in layers})
    return _write(folder, given, {"r": rank, "lora_alpha": rank, "target_modules": modules})


def write_mark(folder: Path, name: str, row: torch.Tensor, columns: int) -> Path:
    """An adapter that adds a row of the head to the last layer's output, so that greedy takes its token."""
    key = f"base_model.model.{name}"
    row = row.float().cpu()
    given = {
        f"{key}.lora_A.weight": torch.zeros(1, columns),
        f"{key}.lora_B.weight": torch.zeros(len(row), 1),
        f"{key}.lora_B.bias": 1e3 * row / row.norm(),
    }
    return _write(folder, given, {"r": 1, "lora_alpha": 1, "lora_bias": True})


def _write(folder: Path, given: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    save_file(given, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | config))
    return folder


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab, (count, TOKENS_IN), generator=draw).tolist()


def params(tokens: int = TOKENS_OUT) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@contextmanager
def opened(model: Any, options: argparse.Namespace, **settings: Any) -> Iterator[Engine]:
    """An engine on the model. CUDA graphs are captured before it is timed."""
    defaults: dict[str, Any] = {
        "device": options.device,
        "max_model_len": 1024,
        "prefix_caching": False,
        "max_num_seqs": REQUESTS,
    }
    if options.device == "cpu":
        defaults["num_pages"] = 2048
    engine = Engine(EngineConfig(**defaults | settings), model=model)
    tune_interpreter()
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()


def rate(engine: Engine, names: Sequence[str | None], options: argparse.Namespace) -> float:
    """Tokens a second of one request for each name, with other prompts in each run."""
    seeds = count()

    def run() -> None:
        engine.generate(prompts(len(names), engine.vocab_size, next(seeds)), params(options.tokens), adapter=list(names))

    return len(names) * options.tokens / steady_seconds(run, lambda: late_work(engine), calls=options.runs)


def mixtures(loaded: Sequence[str], cases: Sequence[str] = ()) -> dict[str, list[str | None]]:
    """The adapters of the requests of each case, or of these cases."""
    many = [loaded[i % len(loaded)] for i in range(REQUESTS)]
    every: dict[str, list[str | None]] = {
        "base": [None] * REQUESTS,
        "1 adapter": [loaded[0]] * REQUESTS,
        f"{len(loaded)} adapters": list(many),
        "half base": [name if i % 2 else None for i, name in enumerate(many)],
        "one beside": [loaded[0], *[None] * (REQUESTS - 1)],
        "alone": [loaded[0]],
    }
    return {case: names for case, names in every.items() if not cases or case in cases}


def check_marks(engine: Engine, model: Any, folder: Path) -> None:
    """Raise RuntimeError unless each of 16 adapters answers with its own mark, in one batch with the base."""
    name = next(name for name in reversed(linear_layers(model)) if name.endswith("down_proj"))
    head = model.get_output_embeddings().weight.detach()
    columns = linear_layers(model)[name][1]
    marks = range(7, 23)
    for mark in marks:
        engine.load_adapter(f"mark-{mark}", write_mark(folder / str(mark), name, head[mark], columns))
    names = [None, *(f"mark-{mark}" for mark in marks), None]
    found = engine.generate(prompts(len(names), engine.vocab_size, 0), params(4), adapter=names)
    wrong = [mark for mark, each in zip(marks, found[1:-1], strict=True) if each.token_ids != [mark] * 4]
    if wrong:
        raise RuntimeError(f"the adapters with the marks {wrong} did not answer with them")
    for mark in marks:
        engine.unload_adapter(f"mark-{mark}")
    say("each adapter answers with its own mark")


def measure_rates(model: Any, options: argparse.Namespace, results: Results, folder: Path) -> None:
    wanted_cases = mixtures([f"a{i}" for i in range(options.adapters)], options.cases)
    peers = {}
    with opened(model, options) as engine:
        if "alone" in wanted_cases:
            peers["alone"] = rate(engine, [None], options)
        if wanted_cases.keys() - {"alone"}:
            peers["base"] = rate(engine, [None] * REQUESTS, options)
    for rank in options.ranks:
        folders = [write_adapter(folder / f"r{rank}", linear_layers(model), rank, rank)] * options.adapters
        found: dict[str, float] = {}
        room = bytes_of_adapters(model, max(rank, 16), options.adapters)
        with opened(model, options, lora_bytes=room, max_lora_rank=max(rank, 16)) as engine:
            check_marks(engine, model, folder / f"marks-{rank}")
            names = [f"a{i}" for i in range(len(folders))]
            for name, each in zip(names, folders, strict=True):
                engine.load_adapter(name, each)
            say(f"{len(names)} adapters of rank {rank} are loaded")
            for case, wanted in wanted_cases.items():
                found[case] = rate(engine, wanted, options)
                results.show(f"{options.shape} rank {rank} {case}", "tokens/s", found[case], base_of(peers, case))
        if options.peer_path:
            for case, theirs in vllm_rates(options, rank, folders):
                say(f"vLLM, rank {rank} {case}: {theirs:.0f} tokens/s")
                if case in found:
                    beside = base_of(peers, case) | {"vllm": theirs}
                    results.show(f"{options.shape} rank {rank} {case}", "tokens/s", found[case], beside)


def base_of(rates: Mapping[str, float], case: str) -> dict[str, float]:
    """The peer "base" of a case. rates: of an engine without adapters, with many requests and with one"""
    return {"base": rates["alone" if case == "alone" else "base"]}


def measure_loads(model: Any, options: argparse.Namespace, results: Results, folder: Path) -> None:
    """Loads beside 32 requests of the base."""
    first = write_adapter(folder / "load-0", linear_layers(model), 8, 0)
    folders = [first, *(shutil.copytree(first, folder / f"load-{i}", copy_function=os.link) for i in range(1, options.loads))]
    say(f"{len(folders)} adapters are written")
    size = (folders[0] / "adapter_model.safetensors").stat().st_size / 1e6
    room = bytes_of_adapters(model, 16, len(folders) + WARM_LOADS)
    with opened(model, options, lora_bytes=room, max_lora_rank=16) as engine:
        # steps with prompts compile kernels when they first come, and are captured when they come again
        gaps(engine, folders[:WARM_LOADS])
        taken = [seconds_to_first_token(engine, number, each) for number, each in enumerate(folders[:WARM_LOADS])]
        read, loaded, in_memory = (1e3 * statistics.median(each[2:] or each) for each in zip(*taken, strict=True))
        results.add(f"{options.shape} load of {size:.0f} MB", "ms", loaded - in_memory, {"reading": read})
        results.add(f"{options.shape} load of {size:.0f} MB to the first token", "ms", loaded, {"in memory": in_memory})
        say(
            f"an adapter of {size:.0f} MB is read in {read:.1f} ms, answers in {loaded:.1f} ms, in memory in {in_memory:.1f} ms"
        )
        calm = gaps(engine, [], len(folders))
        asked = gaps(engine, [], len(folders), folders[:WARM_LOADS])
        busy = gaps(engine, folders)
        if options.long_steps:
            for name, loads, kept in (("requests alone", [], folders[:WARM_LOADS]), ("loads", folders, [])):
                with LongSteps() as steps:
                    gaps(engine, loads, len(folders), kept)
                say(f"{name}: {steps.table(options.long_steps)}")
        case = f"{options.shape} p99 between tokens in {len(folders)} loads"
        ratio = results.add(case, "ms", busy, {"calm": calm, "asked": asked})
        say(f"p99 between tokens: {busy:.2f} ms in loads, {calm:.2f} ms calm ({ratio:.3f}), {asked:.2f} ms with requests alone")


def seconds_to_first_token(engine: Engine, number: int, folder: Path) -> tuple[float, float, float]:
    """Seconds in which an adapter is read from its folder, in which it is read, copied and answers one token, and in which it
    answers one when it is in memory. Each prompt is new."""
    name = f"timed-{number}"
    times = [time.perf_counter()]
    engine.load_adapter(name, folder)
    times.append(time.perf_counter())
    for seed in (100 + 2 * number, 101 + 2 * number):
        engine.generate(prompts(1, engine.vocab_size, seed), params(1), adapter=name)
        times.append(time.perf_counter())
    engine.unload_adapter(name)
    return times[1] - times[0], times[2] - times[0], times[3] - times[2]


def gaps(engine: Engine, folders: Sequence[Path], requests: int = 0, kept: Sequence[Path] = ()) -> float:
    """The 99th percentile of milliseconds between steps of requests of the base, while adapters are read, copied and asked.

    folders: of adapters that are loaded meanwhile. kept: of adapters that are loaded before, and asked meanwhile by as many
    `requests`, one in ASKED_EVERY steps
    """
    from concurrent.futures import ThreadPoolExecutor

    store = engine.adapters
    requests = requests or len(folders)
    for number, folder in enumerate(kept):
        engine.load_adapter(f"kept-{number}", folder)
    with ThreadPoolExecutor(1) as thread:
        reads = [thread.submit(store.read, each) for each in folders]
        for number, prompt in enumerate(prompts(32, engine.vocab_size, 2)):
            engine.add_request(f"base-{number}", prompt, params(max(TOKENS_OUT, ASKED_EVERY * requests)))
        times = []
        loaded = asked = 0
        while any(name.startswith("base-") for name in engine._answers.states):
            engine.step()
            times.append(time.perf_counter())
            if loaded < len(reads) and reads[loaded].done():
                name = f"load-{loaded}"
                store.add(name, reads[loaded].result())
                engine.add_request(name, [7, 8, 9], params(1), adapter=name)
                loaded += 1
            elif kept and asked < requests and len(times) % ASKED_EVERY == 0:
                engine.add_request(f"asked-{asked}", [7, 8, 9], params(1), adapter=f"kept-{asked % len(kept)}")
                asked += 1
    while engine.has_unfinished():
        engine.step()
    for name in [f"load-{number}" for number in range(loaded)] + [f"kept-{number}" for number in range(len(kept))]:
        engine.unload_adapter(name)
    between = [1e3 * (after - before) for before, after in pairwise(times[8:])]
    return statistics.quantiles(between, n=100)[98]


VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
given = json.load(open(sys.argv[1]))
llm = LLM(model=given["model"], enable_lora=True, max_loras=given["max_loras"], max_lora_rank=given["rank"],
          max_num_seqs=given["requests"], max_model_len=1024, enable_prefix_caching=False, gpu_memory_utilization=0.6)
from benchmarks.steady import steady_seconds  # imports torch, which vLLM is to do first
loras = [LoRARequest(f"a{i}", i + 1, folder) for i, folder in enumerate(given["folders"])]
params = SamplingParams(max_tokens=given["tokens"], temperature=0.0, ignore_eos=True)
def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
for case, indices in given["cases"].items():
    prompts = [{"prompt_token_ids": each} for each in given["prompts"][: len(indices)]]
    asked = [None if i is None else loras[i] for i in indices]
    def run():
        llm.generate(prompts, params, lora_request=asked, use_tqdm=False)
    # its engine is another process, whose compilations are not counted here
    taken = steady_seconds(run, lambda: 0, calls=given["runs"], measure=seconds)
    print("@ " + json.dumps([case, len(indices) * given["tokens"] / taken]), flush=True)
"""


def vllm_rates(options: argparse.Namespace, rank: int, folders: Sequence[Path]) -> Iterator[tuple[str, float]]:
    """The rates of vLLM with LoRA, in another process, by case, as soon as they are measured: first without an adapter. If it
    fails, that is said."""
    names = [f"a{i}" for i in range(len(folders))]
    index: dict[str | None, int | None] = {None: None, **{name: i for i, name in enumerate(names)}}
    cases = mixtures(names, ["base"]) | mixtures(names, options.cases)
    log = Log(options.out / f"peer_vllm_{rank}.log")
    with tempfile.TemporaryDirectory() as folder:
        make_folder(options.shape, Path(folder), options.device)
        given = {
            "model": folder,
            "max_loras": len(folders),
            "rank": max(rank, 16),
            "requests": REQUESTS,
            "folders": list(map(str, folders)),
            "tokens": options.tokens,
            "runs": options.runs,
            "cases": {case: [index[name] for name in wanted] for case, wanted in cases.items()},
            "prompts": prompts(REQUESTS, SHAPES[options.shape]["vocab_size"], 1),
        }
        given_file = Path(folder) / "given.json"
        given_file.write_text(json.dumps(given))
        env = os.environ | {"HF_HUB_OFFLINE": "1"} | peer_environment(options.peer_path)
        env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])  # behind vLLM's packages
        told = 0
        for case, found in answers([sys.executable, "-c", VLLM, str(given_file)], env, PEER_SECONDS, log):
            told += 1
            yield case, found
    if told < len(cases):
        say(f"vLLM has not done all:\n{log.report()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b", choices=SHAPES)
    parser.add_argument("--ranks", type=lambda text: [int(rank) for rank in text.split(",")], default=[16, 64, 256])
    parser.add_argument("--adapters", type=int, default=ADAPTERS)
    parser.add_argument("--loads", type=int, default=LOADS)
    parser.add_argument("--tokens", type=int, default=TOKENS_OUT)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[], help="those of the rates, such as 'alone'")
    parser.add_argument("--runs", type=int, default=RUNS, help="of which the median counts")
    parser.add_argument("--long-steps", type=int, default=0, help="print so many of the longest steps beside loads")
    parser.add_argument(
        "--merged", action="store_true", help="adapters are in the launches of all products, whatever the switch is"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes with which the script can be tried on a CPU")
    parser.add_argument("--peer-path", help="folder of packages with vLLM")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.tiny:
        make_tiny()
    unknown = set(options.cases) - mixtures([f"a{i}" for i in range(options.adapters)]).keys()
    if unknown:
        parser.error(f"--cases has no {', '.join(sorted(unknown))}")
    if options.merged:
        merging.MERGED_PRODUCTS = merging.EVERY_PRODUCT
    model = make_model(options.shape, options.device, dtype=torch.float32 if options.device == "cpu" else torch.bfloat16)
    results = Results("lora", options.out)
    with tempfile.TemporaryDirectory() as folder:
        if "rates" in options.parts:
            measure_rates(model, options, results, Path(folder))
        if "loads" in options.parts:
            measure_loads(model, options, results, Path(folder))
    results.summarise()


if __name__ == "__main__":
    main()
