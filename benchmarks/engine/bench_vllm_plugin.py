"""vLLM with fa_serve's plugin as its attention, beside vLLM's attention backends; tokens are compared first.

    python -m benchmarks.engine.bench_vllm_plugin --peer-path DIR             # DIR has vLLM; three backends, 6 minutes
    python -m benchmarks.engine.bench_vllm_plugin --peer-path DIR --gpus 0,1  # two backends at a time, each on one GPU
    python -m benchmarks.engine.bench_vllm_plugin tokens --peer-path DIR      # small models only

`tokens` serves small random models with each backend: a plain one (Llama), one with sliding windows (Mistral) and one with
windows and sinks (gpt-oss). Their weights have a large standard deviation, and they are served in float16 (gpt-oss in bfloat16,
because FlashAttention-3 takes sinks in bfloat16 only), so logits are far apart and rounding seldom decides: greedy tokens
should be equal. Where an answer first differs, it must take the second best token of FLASH_ATTN, and FLASH_ATTN's log-
probabilities of the two must be within `tie_of`; what follows is another text. `rates` serves the shape of an 8B: the workloads
A, B and C of engine_workloads.py, and "long", the decoding of 16 sequences with 32,000 tokens each, whose prompts come from the
prefix cache and are not counted: that takes 67 GB for keys and values. A GPU with less than 100 GB gets 8 sequences. `all` is
both.

Each backend has one process for each model. The peers of every case are FLASH_ATTN and TRITON_ATTN, and its ratio is to the
faster one. Results go to results/vllm_plugin.jsonl in the form of measure.py. vLLM also finds the plugin in a clone that is not
installed. Left out: the float8 cache and tensor parallelism. `tests/upstream/run_vllm_invariance.py` runs vLLM's own tests.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.child_process import Log
from benchmarks.child_process import answers as told
from benchmarks.engine.engine_workloads import SHAPES, WORKLOADS, make_folder, make_model, save_tokenizer, say, tiny_sizes

ROOT = Path(__file__).parents[2]
BACKENDS = ("CUSTOM", "FLASH_ATTN", "TRITON_ATTN")
SMALL = ("tiny", "mistral", "gptoss20b")
SHAPES["mistral"] = SHAPES["tiny"] | {"model_type": "mistral", "sliding_window": 100}
LONG = (16, 32_000, 64)
"""Sequences, tokens of their prompts, tokens that they decode."""
PROMPTS = (1, 17, 90, 130, 250, 400)
TOKENS = 24
WRITING = threading.Lock()


def run(args: argparse.Namespace) -> None:
    """Make the models, serve each with every backend, and report."""
    wanted = {"tokens": list(SMALL), "rates": [args.shape], "all": [args.shape, *SMALL]}[args.part]  # the longest first
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="bench_vllm_") as temporary:
        for shape in wanted:
            make(shape, Path(temporary) / shape, shape in SMALL, args.device)
        declare_plugin(Path(temporary) / "plugins")
        jobs: queue.Queue[tuple[str, str]] = queue.Queue()
        for shape in wanted:
            for backend in args.backends:
                jobs.put((shape, backend))
        workers = [threading.Thread(target=work, args=(jobs, gpu, Path(temporary), answers, args)) for gpu in args.gpus]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    wrong = compare([shape for shape in wanted if shape in SMALL], args.backends, answers)
    if wrong:
        sys.exit(f"nothing is written: {'; '.join(wrong)}")
    for line in write_rates(answers, args):
        say(line)


def write_rates(answers: dict[tuple[str, str], dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """Write the rates of CUSTOM that are known, beside those of the other backends. Returns a line of text for each."""
    from benchmarks.measure import Results

    results = Results("vllm_plugin", args.out)
    lines = []
    for case, rate in answers.get((args.shape, "CUSTOM"), {}).items():
        peers = {name: answers.get((args.shape, name), {}).get(case) for name in args.backends if name != "CUSTOM"}
        known = {name: value for name, value in peers.items() if value is not None}
        ratio = results.add(f"{args.shape} {case}", "tok/s", rate, known)
        others = "  ".join(f"{name} {value:.5g}" for name, value in known.items())
        lines.append(f"{case:<8}{rate:12.5g}  {others}  ratio {ratio:.3f}")
    return lines


def declare_plugin(folder: Path) -> None:
    """Write the entry points of this clone into a folder, which then belongs on PYTHONPATH: vLLM asks installed packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    information = folder / "fa_serve_clone-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fa_serve_clone\nVersion: 0\n")
    group = "vllm.general_plugins"
    lines = [f"{name} = {target}\n" for name, target in project["entry-points"][group].items()]
    (information / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")


def make(shape: str, folder: Path, small: bool, device: str) -> None:
    import torch

    if small:
        # vLLM's kernels want heads of 64, and large weights keep logits apart
        changes = tiny_sizes(shape) | {"initializer_range": 0.2, "sliding_window": SHAPES[shape].get("sliding_window")}
        torch.manual_seed(0)
        known = {name: value for name, value in changes.items() if value is not None}
        model = make_model(shape, device, dtype=torch.bfloat16, **known)
        model.save_pretrained(folder)
        save_tokenizer(folder, model.config.vocab_size)
        del model
    else:
        folder.mkdir()
        make_folder(shape, folder, device)
    if device == "cuda":
        torch.cuda.empty_cache()  # vLLM asks for a share of the whole device


def work(
    jobs: queue.Queue[tuple[str, str]],
    gpu: str,
    folder: Path,
    answers: dict[tuple[str, str], dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    """Serve models on one GPU until there is none left. Rates that no gate holds back are written when a backend has ended."""
    while True:
        try:
            shape, backend = jobs.get_nowait()
        except queue.Empty:
            return
        begin = time.time()
        path = os.pathsep.join([args.peer_path, str(ROOT), str(folder / "plugins")])
        own = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": gpu, "FA_SERVE_VLLM": str(int(backend == "CUSTOM"))}
        own |= {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine.bench_vllm_plugin",
            "serve",
            "--shape",
            shape,
            "--folder",
            str(folder / shape),
            "--backends",
            backend,
        ]
        log = Log(args.out / f"peer_{backend}_{shape}.log")
        result: dict[str, Any] = {}
        for answer in told(command, os.environ | own, args.budget, log):
            if answer == "done":
                break  # all that it would still do is end
            result |= answer
            say(f"{shape} {backend}: {time.time() - begin:.0f} s, {str(answer)[:160]}")
        else:
            say(f"{shape} {backend}: not finished after {time.time() - begin:.0f} s\n{log.report()}")
        answers[shape, backend] = result
        if args.part == "rates":
            with WRITING:
                write_rates(answers, args)


def compare(shapes: list[str], backends: list[str], answers: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """What differs from the tokens of FLASH_ATTN."""
    wrong = []
    for shape in shapes:
        expected = answers.get((shape, "FLASH_ATTN"), {}).get("tokens")
        for backend in backends:
            tokens = answers.get((shape, backend), {}).get("tokens")
            if expected is None or tokens is None:
                wrong.append(f"{shape} has no tokens of {backend} or of FLASH_ATTN")
                continue
            second = answers[shape, "FLASH_ATTN"]["second"]
            tie = tie_of(shape)
            kinds = Counter(kind_of(*each, tie) for each in zip(tokens, expected, second, strict=True))
            say(f"{shape} {backend}: of {len(expected)} answers {dict(kinds)}")
            if backend == "CUSTOM" and kinds["differ"]:
                wrong.append(f"{shape}: {kinds['differ']} answers differ")
    return wrong


def dtype_of(shape: str) -> str:
    """In which dtype a model is served."""
    return "float16" if shape in SMALL and shape != "gptoss20b" else "bfloat16"


def tie_of(shape: str) -> float:
    """Log-probabilities that are so close may change their order when an attention output is rounded in another way. bfloat16
    has three bits less than float16."""
    return 0.03 if dtype_of(shape) == "float16" else 0.24


def kind_of(tokens: list[int], expected: list[int], second: list[tuple[int, float]], tie: float) -> str:
    """How an answer compares with FLASH_ATTN's: "equal", "part at a tie" or "differ".

    second: FLASH_ATTN's second best token at each position, and how much less its log-probability is
    """
    if tokens == expected:
        return "equal"
    place = next(i for i, (x, y) in enumerate(zip(tokens, expected, strict=True)) if x != y)
    other, less = second[place]
    return "part at a tie" if tokens[place] == other and less <= tie else "differ"


def serve(args: argparse.Namespace) -> None:
    """In a process that has vLLM: answer with one backend, and print each result as soon as it is known."""
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    small = args.shape in SMALL
    llm = LLM(
        args.folder,
        skip_tokenizer_init=True,
        dtype=dtype_of(args.shape),
        max_model_len=1024 if small else LONG[1] + LONG[2] + 64,
        gpu_memory_utilization=0.1 if small else 0.85,
        kv_cache_memory_bytes=1 << 30 if small else None,  # not measured, so that small models may share a GPU
        enable_prefix_caching=not small,
        attention_backend=AttentionBackendEnum[args.backends[0]],
        enforce_eager=small,
    )
    vocab = 512 if small else SHAPES[args.shape]["vocab_size"]

    def answer(prompts: list[list[int]], counts: list[int], **more: Any) -> tuple[list[Any], float]:
        sampling = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False, **more) for n in counts]
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [output.outputs[0] for output in outputs], time.perf_counter() - begin

    def second_best(logprobs: dict[int, Any]) -> tuple[int, float]:
        (_, best), (token, second) = sorted(logprobs.items(), key=lambda item: -item[1].logprob)[:2]
        return token, best.logprob - second.logprob

    def tell(result: dict[str, Any] | str) -> None:
        print("@ " + json.dumps(result), flush=True)

    draw = random.Random(0)
    if small:
        prompts = [draw.choices(range(5, vocab), k=length) for length in PROMPTS]
        outputs = answer(prompts, [TOKENS] * len(prompts), logprobs=2)[0]
        second = [[second_best(position) for position in output.logprobs] for output in outputs]
        tell({"tokens": [list(output.token_ids) for output in outputs], "second": second})
    else:
        import torch

        for name in ("C", "A", "B"):
            workload = WORKLOADS[name]
            for turn in ("first", name):
                counts = [tokens_out for _, tokens_out in workload.lengths]
                _, seconds = answer(workload.prompts(turn, vocab), counts)
            tell({name: workload.tokens / seconds})
        count, length, decoded = LONG
        if torch.cuda.get_device_properties(0).total_memory < 100e9:
            count = 8  # 12 would fit; 8 leave room, so that no prompt is evicted before it is timed
        prompts = [draw.choices(range(5, vocab), k=length) for _ in range(count)]
        # the first round computes the prompts; the next two find them in the cache, and compile what that needs
        times = [answer(prompts, [tokens] * count)[1] for tokens in (1, 1, 1 + decoded, 1, 1 + decoded)]
        tell({"long": count * decoded / (times[4] - times[3])})
    tell("done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("all", "tokens", "rates", "serve"), default="all")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument(
        "--gpus", type=lambda text: text.split(","), default=["0"], help="one process at a time on each of these"
    )
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for each process")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where models are made")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    (serve if args.part == "serve" else run)(args)


if __name__ == "__main__":
    main()
