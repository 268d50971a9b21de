"""The engine, vLLM and transformers' continuous batching, offline; results are checked first.

    python -m benchmarks.engine.bench_engine --shapes qwen06 --peer-path DIR  # A, B, C, D and the start-up; DIR has vLLM
    python -m benchmarks.engine.bench_engine --shapes llama8b --workloads all --budget 400
    python -m benchmarks.engine.bench_engine --shapes llama8b --tensor-parallel 2 --peers vllm,one_gpu --workloads A,B,C,C64,D
    python -m benchmarks.engine.bench_engine decode --shapes qwen30a3b,gptoss20b,llama8b-fp8,llama8b-w4,deepseek-lite
    python -m benchmarks.engine.bench_engine profile --shapes llama8b  # decoding steps kernel by kernel, and a prefill
    python -m benchmarks.engine.bench_engine decode --shapes llama70b --layers 20 --tensor-parallel 2 --requests 1
    python -m benchmarks.engine.bench_engine decode --shapes deepseek-lite --tiny --device cpu --requests 1  # to try a shape
    python -m benchmarks.engine.bench_engine --shapes tiny --device cpu --requests 4  # to try the script

`decode` prints a decoding step at 1, 16, 64 and 256 sequences beside its floor, the time of a copy of as many bytes as it must
read (profile_engine.py). It needs no peer, and 20 to 60 s for each shape, most of them to make the weights. `profile` measures
the same steps. Both write them to results/steps.jsonl.

A, B, C, D and C16, C64, C256, which are C with so many requests at once, are in `WORKLOADS` of engine_workloads.py. They are
greedy, ignore end tokens, take and return token ids, and use no prefix cache. `shared` is 128 requests whose first 2,048 tokens
are the same; with it, prefix caches are on for all workloads, but the prompts of the other workloads have nothing in common.
`sampled` is B with temperature 0.7 and top_p 0.9; its peer is our greedy B. `edit` speculates, with 5 drafts accepted in each
step as in an answer that mostly copies its prompt; its peer is `edit_plain`, the same requests without speculation. `edit1` is
the first of these requests alone. `eagle3` and `eagle3_plain` are one request, with and without the drafts of an EAGLE-3 head,
which has random weights; 3 drafts of each step are accepted. Both have an engine for themselves. `unmatched1`, `unmatched16`
and `unmatched256` speculate by prompt lookup where nothing repeats itself; their peers are the same requests without
speculation. The start-up is the time from the start of the process to the first token, with compilers' caches as they are.

With --tensor-parallel N, our engine and vLLM divide the model between N GPUs. The peer `one_gpu` is our engine on one of them.
`decode` and `profile` then show rank 0, whose floor is that of its part of the model.

Every engine loads the same folder, which has the shape's config and random weights. The engines run one after the other, each
in a separate process with a share of --budget seconds for each shape; workloads that do not end in time are left out. Before a
workload is timed, an engine answers it with half the tokens, which compiles and captures what it needs ("first"). Ours and vLLM
answer it twice ("again"): ours captures a step with prompts when its shape occurs again, and vLLM compiles kernels on the way.
vLLM needs 90 to 100 s to start on one H200, so allow 245 s for 0.6B and 290 s for 8B. generate_batch takes minutes for A at
0.6B: use `--requests 16` with it, and do not use it for 8B.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks.child_process import Log, answers
from benchmarks.engine.engine_runs import PARTS
from benchmarks.engine.engine_workloads import HEADS, SHAPES, SPECULATING, WORKLOADS, cut_layers, make_tiny, say
from benchmarks.tuning.profile_engine import decode, profile

SHARES = {"fa_serve": 4, "vllm": 5, "generate_batch": 4, "one_gpu": 4}  # of the time
PEERS = ("vllm", "generate_batch", "one_gpu")
NOT_ASKED = {
    "vllm": ["sampled", *SPECULATING],
    "generate_batch": ["sampled", "B", "shared", *SPECULATING],  # it takes one length of answers, shares nothing
    "one_gpu": HEADS,
}


def run(args: argparse.Namespace) -> None:
    """Run every engine for every shape. Prints each result at once, and a table at the end."""
    rates: dict[str, dict[str, float]] = {}
    for shape in args.shapes:
        deadline = time.time() + args.budget
        model = shape if args.tensor_parallel == 1 else f"{shape} on {args.tensor_parallel} GPUs"
        with tempfile.TemporaryDirectory(prefix="bench_engine_") as folder:
            say(f"{shape}: budget {args.budget:.0f} s")
            if "done" not in dict(child("prepare", shape, folder, [], deadline, args)):
                sys.exit(
                    "nothing is measured: the engine's tokens are not those of model.generate, or the model cannot be made"
                )
            runs = engines_of(args)
            for index, (engine, asked) in enumerate(runs):
                share = SHARES[engine] / sum(SHARES[name] for name, _ in runs[index:])
                end = time.time() + share * (deadline - time.time())
                for name, value in child(engine, shape, folder, asked, end, args):
                    if name == "done":
                        continue
                    values = rates.setdefault(f"{model} {name}", {})
                    values[engine] = value
                    speculative = rates.get(f"{model} {name.removesuffix('_plain')}")
                    if name.endswith("_plain") and speculative:
                        speculative["own_plain"] = value
                    if name == "sampled" and (greedy := rates.get(f"{model} B", {}).get("fa_serve")):
                        values["own_greedy"] = greedy
                    if args.device == "cuda":
                        record(rates, args)
    report(rates, args)


def engines_of(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The engines to run, and the workloads of each. An engine of ours has one drafter."""
    heads = [name for name in args.workloads if name in HEADS]
    runs = [("fa_serve", [name for name in args.workloads if name not in HEADS]), ("fa_serve", heads)]
    runs += [(peer, [name for name in args.workloads if name not in NOT_ASKED[peer]]) for peer in args.peers]
    return [(engine, asked) for engine, asked in runs if asked]


