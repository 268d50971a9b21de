"""Rollouts of GRPO's shape in the trainer's process, and what a training step takes beside them.

    python -m benchmarks.engine.bench_rollouts                         # 0.6B and 8B on one GPU
    python -m benchmarks.engine.bench_rollouts --parts rollouts --peer-path DIR        # DIR has vLLM, which runs beside ours
    python -m benchmarks.engine.bench_rollouts --shapes tiny --device cpu --tiny       # to try the script

rollouts:  answers a second: groups of 16 answers to prompts of 512 tokens, as many and as long as WORKLOADS says: 256 answers
           of 1,024 tokens for 0.6B, and of 512 tokens for 8B, so that each shape takes 150 seconds of a GPU. With --peer-path,
           vLLM generates as many, with their log-probabilities, in another process
update:    milliseconds of `RolloutEngine.update` after a step in place, once, with the pages of all these calls in the prefix
           cache; and the bytes that it allocates. "update again" has nothing in the cache: the median of 5
sleep:     milliseconds of `sleep` and `wake_up` together
exact:     milliseconds of a training forward and backward in `fa_serve.exact`, of 1 and of 8 sequences of 1,024 tokens; the
           peer is the plain forward and backward. Both ways alternate: the median of 5 after 2 warm-ups of each

A rollout's log-probabilities are compared with the exact forward first, in every bit. Rollouts and sleep are warmed up until
two calls in a row agree. No call counts in which a kernel was compiled (benchmarks/steady.py). Of vLLM's update, its own
`reload_weights` from files is timed. Left out: generate_batch, which bench_engine has. The lines are in results/rollouts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fa_serve
from benchmarks.child_process import Log, answers
from benchmarks.engine.bench_serving import peer_environment
from benchmarks.engine.engine_workloads import SHAPES, make_folder, make_model, say
from benchmarks.measure import Results
from benchmarks.steady import late_work, one_call, steady_seconds
from fa_serve.engine import RolloutEngine, SamplingParams

EXACT_BATCHES = (1, 8)
EXACT_WARM_UPS = 2
EXACT_TURNS = 5
SECONDS = 60.0
"""After which no further call of rollouts is timed, but the first one."""


class Workload(NamedTuple):
    """Rollouts of a call, and sequences of a training step. samples: answers to a prompt; length, new: tokens of each"""

    prompts: int = 16
    samples: int = 16
    length: int = 512
    new: int = 1024
    trained: int = 1024


WORKLOADS = {"llama8b": Workload(new=512), "tiny": Workload(2, 3, 8, 6, 14)}


def step_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)


def train(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One forward and backward. Returns the log-probabilities of the tokens after the first."""
    logits = model(input_ids=ids).logits[:, :-1]
    logprobs = fa_serve.token_logprobs(logits, ids[:, 1:])
    logprobs.sum().backward()
    return logprobs.detach()


def measure_engine(results: Results, shape: str, model: Any, tiny: bool, peers: dict[str, float]) -> None:
    """peers: vLLM's rate and update, by case"""

    def beside(case: str) -> dict[str, float]:
        return {"vllm": peers[case]} if case in peers else {}

    work = WORKLOADS.get(shape, Workload())
    size: dict[str, Any] = {"num_pages": 512} if tiny else {}
    engine = RolloutEngine(model, max_model_len=work.length + work.new, **size)
    draw = random.Random(0)
    vocab = model.config.vocab_size
    params = SamplingParams(max_tokens=work.new, seed=0, ignore_eos=True)

    def roll_out() -> None:
        """With other prompts in each call, so that nothing is found in the prefix cache, which fills up."""
        asked = [[draw.randrange(vocab) for _ in range(work.length)] for _ in range(work.prompts)]
        engine.generate(asked, work.samples, params)

    engine.update()
    seconds = steady_seconds(roll_out, lambda: late_work(engine), budget=SECONDS)
    results.show(f"{shape} rollouts", "answers/s", work.prompts * work.samples / seconds, beside("rollouts"))
    step_in_place(model)
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    results.show(f"{shape} update", "ms", one_call(engine.update) * 1e3, beside("update"))
    if torch.cuda.is_available():
        results.show(f"{shape} update memory", "bytes", torch.cuda.max_memory_allocated() - before, {})

    again = []
    for _ in range(5):
        step_in_place(model)
        again.append(one_call(engine.update) * 1e3)
    results.show(f"{shape} update again", "ms", statistics.median(again), {})

    def nap() -> None:
        engine.sleep()
        engine.wake_up()

    results.show(f"{shape} sleep", "ms", steady_seconds(nap) * 1e3, {})
    engine.close()


VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
given = json.load(open(sys.argv[1]))
llm = LLM(
    given["model"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=given["longest"], gpu_memory_utilization=0.6
)
params = SamplingParams(
    n=given["samples"], max_tokens=given["new"], temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
)
seconds = []
for asked in given["prompts"]:
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": each} for each in asked], params, use_tqdm=False)
    seconds.append(time.perf_counter() - begin)
print("@ " + json.dumps(["rollouts", min(seconds[1:])]), flush=True)
begin = time.perf_counter()
llm.collective_rpc("reload_weights")
llm.reset_prefix_cache()
print("@ " + json.dumps(["update", time.perf_counter() - begin]), flush=True)
"""


def measure_vllm(shape: str, options: argparse.Namespace) -> dict[str, float]:
    """The rate and the milliseconds of an update of vLLM, in another process, by case. What fails is said and left out."""
    work = WORKLOADS.get(shape, Workload())
    draw = random.Random(1)
    vocab = SHAPES[shape]["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="bench_rollouts_") as folder:
        make_folder(shape, Path(folder), options.device)
        given = {
            "model": folder,
            "longest": work.length + work.new,
            "samples": work.samples,
            "new": work.new,
            "prompts": [[[draw.randrange(vocab) for _ in range(work.length)] for _ in range(work.prompts)] for _ in range(3)],
        }
        env = os.environ | {"HF_HUB_OFFLINE": "1"} | peer_environment(options.peer_path)
        given_file = Path(folder) / "given.json"
        given_file.write_text(json.dumps(given))
        command = [sys.executable, "-c", VLLM, str(given_file)]
        log = Log(options.out / f"peer_vllm_{shape}.log")
        seconds: dict[str, float] = dict(answers(command, env, 600.0, log))
    if len(seconds) < 2:
        say(f"vLLM has not done all:\n{log.report()}")
    rates = {"rollouts": work.prompts * work.samples / seconds["rollouts"]} if "rollouts" in seconds else {}
    return rates | ({"update": 1e3 * seconds["update"]} if "update" in seconds else {})


def measure_exact(results: Results, shape: str, model: Any, tiny: bool) -> None:
    work = WORKLOADS.get(shape, Workload())
    exact = fa_serve.exact(model)
    require_equal_bits(model, exact, work, tiny)
    draw = torch.Generator().manual_seed(0)

    def in_context(ids: torch.Tensor) -> None:
        with exact:
            train(model, ids)

    for batch in EXACT_BATCHES:
        ids = torch.randint(model.config.vocab_size, (batch, work.trained), generator=draw).to(model.device)
        ways = {"exact": partial(in_context, ids), "plain": partial(train, model, ids)}
        for _ in range(EXACT_WARM_UPS):
            for way in ways.values():
                way()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(2 * EXACT_TURNS):
            for name, way in ways.items():
                num_late = late_work()
                taken = one_call(way) * 1e3
                if late_work() == num_late and len(times[name]) < EXACT_TURNS:
                    times[name].append(taken)
        if not all(times.values()):
            raise RuntimeError("each training step has compiled something")
        found = {name: statistics.median(each) for name, each in times.items()}
        case = f"{shape} exact" if batch == 1 else f"{shape} exact {batch}"
        results.show(case, "ms", found["exact"], {"plain forward": found["plain"]})
    model.zero_grad(set_to_none=True)


def require_equal_bits(model: Any, exact: Any, work: Workload, tiny: bool) -> None:
    """Raise AssertionError unless a training forward has the log-probabilities of a rollout in every bit."""
    length = work.length
    new = min(work.new, work.trained - length)
    size: dict[str, Any] = {"num_pages": 512} if tiny else {}
    engine = RolloutEngine(model, deterministic=True, max_model_len=work.trained, **size)
    prompt = [7] * length
    params = SamplingParams(max_tokens=new, seed=0, ignore_eos=True)
    [rollout] = engine.generate([prompt], params=params)[0].rollouts
    engine.close()
    ids = torch.tensor([prompt + rollout.token_ids], device=model.device)
    with exact:
        found = train(model, ids)[0, length - 1 :]
    assert found.tolist() == rollout.logprobs, "the training forward differs from the rollout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="qwen06,llama8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few and short answers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--parts", default="rollouts,exact", help="what is measured")
    parser.add_argument("--peer-path", help="folder of packages with vLLM")
    options = parser.parse_args()
    results = Results("rollouts", options.out)
    for shape in options.shapes.split(","):
        peers = measure_vllm(shape, options) if options.peer_path else {}
        model = make_model(shape, options.device, dtype=torch.float32 if options.tiny else torch.bfloat16)
        model.set_attn_implementation("fa_serve")
        if "rollouts" in options.parts:
            measure_engine(results, shape, model, options.tiny, peers)
        if "exact" in options.parts:
            measure_exact(results, shape, model, options.tiny)


if __name__ == "__main__":
    main()