def child(
    engine: str, shape: str, folder: str, workloads: list[str], deadline: float, args: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Run one engine in a process until the deadline. Yields (workload, rate) as they arrive, and ("done", 0.0)."""
    if engine == "vllm":
        path = args.peer_path
        own = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        # without NVLink multicast, as ours
        own |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    else:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        own = {}
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | own
    options = {
        "folder": folder,
        "shapes": shape,
        "deadline": deadline,
        "device": args.device,
        "requests": args.requests,
        "started": time.time(),
        "workloads": ",".join(workloads),
        "tensor-parallel": 1 if engine == "one_gpu" else args.tensor_parallel,
    }
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine.bench_engine",
        engine,
        *(f"--{name}={value}" for name, value in options.items() if value not in ("", None)),
    ]
    command += [f"--set={name}={json.dumps(value)}" for name, value in args.set.items()]
    log = Log(args.out / f"peer_{engine}_{shape}.log" if engine in PEERS else None)
    for name, value, note in answers(command, env, deadline - time.time(), log):
        if value is not None:
            yield name, value
        if name == "done":
            return  # all that it would still do is end
        say(f"  {engine:<15}{name:<14}{'' if value is None else f'{value:10.5g}'}  {note}")
    say(f"  {engine:<15}not finished:\n{log.report()}")


def record(rates: dict[str, dict[str, float]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Write what is measured so far, so a run that is cut off loses nothing. Cases that are not measured keep their lines."""
    from benchmarks.measure import Results

    results = Results("engine", args.out)
    for case, values in rates.items():
        if "fa_serve" in values:
            peers = {name: value for name, value in values.items() if name != "fa_serve"}
            name = case if args.requests is None else f"{case} of {args.requests}"
            results.add(name, "s" if case.endswith("startup") else "tok/s", values["fa_serve"], peers)
    return results.lines


def report(rates: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    names = ["fa_serve", *args.peers, "own_greedy", "own_plain"]
    say("\n" + f"{'case':<20}" + "".join(f"{name:>15}" for name in names) + "   ratio")
    lines = record(rates, args) if args.device == "cuda" else []
    ratios = {line["case"]: line["ratio"] for line in lines if line["ratio"] is not None}
    for case, values in rates.items():
        say(
            f"{case:<20}"
            + "".join(f"{values.get(name, float('nan')):15.5g}" for name in names)
            + f"{ratios.get(case, float('nan')):8.3f}"
        )
    if args.device != "cuda":
        say("not written: results are those of a GPU")


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        if unknown := set(chosen) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} not among {list(known)}")
        return chosen

    return parse


def settings(items: list[str]) -> dict[str, Any]:
    """Parse name=value. A value that is not JSON is a string."""
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
    parts = {"run": run, "decode": decode, "profile": profile, **PARTS}
    parser.add_argument(
        "part", nargs="?", choices=parts, default="run", help="run, decode or profile; the others are run's own"
    )
    parser.add_argument("--shapes", type=names(SHAPES), default=["llama8b", "qwen06"])
    parser.add_argument("--workloads", type=names(WORKLOADS), default=["A", "B", "C", "D"])
    parser.add_argument("--peers", type=names(PEERS), default=["vllm"])
    parser.add_argument("--no-peers", dest="peers", action="store_const", const=[])
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM's process")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs between which models are divided")
    parser.add_argument(
        "--budget",
        type=float,
        default=180.0,
        help="seconds for each shape; for decode and profile they start when the model is made",
    )
    parser.add_argument("--requests", type=int, help="so many of each workload's at most")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, metavar="N", help="models get at most so many, to load large ones sooner")
    parser.add_argument("--tiny", action="store_true", help="the chosen shapes in tiny sizes, to try decode or profile")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of EngineConfig, e.g. eager=true")
    parser.add_argument("--top", type=int, default=8, help="kernels that the profile shows")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    for name, kind in (("folder", str), ("deadline", float), ("started", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.set = settings(args.set)
    if args.tensor_parallel == 1 and "one_gpu" in args.peers:
        parser.error("the peer one_gpu needs --tensor-parallel above 1")
    if args.tiny:
        make_tiny()
    if args.layers is not None:
        if args.part not in ("decode", "profile"):
            parser.error("--layers is for decode and profile")
        cut_layers(args.layers)
    parts[args.part](args)


if __name__ == "__main__":
    main()
